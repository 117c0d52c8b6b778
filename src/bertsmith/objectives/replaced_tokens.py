"""Replaced-token detection: a generator guesses masked tokens, the encoder tells guesses from text (Clark et al. 2020).

    masked      the text with some places masked
    scores      what the generator says there                       loss: cross-entropy, as in masked language modelling
    guessed     the text with a token drawn from the scores at every chosen place
    replaced    what the encoder says of every token of `guessed`   loss: binary; a guess that is right counts as text

Nothing flows from the second loss back into the generator: a drawn token has no gradient.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import Corrupted, MaskingConfig, Vocabulary, corrupt
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.random import bits, key, uniform
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, ObjectiveConfig, Portion, Share, Sums, Term, class_sums, wide
from bertsmith.objectives.masked_lm import vocabulary_of
from bertsmith.text.tokenizer import Tokenizer

_RUN = 256  # tokens of the vocabulary that are summed before one is drawn
_GUESS = 11  # the stream of random numbers that draws the generator's guesses


class GuessedConfig(MaskingConfig):
    """Where the generator guesses, with ELECTRA's shares; DeBERTa v3 has mask = 1."""

    mask: float = Field(default=0.85, ge=0, le=1)
    """Share of the chosen tokens that become [MASK] …"""
    random: float = Field(default=0.0, ge=0, le=1)
    """… and that become a random token; the others stay as they are."""


class ReplacedTokenDetectionConfig(ObjectiveConfig):
    """Tell the tokens of the text from a generator's guesses."""

    kind: Literal["replaced_tokens"] = "replaced_tokens"
    masking: GuessedConfig = GuessedConfig()
    weight: float = Field(default=50.0, gt=0)
    """Of the encoder's loss beside the generator's."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the generator's guesses: lower ones are nearer to its best guess."""
    optimizers: Literal["one", "two"] = "one"
    """With "two", the gradients of generator and encoder are clipped apart, as DeBERTa v3 does."""
    generator_rate: float = Field(default=1.0, gt=0)
    """For "two": the generator's learning rate as a share of the encoder's."""

    @model_validator(mode="after")
    def _check_rate(self) -> "ReplacedTokenDetectionConfig":
        if self.optimizers == "one" and self.generator_rate != 1:
            raise ValueError(f"generator_rate is {self.generator_rate} and optimizers 'one'; it needs optimizers 'two'")
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

    def build(self, tokenizer: Tokenizer, ponder_weight: float | None = None) -> "ReplacedTokenDetection":
        if ponder_weight is not None:
            raise InputError("encoder.universal.halting is given; allowed with replaced_tokens: an encoder without it")
        return ReplacedTokenDetection(self, vocabulary_of(tokenizer))


@dataclass(frozen=True)
class ReplacedBatch:
    """A masked batch, the text it was made from, and where it is text."""

    corrupted: Corrupted
    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None
    is_real: Tensor
    draw: Tensor
    """(places,): a number from 0 to 1 for the guess at every chosen place."""


class ReplacedTokenDetection(Objective[TokenBatch, ReplacedBatch]):
    """The generator's cross-entropy at the masked places and the encoder's binary one at every token."""

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
        # one draw for each place, known by the sequence and the position in it, however the batch is put together
        sequence = batch.layout.sequence_index(batch.tokens).flatten()[corrupted.positions]
        position = batch.layout.positions(batch.tokens).flatten()[corrupted.positions]
        draw = uniform(bits(key(seed, _GUESS), batch.sample[sequence]), position)
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
        # (places, width) -> (places, vocabulary): scores are computed nowhere else
        inputs = EncoderInputs(corrupted.tokens, layout, _types_for(generator, types))
        output = generator.run(inputs, Want(masked_positions=corrupted.positions))
        scores = generator.head("masked_tokens")(output.masked_states, generator.token_table)
        guesses = sample(scores.detach(), prepared.draw, self.config.temperature, self.vocabulary.size)
        guessed, is_replaced = put(prepared.tokens, corrupted, guesses)
        hidden = model.run(EncoderInputs(guessed, layout, _types_for(model, types))).last
        logits = model.head("replaced_tokens")(hidden, layout)
        return {
            "generator": class_sums(scores, corrupted.targets),
            "replaced": _replaced_sums(logits, is_replaced, prepared.is_real),
        }

    def portions(self, model: Model) -> list[Portion]:
        whole = super().portions(model)
        if self.config.optimizers == "one":
            return whole
        # what both share is the encoder's
        encoders = {id(p) for part in (model.encoder, model.heads) for p in part.parameters()}
        moved = [p for portion in whole for p in portion.parameters]
        own = tuple(p for p in moved if id(p) in encoders)
        generators = tuple(p for p in moved if id(p) not in encoders)
        return [Portion.of(generators, self.config.generator_rate), Portion.of(own)]

    def for_evaluation(self) -> "ReplacedTokenDetection":
        # 15 % of single tokens, whatever was trained with, so that runs can be compared
        masking = GuessedConfig(mask=self.config.masking.mask, random=self.config.masking.random)
        return ReplacedTokenDetection(self.config.model_copy(update={"masking": masking}), self.vocabulary)


def sample(scores: Tensor, draw: Tensor, temperature: float, vocabulary: int) -> Tensor:
    """One token for every row of scores, with the chances its softmax gives; `draw` from [0, 1) decides which.

    Shape: scores (places, vocabulary or more), draw (places,) -> (places,).
    """
    chances = (wide(scores[:, :vocabulary]) / temperature).softmax(-1)
    # in two steps, a run of tokens and one of its tokens: a running sum over the whole vocabulary is slow on a GPU
    runs = pad(chances, (0, -vocabulary % _RUN)).unflatten(-1, (-1, _RUN))  # (places, runs, tokens of a run)
    sums = runs.sum(-1)
    run, rest = _drawn(sums, draw.to(sums))
    # (places, runs, tokens of a run) -> (places, tokens of a run)
    inside = runs.gather(1, run[:, None, None].expand(-1, 1, _RUN)).squeeze(1)
    token, _ = _drawn(inside, rest)
    return run * _RUN + token


def _drawn(chances: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """The place in each row that a draw from [0, 1) falls on, and how far into that place's chance, again in [0, 1).

    Shape: chances (rows, places), which need not sum to 1; draw (rows,) -> (rows,) both.
    """
    heights = chances.cumsum(-1)
    limit = draw * heights[:, -1]
    # a count instead of a search, which compilers fuse; rounding must not lead past the last place that has a chance
    last = (heights < heights[:, -1:]).sum(-1)
    position = torch.minimum((heights <= limit[:, None]).sum(-1), last)
    chance = chances.gather(-1, position[:, None]).squeeze(-1)
    below = heights.gather(-1, position[:, None]).squeeze(-1) - chance
    rest = (limit - below) / chance.clamp(min=torch.finfo(chances.dtype).tiny)
    return position, rest.clamp(min=0, max=1 - torch.finfo(chances.dtype).eps)


def put(tokens: Tensor, corrupted: Corrupted, guesses: Tensor) -> tuple[Tensor, Tensor]:
    """The text with the guesses at the chosen places, and True where a guess is not what stood there."""
    is_chosen = corrupted.targets != IGNORED
    flat = tokens.flatten()
    guesses = torch.where(is_chosen, guesses.to(flat), flat[corrupted.positions])
    guessed = flat.scatter(0, corrupted.positions, guesses).view_as(tokens)
    return guessed, guessed != tokens


def _replaced_sums(logits: Tensor, is_replaced: Tensor, is_real: Tensor) -> Sums:
    scores = wide(logits)
    losses = binary_cross_entropy_with_logits(scores, is_replaced.to(scores), reduction="none")
    loss = torch.where(is_real, losses, 0).sum()
    is_called = (logits.detach() > 0) & is_real
    found, replaced, real = (is_called & is_replaced).sum(), is_replaced.sum(), is_real.sum()
    metrics = {
        "accuracy": Share(((is_called == is_replaced) & is_real).sum(), real),
        "recall": Share(found, replaced),
        "precision": Share(found, is_called.sum()),
        "share": Share(replaced, real),
    }
    return Sums(loss, metrics)


def _types_for(model: Model, types: Tensor | None) -> Tensor | None:
    return types if model.config.encoder.embedding.types else None
