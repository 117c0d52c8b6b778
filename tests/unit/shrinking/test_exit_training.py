"""Exit rules: evaluating them from one pass over dev equals running with early exits."""

import numpy as np
import pytest
import torch

from bertsmith.data.layout import SequenceLayout
from bertsmith.models.build import build
from bertsmith.models.exiting import answer_early, exit_outputs, exits_config
from bertsmith.models.heads.exits import ExitRule, ExitsConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.published import preset
from bertsmith.shrinking.exits import ExitOutputs, RuleScore, best_rule, candidate_rules, exit_indices


@pytest.mark.parametrize("answer", ["classes", "labels", "choices"])
@pytest.mark.parametrize("measure", ["probability", "entropy", "patience"])
@torch.no_grad()
def test_rules_evaluated_in_one_pass_equal_early_exits(answer: str, measure: str) -> None:
    outputs = 1 if answer == "choices" else 3
    head = ClassifierConfig(labels=tuple("abc"[:outputs]), dropout=0.0)
    exits = {"layers": [1, 3, 4], "outputs": outputs, "answer": answer, "hidden": "tanh"}
    config = preset("bert-tiny", width=16, layers=5, heads=2, vocabulary=40, init_std=0.3, dropout=0.0)
    config = config.changed(heads=(head, ExitsConfig.parse(exits, source="a test")))
    model = build(config, seed=0).double().eval()
    lengths, sizes = [4, 9, 2, 6, 3, 7, 1, 5], torch.tensor([3, 1, 2, 2] if answer == "choices" else [1] * 8)
    tokens = torch.randint(5, 40, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    layout = SequenceLayout.packed(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    starts = np.cumsum(sizes.numpy())[:-1]
    by_head = ExitOutputs([np.split(one.numpy(), starts) for one in exit_outputs(model, tokens, layout)])
    seen = set()
    for rule in candidate_rules(measure, (), 3, 0.0):  # type: ignore[arg-type]
        indices = exit_indices(exits_config(model), by_head, rule)
        early = answer_early(model, tokens, layout, rule=rule, sizes=sizes)
        layers = np.array([1, 3, 4, 5])[indices]
        assert np.repeat(layers, sizes.numpy()).tolist() == early.layers.tolist()
        np.testing.assert_allclose(np.concatenate(by_head.select(indices)), early.outputs.numpy(), rtol=1e-9)
        seen.update(layers.tolist())
    assert len(seen) > 1  # else no sequence exited early


def _row(score: float, saving: float) -> RuleScore:
    return RuleScore(threshold=0.5, score=score, mean_layers=1.0, flops=1.0, saving=saving)


def test_best_rule_saves_most_within_the_tolerance() -> None:
    rows = [_row(80.0, 0.7), _row(89.6, 0.4), _row(90.2, 0.5), _row(90.0, -0.01)]
    assert best_rule(rows, 90.0, 0.5) == 2
    assert best_rule(rows, 90.0, 10.0) == 0
    assert best_rule(rows[3:], 90.0, 0.5) is None
    assert best_rule([], 90.0, 0.5) is None


def test_default_thresholds() -> None:
    assert [rule.threshold for rule in candidate_rules("patience", (), 4, 0.0)] == [1, 2, 3]
    assert candidate_rules("entropy", (0.3,), 4, 0.0) == [ExitRule(measure="entropy", threshold=0.3)]
