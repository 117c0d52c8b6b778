"""The schema of a whole model. Sizes live in presets.py; each part's settings beside the part."""

from pydantic import Field, model_validator

from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers import AnyMixer
from bertsmith.layers.norm import NormConfig
from bertsmith.models.heads import AnyHead
from bertsmith.settings import Record


class LayerConfig(Record):
    """One block."""

    mixer: AnyMixer
    feedforward: FeedForwardConfig
    norm: NormConfig = NormConfig()
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On the output of mixer and feed-forward, before the residual sum."""


class EncoderConfig(Record):
    """embedding → layers → states. A layer in a file may say `repeat = 12`."""

    vocabulary: int = Field(gt=0)
    width: int = Field(gt=0)
    embedding: EmbeddingConfig = EmbeddingConfig()
    layers: tuple[LayerConfig, ...] = Field(min_length=1)
    final_norm: NormConfig | None = None
    """A norm after the last layer; pre-norm encoders need one."""
    deviation: float = Field(default=0.02, gt=0)
    """Standard deviation of fresh weights, drawn from a normal cut off at two deviations."""

    @model_validator(mode="after")
    def _check_layers(self) -> "EncoderConfig":
        for layer in self.layers:
            layer.mixer.check(self.width)
            layer.feedforward.check(self.width)
        return self

    @property
    def embedding_width(self) -> int:
        return self.embedding.width or self.width

    def flops(self, length: int) -> int:
        """Floating-point operations of one token's forward pass through the layers (2 per multiply-add)."""
        widening = 0 if self.embedding_width == self.width else 2 * self.embedding_width * self.width
        layers = (layer.mixer.flops(self.width, length) + layer.feedforward.flops(self.width) for layer in self.layers)
        return widening + sum(layers)


class ModelConfig(Record):
    """An encoder and the heads that stand on it."""

    family: str
    """Whose architecture it is, for exchange with other libraries: "bert", "electra", …"""
    encoder: EncoderConfig
    heads: tuple[AnyHead, ...] = ()

    @model_validator(mode="after")
    def _check_heads(self) -> "ModelConfig":
        kinds = [head.kind for head in self.heads]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"heads are {kinds}; each kind may stand once")
        return self
