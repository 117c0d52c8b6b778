"""Early exit: rules, items of several sequences, shrinking batches, invalid settings."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bertsmith.checkpoint.store import load, save
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import build, extract
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.exiting import Certainty, answer_early, exit_outputs, exits_config, with_rule
from bertsmith.models.heads.base import FeaturesConfig, RecurrentConfig
from bertsmith.models.heads.exits import ExitRule, ExitsConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.models.published import preset

ONES = torch.ones(2, dtype=torch.long)


def _exits(answer: str = "classes", outputs: int = 2, **more: object) -> ExitsConfig:
    return ExitsConfig.parse({"layers": [1, 2], "outputs": outputs, "answer": answer, **more}, source="a test")


def _model(features: FeaturesConfig | None = None, recurrent: RecurrentConfig | None = None) -> Model:
    config = preset("bert-tiny", width=16, layers=3, heads=2, vocabulary=40, init_std=0.3, dropout=0.0)
    head = ClassifierConfig(labels=("a", "b"), features=features or FeaturesConfig(), recurrent=recurrent, dropout=0.0)
    return build(config.changed(heads=(head, _exits())), seed=1).double().eval()


def _batch(empty: int = 0) -> tuple[Tensor, SequenceLayout]:
    lengths = [4, 9, 2, 6, *[0] * empty]
    tokens = torch.randint(5, 40, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return tokens, SequenceLayout.packed(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))


def _sure(config: ExitsConfig, rule: ExitRule, *outputs: Tensor, sizes: Tensor = ONES) -> list[list[bool]]:
    certainty = Certainty(config, rule)
    return [certainty.are_sure(message, sizes).tolist() for message in outputs]


def test_probability_and_entropy_of_classes() -> None:
    scores = torch.tensor([[math.log(4), 0.0], [0.0, math.log(1.5)]])  # probabilities 0.8 and 0.6
    assert _sure(_exits(), ExitRule(measure="probability", threshold=0.7), scores) == [[True, False]]
    entropy = -(0.8 * math.log2(0.8) + 0.2 * math.log2(0.2))
    assert _sure(_exits(), ExitRule(measure="entropy", threshold=entropy + 1e-6), scores) == [[True, False]]
    assert _sure(_exits(), ExitRule(measure="entropy", threshold=entropy - 1e-6), scores) == [[False, False]]


def test_labels_exit_by_the_least_certain_label() -> None:
    scores = torch.tensor([[5.0, -5.0], [5.0, 0.1]])
    assert _sure(_exits("labels"), ExitRule(measure="probability", threshold=0.9), scores) == [[True, False]]
    assert _sure(_exits("labels"), ExitRule(measure="entropy", threshold=0.5), scores) == [[True, False]]
    rule = ExitRule(measure="patience", threshold=1)
    other = torch.tensor([[4.0, -1.0], [5.0, 0.5]])
    assert _sure(_exits("labels"), rule, scores, other) == [[False, False], [True, True]]
    # with another threshold for labels, 0.1 is negative and 0.5 positive
    assert _sure(_exits("labels", yes_from=0.6), rule, scores, other) == [[False, False], [True, False]]


def test_choices_exit_by_the_certainty_of_the_item() -> None:
    scores, sizes = torch.tensor([[3.0], [0.0], [0.0], [1.0], [1.0], [0.5]]), torch.tensor([3, 1, 2])
    config = _exits("choices", outputs=1)
    assert _sure(config, ExitRule(measure="probability", threshold=0.8), scores, sizes=sizes) == [[True, True, False]]
    assert _sure(config, ExitRule(measure="entropy", threshold=0.5), scores, sizes=sizes) == [[True, True, False]]


def test_patience_counts_consecutive_agreements() -> None:
    left, right = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    rule = ExitRule(measure="patience", threshold=2)
    assert _sure(_exits(), rule, left, right, left, left)[1:] == [[False, False], [True, False], [True, False]]
    near = ExitRule(measure="patience", threshold=1, within=0.2)
    values = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.1], [1.5]])
    assert _sure(_exits("value", outputs=1), near, *values) == [[False, False], [True, False]]


def test_all_or_no_items_exit() -> None:
    model, batch = _model(), _batch()
    with torch.no_grad():
        first, *_, last = exit_outputs(model, *batch)
        at_once = answer_early(model, *batch, rule=ExitRule(measure="probability", threshold=0.0))
        never = answer_early(model, *batch, rule=ExitRule(measure="entropy", threshold=0.0))
        assert at_once.layers.tolist() == [1] * 4
        assert torch.equal(at_once.outputs, first)
        assert never.layers.tolist() == [3] * 4
        assert torch.equal(never.outputs, model.outputs(*batch))
        assert torch.equal(never.outputs, last)


def test_only_empty_sequences_left_stops_the_pass() -> None:
    model, rule = _model(), ExitRule(measure="probability", threshold=0.0)
    with torch.no_grad():
        answers = answer_early(model, *_batch(empty=2), rule=rule)
        torch.testing.assert_close(answers.outputs[:4], answer_early(model, *_batch(), rule=rule).outputs)


@pytest.mark.parametrize("empty", [0, 1])
@torch.no_grad()
def test_sequences_of_an_item_exit_together(empty: int) -> None:
    model, batch, sizes = _model(), _batch(empty), torch.tensor([2, 2, *[1] * empty])
    config = exits_config(model).changed(outputs=1, answer="choices")
    heads = (ClassifierConfig(labels=("score",), dropout=0.0), config)
    model = build(model.config.changed(heads=heads), seed=2).double().eval()
    shares = [message[:2].flatten().softmax(0).max() for message in exit_outputs(model, *batch)[:2]]
    rule = ExitRule(measure="probability", threshold=float(max(shares)) - 1e-6)
    layers = answer_early(model, *batch, rule=rule, sizes=sizes).layers.tolist()
    assert layers[0] == layers[1] < 3
    assert layers[2] == layers[3]


@pytest.mark.parametrize("features", [FeaturesConfig(layers=2), FeaturesConfig(layers=2, skip=1), FeaturesConfig()])
@pytest.mark.parametrize("recurrent", [None, RecurrentConfig(layers=1, width=8)])
@torch.no_grad()
def test_task_head_may_read_several_layers(features: FeaturesConfig, recurrent: RecurrentConfig | None) -> None:
    model, batch = _model(features, recurrent), _batch()
    by_head = torch.stack(exit_outputs(model, *batch))
    threshold = float(by_head[:2].softmax(-1).amax(-1).amax(0).quantile(0.5))
    answers = answer_early(model, *batch, rule=ExitRule(measure="probability", threshold=threshold))
    assert len(set(answers.layers.tolist())) > 1
    assert 3 in answers.layers
    torch.testing.assert_close(answers.outputs, by_head[answers.layers - 1, torch.arange(4)])


def test_layout_select() -> None:
    tokens, layout = _batch()
    rows, padded = layout.pad(tokens)
    chosen = torch.tensor([0, 3])
    packed, positions = layout.select(chosen)
    assert packed.max_length == 6
    assert packed.lengths().tolist() == [4, 6]
    assert tokens[positions].tolist() == [*tokens[:4].tolist(), *tokens[15:].tolist()]
    short, positions = padded.select(chosen)
    assert short.max_length == 6
    assert short.lengths().tolist() == [4, 6]
    assert torch.equal(rows[positions][:, :6][short.is_token], tokens[layout.select(chosen)[1]])
    assert SequenceLayout.full(3, 5).select(chosen)[0] == SequenceLayout.full(2, 5)


def test_exits_and_rule_are_saved(tmp_path: Path) -> None:
    model, rule = _model().float(), ExitRule(measure="entropy", threshold=0.25)
    with_rule(model, rule)
    save(model, tmp_path / "model")
    other = load(tmp_path / "model")
    assert exits_config(other).rule == rule
    for mine, theirs in zip(exit_outputs(model, *_batch()), exit_outputs(other, *_batch()), strict=True):
        assert torch.equal(mine, theirs)


def test_extract_keeps_exits_unless_layers_are_removed() -> None:
    model, batch = _model(), _batch()
    with torch.no_grad():
        narrow = extract(model, Subnet(width=0.5))
        trail = model.run(
            EncoderInputs(*batch, subnet=Subnet(width=0.5)), Want(task=True, all_hidden_states=True)
        ).hidden_states
        for layer, message in zip((1, 2), exit_outputs(narrow, *batch), strict=False):
            torch.testing.assert_close(message, model.heads["exits"](layer, trail[layer], batch[1]))
    shallow = extract(model, Subnet(layers=(0, 2)))
    assert "exits" not in shallow.heads
    assert [head.kind for head in shallow.config.heads] == ["classifier"]
    with pytest.raises(InputError, match="this model has no exits"):
        exit_outputs(shallow, *batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [2, 1]}, "numbers, ascending"),
        ({"layers": [0]}, "distinct positive numbers"),
        ({"answer": "choices"}, "outputs is 2 with answer 'choices'; allowed: 1"),
        ({"rule": {"measure": "patience", "threshold": 1.5}}, "a positive whole number"),
        ({"rule": {"measure": "entropy", "threshold": 1.5}}, "threshold is 1.5 with entropy; allowed: 0 to 1"),
        ({"answer": "value", "outputs": 1, "rule": {"measure": "entropy", "threshold": 0.5}}, "allowed: 'patience'"),
    ],
)
def test_invalid_settings_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _exits(**{"answer": "classes", **change})  # type: ignore[arg-type]


def test_exits_must_be_below_the_last_layer() -> None:
    config = _model().config
    high = tuple(head.changed(layers=(3,)) if isinstance(head, ExitsConfig) else head for head in config.heads)
    with pytest.raises(InputError, match="allowed: 1 to 2, below the last layer"):
        config.changed(heads=high)
    with pytest.raises(InputError, match="universal steps"):
        preset("universal-base", width=16, layers=3, heads=2, vocabulary=40).changed(heads=(_exits(),))
    low = tuple(
        head.changed(features=FeaturesConfig(layers=0)) if isinstance(head, ClassifierConfig) else head
        for head in config.heads
    )
    with pytest.raises(InputError, match=r"head\.features\.layers is 0"):
        config.changed(heads=low)
