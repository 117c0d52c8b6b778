"""Heads on the way: what a model would answer after some of its layers, and when that is good enough."""

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.elementwise import Activation
from bertsmith.models.heads.base import FeaturesConfig, HeadConfig, LayerFeatures
from bertsmith.models.heads.task import Classifier
from bertsmith.settings import Record

Answer = Literal["classes", "labels", "choices", "value"]
"""What a head's outputs are: scores of which one class is right, a yes or no for every label, the score of one of the
sequences that an item has, a number."""


class ExitRule(Record):
    """When an answer on the way is taken, and the layers above are not computed."""

    measure: Literal["probability", "entropy", "patience"]
    """The share of the likeliest answer; the entropy of the shares, 1 where all are even (DeeBERT, FastBERT); or how
    often in a row an exit said what the exit before it had said (PABEE)."""
    threshold: float = Field(ge=0)
    """An item leaves with a probability or a patience of at least, an entropy of at most this."""
    within: float = Field(default=0.0, ge=0)
    """How far apart two numbers may be that count as the same, for patience in a regression."""

    @model_validator(mode="after")
    def _check_threshold(self) -> "ExitRule":
        if self.measure == "patience":
            if self.threshold < 1 or self.threshold != int(self.threshold):
                raise ValueError(f"threshold is {self.threshold:g} with patience; allowed: a whole number from 1 up")
        elif self.threshold > 1:
            raise ValueError(f"threshold is {self.threshold:g} with {self.measure}; allowed: 0 to 1")
        return self


class ExitsConfig(HeadConfig):
    """One small head after each of some layers, which says what the task's own head would say."""

    kind: Literal["exits"] = "exits"
    layers: tuple[int, ...] = Field(min_length=1)
    """After how many layers there is one, in rising order; the last layer has the task's head."""
    outputs: int = Field(gt=0)
    """As many as the task's head has."""
    answer: Answer
    """What the outputs are."""
    yes_from: float = Field(default=0.5, gt=0, lt=1)
    """The share from which a label is said, where there is a yes or no for each."""
    pooling: Literal["first", "mean"] = "first"
    """The vector of a sequence: the first token's state, or the mean of all."""
    hidden: Activation | None = None
    """The activation of a layer between that vector and the scores; None for no such layer."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    rule: ExitRule | None = None
    """When they are used; None for never, all layers are computed then."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Exits":
        return Exits(self, width)

    @model_validator(mode="after")
    def _check_layers(self) -> "ExitsConfig":
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1:
            raise ValueError(f"layers is {list(self.layers)}; allowed: different numbers from 1 up, in rising order")
        return self

    @model_validator(mode="after")
    def _check_answer(self) -> "ExitsConfig":
        if self.answer in ("choices", "value") and self.outputs != 1:
            raise ValueError(f"outputs is {self.outputs} and answer {self.answer!r}; allowed: 1")
        self.check_rule(self.rule)
        return self

    def check_rule(self, rule: ExitRule | None) -> None:
        """Raises a sentence if a rule cannot be followed with these answers."""
        if rule is not None and self.answer == "value" and rule.measure != "patience":
            raise ValueError(f"measure is {rule.measure!r} and the answers are numbers; allowed: 'patience'")


class Exits(nn.Module):
    """The heads by the number of layers below them."""

    def __init__(self, config: ExitsConfig, width: int) -> None:
        super().__init__()
        self.layers = config.layers
        self.by_layer = nn.ModuleDict(
            {
                str(layer): Classifier(
                    LayerFeatures(width, FeaturesConfig(), None),
                    config.outputs,
                    config.pooling,
                    config.hidden,
                    config.dropout,
                )
                for layer in config.layers
            }
        )

    def forward(self, layer: int, hidden_states: Tensor, layout: SequenceLayout) -> Tensor:
        """What is said after so many layers.

        Shape: hidden_states (batch, length, width) or (tokens, width), normalised; result (batch, outputs).
        """
        said: Tensor = self.by_layer[str(layer)]([hidden_states], layout)
        return said
