"""Depth-adaptive translation (Elbayad et al. 2020): train exits of a decoder and choose a rule for a budget of blocks.

add exits -> aligned training -> observe all exits on dev -> search rules for several budgets -> decode dev with each
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from bertsmith.answers.texts import TextExample
from bertsmith.data.loader import SpecialTokens
from bertsmith.data.pairs import PairBatch, PairConfig, PairPlan, PairReader, Pairs
from bertsmith.engines.exit_runner import AdaptiveTranslator
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.models.adaptive_depth import (
    AdaptiveSteps,
    BlockCounts,
    BySequence,
    decoder_exits_config,
    mean_blocks,
    set_depth_rule,
)
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters
from bertsmith.models.heads.decoder_exits import Choose, DecoderExits, DecoderExitsConfig, DepthRule, GeometricChooser
from bertsmith.models.seq2seq import Seq2Seq, Steps
from bertsmith.objectives.depth import DepthLearning, LearnFrom, OracleConfig, exit_scores, teacher_forced
from bertsmith.settings import Record
from bertsmith.shrinking.context import ShrinkSettings
from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import loss_bounds
from bertsmith.tasks.translation import BATCH_SIZE, Translation
from bertsmith.training.optimizer import BatchConfig, OptimizerConfig, ScheduleConfig
from bertsmith.training.phases import all_phases
from bertsmith.training.run_config import Method, RunConfig

OBSERVED_TOKENS = 20_000
"""Target tokens of dev on which rules are searched."""


class DecoderExitHeadsConfig(Record):
    """The exits of the decoder."""

    layers: tuple[int, ...] = ()
    """Decoder blocks (counted from 1) that are followed by an exit; empty for all but the last."""
    is_tied: bool = True
    """Whether exits share the token table with the last head or have a matrix of their own each."""
    choose: Choose = "confidence"
    """Choice of the exit of each token (docs/how-to/exits.md)."""
    neurons: int = Field(default=0, ge=0)
    """Neurons of a hidden layer in the classifier that chooses; 0 for a linear one."""


class DepthRuleConfig(Record):
    """Selection of the rule on dev."""

    blocks: float | None = Field(default=None, gt=0)
    """Maximum mean number of decoder blocks per token; None for the fewest operations within the tolerance."""
    tolerance: float = Field(default=0.5, ge=0)
    """Maximum loss of score, in points, without `blocks`."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Probability with which the loss on new text is within the tolerance, by a bootstrap over dev for all rules at
    once."""
    budgets: tuple[float, ...] = ()
    """Mean numbers of blocks to search rules for; empty for a default range."""
    candidates: int = Field(default=2000, gt=0)
    """Random thresholds that are tried for the budgets."""
    examples: int = Field(default=2000, ge=0)
    """Rows of dev that are decoded with every rule; 0 for all. With few rows the bounds are wide."""


class DecoderExitSettings(ShrinkSettings):
    """All settings of decoder exits."""

    is_for_translation: ClassVar[bool] = True

    method: Literal["exits"] = "exits"
    sequences: PairConfig = PairConfig()
    exits: DecoderExitHeadsConfig = DecoderExitHeadsConfig()
    leave: DepthRuleConfig = DepthRuleConfig()
    oracle: OracleConfig = OracleConfig()
    learn_from: LearnFrom = "labels"
    """Targets of the exits: the right tokens, or the last head's probabilities, which the last head itself does not
    learn from."""
    weighting: Literal["even", "by_depth"] = "even"
    """Weights of the exits in the loss: equal, or proportional to the number of blocks."""
    batch: BatchConfig = BatchConfig(tokens=4096)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-4, epsilon=1e-9, weight_decay=0.0, clip=0.0)
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.1)
    run: RunConfig = RunConfig(steps=1000, evaluate_batches=1000)

    @property
    def translation(self) -> Translation:
        """The task."""
        assert isinstance(self.task, Translation)
        return self.task

    @property
    def learning(self) -> Method:
        """Schedule and sizes of the steps."""
        phases = all_phases(self.sequences.length, self.sequences.micro_tokens, self.batch, ())
        return Method(self.run, self.optimizer, self.schedule, phases)

    @model_validator(mode="after")
    def _check_compile(self) -> "DecoderExitSettings":
        if self.run.compile not in ("auto", "off"):
            raise ValueError(f"run.compile is {self.run.compile!r}; allowed with decoder exits: 'auto', 'off'")
        return self


def with_decoder_exits(model: Seq2Seq, settings: DecoderExitSettings) -> Seq2Seq:
    """Return the model with exits beside its next_token head; trained exits after the same blocks are kept."""
    choice, depth = settings.exits, len(model.decoder.blocks)
    layers = choice.layers or tuple(range(1, depth))
    if not layers:
        raise InputError("the decoder has one block; exits need at least 2")
    exits = DecoderExitsConfig.parse({**choice.plain(), "layers": layers}, source="exits")
    if settings.leave.blocks is not None and settings.leave.blocks < layers[0]:
        raise InputError(
            f"leave.blocks is {settings.leave.blocks:g}, but the first exit is after block {layers[0]}; allowed: "
            f"{layers[0]} or more"
        )
    heads = (*(head for head in model.config.heads if head.kind != "decoder_exits"), exits)
    earlier = model.heads.pop("decoder_exits") if "decoder_exits" in model.heads else None
    fitted, _ = fit_heads(model, model.config.changed(heads=heads), "the model", seed=settings.run.seed)
    assert isinstance(fitted, Seq2Seq)
    fresh = fitted.head("decoder_exits")
    assert isinstance(fresh, DecoderExits)
    if isinstance(earlier, DecoderExits) and (earlier.layers, earlier.is_tied) == (fresh.layers, fresh.is_tied):
        fresh.by_layer = earlier.by_layer  # another choice among the same exits
    return fitted


def depth_objective(settings: DecoderExitSettings, model: Seq2Seq) -> DepthLearning:
    """Return the objective of the exits of a model."""
    return DepthLearning(
        decoder_exits_config(model),
        smoothing=settings.translation.smoothing,
        learn_from=settings.learn_from,
        weighting=settings.weighting,
        depth=len(model.decoder.blocks),
        oracle=settings.oracle,
    )


@dataclass(frozen=True)
class ObservedExits:
    """Outputs of all exits on dev, with teacher forcing.

    Shape: log_likelihoods (heads, tokens), of the right tokens; decisions (exits, tokens), the numbers that thresholds
    apply to, or (heads, tokens), log q of a chooser that takes the largest.
    """

    layers: tuple[int, ...]
    """Blocks below each head."""
    log_likelihoods: np.ndarray
    decisions: np.ndarray

    @property
    def has_thresholds(self) -> bool:
        return len(self.decisions) < len(self.layers)

    def heads(self, rule: DepthRule) -> np.ndarray:
        """Return the head that answers each token, (tokens,)."""
        if not self.has_thresholds:
            penalties = rule.depth_penalty * np.array(self.layers)[:, None]
            chosen: np.ndarray = (self.decisions - penalties).argmax(0)
            return chosen
        leaves = self.decisions > np.array(rule.thresholds)[:, None]
        always = np.ones_like(leaves[:1])
        first: np.ndarray = np.concatenate([leaves, always]).argmax(0)
        return first

    def evaluate(self, rule: DepthRule) -> tuple[float, float]:
        """Return mean blocks and mean log-likelihood per token under a rule."""
        heads = self.heads(rule)
        blocks = float(np.array(self.layers)[heads].mean())
        return blocks, float(self.log_likelihoods[heads, np.arange(len(heads))].mean())

    def candidates(self, count: int, seed: int) -> list[DepthRule]:
        """Return rules to try: random quantiles of every exit's decisions, or a range of penalties."""
        if not self.has_thresholds:
            steps = np.geomspace(1e-3, 1e3, 60)
            return [DepthRule(depth_penalty=float(each)) for each in (*(-steps[::-1]), 0.0, *steps)]
        random = np.random.default_rng(seed)
        exits = len(self.decisions)
        # thresholds by quantile: probabilities crowd near 0 or 1, differently after every block
        shares = np.concatenate([np.zeros((1, exits)), random.random((count, exits))])
        ordered = np.sort(self.decisions, axis=1)
        index = np.minimum((shares * ordered.shape[1]).astype(int), ordered.shape[1] - 1)
        thresholds = np.take_along_axis(ordered.T, index, axis=0)
        thresholds[0] = 0.0  # everything leaves at the first exit
        return [DepthRule(thresholds=tuple(map(float, row))) for row in thresholds]


@torch.no_grad()
def observe_exits(model: Seq2Seq, pairs: Pairs, config: PairConfig) -> ObservedExits:
    """Run all exits on pairs of dev with the right target so far."""
    exits, layers = model.head("decoder_exits"), decoder_exits_config(model).layers
    assert isinstance(exits, DecoderExits)
    tokenizer = model.require_tokenizer()
    reader = PairReader(pairs, config, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator))
    likelihoods, decisions, tokens = [], [], 0
    with model.evaluating():
        for plan in PairPlan(pairs, config, 0).one_epoch():
            batch = reader[plan].batch
            assert isinstance(batch, PairBatch)
            batch = batch.to(model.device)
            source, output = teacher_forced(model, batch)
            scores = exit_scores(model, output, batch, layers, 0.0)
            states = [output.normalised(layer).flatten(0, -2) for layer in (1, *layers)]
            is_target = (batch.expected >= 0).flatten()
            decided = _decisions(exits, batch, source, states, scores.probabilities)
            likelihoods.append(scores.log_likelihoods[:, is_target].float().cpu().numpy())
            decisions.append(decided[:, is_target].float().cpu().numpy())
            tokens += int(is_target.sum())
            if tokens >= OBSERVED_TOKENS:
                break
    heads = (*layers, len(model.decoder.blocks))
    return ObservedExits(heads, np.concatenate(likelihoods, axis=1), np.concatenate(decisions, axis=1))


def _decisions(
    exits: DecoderExits, batch: PairBatch, source: Tensor, states: Sequence[Tensor], probabilities: Tensor
) -> Tensor:
    """Return the numbers that a rule decides by, for every token."""
    chooser, (first, *at_exits) = exits.chooser, states
    if not chooser.is_trained:
        return probabilities[:-1]
    if isinstance(chooser, GeometricChooser):
        return torch.stack([chooser.stop_scores(index, hidden).sigmoid() for index, hidden in enumerate(at_exits)])
    logs = chooser.log_probabilities(batch.source_layout.means(source), first, at_exits)
    if len(logs) != len(first):  # one row per sequence
        logs = logs[batch.target_layout.sequence_index(batch.target).flatten()]
    return logs.T


def search_rules(observed: ObservedExits, budgets: Sequence[float], candidates: int, seed: int) -> list[DepthRule]:
    """Return the rule of largest likelihood within each budget of mean blocks, without repetitions."""
    rules = observed.candidates(candidates, seed)
    measured = [observed.evaluate(rule) for rule in rules]
    found: dict[DepthRule, None] = {}
    for budget in budgets:
        fitting = [index for index, (blocks, _) in enumerate(measured) if blocks <= budget]
        if fitting:
            found[rules[max(fitting, key=lambda index: measured[index][1])]] = None
    return list(found)


class DepthScore(Record):
    """A rule with its score and cost on dev."""

    rule: DepthRule
    score: float
    loss_bound: float
    """Upper confidence bound of the score that the rule loses against all blocks; the bounds of all rules hold
    together."""
    mean_blocks: float
    """Mean decoder blocks per token."""
    flops: float
    """Estimated FLOP of the decoder per token: the blocks and the products with the vocabulary."""
    texts_per_second: float


@dataclass(frozen=True)
class ChosenDepth:
    """Dev scores of every exit and every rule, and the chosen rule."""

    metric: str
    score: float
    mean_blocks: float
    flops: float
    texts_per_second: float
    loss_bound: float | None = field(metadata={"nullable": True})
    """None if all blocks are computed."""
    full_score: float
    """Score with all blocks."""
    full_flops: float
    full_texts_per_second: float
    score_before: float
    """Score of the fine-tuned model, before the exits were trained."""
    blocks: int
    exit_scores: dict[str, float]
    """Score with all tokens at one exit, by its block."""
    rule: DepthRule | None = field(metadata={"nullable": True})
    """None if all blocks are computed."""
    table: tuple[DepthScore, ...]
    chosen_index: int | None = field(metadata={"hidden": True})
    """Index of the chosen rule in `table`."""
    examples: int
    """Rows of dev that were decoded."""
    tolerance: float
    confidence: float


@dataclass(frozen=True)
class Decoded:
    """Dev decoded in one way."""

    evaluation: Evaluation
    texts_per_second: float

    @property
    def score(self) -> float:
        return self.evaluation.score


class DepthEvaluator:
    """Decodes rows of dev with a model at several depths."""

    def __init__(self, task: Translation, examples: Sequence[TextExample], limit: int) -> None:
        self.task = task
        step = max(1, len(examples) // limit) if limit else 1
        self.examples = list(examples)[::step][: limit or None]

    def decode(self, translate: Callable[..., list[str]], **options: Any) -> Decoded:
        """Translate and score the rows."""
        texts, start = [example.text for example in self.examples], time.perf_counter()
        outputs = translate(texts, self.task.generation, batch_size=BATCH_SIZE, **options)
        seconds = time.perf_counter() - start
        evaluation = self.task.evaluate(self.examples, [{"answer": output} for output in outputs])
        return Decoded(evaluation, len(texts) / seconds)


def fixed_exit(model: Seq2Seq, exit_index: int) -> Callable[[Memory], Steps]:
    """Return the argument `begin` of `Seq2Seq.translate` that makes all tokens leave at one exit."""

    def begin(memory: Memory) -> Steps:
        chosen = torch.full((memory.layout.batch,), exit_index, device=memory.hidden_states.device)
        return AdaptiveSteps(model, memory, BySequence(chosen), BlockCounts())

    return begin


def choose_depth(
    settings: DecoderExitSettings,
    model: Seq2Seq,
    examples: Sequence[TextExample],
    score_before: float,
    say: Callable[[str], None] = lambda text: None,
) -> ChosenDepth:
    """Search rules on dev, decode dev with each and set the best one in the model."""
    leave, depth = settings.leave, len(model.decoder.blocks)
    config = decoder_exits_config(model)
    evaluator = DepthEvaluator(settings.translation, examples, leave.examples)
    pairs = settings.translation.pairs(examples, model, settings.sequences)
    observed = observe_exits(model, pairs, settings.sequences)
    full = evaluator.decode(model.translate)
    metric = full.evaluation.metric
    say(f"all {depth} blocks: {metric} {full.score:.2f}")
    rules, decoded, tokens, by_exit = [], [], [], {}
    for index, layer in enumerate(config.layers):
        alone = evaluator.decode(model.translate, begin=fixed_exit(model, index))
        by_exit[str(layer)] = alone.score
        say(f"block {layer} alone: {metric} {alone.score:.2f}")
        if observed.has_thresholds:  # a fixed depth is a rule, too
            rules.append(DepthRule.only(index, len(config.layers)))
            decoded.append(alone)
            tokens.append({layer: 1})
    for rule in search_rules(observed, depth_budgets(leave, observed.layers), leave.candidates, settings.run.seed):
        runner = AdaptiveTranslator(model, rule)
        rules.append(rule)
        decoded.append(evaluator.decode(runner.translate))
        tokens.append(runner.counts.tokens)
        say(f"{runner.counts.mean or depth:.2f} blocks: {metric} {decoded[-1].score:.2f}")
    evaluations = [one.evaluation for one in decoded]
    bounds = loss_bounds(full.evaluation, evaluations, len(evaluator.examples), level=leave.confidence)
    length = round(float(pairs.lengths[1].mean()))
    full_flops = decoding_flops(model.config, None, {depth: 1}, length)
    table = [
        DepthScore(
            rule=rule,
            score=one.score,
            loss_bound=bound,
            mean_blocks=mean_blocks(by_blocks),
            flops=decoding_flops(model.config, rule, by_blocks, length),
            texts_per_second=one.texts_per_second,
        )
        for rule, one, by_blocks, bound in zip(rules, decoded, tokens, bounds, strict=True)
    ]
    chosen_index = best_depth(table, full_flops, leave)
    chosen = None if chosen_index is None else table[chosen_index]
    set_depth_rule(model, None if chosen is None else chosen.rule)
    return ChosenDepth(
        metric=metric,
        score=full.score if chosen is None else chosen.score,
        mean_blocks=float(depth) if chosen is None else chosen.mean_blocks,
        flops=full_flops if chosen is None else chosen.flops,
        texts_per_second=full.texts_per_second if chosen is None else chosen.texts_per_second,
        loss_bound=None if chosen is None else chosen.loss_bound,
        full_score=full.score,
        full_flops=full_flops,
        full_texts_per_second=full.texts_per_second,
        score_before=score_before,
        blocks=depth,
        exit_scores=by_exit,
        rule=None if chosen is None else chosen.rule,
        table=tuple(table),
        chosen_index=chosen_index,
        examples=len(evaluator.examples),
        tolerance=leave.tolerance,
        confidence=leave.confidence,
    )


def decoding_flops(config: ModelConfig, rule: DepthRule | None, tokens: Mapping[int, int], length: int) -> float:
    """Return the estimated FLOP of the decoder per token, from the numbers of tokens by their blocks.

    With confidence every open exit on a token's way multiplies by the vocabulary, otherwise only the one it leaves by.
    """
    decoder = config.decoder
    assert decoder is not None
    exits = next(head for head in config.heads if isinstance(head, DecoderExitsConfig))
    products = []
    if rule is not None and exits.choose == "confidence":
        products = [layer for index, layer in enumerate(exits.layers) if rule.is_open(index)]
    product = 2 * decoder.embedding_width * decoder.vocabulary
    total = 0.0
    for blocks, count in tokens.items():
        own = decoder.changed(layers=decoder.layers[:blocks]).flops(length)
        total += count * (own + product * (sum(layer <= blocks for layer in products) + (blocks not in products)))
    return total / sum(tokens.values())


def depth_budgets(leave: DepthRuleConfig, layers: Sequence[int]) -> list[float]:
    """Return the budgets to search rules for: the given ones, shares of `blocks`, or a range over all depths."""
    if leave.budgets:
        return list(leave.budgets)
    if leave.blocks is not None:
        # decoding may take more blocks than teacher forcing, on which rules are searched
        return [max(float(layers[0]), share * leave.blocks) for share in (1.0, 0.95, 0.9, 0.8, 0.7)]
    return [float(each) for each in np.linspace(layers[0], layers[-1], 8)[1:-1]]


def best_depth(rows: Sequence[DepthScore], full_flops: float, leave: DepthRuleConfig) -> int | None:
    """Return the index of the chosen rule: the best within the budget, or the cheapest surely within the tolerance."""
    if leave.blocks is not None:
        fitting = [index for index, row in enumerate(rows) if row.mean_blocks <= leave.blocks]
        if not fitting:
            nearest = f"; the nearest has {min(row.mean_blocks for row in rows):.2f}" if rows else ""
            raise InputError(
                f"leave.blocks is {leave.blocks:g}, but no rule decodes dev with so few{nearest}: raise leave.blocks"
            )
        return max(fitting, key=lambda index: rows[index].score)
    good = [index for index, row in enumerate(rows) if row.loss_bound <= leave.tolerance and row.flops < full_flops]
    return min(good, key=lambda index: rows[index].flops, default=None)


def explain_decoder_exits(settings: DecoderExitSettings, model: Seq2Seq) -> dict[str, str]:
    """Describe the exits of a model and the cost of training them."""
    config = model.config
    plain = config.changed(heads=tuple(head for head in config.heads if head.kind != "decoder_exits"))
    return {
        "exits after decoder blocks": ", ".join(str(layer) for layer in decoder_exits_config(model).layers),
        "parameters of the exits": f"{parameters(config) - parameters(plain):,}",
        "steps": f"{settings.run.steps:,}",
    }
