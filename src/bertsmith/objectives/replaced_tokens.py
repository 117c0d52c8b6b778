"""Replaced-token detection (ELECTRA, Clark et al. 2020): train an encoder to detect tokens that a generator replaced.

    corrupted   the text with masked positions
    scores      generator logits at the masked positions       loss: cross-entropy, as in masked language modelling
    sampled     the text with a token sampled from the scores at every masked position
    logits      encoder logits at every token of `sampled`     loss: binary cross-entropy; a token that was sampled
                                                               correctly counts as original

Sampling stops gradients, so the second loss does not train the generator.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import Corrupted, MaskingConfig, Vocabulary, corrupt
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.random import bits, key, uniform
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import ReplacedTokensConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, ObjectiveConfig, Portion, Share, Sums, Term, token_sums, wide
from bertsmith.objectives.masked_lm import vocabulary_of
from bertsmith.ops.token_loss import Sampling
from bertsmith.text.tokenizer import Tokenizer

_SAMPLE_STREAM = 11  # random stream of the generator's samples


class GeneratorMaskingConfig(MaskingConfig):
    """Masking of the generator's input with ELECTRA's defaults; DeBERTa v3 has mask = 1."""

    mask: float = Field(default=0.85, ge=0, le=1)
    """Fraction of the selected tokens that become [MASK] …"""
    random: float = Field(default=0.0, ge=0, le=1)
    """… and that become a random token; the others stay unchanged."""


class ReplacedTokenDetectionConfig(ObjectiveConfig):
    """Detect tokens that a generator replaced."""

    kind: Literal["replaced_tokens"] = "replaced_tokens"
    masking: GeneratorMaskingConfig = GeneratorMaskingConfig()
    weight: float = Field(default=50.0, gt=0)
    """Weight of the encoder's loss relative to the generator's."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the generator."""
    optimizers: Literal["one", "two"] = "one"
    """With "two", the gradients of generator and encoder are clipped separately, as in DeBERTa v3."""
    generator_rate: float = Field(default=1.0, gt=0)
    """For "two": the generator's learning rate relative to the encoder's."""

    @model_validator(mode="after")
    def _check_rate(self) -> "ReplacedTokenDetectionConfig":
        if self.optimizers == "one" and self.generator_rate != 1:
            raise ValueError(f"generator_rate is {self.generator_rate}; allowed with optimizers = 'one': 1")
        return self

    @property
    def heads(self) -> tuple[str, ...]:
        return ("replaced_tokens",)

    @property
    def targets_per_token(self) -> float:
        return self.masking.rate

    @property
    def token_term(self) -> str:
        return "generator"

    def network(self, config: ModelConfig) -> ModelConfig:
        adds_first = any(isinstance(head, ReplacedTokensConfig) and head.adds_first for head in config.heads)
        if adds_first and config.is_causal:
            raise InputError(
                "replaced_tokens.adds_first is true, but in a causal encoder the first token sees itself alone; "
                "allowed: false"
            )
        return config

    def build(
        self, tokenizer: Tokenizer, ponder_weight: float | None = None, jacobian_weight: float | None = None
    ) -> "ReplacedTokenDetection":
        if jacobian_weight is not None:
            raise InputError("encoder.equilibrium is given; allowed with replaced_tokens: an encoder without it")
        if ponder_weight is not None:
            raise InputError("encoder.universal.halting is given; allowed with replaced_tokens: an encoder without it")
        return ReplacedTokenDetection(self, vocabulary_of(tokenizer))


@dataclass(frozen=True)
class ReplacedBatch:
    """A corrupted batch and the original text."""

    corrupted: Corrupted
    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None
    is_real: Tensor
    draw: Tensor
    """(positions,): a uniform random number from [0, 1) for every masked position."""


class ReplacedTokenDetection(Objective[TokenBatch, ReplacedBatch]):
    """Generator cross-entropy at the masked positions and encoder binary cross-entropy at every token."""

    def __init__(self, config: ReplacedTokenDetectionConfig, vocabulary: Vocabulary) -> None:
        self.config, self.vocabulary = config, vocabulary
        self.terms = {
            "generator": Term(("accuracy",)),
            "replaced": Term(("accuracy", "recall", "precision", "share"), weight=config.weight),
        }

    def to(self, device: torch.device | str) -> "ReplacedTokenDetection":
        return ReplacedTokenDetection(self.config, self.vocabulary.to(device))

    def prepare(self, batch: TokenBatch, seed: int) -> ReplacedBatch:
        corrupted = corrupt(batch, seed, self.config.masking, self.vocabulary)
        # one draw per position, determined by sequence and position in it, independent of batching
        sequence = batch.layout.sequence_index(batch.tokens).flatten()[corrupted.positions]
        position = batch.layout.positions(batch.tokens).flatten()[corrupted.positions]
        draw = uniform(bits(key(seed, _SAMPLE_STREAM), batch.sample[sequence]), position)
        return ReplacedBatch(corrupted, batch.tokens, batch.layout, batch.types, batch.is_real, draw)

    def counts(self, prepared: ReplacedBatch) -> dict[str, Tensor]:
        return {
            "generator": (prepared.corrupted.targets != IGNORED).sum(),
            "replaced": prepared.is_real.sum(),
        }

    def __call__(self, model: Model, prepared: ReplacedBatch) -> dict[str, Sums]:
        generator = model.generator
        if generator is None:
            raise InputError("this model has no generator; replaced_tokens needs one")
        corrupted, layout, types = prepared.corrupted, prepared.layout, prepared.types
        # hidden states are computed at the masked positions only: (positions, width)
        inputs = EncoderInputs(corrupted.tokens, layout, _types_for(generator, types))
        output = generator.run(inputs, Want(masked_positions=corrupted.positions))
        sampling = Sampling(prepared.draw, self.config.temperature, self.vocabulary.size)
        loss = generator.masked_loss(output.masked_states, corrupted.targets, sampling)
        assert loss.samples is not None
        sampled, is_replaced = insert_samples(prepared.tokens, corrupted, loss.samples)
        hidden = model.run(EncoderInputs(sampled, layout, _types_for(model, types))).last
        logits = model.head("replaced_tokens")(hidden, layout)
        return {
            "generator": token_sums(loss),
            "replaced": _replaced_sums(logits, is_replaced, prepared.is_real),
        }

    def portions(self, model: Model) -> list[Portion]:
        whole = super().portions(model)
        if self.config.optimizers == "one":
            return whole
        # shared parameters belong to the encoder
        encoder_ids = {id(p) for module in (model.encoder, model.heads) for p in module.parameters()}
        trained = [p for portion in whole for p in portion.parameters]
        encoder = tuple(p for p in trained if id(p) in encoder_ids)
        generator = tuple(p for p in trained if id(p) not in encoder_ids)
        return [Portion.of(generator, self.config.generator_rate), Portion.of(encoder)]

    def for_evaluation(self) -> "ReplacedTokenDetection":
        # 15 % of single tokens, whatever the training used, so that runs are comparable
        masking = GeneratorMaskingConfig(mask=self.config.masking.mask, random=self.config.masking.random)
        return ReplacedTokenDetection(self.config.model_copy(update={"masking": masking}), self.vocabulary)


def insert_samples(tokens: Tensor, corrupted: Corrupted, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the text with the sampled tokens inserted, and True where they differ from the original."""
    is_target = corrupted.targets != IGNORED
    flat = tokens.flatten()
    samples = torch.where(is_target, samples.to(flat), flat[corrupted.positions])
    sampled = flat.scatter(0, corrupted.positions, samples).view_as(tokens)
    return sampled, sampled != tokens


def _replaced_sums(logits: Tensor, is_replaced: Tensor, is_real: Tensor) -> Sums:
    scores = wide(logits)
    losses = -logsigmoid(torch.where(is_replaced, scores, -scores))  # binary cross-entropy
    loss = torch.where(is_real, losses, 0).sum()
    is_detected = (logits.detach() > 0) & is_real
    is_correct = (is_detected == is_replaced) & is_real
    flags = torch.stack([is_correct, is_detected & is_replaced, is_detected, is_replaced, is_real])
    correct, hits, detected, replaced, real = flags.flatten(1).sum(-1)  # one sum: each alone takes a launch
    metrics = {
        "accuracy": Share(correct, real),
        "recall": Share(hits, replaced),
        "precision": Share(hits, detected),
        "share": Share(replaced, real),
    }
    return Sums(loss, metrics)


def _types_for(model: Model, types: Tensor | None) -> Tensor | None:
    return types if model.config.encoder.embedding.types else None
