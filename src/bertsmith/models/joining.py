"""Two models of one network made one: the encoder that learned more, with all that only the other has."""

import copy
from typing import Any

import torch

from bertsmith.errors import InputError
from bertsmith.models.model import Model

_SHARED = ("token_table", "type_table", "position.", "norm.")  # what a generator shares of an embedding, if all (share)


def with_encoder(model: Model, tuned: Model) -> Model:
    """The model with the encoder and the heads of one that was fine-tuned of it; its other heads and generator stay.

    So a model that learned vectors of texts still fills masks. Both stay as they are. Where the generator shares the
    embedding (sharing "full"), fine-tuning must have kept that: encoder.frozen = "embedding".
    """
    _check_networks(model, tuned)
    generator = model.config.generator
    if generator is not None and generator.sharing == "full":
        _check_shared(model, tuned)
    joined = copy.deepcopy(model).to(next(tuned.parameters()))
    joined.encoder.load_state_dict(tuned.encoder.state_dict())
    heads = {head.kind: head for head in (*model.config.heads, *tuned.config.heads)}
    joined.config = joined.config.changed(heads=tuple(heads.values()))
    joined.heads.update({kind: copy.deepcopy(head) for kind, head in tuned.heads.items()})
    for parameter in joined.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return joined


def _check_networks(model: Model, tuned: Model) -> None:
    """Raises a sentence unless both are encoders of one network with one tokenizer."""
    for name in ("encoder", "decoder", "quantisation"):
        own, other = (_lasting(one.config.plain()[name]) for one in (model, tuned))
        if own != other:
            raise InputError(f"the two models differ in their {name}; allowed: a model and what was fine-tuned of it")
    tokenizers = [one.tokenizer.hash for one in (model, tuned) if one.tokenizer is not None]
    if len(set(tokenizers)) > 1:
        raise InputError("the two models have different tokenizers; allowed: a model and what was fine-tuned of it")


def _check_shared(model: Model, tuned: Model) -> None:
    own, others = model.encoder.embedding.state_dict(), tuned.encoder.embedding.state_dict()
    for name, tensor in own.items():
        # a model that was kept in half precision was fine-tuned in float32, which holds its numbers exactly
        if name.startswith(_SHARED) and not torch.equal(tensor.cpu(), others[name].to(tensor.dtype).cpu()):
            raise InputError(
                f"the fine-tuned encoder's embedding.{name} is not the model's, which its generator shares; fine-tune "
                "with encoder.frozen = 'embedding'"
            )


def _lasting(data: Any) -> Any:
    """Plain settings without those that only training reads."""
    if isinstance(data, list):
        return [_lasting(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        name: _lasting(value) for name, value in data.items() if not name.endswith("dropout") and name != "layer_drop"
    }
