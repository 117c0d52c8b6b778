"""Run a model with early exits: every item is answered by the first exit that is confident enough."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bertsmith.answers.chart import SpanWeights
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.base import Runner
from bertsmith.layers.subnet import Subnet
from bertsmith.models.adaptive_depth import BlockCounts, adaptive_steps, decoder_exits_config
from bertsmith.models.encoder import EncoderInputs
from bertsmith.models.exiting import EarlyAnswers, answer_early, exit_outputs, exits_config
from bertsmith.models.heads.decoder_exits import DepthRule
from bertsmith.models.heads.exits import ExitRule
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq
from bertsmith.text.tokenizer import Tokenizer


class ModelRunner:
    """Base class of runners that delegate to a PyTorch model."""

    has_subnets = False
    has_early_exits = False
    mean_layers: float | None = None

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config, self.tokenizer = model.config, model.tokenizer
        self.is_evaluating = False

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def torch_model(self) -> Model | None:
        return self.model

    @property
    def is_for_tokens(self) -> bool:
        return self.model.is_for_tokens

    @property
    def span_weights(self) -> SpanWeights | None:
        return self.model.span_weights

    @property
    def can_embed(self) -> bool:
        return self.model.can_embed

    @property
    def can_fill_masks(self) -> bool:
        return self.model.can_fill_masks

    def require_tokenizer(self) -> Tokenizer:
        return self.model.require_tokenizer()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        is_inner, self.is_evaluating = self.is_evaluating, True
        if not is_inner:
            self.reset_counts()
        try:
            with self.model.evaluating():
                yield
        finally:
            self.is_evaluating = is_inner

    def reset_counts(self) -> None:
        """Reset the counters of early exits; `evaluating` calls it, but not inside another `evaluating`."""

    def outputs(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        return self.model.outputs(tokens, layout, types, subnet=subnet)

    def vectors(self, inputs: EncoderInputs) -> Tensor:
        return self.model.vectors(inputs)

    def mask_probabilities(self, inputs: EncoderInputs, positions: Tensor) -> Tensor:
        return self.model.mask_probabilities(inputs, positions)


class ExitRunner(ModelRunner):
    """Apply an exit rule and count the computed layers since `evaluating` was entered."""

    has_early_exits = True

    def __init__(self, model: Model, rule: ExitRule) -> None:
        super().__init__(model)
        exits_config(model).check_rule(rule)
        self.rule = rule
        self.layers_used: Counter[int] = Counter()
        """Number of sequences by the number of layers computed for them."""

    def reset_counts(self) -> None:
        self.layers_used = Counter()

    @property
    def mean_layers(self) -> float | None:  # type: ignore[override]
        """Mean number of layers per sequence; None before the first batch."""
        sequences = self.layers_used.total()
        return sum(depth * count for depth, count in self.layers_used.items()) / sequences if sequences else None

    def outputs(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of every sequence; a sub-network computes all of its layers."""
        if subnet is not None:
            return self.model.outputs(tokens, layout, types, subnet=subnet)
        return self.early(tokens, layout, types, sizes=sizes).outputs

    def early(
        self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None, *, sizes: Tensor | None = None
    ) -> EarlyAnswers:
        """Return the outputs of every sequence and the number of layers computed for it.

        In multiple choice an exit decides per item, so without `sizes` all layers are computed.
        Shape: tokens and types (batch, length) or (tokens,); sizes (items,), int64.
        """
        if sizes is None and exits_config(self.model).answer == "choices":
            depth = len(self.config.encoder.layers)
            answers = EarlyAnswers(self.model.outputs(tokens, layout, types), torch.full((layout.batch,), depth))
        else:
            answers = answer_early(self.model, tokens, layout, types, rule=self.rule, sizes=sizes)
        self.layers_used.update(answers.layers.tolist())
        return answers


class AdaptiveTranslator(ModelRunner):
    """Translate with the exits of a decoder and count the computed blocks since `evaluating` was entered."""

    has_early_exits = True

    def __init__(self, model: Seq2Seq, rule: DepthRule) -> None:
        super().__init__(model)
        decoder_exits_config(model).check_rule(rule)
        self.translator, self.rule, self.counts = model, rule, BlockCounts()

    @property
    def mean_layers(self) -> float | None:  # type: ignore[override]
        """Mean number of decoder blocks per token; None before the first text."""
        return self.counts.mean

    def translate(
        self,
        texts: Sequence[str],
        config: GenerationConfig | None = None,
        *,
        batch_size: int = 32,
        progress: Callable[[int], None] = lambda texts: None,
    ) -> list[str]:
        """Return one text for each text; see `Seq2Seq.translate`."""
        with self.evaluating():
            begin = adaptive_steps(self.translator, self.rule, self.counts)
            return self.translator.translate(texts, config, batch_size=batch_size, progress=progress, begin=begin)

    def reset_counts(self) -> None:
        self.counts = BlockCounts()


class AllExits(ModelRunner):
    """Return the concatenated outputs of every exit, the task head last: (sequences, exits × outputs)."""

    def outputs(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        return torch.cat(exit_outputs(self.model, tokens, layout, types), dim=-1)


def with_exits(model: Model) -> Runner:
    """Return a runner that uses the model's exits, or the model itself if it has no exits or no exit rule."""
    if isinstance(model, Seq2Seq):
        depth_rule = decoder_exits_config(model).rule if "decoder_exits" in model.heads else None
        return model if depth_rule is None else AdaptiveTranslator(model, depth_rule)
    rule = exits_config(model).rule if "exits" in model.heads else None
    return model if rule is None else ExitRunner(model, rule)
