"""Early exit for every family: exit layer and answer of a sequence do not depend on the rest of the batch."""

import pytest
import torch
from cases import FAMILIES, tiny_model
from elastic_cases import NORMED
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.exiting import EarlyAnswers, answer_early, exit_outputs
from bertsmith.models.heads.base import FeaturesConfig
from bertsmith.models.heads.exits import ExitRule, ExitsConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model

LENGTHS = [5, 12, 1, 9, 2, 7]
CONFIGS = {name: tiny_model(name).config for name in FAMILIES}
ENCODERS = [name for name, config in CONFIGS.items() if config.decoder is None and not config.encoder.other_walk]


def exiting_model(name: str, layers: int = 1, labels: int = 3) -> Model:
    """Build a tiny encoder of four layers with exits after all but the last, whose classifier reads `layers` layers."""
    model = tiny_model(name, layers=4)
    features, hidden = FeaturesConfig(layers=layers), NORMED if name.startswith("modern") else None
    head = ClassifierConfig(labels=tuple("abc"[:labels]), features=features, hidden=hidden, dropout=0.0)
    exits = ExitsConfig(layers=(1, 2, 3), outputs=labels, answer="classes", hidden="tanh", dropout=0.0)
    config = model.config.changed(heads=(head, exits), generator=None)
    return fit_heads(model, config, "the model", seed=3)[0].double().eval()


def rules(by_exit: Tensor) -> list[ExitRule]:
    """Return rules by which some sequences exit early, with a margin. Shape: by_exit (exits, sequences, labels)."""
    shares = by_exit[:-1].softmax(-1)
    entropies = torch.special.entr(shares).sum(-1) / torch.tensor(shares.shape[-1]).log()
    return [
        ExitRule(measure="probability", threshold=float(shares.amax(-1).amax(0).quantile(0.5))),
        ExitRule(measure="entropy", threshold=float(entropies.amin(0).quantile(0.5))),
        ExitRule(measure="patience", threshold=1),
    ]


def _rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(5, 50, (length,), generator=generator) for length in LENGTHS]


def packed(rows: list[Tensor]) -> tuple[Tensor, SequenceLayout]:
    starts = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
    return torch.cat(rows), SequenceLayout.packed(starts, max(map(len, rows)))


def padded(rows: list[Tensor]) -> tuple[Tensor, SequenceLayout]:
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, SequenceLayout.padded(torch.arange(tokens.shape[1]) < lengths[:, None])


def _close(own: EarlyAnswers, other: EarlyAnswers) -> None:
    assert own.layers.tolist() == other.layers.tolist()
    torch.testing.assert_close(own.outputs, other.outputs)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_early_exit_is_independent_of_the_batch(name: str) -> None:
    model = exiting_model(name)
    rows = _rows()
    by_exit = torch.stack(exit_outputs(model, *packed(rows)))  # (exits, sequences, labels)
    for rule in rules(by_exit):
        together = answer_early(model, *packed(rows), rule=rule)
        assert rule.measure == "patience" or len(set(together.layers.tolist())) > 1  # otherwise the test is trivial
        alone = [answer_early(model, row[None], SequenceLayout.full(1, len(row)), rule=rule) for row in rows]
        outputs, layers = (torch.cat([getattr(one, part) for one in alone]) for part in ("outputs", "layers"))
        _close(together, EarlyAnswers(outputs, layers))
        _close(together, answer_early(model, *padded(rows), rule=rule))
        torch.testing.assert_close(together.outputs, by_exit[together.layers - 1, torch.arange(len(rows))])
