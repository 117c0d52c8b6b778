"""Search of depth rules: simulated exits, budgets, the choice on dev."""

import numpy as np
import pytest
import torch
from cases import tiny_model

from bertsmith.errors import InputError
from bertsmith.models.adaptive_depth import BlockCounts, adaptive_steps
from bertsmith.models.heads.decoder_exits import DepthRule
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq
from bertsmith.shrinking.decoder_exits import (
    DecoderExitSettings,
    DepthRuleConfig,
    DepthScore,
    ObservedExits,
    best_depth,
    decoding_flops,
    depth_budgets,
    fixed_exit,
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


def _row(score: float, loss_bound: float, blocks: float, flops: float) -> DepthScore:
    return DepthScore(
        rule=DepthRule(), score=score, loss_bound=loss_bound, mean_blocks=blocks, flops=flops, texts_per_second=1.0
    )


def test_cheapest_rule_that_is_surely_within_the_tolerance() -> None:
    # full score 34: the second row loses 0.2 but may lose 0.9, the third saves blocks but no operations
    rows = [_row(30.0, 4.7, 1.5, 3e6), _row(33.8, 0.9, 2.5, 4e6), _row(34.1, 0.4, 3.5, 9e6), _row(33.9, 0.5, 3.0, 5e6)]
    assert best_depth(rows, 8e6, DepthRuleConfig(tolerance=0.5)) == 3
    assert best_depth(rows, 8e6, DepthRuleConfig(tolerance=5)) == 0
    assert best_depth(rows, 8e6, DepthRuleConfig(tolerance=0.3)) is None
    assert best_depth(rows, 4e6, DepthRuleConfig(tolerance=0.5)) is None
    assert best_depth(rows, 8e6, DepthRuleConfig(blocks=3.2)) == 3
    with pytest.raises(InputError, match=r"nearest has 1\.50"):
        best_depth(rows, 8e6, DepthRuleConfig(blocks=1.2))


def with_exits(**exits: object) -> Seq2Seq:
    """Return a tiny model of three blocks with exits after the first two."""
    model = tiny_model("transformer-tiny", layers=3)
    assert isinstance(model, Seq2Seq)
    settings = {"model": "base", "task": {"kind": "translation"}, "exits": {"layers": [1, 2], **exits}}
    return with_decoder_exits(model, DecoderExitSettings.parse(settings))


def test_operations_count_blocks_and_products_with_the_vocabulary() -> None:
    confidence, geometric = with_exits().config, with_exits(choose="geometric").config
    decoder = confidence.decoder
    assert decoder is not None
    block = decoder.changed(layers=decoder.layers[:1]).flops(10)
    product = 2 * decoder.width * decoder.vocabulary
    tokens = {1: 3, 2: 1, 3: 4}
    blocks = (3 * 1 + 1 * 2 + 4 * 3) / 8 * block
    both = decoding_flops(confidence, DepthRule(thresholds=(0.5, 0.5)), tokens, 10)
    assert both == pytest.approx(blocks + (3 * 1 + 1 * 2 + 4 * 3) / 8 * product)
    first = decoding_flops(confidence, DepthRule(thresholds=(0.5, 1.0)), {1: 3, 3: 5}, 10)
    assert first == pytest.approx((3 * 1 + 5 * 3) / 8 * block + (3 * 1 + 5 * 2) / 8 * product)
    one_each = decoding_flops(geometric, DepthRule(thresholds=(0.5, 0.5)), tokens, 10)
    assert one_each == pytest.approx(blocks + product)
    assert decoding_flops(confidence, None, {3: 1}, 10) == pytest.approx(3 * block + product)


def test_sequences_leave_at_a_fixed_exit_by_a_rule() -> None:
    model = with_exits().float().eval()
    source = torch.tensor([[5, 6, 7], [8, 9, 3]])
    search = GenerationConfig(method="greedy", extra_length=4)
    for index in range(2):
        counts = BlockCounts()
        by_rule = adaptive_steps(model, DepthRule.only(index, 2), counts)
        assert model.generate(source, None, search, start=1, end=2, begin=by_rule) == model.generate(
            source, None, search, start=1, end=2, begin=fixed_exit(model, index)
        )
        assert counts.mean == index + 1


def test_closed_exits_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_exits().float().eval()
    scored: list[int] = []
    exit_scores = model.exit_scores
    monkeypatch.setattr(model, "exit_scores", lambda layer, states: scored.append(layer) or exit_scores(layer, states))
    for thresholds, expected in (((1.0, 1.0), set()), ((1.0, 0.0), {2}), ((0.999, 1.0), {1})):
        scored.clear()
        begin = adaptive_steps(model, DepthRule(thresholds=thresholds), BlockCounts())
        model.generate(torch.tensor([[5, 6, 7]]), None, GenerationConfig(method="greedy"), start=1, end=2, begin=begin)
        assert set(scored) == expected


def test_another_chooser_keeps_trained_exits() -> None:
    model = with_exits(choose="geometric")

    def add_exits(model: Seq2Seq, **exits: object) -> Seq2Seq:
        return with_decoder_exits(
            model, DecoderExitSettings.parse({"model": "base", "task": {"kind": "translation"}, "exits": exits})
        )

    with torch.no_grad():
        model.heads["decoder_exits"].by_layer["2"].norm.weight.fill_(3.0)
    model = add_exits(model, layers=[1, 2], choose="confidence")
    assert (model.heads["decoder_exits"].by_layer["2"].norm.weight == 3.0).all()
    model = add_exits(model, layers=[2], choose="confidence")
    assert (model.heads["decoder_exits"].by_layer["2"].norm.weight != 3.0).any()
