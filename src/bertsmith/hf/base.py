"""Base of the classes of `bertsmith.hf`: one of our models inside, with the tensor names of our files."""

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from bertsmith.checkpoint.files import tensors_of
from bertsmith.checkpoint.hf.wrapped import MODEL_TYPE, MODELLING, wrapped_settings
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.build import assemble, build, initialise
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq

HfOutput: TypeAlias = ModelOutput | tuple[object, ...]
"""A named output of transformers, or a tuple if the caller sets `return_dict` to false."""


class BertsmithConfig(PreTrainedConfig):
    """config.json of a folder that `bertsmith.export` wrote for `bertsmith.hf`; our config is under "model"."""

    model_type = MODEL_TYPE

    # None as default, so that values of the files are always written again
    bertsmith: int | None = None
    model: dict[str, Any] | None = None
    not_standalone: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    eos_token_id: int | None = None
    tie_word_embeddings: bool = False
    """For their loader: shared layers are one module here, and vocabulary heads read the embedding table."""

    @classmethod
    def of(cls, config: ModelConfig, architecture: str, **others: object) -> "BertsmithConfig":
        """Create it from a config of ours."""
        return cls(**{**wrapped_settings(config, architecture), **others})

    @property
    def network(self) -> ModelConfig:
        """Our config."""
        if not isinstance(self.model, dict):
            raise InputError("this BertsmithConfig has no 'model'; make one with BertsmithConfig.of or from a folder")
        return ModelConfig.parse(self.model, source="config.json")


class BertsmithPreTrainedModel(PreTrainedModel):
    """A `PreTrainedModel` that shares modules and weights with one of our models."""

    config_class = BertsmithConfig
    config: BertsmithConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True  # our layers choose their implementation, whatever the loader is told
    head_kinds: ClassVar[tuple[str, ...]] = ()
    """The class needs one of these heads; empty if it needs none."""

    def __init__(self, config: BertsmithConfig) -> None:
        super().__init__(config)
        network = self.network_config(config)
        config.model = network.plain()
        self._is_loading = torch.get_default_device() == torch.device("meta")
        # on the CPU even if their loader uses the meta device: derived buffers are in no file
        with torch.device("cpu"):
            model = assemble(network) if self._is_loading else build(network)
        self.encoder, self.heads = model.encoder, model.heads
        if isinstance(model, Seq2Seq):
            self.decoder = model.decoder
        # not a submodule: its parts are registered above, under the names of our files
        self._reference = _ModelReference(model)
        self._fresh = self._fresh_values(model)
        self.post_init()

    def network_config(self, config: BertsmithConfig) -> ModelConfig:
        """The network to build: that of the config, which must have a head that the class can use."""
        network = config.network
        kinds = [head.kind for head in network.heads]
        if self.head_kinds and not set(kinds) & set(self.head_kinds):
            have = ", ".join(kinds) or "none"
            needed = " or ".join(self.head_kinds)
            raise InputError(f"{type(self).__name__} needs a head of kind {needed}; this model's heads: {have}")
        return network

    @property
    def inner(self) -> Model:
        """Our model, with the same weights."""
        model = self._reference.model
        model.training = self.training
        return model

    def layout(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, others: dict[str, object]
    ) -> SequenceLayout:
        """The layout of the rows; raise for inputs that our models do not take."""
        given = [name for name in ("inputs_embeds", "position_ids", "past_key_values") if others.get(name) is not None]
        if given:
            raise InputError(f"{given[0]} is given, which this model does not read; allowed: input_ids")
        if input_ids is None or input_ids.dim() != 2:
            shape = "missing" if input_ids is None else f"of shape {tuple(input_ids.shape)}"
            raise InputError(f"input_ids is {shape}; allowed: (batch, length)")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            shapes = f"{tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}"
            raise InputError(f"attention_mask has shape {shapes}; they must be equal")
        return SequenceLayout.rows(input_ids, attention_mask)

    def types(self, token_type_ids: Tensor | None) -> Tensor | None:
        """Token types, if the model has any."""
        return token_type_ids if self.inner.config.encoder.embedding.types else None

    def extras(
        self, input_ids: Tensor, layout: SequenceLayout, token_type_ids: Tensor | None, others: dict[str, object]
    ) -> dict[str, tuple[Tensor, ...]]:
        """Hidden states of all layers and attention maps on request, computed in a second pass.

        Shape: hidden states (batch, length, width), maps (batch, heads, length, length).
        """
        want = Want(
            all_hidden_states=self._is_requested("output_hidden_states", others),
            maps=self._is_requested("output_attentions", others),
        )
        if not (want.all_hidden_states or want.maps):
            return {}
        output = self.inner.encoder.run(EncoderInputs(input_ids, layout, self.types(token_type_ids)), want)
        found: dict[str, tuple[Tensor, ...]] = {}
        if want.all_hidden_states:
            found["hidden_states"] = (*output.hidden_states[:-1], output.normalised(-1))
        if want.maps:
            if not all("attention" in own for own in output.maps):
                raise InputError("output_attentions is true and a layer of this model has no map of attention")
            found["attentions"] = tuple(own["attention"] for own in output.maps)
        return found

    def make_output(self, kind: type[ModelOutput], others: dict[str, object], **values: object) -> HfOutput:
        """An output with names, or a tuple on request."""
        output, asked = kind(**values), others.get("return_dict")
        return output if (self.config.return_dict if asked is None else asked) else output.to_tuple()

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.encoder.embedding

    def resize_token_embeddings(self, *_: object, **__: object) -> NoReturn:
        """Not supported."""
        raise InputError("a Bertsmith vocabulary is not resized here; bertsmith shrink --vocabulary cuts one")

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *rest: Any,
        **others: Any,
    ) -> None:
        """Write a folder that this class and `bertsmith.load` read; shared tensors are written once."""
        names = tensors_of(self)
        whole = self.state_dict() if state_dict is None else state_dict
        unique = {name: tensor for name, tensor in whole.items() if name in names}
        super().save_pretrained(save_directory, is_main_process, unique, *rest, **others)
        if is_main_process:
            shutil.copyfile(MODELLING, Path(save_directory) / MODELLING.name)

    def _fresh_values(self, model: Model) -> dict[int, dict[str, Tensor]]:
        """Values by module that their loader may ask for again: derived buffers, and the fresh weights of a task head.

        The loader allocates both anew and fills them from the files, which have the head at most.
        """
        if not self._is_loading:
            return {}
        tasks = [head for kind, head in model.heads.items() if kind in self.head_kinds]
        for head in tasks:
            initialise(head, model.config.encoder.init_std)
        head_modules = {id(module) for head in tasks for module in head.modules()}
        fresh: dict[int, dict[str, Tensor]] = {}
        for module in self.modules():
            names = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
            if id(module) in head_modules:
                names += [name for name, own in module._parameters.items() if own is not None]
            if names:
                fresh[id(module)] = {name: getattr(module, name).detach().clone() for name in names}
        return fresh

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Called by their loader for every module with tensors that the files lack."""
        if not self._is_loading:
            return
        fresh = self._fresh.get(id(module), {})
        derived = module._non_persistent_buffers_set
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name not in derived and getattr(tensor, "_is_hf_initialized", False):
                continue
            if name not in fresh:
                raise InputError(f"the files lack the tensor {name!r} of a {type(module).__name__} of this model")
            tensor.copy_(fresh[name])

    def _is_requested(self, name: str, others: dict[str, object]) -> bool:
        given = others.get(name)
        return bool(getattr(self.config, name, False) if given is None else given)


class _ModelReference:
    """A reference to a model that does not register it as a submodule."""

    def __init__(self, model: Model) -> None:
        self.model = model
