"""Search of depth rules: simulated exits, budgets, the choice on dev."""

import numpy as np
import pytest
import torch
from cases import tiny_model

from bertsmith.errors import InputError
from bertsmith.models.heads.decoder_exits import DepthRule
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.shrinking.decoder_exits import (
    DecoderExitSettings,
    DepthRuleConfig,
    DepthScore,
    ObservedExits,
    best_depth,
    depth_budgets,
    search_rules,
    with_decoder_exits,
)

RANDOM = np.random.default_rng(0)
CONFIDENT = ObservedExits((1, 2, 4), -RANDOM.random((3, 500)), RANDOM.random((2, 500)))
CHOSEN = ObservedExits((1, 2, 4), -RANDOM.random((3, 500)), np.log(RANDOM.dirichlet([1, 1, 1], 500).T))


def test_thresholds_by_hand() -> None:
    observed = ObservedExits(
        (1, 3, 4),
        np.array([[-1.0, -2.0, -3.0], [-0.5, -1.0, -2.0], [-0.1, -0.2, -0.3]]),
        np.array([[0.9, 0.1, 0.2], [0.9, 0.8, 0.3]]),
    )
    rule = DepthRule(thresholds=(0.5, 0.7))
    assert observed.heads(rule).tolist() == [0, 1, 2]
    assert observed.evaluate(rule) == pytest.approx((8 / 3, -(1.0 + 1.0 + 0.3) / 3))


def test_penalty_moves_tokens_to_earlier_exits() -> None:
    blocks = [CHOSEN.evaluate(DepthRule(depth_penalty=penalty))[0] for penalty in (-1e6, -0.3, 0.0, 0.3, 1e6)]
    assert blocks == sorted(blocks, reverse=True)
    assert (blocks[0], blocks[-1]) == (4, 1)


@pytest.mark.parametrize("observed", [CONFIDENT, CHOSEN])
def test_rules_keep_their_budgets(observed: ObservedExits) -> None:
    budgets = [1.0, 1.5, 2.5, 3.5]
    rules = search_rules(observed, budgets, 500, 0)
    measured = [observed.evaluate(rule) for rule in rules]
    assert 1 < len(rules) <= len(budgets)
    assert all(blocks <= budgets[-1] for blocks, _ in measured)
    assert measured[0][0] == 1.0
    likelihoods = [likelihood for _, likelihood in measured]
    assert likelihoods == sorted(likelihoods)  # more blocks never have to be worse on what was searched


def test_search_beats_one_threshold_for_all_exits() -> None:
    one = [CONFIDENT.evaluate(DepthRule(thresholds=(each, each))) for each in np.linspace(0, 1, 101)]
    for budget in (1.5, 2.0, 3.0):
        (rule,) = search_rules(CONFIDENT, [budget], 4000, 0)
        assert CONFIDENT.evaluate(rule)[1] >= max(value for blocks, value in one if blocks <= budget) - 0.01


def test_default_budgets() -> None:
    assert depth_budgets(DepthRuleConfig(budgets=(2.0,)), (1, 2, 4)) == [2.0]
    assert max(depth_budgets(DepthRuleConfig(blocks=3.0), (1, 2, 4))) == 3.0
    assert min(depth_budgets(DepthRuleConfig(blocks=1.2), (1, 2, 4))) == 1.0
    budgets = depth_budgets(DepthRuleConfig(), (1, 2, 4))
    assert budgets == sorted(budgets)
    assert 1 < budgets[0] < budgets[-1] < 4


def _row(score: float, blocks: float) -> DepthScore:
    return DepthScore(rule=DepthRule(), score=score, mean_blocks=blocks, texts_per_second=1.0)


def test_best_depth() -> None:
    rows = [_row(30.0, 1.5), _row(33.8, 2.5), _row(34.1, 3.0), _row(35.0, 4.0)]
    assert best_depth(rows, 34.0, DepthRuleConfig(tolerance=0.5), 4) == 1
    assert best_depth(rows, 34.0, DepthRuleConfig(tolerance=5), 4) == 0
    assert best_depth(rows, 38.0, DepthRuleConfig(tolerance=0.5), 4) is None
    assert best_depth(rows, 34.0, DepthRuleConfig(blocks=3.5), 4) == 2
    with pytest.raises(InputError, match=r"nearest has 1\.50"):
        best_depth(rows, 34.0, DepthRuleConfig(blocks=1.2), 4)


def test_another_chooser_keeps_trained_exits() -> None:
    model = tiny_model("transformer-tiny", layers=3)
    assert isinstance(model, Seq2Seq)

    def add_exits(model: Seq2Seq, **exits: object) -> Seq2Seq:
        return with_decoder_exits(
            model, DecoderExitSettings.parse({"model": "base", "task": {"kind": "translation"}, "exits": exits})
        )

    model = add_exits(model, layers=[1, 2], choose="geometric")
    with torch.no_grad():
        model.heads["decoder_exits"].by_layer["2"].norm.weight.fill_(3.0)
    model = add_exits(model, layers=[1, 2], choose="confidence")
    assert (model.heads["decoder_exits"].by_layer["2"].norm.weight == 3.0).all()
    model = add_exits(model, layers=[2], choose="confidence")
    assert (model.heads["decoder_exits"].by_layer["2"].norm.weight != 3.0).any()
