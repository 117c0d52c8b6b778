"""Exits of a decoder (Elbayad et al. 2020): a prediction of the next token after some blocks, and the choice of one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from bertsmith.layers.elementwise import Norm
from bertsmith.layers.embedding import token_scores
from bertsmith.models.heads.base import HeadConfig
from bertsmith.ops.cumulative_sum import cumulative_sum
from bertsmith.settings import Record

Choose = Literal["confidence", "sequence", "multinomial", "geometric"]


class DepthRule(Record):
    """When a token leaves the decoder."""

    thresholds: tuple[float, ...] = ()
    """One number per exit, with choose = "confidence" or "geometric": a token leaves if the largest probability, or the
    probability of stopping, is above it. 1 closes an exit: it is not computed."""
    depth_penalty: float = 0.0
    """With choose = "sequence" or "multinomial": the exit of largest log q(n) - depth_penalty · blocks is taken."""

    @classmethod
    def only(cls, exit_index: int, exits: int) -> "DepthRule":
        """Return the thresholds with which all tokens leave at one exit."""
        return cls(thresholds=tuple(0.0 if index == exit_index else 1.0 for index in range(exits)))

    def is_open(self, exit_index: int) -> bool:
        """Whether tokens may leave at an exit with a threshold."""
        return self.thresholds[exit_index] < 1


class DecoderExitsConfig(HeadConfig):
    """One prediction of the next token after each of some decoder blocks; the last block has the next_token head."""

    kind: Literal["decoder_exits"] = "decoder_exits"
    layers: tuple[int, ...] = Field(min_length=1)
    """Numbers of blocks below each exit, in rising order, all smaller than the number of decoder blocks."""
    is_tied: bool = True
    """Whether exits share the token table of the next_token head or have a matrix of their own each."""
    choose: Choose = "confidence"
    """Choice of the exit: by the probability of the likeliest token ("confidence", nothing to train), or by a
    classifier that reads the source ("sequence"), the hidden states after the first block ("multinomial") or those
    after every exit ("geometric")."""
    neurons: int = Field(default=0, ge=0)
    """Neurons of a hidden layer in that classifier; 0 for a linear one, as published."""
    rule: DepthRule | None = None
    """None: all blocks are computed."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "DecoderExits":
        return DecoderExits(self, width, vocabulary)

    @model_validator(mode="after")
    def _check_layers(self) -> "DecoderExitsConfig":
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1:
            raise ValueError(f"layers is {list(self.layers)}; allowed: different numbers from 1 up, in rising order")
        if self.rule is not None:
            self.check_rule(self.rule)
        return self

    def check_rule(self, rule: DepthRule) -> None:
        """Raise ValueError if a rule does not fit these exits."""
        wanted = len(self.layers) if self.choose in ("confidence", "geometric") else 0
        if len(rule.thresholds) != wanted:
            raise ValueError(
                f"rule.thresholds has {len(rule.thresholds)} numbers with choose = {self.choose!r}; allowed: {wanted}"
            )
        if wanted and rule.depth_penalty:
            raise ValueError(f"rule.depth_penalty is {rule.depth_penalty:g} with choose = {self.choose!r}; allowed: 0")


class DecoderExits(nn.Module):
    """The exits by the number of blocks below them, and the classifier that chooses among them, if there is one."""

    def __init__(self, config: DecoderExitsConfig, width: int, vocabulary: int) -> None:
        super().__init__()
        self.layers, self.is_tied = config.layers, config.is_tied
        own = None if config.is_tied else vocabulary
        self.by_layer = nn.ModuleDict({str(layer): DecoderExit(width, own) for layer in config.layers})
        self.chooser = CHOOSERS[config.choose](width, len(config.layers), config.neurons)

    def forward(self, layer: int, hidden: Tensor, table_scores: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the scores of the next token at the exit after block `layer`: (…, width) -> (…, vocabulary).

        `hidden` comes after the decoder's final norm; `table_scores` is the product with the shared token table.
        """
        scores: Tensor = self.by_layer[str(layer)](hidden, table_scores)
        return scores


class DecoderExit(nn.Module):
    """A norm, then the product with the shared token table or with a matrix of its own."""

    def __init__(self, width: int, vocabulary: int | None) -> None:
        super().__init__()
        self.norm = Norm(width, 1e-5)
        self.table = None if vocabulary is None else nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, hidden: Tensor, table_scores: Callable[[Tensor], Tensor]) -> Tensor:
        hidden = self.norm(hidden)
        return table_scores(hidden) if self.table is None else token_scores(hidden, self.table, None)


def _classifier(width: int, classes: int, neurons: int) -> nn.Module:
    if not neurons:
        return nn.Linear(width, classes)
    return nn.Sequential(nn.Linear(width, neurons), nn.ReLU(), nn.Linear(neurons, classes))


class Chooser(nn.Module, ABC):
    """A distribution q over the exits, the last block among them.

    Its matrices are small and no ElasticLinear: quantisation leaves them alone.
    """

    @property
    def is_trained(self) -> bool:
        """Whether there is something to train."""
        return True

    @abstractmethod
    def log_probabilities(self, source: Tensor, first: Tensor, at_exits: Sequence[Tensor]) -> Tensor:
        """Return log q, (items, exits + 1): items are sequences if q depends on the source alone, else tokens.

        Shape: source (sequences, width), the mean of the encoder's hidden states; first and at_exits (tokens, width),
        the hidden states after the first block and after every exit's block.
        """


class NoChooser(Chooser):
    """The chooser of confidence: thresholds on the predictions themselves."""

    def __init__(self, width: int, exits: int, neurons: int = 0) -> None:
        super().__init__()

    @property
    def is_trained(self) -> bool:
        return False

    def log_probabilities(self, source: Tensor, first: Tensor, at_exits: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError("confidence has no distribution over exits")


class SequenceChooser(Chooser):
    """One exit for all tokens of a sequence: softmax(W · mean of the encoder's hidden states + b)."""

    def __init__(self, width: int, exits: int, neurons: int = 0) -> None:
        super().__init__()
        self.score = _classifier(width, exits + 1, neurons)

    def log_probabilities(self, source: Tensor, first: Tensor, at_exits: Sequence[Tensor]) -> Tensor:
        scores: Tensor = self.score(source)
        return scores.float().log_softmax(-1)


class MultinomialChooser(Chooser):
    """The exit of each token, chosen after the first block: softmax(W · hidden state + b)."""

    def __init__(self, width: int, exits: int, neurons: int = 0) -> None:
        super().__init__()
        self.score = _classifier(width, exits + 1, neurons)

    def log_probabilities(self, source: Tensor, first: Tensor, at_exits: Sequence[Tensor]) -> Tensor:
        scores: Tensor = self.score(first)
        return scores.float().log_softmax(-1)


class GeometricChooser(Chooser):
    """A probability χ of stopping at every exit: q(n) = χ(n) · Π (1 - χ) of those before; the last takes the rest."""

    def __init__(self, width: int, exits: int, neurons: int = 0) -> None:
        super().__init__()
        self.score = nn.ModuleList([_classifier(width, 1, neurons) for _ in range(exits)])

    def stop_scores(self, index: int, hidden: Tensor) -> Tensor:
        """Return the scores of stopping at an exit, before the sigmoid: (…, width) -> (…,)."""
        scores: Tensor = self.score[index](hidden)
        return scores.float().squeeze(-1)

    def log_probabilities(self, source: Tensor, first: Tensor, at_exits: Sequence[Tensor]) -> Tensor:
        scores = torch.stack([self.stop_scores(index, hidden) for index, hidden in enumerate(at_exits)], dim=-1)
        going_on = cumulative_sum(logsigmoid(-scores), -1)  # (tokens, exits): log of having passed an exit
        before = torch.cat([torch.zeros_like(going_on[:, :1]), going_on], dim=-1)
        stopping = torch.cat([logsigmoid(scores), torch.zeros_like(going_on[:, :1])], dim=-1)
        return before + stopping


CHOOSERS: dict[Choose, type[NoChooser] | type[SequenceChooser] | type[MultinomialChooser] | type[GeometricChooser]] = {
    "confidence": NoChooser,
    "sequence": SequenceChooser,
    "multinomial": MultinomialChooser,
    "geometric": GeometricChooser,
}
