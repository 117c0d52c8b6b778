"""Early-exit heads after inner layers, and the rules that decide whether their answers are final."""

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.elementwise import Activation
from bertsmith.models.heads.base import FeaturesConfig, HeadConfig, LayerFeatures
from bertsmith.models.heads.task import Classifier, HiddenLayerConfig
from bertsmith.settings import Record

Answer = Literal["classes", "labels", "choices", "value"]
"""Meaning of the outputs: scores of exclusive classes, an independent score per label, the score of one of an item's
choices, or a number."""


class ExitRule(Record):
    """Criterion for accepting an exit's answer and skipping the layers above."""

    measure: Literal["probability", "entropy", "patience"]
    """Probability of the most probable answer; normalised entropy, 1 for a uniform distribution (DeeBERT, FastBERT); or
    number of consecutive exits that agree with the exit before (PABEE)."""
    threshold: float = Field(ge=0)
    """Lowest probability or patience, or highest entropy, at which an item exits."""
    within: float = Field(default=0.0, ge=0)
    """Largest difference between two predictions that count as equal, for patience in regression."""

    @model_validator(mode="after")
    def _check_threshold(self) -> "ExitRule":
        if self.measure == "patience":
            if self.threshold < 1 or self.threshold != int(self.threshold):
                raise ValueError(f"threshold is {self.threshold:g} with patience; allowed: a positive whole number")
        elif self.threshold > 1:
            raise ValueError(f"threshold is {self.threshold:g} with {self.measure}; allowed: 0 to 1")
        return self


class ExitsConfig(HeadConfig):
    """Small heads after inner layers that predict the same outputs as the task head."""

    kind: Literal["exits"] = "exits"
    layers: tuple[int, ...] = Field(min_length=1)
    """Numbers of layers after which there is an exit, ascending; the last layer has the task head."""
    outputs: int = Field(gt=0)
    """Number of outputs of the task head."""
    answer: Answer
    """Meaning of the outputs."""
    yes_from: float = Field(default=0.5, gt=0, lt=1)
    """Probability from which a label is predicted, for answer = "labels"."""
    pooling: Literal["first", "last", "mean"] = "first"
    """Vector of a sequence: the hidden state of the first or last token, or the mean of all tokens."""
    hidden: Activation | None = None
    """Activation of a hidden layer between that vector and the scores; None for no hidden layer."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    rule: ExitRule | None = None
    """Exit rule; None disables the exits, so all layers are computed."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Exits":
        return Exits(self, width)

    @model_validator(mode="after")
    def _check_layers(self) -> "ExitsConfig":
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1:
            raise ValueError(f"layers is {list(self.layers)}; allowed: distinct positive numbers, ascending")
        return self

    @model_validator(mode="after")
    def _check_answer(self) -> "ExitsConfig":
        if self.answer in ("choices", "value") and self.outputs != 1:
            raise ValueError(f"outputs is {self.outputs} with answer {self.answer!r}; allowed: 1")
        self.check_rule(self.rule)
        return self

    def check_rule(self, rule: ExitRule | None) -> None:
        """Raise ValueError if the rule does not support this kind of answer."""
        if rule is not None and self.answer == "value" and rule.measure != "patience":
            raise ValueError(f"measure is {rule.measure!r}, but the answers are numbers; allowed: 'patience'")


class Exits(nn.Module):
    """Exit heads by the number of layers below them."""

    def __init__(self, config: ExitsConfig, width: int) -> None:
        super().__init__()
        self.layers = config.layers
        hidden = None if config.hidden is None else HiddenLayerConfig(activation=config.hidden)
        self.by_layer = nn.ModuleDict(
            {
                str(layer): Classifier(
                    LayerFeatures(width, FeaturesConfig(), None),
                    config.outputs,
                    config.pooling,
                    hidden,
                    config.dropout,
                )
                for layer in config.layers
            }
        )

    def forward(self, layer: int, hidden_states: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the outputs of the exit after `layer` layers.

        Shape: hidden_states (batch, length, width) or (tokens, width), normalised; result (batch, outputs).
        """
        outputs: Tensor = self.by_layer[str(layer)]([hidden_states], layout)
        return outputs
