"""What it takes to exchange one family with Hugging Face: a config translation and a table of names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bertsmith.checkpoint.names import Row, expand, linear
from bertsmith.errors import InputError, nearest
from bertsmith.layers.elementwise import Activation
from bertsmith.layers.mixers.base import MixerConfig
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.heads import HeadConfig

_Kind = TypeVar("_Kind", bound=MixerConfig)

ACTIVATION_NAMES: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

REPLACED_ROWS = (
    *linear("heads.replaced_tokens.transform", "discriminator_predictions.dense"),
    *linear("heads.replaced_tokens.score", "discriminator_predictions.dense_prediction"),
)
"""The head of ELECTRA's discriminator, under the names it has there."""


@dataclass(frozen=True)
class TaskForm:
    """A class of Hugging Face's for a kind of task, and the form that a head of ours has in it."""

    architecture: str
    """Its name, by which a folder says what its tensors are: several classes give theirs the same names."""
    kind: str
    """Of our head: "classifier", "tagger" or "spans"."""
    rows: tuple[Row, ...]
    """The head's own tensors."""
    read: Callable[[dict[str, Any]], HeadConfig]
    """Their config.json → our head."""
    write: Callable[[HeadConfig], dict[str, Any]]
    """Our head → what it adds to their config.json."""
    is_choice: bool = False
    """Whether it scores the sequences of an item against each other."""
    reads_pooler: bool = False
    """Whether it stands on the model's pooler."""
    hides: frozenset[str] = frozenset()
    """Optional parts whose tensors are the head's own here."""
    settles: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are the head's alone, as the reader of the encoder is to find them."""
    fits: Callable[[dict[str, Any]], bool] = lambda data: True
    """Whether a folder of this class has its head in this form, where there are several."""
    takes: Callable[[HeadConfig], str | None] = lambda head: None
    """(our head) → what keeps it from having this form although settings could say it, or None."""


@dataclass(frozen=True)
class Twin:
    """A family of ours and the Hugging Face model type that computes the same."""

    model_type: str
    family: str
    """Our name of it."""
    prefix: str
    """What Hugging Face writes before the encoder's names; some files leave it out."""
    encoder: Callable[[ModelConfig], Sequence[Row]]
    """The rows every model has."""
    optional: Mapping[str, tuple[Row, ...]]
    """Rows of parts a model may lack, by the start of our names, such as `heads.pooler`."""
    tied: Mapping[str, str]
    """Their names that repeat another tensor of theirs; read only to check, never written."""
    read_config: Callable[[dict[str, Any], frozenset[str]], ModelConfig]
    """(their config.json, the optional parts that are there) → our config."""
    write_config: Callable[[ModelConfig], dict[str, Any]]
    bare: tuple[str, ...] = ("embeddings.", "embeddings_project.", "encoder.", "pooler.")
    """Starts of names that get the prefix where a file left it out."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Starts of names that some files use, and what they are called in the table."""
    written: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    """Starts of names in the table that a model is to be written with others for."""
    remark: Callable[[ModelConfig], str | None] = lambda config: None
    """(our config) → what their class computes otherwise although every weight has its place, or None."""
    derived: tuple[str, ...] = ()
    """Their names of tensors that follow from the config; left out when read, never written."""
    forms: tuple[TaskForm, ...] = ()
    """Their classes for tasks."""
    lacks: Callable[[ModelConfig], str | None] = lambda config: None
    """(our config) → what none of their classes computes although a person would ask for it there, or None."""

    def parts(self, names: Iterable[str]) -> frozenset[str]:
        """The optional parts of a model with tensors of these names."""
        names = tuple(names)
        return frozenset(part for part in self.optional if any(name.startswith(part + ".") for name in names))

    def rows(self, config: ModelConfig, parts: frozenset[str]) -> list[Row]:
        """The table for one model with these optional parts."""
        rows = [*self.encoder(config)]
        for part in sorted(parts):
            rows += self.optional[part]
        return expand(rows, len(config.encoder.layers), 0 if config.decoder is None else len(config.decoder.layers))


def headless(config: ModelConfig) -> str | None:
    """The remark on a replaced_tokens head for twins that have no class with one, or None."""
    if not any(head.kind == "replaced_tokens" for head in config.heads):
        return None
    return "transformers has no such model with a replaced_tokens head: its weights are in the file and ignored there"


def cannot(model_type: str, reason: str) -> InputError:
    """The error of a model that Hugging Face's class cannot be."""
    return InputError(f"this model cannot be exported as a Hugging Face {model_type}: {reason}")


def first_mixer(stack: EncoderConfig, kind: type[_Kind], model_type: str) -> _Kind:
    """The mixer of a stack's first layer, which must be of the kind that Hugging Face's class has."""
    mixer = stack.layers[0].mixer
    if not isinstance(mixer, kind):
        raise cannot(model_type, f"its mixer is not {kind.model_fields['kind'].default}")
    return mixer


def check_heads(heads: int, head_width: int | None, width: int, model_type: str) -> None:
    """Raises a sentence if heads do not fill the width, as those of a model cut down to some of them do not."""
    if head_width is not None and heads * head_width != width:
        raise cannot(model_type, "its heads do not fill its width")


def read_activation(data: dict[str, Any], key: str, default: str = "gelu") -> Activation:
    """Our name of the activation that a setting of theirs names."""
    name = data.get(key, default)
    if name not in ACTIVATION_NAMES:
        raise InputError(f"config.json: {key} is {name!r}; {nearest(str(name), ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def write_activation(activation: Activation) -> str:
    """Their name of an activation of ours."""
    return next(theirs for theirs, ours in ACTIVATION_NAMES.items() if ours == activation)


def refuse(data: dict[str, Any], **allowed: Any) -> None:
    """Raises a sentence if a setting of theirs has another value than the one our network computes."""
    for key, only in allowed.items():
        if data.get(key, only) not in (only, None):
            raise InputError(f"config.json: {key} is {data[key]!r}; allowed: {only!r}")


def required(data: dict[str, Any], key: str) -> Any:
    """A setting of theirs that must be there."""
    if key not in data:
        raise InputError(f"config.json lacks {key!r}")
    return data[key]
