"""Masked loss of a generator with and without the norm on its mask decoder's keys and values.

    python benchmarks/mask_decoder.py small --texts wikitext-2/valid.txt

The generator of the bundled model was trained without the norm; this shows the cost of switching it on untrained.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.models.build import rebuild
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.text.readers import read_documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model with a generator")
    parser.add_argument("--texts", type=Path, required=True, help="a file of texts")
    parser.add_argument(
        "--count", type=int, default=400, help="number of texts, the first ones of at least 200 letters"
    )
    parser.add_argument("--rate", type=float, default=0.15, help="share of tokens to mask")
    options = parser.parse_args()

    model = bertsmith.load(options.model)
    generator = model.generator
    if generator is None or "mask_decoder" not in generator.heads:
        raise SystemExit(f"{options.model} has no generator with a mask decoder")
    texts = [text for text in read_documents([options.texts]) if len(text) >= 200][: options.count]
    for normalises in (False, True):
        heads = tuple(
            head.changed(normalises_memory=normalises) if head.kind == "mask_decoder" else head
            for head in generator.config.heads
        )
        changed = rebuild(generator, generator.config.changed(heads=heads)).eval()
        loss, count = masked_loss(changed, model.require_tokenizer(), texts, options.rate)
        print(f"normalises_memory={normalises!s:5}  masked loss {loss:.3f} over {count:,} tokens")


@torch.no_grad()
def masked_loss(model: Model, tokenizer: bertsmith.Tokenizer, texts: list[str], rate: float) -> tuple[float, int]:
    """Return the mean loss of masked tokens, drawn by a fixed seed, and their number."""
    draw, total, count = torch.Generator().manual_seed(0), 0.0, 0
    for text in texts:
        tokens = torch.from_numpy(tokenizer.encode([text], max_length=128)["input_ids"]).long()
        is_masked = torch.rand(tokens.shape, generator=draw) < rate
        is_masked[:, 0] = is_masked[:, -1] = False
        positions = is_masked.flatten().nonzero().squeeze(-1)
        if not len(positions):
            continue
        inputs = EncoderInputs(tokens.masked_fill(is_masked, tokenizer.mask), SequenceLayout.full(*tokens.shape))
        states = model.run(inputs, Want(masked_positions=positions)).masked_states
        scores = model.heads["masked_tokens"](states, model.token_table)
        total += cross_entropy(scores, tokens[is_masked], reduction="sum").item()
        count += len(positions)
    return total / count, count


if __name__ == "__main__":
    main()
