"""Continue the pre-training of the bundled model on your own texts, so that it learns your domain.

    python examples/continue_pretraining.py texts/ --budget 30min --out runs/domain

Texts are .txt, .jsonl or .parquet files, plain or compressed. The result can be used wherever a model is
expected: `bertsmith finetune runs/domain/pretrained --data ...`.
"""

import argparse
from pathlib import Path

import bertsmith


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="a file or folder of texts")
    parser.add_argument("--model", default="small", help="bundled model or folder to continue from")
    parser.add_argument("--new-tokens", type=int, default=1000, help="tokens to add for words of the domain")
    parser.add_argument("--budget", default="30min", help="time, tokens or operations, such as 2h or 300M")
    parser.add_argument("--set", action="append", default=[], help="one setting over the recipe, such as run.seed=1")
    parser.add_argument("--recipe", default="continue-small", help="name or .toml file")
    parser.add_argument("--out", type=Path, default=Path("runs/domain"), help="parent folder of the results")
    options = parser.parse_args()

    tokenizer, corpus, run = (options.out / name for name in ("tokenizer", "corpus", "pretrained"))
    bertsmith.tokenizer([options.texts], extend=options.model, tokens=options.new_tokens, out=tokenizer)
    bertsmith.corpus([options.texts], tokenizer=tokenizer, out=corpus)
    result = bertsmith.pretrain(
        options.recipe,
        data=corpus,
        budget=options.budget,
        set=[f"model.folder={options.model}", *options.set],
        out=run,
    )
    print(f"held-out loss {result.held_out['loss']:.3f} after {result.training.steps} steps")


if __name__ == "__main__":
    main()
