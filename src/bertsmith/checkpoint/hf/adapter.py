"""Adapters between our models and Hugging Face's classes: config translation and tables of tensor names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from bertsmith.checkpoint.hf.names import Row, expand, linear
from bertsmith.errors import InputError, nearest
from bertsmith.layers.elementwise import Activation, NormConfig
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.base import MixerConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import HeadConfig

_Mixer = TypeVar("_Mixer", bound=MixerConfig)

ACTIVATION_NAMES: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
_DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
}

REPLACED_TOKENS_ROWS = (
    *linear("heads.replaced_tokens.transform", "discriminator_predictions.dense"),
    *linear("heads.replaced_tokens.score", "discriminator_predictions.dense_prediction"),
)
"""The head of ELECTRA's discriminator."""

POOLER = "heads.pooler"
"""Prefix of the pooler's tensors, a part that encoder classes initialise with a warning if a file lacks it."""

HfSettings: TypeAlias = dict[str, Any]
"""Settings to write into a config.json of Hugging Face."""


class HfConfig(HfSettings):
    """A config.json of Hugging Face, with checks that name the key."""

    def required(self, key: str) -> Any:
        """Return a setting that must be present."""
        if key not in self:
            raise InputError(f"config.json lacks {key!r}")
        return self[key]

    def allow_only(self, **allowed: object) -> None:
        """Raise if a setting has a value that our network does not support."""
        for key, only in allowed.items():
            if self.get(key, only) not in (only, None):
                raise InputError(f"config.json: {key} is {self[key]!r}; allowed: {only!r}")

    def activation(self, key: str, default: str = "gelu") -> Activation:
        """Return our name of an activation."""
        name = self.get(key, default)
        if name not in ACTIVATION_NAMES:
            raise InputError(f"config.json: {key} is {name!r}; {nearest(str(name), ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[name]

    def with_defaults(self, **defaults: object) -> "HfConfig":
        """Fill in the settings that BERT and its successors share; `defaults` are a family's own."""
        return HfConfig({**_DEFAULTS, **defaults, **self})


@dataclass(frozen=True)
class HeadAdapter:
    """A task class of Hugging Face and the head of ours that computes the same."""

    architecture: str
    """Name of the class; a folder names it because several classes have the same tensor names."""
    kind: str
    """Kind of our head: "classifier", "tagger" or "spans"."""
    rows: tuple[Row, ...]
    """Tensor names of the head."""
    read: Callable[[HfConfig], HeadConfig]
    """Their config.json → our head."""
    write: Callable[[HeadConfig], HfSettings]
    """Our head → its settings in their config.json."""
    is_choice: bool = False
    """Whether it scores the sequences of an item against each other."""
    reads_pooler: bool = False
    """Whether its input is the model's pooler."""
    excludes: frozenset[str] = frozenset()
    """Optional parts of the model whose tensors belong to the head in this class."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Settings that only the head reads, with the value that the encoder's reader expects."""
    constants: Mapping[str, Callable[[int], Tensor]] = field(default_factory=dict)
    """Their names of tensors that have one value here, with the function from the width to it; checked on reading."""
    matches: Callable[[HfConfig], bool] = lambda data: True
    """Whether the settings of a folder describe this variant of the head."""


@dataclass(frozen=True)
class FamilyAdapter:
    """A family of ours and the Hugging Face model type that computes the same."""

    model_type: str
    family: str
    """Our name of the family."""
    prefix: str
    """Prefix of the encoder's tensor names; some files omit it."""
    encoder_rows: Callable[[ModelConfig], Sequence[Row]]
    """Tensor names that every model has."""
    optional_rows: Mapping[str, tuple[Row, ...]]
    """Tensor names of optional parts, by the prefix of our names, such as `heads.pooler`."""
    tied: Mapping[str, str]
    """Their names of tensors that repeat another one; checked on reading, never written."""
    read_config: Callable[[HfConfig, frozenset[str]], ModelConfig]
    """(their config.json, the optional parts that are present) → our config."""
    write_config: Callable[[ModelConfig], HfSettings]
    unprefixed: tuple[str, ...] = ("embeddings.", "embeddings_project.", "encoder.", "pooler.")
    """Starts of names to which the prefix is added if a file omits it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other prefixes of names that some files use → prefixes in the table."""
    output_aliases: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    """(our config) → prefixes in the table → prefixes to write."""
    remark: Callable[[ModelConfig], str | None] = lambda config: None
    """(our config) → what their class computes differently although it has every weight, or None."""
    derived: tuple[str, ...] = ()
    """Their names of tensors that follow from the config; ignored on reading, never written."""
    task_heads: tuple[HeadAdapter, ...] = ()
    """Their task classes."""
    missing: Callable[[ModelConfig], str | None] = lambda config: None
    """(our config) → an expected feature that none of their classes has, or None."""

    def parts(self, names: Iterable[str]) -> frozenset[str]:
        """Optional parts of a model with tensors of these names."""
        names = tuple(names)
        return frozenset(part for part in self.optional_rows if any(name.startswith(part + ".") for name in names))

    def rows(self, config: ModelConfig, parts: frozenset[str]) -> list[Row]:
        """Tensor names of a model with these optional parts."""
        rows = [*self.encoder_rows(config)]
        for part in sorted(parts):
            rows += self.optional_rows[part]
        return expand(rows, len(config.encoder.layers), 0 if config.decoder is None else len(config.decoder.layers))


def missing_head_remark(config: ModelConfig) -> str | None:
    """Remark on a replaced_tokens head for families whose classes have none, or None."""
    if not any(head.kind == "replaced_tokens" for head in config.heads):
        return None
    return "transformers has no such model with a replaced_tokens head: its weights are in the file and ignored there"


def not_exportable(model_type: str, reason: str) -> InputError:
    """Return the error for a model that no class of Hugging Face computes."""
    return InputError(f"this model cannot be exported as a Hugging Face {model_type}: {reason}")


def first_mixer(stack: EncoderConfig, kind: type[_Mixer], model_type: str) -> _Mixer:
    """Return the mixer of the first layer; raise if it is not of the kind that Hugging Face's class has."""
    mixer = stack.layers[0].mixer
    if not isinstance(mixer, kind):
        raise not_exportable(model_type, f"its mixer is not {kind.model_fields['kind'].default}")
    return mixer


def check_heads(heads: int, head_width: int | None, width: int, model_type: str) -> None:
    """Raise if the heads do not fill the width, as in a pruned model."""
    if head_width is not None and heads * head_width != width:
        raise not_exportable(model_type, "its heads do not fill its width")


def write_activation(activation: Activation) -> str:
    """Hugging Face's name of an activation."""
    return next(theirs for theirs, ours in ACTIVATION_NAMES.items() if ours == activation)


def read_encoder(
    data: HfConfig, mixer: MixerConfig, *, has_positions: bool = True, groups: int = 1, **others: Any
) -> EncoderConfig:
    """Read an encoder of equal layers from complete settings; `others` are further settings of ours."""
    width, dropout = data.required("hidden_size"), float(data["hidden_dropout_prob"])
    norm = NormConfig(epsilon=data["layer_norm_eps"])
    embedding_width = data.get("embedding_size", width)
    embedding = EmbeddingConfig(
        width=None if embedding_width == width else embedding_width,
        positions="learned" if has_positions else "none",
        max_length=data["max_position_embeddings"],
        types=data["type_vocab_size"],
        epsilon=norm.epsilon,
        dropout=dropout,
    )
    neurons, activation = data.required("intermediate_size"), data.activation("hidden_act")
    feedforward = FeedForwardConfig(neurons=neurons, activation=activation, groups=groups)
    layer = LayerConfig(mixer=mixer, feedforward=feedforward, norm=norm, dropout=dropout)
    return EncoderConfig(
        vocabulary=data.required("vocab_size"),
        width=width,
        embedding=embedding,
        layers=(layer,) * data.required("num_hidden_layers"),
        init_std=data["initializer_range"],
        **others,
    )


def read_heads(possible: Mapping[str, HeadConfig], parts: frozenset[str]) -> tuple[HeadConfig, ...]:
    """Select the heads that are present among those a family may have, by part."""
    return tuple(possible[part] for part in sorted(parts & possible.keys()))


def write_encoder(
    encoder: EncoderConfig,
    mixer: FullConfig | SpanConvConfig | DisentangledConfig,
    model_type: str,
    *,
    kinds_of_heads: int = 1,
) -> HfSettings:
    """Settings of an encoder whose layers have this mixer; their head count is `kinds_of_heads` times ours."""
    layer, heads = encoder.layers[0], kinds_of_heads * mixer.heads
    check_heads(heads, mixer.head_width, encoder.width, model_type)
    return {
        "model_type": model_type,
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.layers),
        "num_attention_heads": heads,
        "intermediate_size": layer.feedforward.neurons,
        "hidden_act": write_activation(layer.feedforward.activation),
        "hidden_dropout_prob": layer.dropout,
        "attention_probs_dropout_prob": mixer.dropout,
        "max_position_embeddings": encoder.embedding.max_length,
        "type_vocab_size": encoder.embedding.types,
        "initializer_range": encoder.init_std,
        "layer_norm_eps": layer.norm.epsilon,
        "tie_word_embeddings": True,
    }
