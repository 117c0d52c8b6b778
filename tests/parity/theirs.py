"""Shared functions of comparisons with `transformers`: build their model, import it, compare gradients, export it."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.answers.sequences import IGNORED
from bertsmith.checkpoint.hf.adapter import FamilyAdapter, HeadAdapter
from bertsmith.checkpoint.hf.names import to_theirs
from bertsmith.checkpoint.hf.reading import adapter_for
from bertsmith.data.corruption import Corrupted, Vocabulary
from bertsmith.models.model import Model
from bertsmith.objectives.masked_lm import MaskedBatch, MaskedLM, MaskedLMConfig

VOCABULARY = 67
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}


def make(kind: type[PreTrainedModel], seed: int, settings: dict) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = kind(kind.config_class(**settings)).double().eval()
    with torch.no_grad():  # fresh biases and norms are 0 and 1, which would hide errors
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in name and (tensor.dim() == 1 or name.endswith("bias")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model


def ours(theirs: PreTrainedModel, folder: Path) -> Model:
    theirs.save_pretrained(folder)
    return bertsmith.load(folder)


def batch(lengths: list[int], length: int, *, pad: int = 0, filled: bool = False) -> dict[str, Tensor]:
    """Return random sequences; padding is `pad`, or random tokens if `filled`, so that leaks become visible."""
    # transformers gives the padding row no gradient, so it must not be used as a real token
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(0, VOCABULARY - 1, mask.shape)
    ids = ids + (ids >= pad)
    types = torch.randint(0, 2, ids.shape)
    return {
        "input_ids": ids if filled else ids.where(mask.bool(), pad),
        "attention_mask": mask,
        "token_type_ids": types,
    }


def masked_batch(inputs: dict[str, Tensor], has_pairs: bool = False) -> tuple[MaskedBatch, dict[str, Tensor]]:
    """Choose some real positions as targets; return our batch and their arguments."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    chosen = (torch.rand(ids.shape) < 0.4) & mask
    chosen[:, 0] = True
    labels = torch.where(chosen, torch.randint(0, VOCABULARY, ids.shape), IGNORED)
    positions = chosen.flatten().nonzero().squeeze(-1)
    corrupted = Corrupted(ids, positions, labels.flatten()[positions])
    follows = torch.randint(0, 2, (len(ids),)) if has_pairs else None
    prepared = MaskedBatch(corrupted, SequenceLayout.padded(mask), inputs["token_type_ids"], follows)
    return prepared, {"labels": labels, **({"next_sentence_label": follows} if has_pairs else {})}


def masked_loss(model: Model, prepared: MaskedBatch) -> Tensor:
    no_tokens = torch.zeros(VOCABULARY, dtype=torch.bool)
    settings = MaskedLMConfig(next_sentence=prepared.sentence_targets is not None)
    objective = MaskedLM(settings, Vocabulary(VOCABULARY, 3, no_tokens, ~no_tokens))
    counts, sums = objective.counts(prepared), objective(model, prepared)
    return sum(term.weight * sums[name].loss / counts[name] for name, term in objective.terms.items())


def compare_masked_losses(
    model: Model, theirs: PreTrainedModel, inputs: dict[str, Tensor], atol: float = 1e-10, has_pairs: bool = False
) -> None:
    """Assert equal masked-token and sentence-pair losses, with every gradient."""
    prepared, targets = masked_batch(inputs, has_pairs)
    expected, loss = theirs(**inputs, **targets).loss, masked_loss(model, prepared)
    torch.testing.assert_close(loss, expected, rtol=0, atol=atol)
    expected.backward()
    loss.backward()
    assert_gradients_equal(model, theirs, atol)


def assert_gradients_equal(
    model: Model, theirs: PreTrainedModel, atol: float = 1e-10, head: HeadAdapter | None = None
) -> None:
    """Assert that all gradients are equal and that neither side has others; `head` is the adapter of a task head."""
    adapter = adapter_for(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients
    rows = adapter.rows(model.config, adapter.parts(name for name, _ in model.named_parameters()))
    rows = [row for row in (*rows, *(() if head is None else head.rows)) if row.ours in gradients]
    assert len(rows) == len(gradients)
    mine = to_theirs(rows, gradients)
    tensors = (*theirs.named_parameters(), *theirs.named_buffers())
    reference = {_full_name(name, adapter): tensor.grad for name, tensor in tensors if tensor.grad is not None}
    assert mine.keys() == reference.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, reference[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def there_and_back(theirs: PreTrainedModel, dtype: torch.dtype, folder: Path) -> PreTrainedModel:
    """Import, save, load and export their model; assert that every tensor is bitwise equal."""
    theirs.to(dtype)
    model = ours(theirs, folder / "theirs")
    bertsmith.save(model, folder / "ours")
    bertsmith.export(bertsmith.load(folder / "ours"), folder / "back")
    assert bertsmith.load(folder / "back").config == model.config
    back = type(theirs).from_pretrained(folder / "back", dtype=dtype)
    assert back.config.architectures == [type(theirs).__name__]
    state, sent = back.state_dict(), theirs.state_dict()
    assert state.keys() == sent.keys()
    for name, tensor in sent.items():
        # their DeBERTa v1 always creates query and value biases in float32
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name
    written, adapter = load_file(folder / "back/model.safetensors"), adapter_for(model)
    for name, tensor in load_file(folder / "theirs/model.safetensors").items():
        assert torch.equal(written.pop(_full_name(name, adapter)), tensor), name
    assert not written
    return back


def _full_name(name: str, adapter: FamilyAdapter) -> str:
    """Return their name with the prefix that models without a head omit."""
    return adapter.prefix + name if name.startswith(adapter.unprefixed) else name
