"""Depth-adaptive decoding: all blocks = ordinary decoding, one exit for all = a shallower decoder, rows independent."""

import copy
from pathlib import Path

import pytest
import torch
from cases import padded_layout, tiny_model
from torch import Tensor, nn

import bertsmith
from bertsmith import SequenceLayout, Subnet
from bertsmith.checkpoint.store import load, write_model
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.layers.elementwise import NormConfig
from bertsmith.layers.mixers.dynamic_conv import DynamicConvConfig
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.long_short import LongShortConfig
from bertsmith.layers.mixers.multi_linear import MultiLinearConfig
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.models.adaptive_depth import (
    AdaptiveSteps,
    BlockCounts,
    ExitPolicy,
    adaptive_steps,
    decoder_exits_config,
    set_depth_rule,
)
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.build import build
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.decoder_exits import CHOOSERS, Choose, DecoderExitsConfig, DepthRule, GeometricChooser
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq, Steps

START, END = 1, 2
DEPTH = 4
SEARCHES = {
    "greedy": GenerationConfig(method="greedy", extra_length=4),
    "beam": GenerationConfig(beam=3, extra_length=4),
    "sample": GenerationConfig(method="sample", extra_length=4, seed=5),
}
VARIANTS = [
    "full", "pre-norm", "rotary window", "favor", "dynamic_conv", "span_conv", "long_short", "multi_linear",
]  # fmt: skip
NEVER = {  # the exits are open, but no probability of a random network is that large
    "confidence": DepthRule(thresholds=(0.999999,) * 3),
    "geometric": DepthRule(thresholds=(0.999999,) * 3),
    "sequence": DepthRule(depth_penalty=-1e6),
    "multinomial": DepthRule(depth_penalty=-1e6),
}
FIRST = {
    "confidence": DepthRule(thresholds=(0.0,) * 3),
    "geometric": DepthRule(thresholds=(0.0,) * 3),
    "sequence": DepthRule(depth_penalty=1e6),
    "multinomial": DepthRule(depth_penalty=1e6),
}


def exiting(choose: Choose = "confidence", *, variant: str = "full", is_tied: bool = True, neurons: int = 0) -> Seq2Seq:
    """Build a tiny encoder-decoder of four blocks with exits after the first three."""
    config = tiny_model("transformer-tiny", layers=DEPTH).config
    decoder = config.decoder
    assert decoder is not None
    mixer, norm = decoder.layers[0].mixer, decoder.layers[0].norm
    shape = {"heads": mixer.heads, "dropout": 0.0, "is_causal": True}
    mixers = {
        "full": mixer,
        "pre-norm": mixer,
        "rotary window": FullConfig(**shape, rotary=100.0, window=3),
        "favor": FavorConfig(**shape, features=16),
        "dynamic_conv": DynamicConvConfig(**shape, kernel_size=3),
        "span_conv": SpanConvConfig(**shape, kernel_size=3),
        "long_short": LongShortConfig(**shape, kernel_size=3),
        "multi_linear": MultiLinearConfig(**shape, max_length=16),
    }
    assert mixers.keys() == set(VARIANTS)
    norm = NormConfig(placement="pre") if variant == "pre-norm" else norm
    layers = tuple(layer.changed(mixer=mixers[variant], norm=norm) for layer in decoder.layers)
    final = norm if variant == "pre-norm" else None
    exits = DecoderExitsConfig(layers=(1, 2, 3), choose=choose, is_tied=is_tied, neurons=neurons)
    config = config.changed(decoder=decoder.changed(layers=layers, final_norm=final), heads=(*config.heads, exits))
    model = build(config, seed=3).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    assert isinstance(model, Seq2Seq)
    return model


def sources(lengths: list[int]) -> tuple[Tensor, Tensor]:
    layout = padded_layout(lengths)
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 50, layout.is_token.shape, generator=generator) * layout.is_token, layout.is_token.long()


def middle_rule(model: Seq2Seq, ids: Tensor, mask: Tensor) -> DepthRule:
    """Return a rule by which tokens of a random network leave at different exits; centre its chooser for that."""
    choose = decoder_exits_config(model).choose
    seen: dict[nn.Linear, list[Tensor]] = {}
    layers = [part for part in model.heads["decoder_exits"].modules() if isinstance(part, nn.Linear)]
    hooks = [
        layer.register_forward_pre_hook(lambda own, inputs: seen.setdefault(own, []).append(inputs[0]))
        for layer in layers
    ]
    written(model, ids, mask, SEARCHES["greedy"], NEVER[choose])
    for layer, hook in zip(layers, hooks, strict=True):
        hook.remove()
        layer.bias.data = -layer.weight.data @ torch.cat(seen[layer]).mean(0)
    if choose in ("sequence", "multinomial"):
        return DepthRule()
    return DepthRule(thresholds=(0.2, 0.2, 0.2) if choose == "confidence" else (0.5, 0.5, 0.5))


def written(
    model: Seq2Seq,
    ids: Tensor,
    mask: Tensor,
    search: GenerationConfig,
    rule: DepthRule,
    counts: BlockCounts | None = None,
) -> list[list[int]]:
    begin = adaptive_steps(model, rule, counts or BlockCounts())
    return model.generate(ids, mask, search, start=START, end=END, begin=begin)


@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize("search", SEARCHES)
def test_no_exit_equals_ordinary_decoding(choose: Choose, search: str) -> None:
    model, counts = exiting(choose), BlockCounts()
    ids, mask = sources([6, 2, 4])
    expected = model.generate(ids, mask, SEARCHES[search], start=START, end=END)
    assert written(model, ids, mask, SEARCHES[search], NEVER[choose], counts) == expected
    assert counts.mean == DEPTH


@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize("variant", ["full", "pre-norm", "favor", "dynamic_conv"])
def test_everything_at_the_first_exit_equals_a_decoder_of_one_block(choose: Choose, variant: str) -> None:
    model, counts = exiting(choose, variant=variant), BlockCounts()
    ids, mask = sources([6, 2, 4])
    assert written(model, ids, mask, SEARCHES["beam"], FIRST[choose], counts) == cut_decoding(model, ids, mask, 1)
    assert counts.mean == 1.0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("is_tied", [True, False])
def test_everything_at_one_exit_equals_the_cut_decoder(depth: int, is_tied: bool) -> None:
    model, counts = exiting(is_tied=is_tied), BlockCounts()
    ids, mask = sources([6, 2, 4])
    rule = DepthRule(thresholds=tuple(0.0 if layer == depth else 1.0 for layer in (1, 2, 3)))
    assert written(model, ids, mask, SEARCHES["beam"], rule, counts) == cut_decoding(model, ids, mask, depth)
    assert counts.tokens.keys() == {depth}


def cut_decoding(model: Seq2Seq, ids: Tensor, mask: Tensor, depth: int) -> list[list[int]]:
    """Decode with the first blocks of the decoder alone and the head of their exit."""
    cut = copy.deepcopy(model)
    cut.decoder.blocks = nn.ModuleList(cut.decoder.blocks[:depth])
    begin = lambda memory: Steps(  # noqa: E731
        cut.decoder, lambda states: model.exit_scores(depth, states), memory, table=cut.borrowed_table
    )
    return cut.generate(ids, mask, SEARCHES["beam"], start=START, end=END, begin=begin)


@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_rows_alone_equal_rows_in_a_batch(choose: Choose, search: str) -> None:
    model, counts = exiting(choose), BlockCounts()
    ids, mask = sources([6, 2, 4, 5])
    rule = middle_rule(model, ids, mask)
    together = written(model, ids, mask, SEARCHES[search], rule, counts)
    alone = BlockCounts()
    for row, length in enumerate([6, 2, 4, 5]):
        one = ids[row : row + 1, :length], mask[row : row + 1, :length]
        assert written(model, *one, SEARCHES[search], rule, alone) == together[row : row + 1]
    assert alone.tokens == counts.tokens
    assert len(counts.tokens) > 1  # tokens do leave at different blocks


class Fixed(ExitPolicy):
    """Exits given in advance, by step and row."""

    def __init__(self, exits: list[list[int]]) -> None:
        self.exits, self.step = torch.tensor(exits), -1

    def after_first_block(self, hidden: Tensor, rows: Tensor) -> None:
        self.step += 1

    def leaves(self, exit_index: int, hidden: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        return self.exits[self.step, rows] == exit_index


@pytest.mark.parametrize("variant", VARIANTS)
def test_left_tokens_are_copied_upward(variant: str) -> None:
    model = exiting(variant=variant)
    ids, mask = sources([6, 3])
    memory = Memory(model(ids, mask), SequenceLayout.padded(mask.bool()))
    exits = torch.randint(0, DEPTH, (8, 4), generator=torch.Generator().manual_seed(1))
    exits[:5] = torch.tensor(
        [[0] * 4, [0] * 4, [1] * 4, [0, 3, 0, 0], [3, 3, 0, 3]]
    )  # upper blocks have much to absorb
    tokens = torch.randint(3, 50, (8, 4), generator=torch.Generator().manual_seed(2))
    steps = AdaptiveSteps(model, memory, Fixed(exits.tolist()), BlockCounts())
    steps.repeat(2)  # the rows of a beam search
    found = []
    for position, row in enumerate(tokens):
        if position == 2:
            rows = torch.tensor([1, 1, 2, 2])
            steps.select(rows)
            tokens[:2], exits[:2] = tokens[:2, rows], exits[:2, rows]
        found.append(steps.next(row))
    scores = torch.stack(found[2:], dim=1)  # (rows, steps, vocabulary)

    # the same over whole sequences: block by block, a token that has left keeps its hidden state
    target, layout = SequenceLayout.full(4, 8), SequenceLayout.padded(mask.bool().repeat_interleave(2, dim=0))
    stack, table = model.decoder, model.borrowed_table
    hidden = stack.embedding(tokens.T, target, None, table)
    context = stack.context(hidden, target, memory=Memory(memory.hidden_states.repeat_interleave(2, dim=0), layout))
    expected = hidden.new_empty(4, 8, scores.shape[-1])
    for number, (block, own) in enumerate(stack.active_blocks(context), start=1):
        is_running = (number <= exits.T + 1)[..., None]
        hidden = torch.where(is_running, block(hidden, own), hidden)
        normalised = stack.final_norm(hidden)
        head = model.scores(normalised) if number == DEPTH else model.exit_scores(number, normalised)
        is_here = (number == exits.T + 1)[..., None]
        expected = torch.where(is_here, head.log_softmax(-1), expected)
    torch.testing.assert_close(scores, expected[:, 2:].float(), rtol=0, atol=1e-5)  # log-probabilities are float32


def test_geometric_probabilities_sum_to_one() -> None:
    chooser = GeometricChooser(8, 3).double()
    states = [torch.randn(5, 8, dtype=torch.float64) * 4 for _ in range(3)]
    logs = chooser.log_probabilities(states[0], states[0], states)
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(5))
    stop = [chooser.stop_scores(index, hidden).sigmoid() for index, hidden in enumerate(states)]
    torch.testing.assert_close(logs[:, 1].exp(), stop[1] * (1 - stop[0]))


def test_exits_survive_saving(tmp_path: Path) -> None:
    model = exiting("geometric", is_tied=False, neurons=5).float()
    set_depth_rule(model, DepthRule(thresholds=(0.25, 0.5, 0.75)))
    write_model(model, tmp_path)
    again = load(tmp_path)
    assert isinstance(again, Seq2Seq)
    assert decoder_exits_config(again).rule == DepthRule(thresholds=(0.25, 0.5, 0.75))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_narrower_models_keep_their_exits() -> None:
    model = exiting()
    assert "decoder_exits" in bertsmith.extract(model, Subnet(width=0.5)).heads
    assert "decoder_exits" not in bertsmith.extract(model, Subnet(depth=0.5)).heads


def test_fresh_exits_leave_the_decoder_unchanged() -> None:
    model = exiting()
    plain, _ = fit_heads(model, model.config.changed(heads=model.config.heads[:1]), "the model", seed=0)
    ids, _ = sources([6, 6])
    layout = SequenceLayout.full(2, 6)
    hidden = [
        one.decoder.run(
            EncoderInputs(ids, layout, memory=Memory(one(ids), layout), table=one.borrowed_table), Want()
        ).last
        for one in (model, plain)
    ]
    torch.testing.assert_close(*hidden, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (1, 4)}, "1 to 3"),
        ({"layers": (2, 1)}, "rising order"),
        ({"layers": (1, 2), "rule": DepthRule(thresholds=(0.5,))}, "allowed: 2"),
        ({"layers": (1,), "choose": "sequence", "rule": DepthRule(thresholds=(0.5,))}, "allowed: 0"),
        ({"layers": (1,), "rule": DepthRule(thresholds=(0.5,), depth_penalty=1.0)}, "depth_penalty"),
    ],
)
def test_impossible_exits_are_refused(changes: dict[str, object], message: str) -> None:
    config = tiny_model("transformer-tiny", layers=DEPTH).config
    with pytest.raises((InputError, ValueError), match=message):
        config.changed(heads=(*config.heads, DecoderExitsConfig(**changes)))


def test_exits_need_a_decoder() -> None:
    config = tiny_model("bert-tiny", layers=DEPTH).config
    with pytest.raises((InputError, ValueError), match="need a decoder"):
        config.changed(heads=(*config.heads, DecoderExitsConfig(layers=(1,))))
    with pytest.raises(InputError, match="has no decoder exits"):
        decoder_exits_config(tiny_model("transformer-tiny"))
