"""A trained model with another kind of attention around the same weights."""

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bertsmith.errors import InputError, nearest
from bertsmith.layers.mixers import MixerConfig
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.models.build import rebuild
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.model import Model

_KINDS: dict[str, type[MixerConfig]] = {"favor": FavorConfig, "full": FullConfig}
_KEPT = {"heads", "head_width", "value_width", "dropout", "is_causal"}
_FAMILIES = {"favor": {"bert": "performer"}, "full": {"performer": "bert"}}


def convert(model: Model, to: Literal["favor", "full"], *, seed: int = 0, **settings: Any) -> Model:
    """A new model with the same weights, bit for bit, whose full attention is FAVOR+, or the other way round.

    `settings` are those of the favor mixer, such as features=512 or feature_map="hyperbolic"; the seed draws its random
    matrices. Mixers of other kinds stay. A Performer made of a trained model wants further training.
    The family changes between "bert" and "performer", which differ in their attention only; any other, such as
    "electra" or "transformer", names the rest of the network as well and stays.
    """
    if to not in _KINDS:
        raise InputError(f"to is {to!r}; {nearest(str(to), _KINDS)}")
    free = _KINDS[to].model_fields.keys() - _KEPT - {"kind"}
    for name in settings:
        if name not in free:
            raise InputError(f"{name} is not a setting of the conversion to {to!r}; {nearest(name, free)}")
    try:
        config = _converted_model(model.config, to, settings)
    except InputError as error:
        raise InputError(f"convert to {to!r}: {error}") from None
    if config == model.config:
        raise InputError(f"convert to {to!r}: this model has no attention of the other kind")
    return rebuild(model, config, seed=seed)


def _converted_model(config: ModelConfig, to: str, settings: dict[str, Any]) -> ModelConfig:
    encoder = _converted_stack(config.encoder, to, settings)
    decoder = None if config.decoder is None else _converted_stack(config.decoder, to, settings)
    if (encoder, decoder) == (config.encoder, config.decoder):
        return config
    return config.changed(encoder=encoder, decoder=decoder, family=_FAMILIES[to].get(config.family, config.family))


def _converted_stack(config: EncoderConfig, to: str, settings: dict[str, Any]) -> EncoderConfig:
    layers = []
    for layer in config.layers:
        cross = None if layer.cross is None else _converted(layer.cross, to, settings)
        layers.append(layer.changed(mixer=_converted(layer.mixer, to, settings), cross=cross))
    return config.changed(layers=tuple(layers))


def _converted(mixer: MixerConfig, to: str, settings: dict[str, Any]) -> MixerConfig:
    """The config of the other kind with all that both kinds have; one that is of neither kind, or of this, stays."""
    if not isinstance(mixer, FavorConfig | FullConfig) or mixer.kind == to:
        return mixer
    if isinstance(mixer, FullConfig):
        for name, field in FullConfig.model_fields.items():
            value = getattr(mixer, name)
            if name not in _KEPT and value != field.default:
                raise InputError(f"{name} is {value}, which {to} has not; allowed: {field.default}")
    kept = {name: value for name, value in mixer.plain().items() if name in _KEPT}
    return _KINDS[to](kind=to, heads=mixer.heads).changed(**kept, **settings)


_TINY = 1e-30  # a column of nothing is divided by it


@torch.no_grad()
def factorise(model: Model, rank: int, weights: Tensor | None = None) -> Model:
    """A copy of a model whose token table E is A · B, (vocabulary, rank) · (rank, width), the nearest of that rank.

    With `weights`, such as how often each token occurs, it is the one of least Σ weight · |row of E - row of A · B|²; a
    token of weight 0 gets the best that B has for it. Only the tokens' table is replaced: positions, types and the norm
    stay as wide as they were, and heads over the vocabulary score with A · B, so at full rank nothing changes. Below
    it, train on, by distillation for example, or repair the factors alone (shrinking/embedding_repair.py).
    Shape: weights (vocabulary,).
    """
    table = model.token_table
    most = min(table.shape)
    if not 1 <= rank <= most:
        raise InputError(f"rank is {rank}; allowed: 1 to {most}")
    left, right = _nearest(table.double(), rank, _checked(weights, table))
    root = left.norm(dim=0).clamp_min(_TINY).sqrt()  # half to either side, so that both learn at the same pace
    encoder = model.config.encoder
    config = model.config.changed(encoder=encoder.changed(embedding=encoder.embedding.changed(rank=rank)))
    small = copy.deepcopy(model)
    small.config = config
    small.encoder.embedding.token_table = nn.Parameter((left / root).to(table))
    small.encoder.embedding.token_factor = nn.Parameter((root[:, None] * right).to(table))
    return small


def _nearest(table: Tensor, rank: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two factors, the second with orthonormal rows.

    The rows of least weighted error lie in the space of the first right singular vectors of the weighted table, and
    each is the projection of its own onto it, whatever its weight.
    """
    weighted = table if weights is None else weights.sqrt()[:, None] * table
    right = torch.linalg.svd(weighted, full_matrices=False)[2][:rank]
    return table @ right.T, right


def _checked(weights: Tensor | None, table: Tensor) -> Tensor | None:
    if weights is None:
        return None
    if weights.shape != table.shape[:1]:
        raise InputError(f"weights has shape {tuple(weights.shape)}; allowed: ({len(table)},), one for every token")
    weights = weights.to(table.device, torch.float64)
    if not (weights.isfinite().all() and weights.min() >= 0 and weights.max() > 0):
        raise InputError(f"weights goes from {weights.min():g} to {weights.max():g}; allowed: 0 and up, some above 0")
    return weights


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
