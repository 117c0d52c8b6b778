"""Convert trained models: swap full attention and FAVOR+, factorise the token table, or replace the encoder."""

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
_COMMON_SETTINGS = {"heads", "head_width", "value_width", "dropout", "is_causal"}
_FAMILIES = {"favor": {"bert": "performer"}, "full": {"performer": "bert"}}


def convert(model: Model, to: Literal["favor", "full"], *, seed: int = 0, **settings: Any) -> Model:
    """Return a model with bitwise the same weights, with FAVOR+ instead of full attention or vice versa.

    `settings` configure the favor mixer, such as features=512 or feature_map="hyperbolic"; the seed draws its random
    matrices. Other mixers do not change. A Performer made from a trained model needs further training.
    The family changes between "bert" and "performer", which differ in their attention only; other families, such as
    "electra" or "transformer", do not change.
    """
    if to not in _KINDS:
        raise InputError(f"to is {to!r}; {nearest(str(to), _KINDS)}")
    free = _KINDS[to].model_fields.keys() - _COMMON_SETTINGS - {"kind"}
    for name in settings:
        if name not in free:
            raise InputError(f"{name} is not a setting of the conversion to {to!r}; {nearest(name, free)}")
    try:
        config = _convert_model(model.config, to, settings)
    except InputError as error:
        raise InputError(f"convert to {to!r}: {error}") from None
    if config == model.config:
        raise InputError(f"convert to {to!r}: this model has no attention to convert")
    return rebuild(model, config, seed=seed)


def _convert_model(config: ModelConfig, to: str, settings: dict[str, Any]) -> ModelConfig:
    encoder = _convert_stack(config.encoder, to, settings)
    decoder = None if config.decoder is None else _convert_stack(config.decoder, to, settings)
    if (encoder, decoder) == (config.encoder, config.decoder):
        return config
    return config.changed(encoder=encoder, decoder=decoder, family=_FAMILIES[to].get(config.family, config.family))


def _convert_stack(config: EncoderConfig, to: str, settings: dict[str, Any]) -> EncoderConfig:
    layers = []
    for layer in config.layers:
        cross = None if layer.cross is None else _convert_mixer(layer.cross, to, settings)
        layers.append(layer.changed(mixer=_convert_mixer(layer.mixer, to, settings), cross=cross))
    return config.changed(layers=tuple(layers))


def _convert_mixer(mixer: MixerConfig, to: str, settings: dict[str, Any]) -> MixerConfig:
    """Return the mixer's config as the kind `to`; mixers of this kind or of neither are returned unchanged."""
    if not isinstance(mixer, FavorConfig | FullConfig) or mixer.kind == to:
        return mixer
    if isinstance(mixer, FullConfig):
        for name, field in FullConfig.model_fields.items():
            value = getattr(mixer, name)
            if name not in _COMMON_SETTINGS and value != field.default:
                raise InputError(f"{name} is {value}, which {to} does not support; allowed: {field.default}")
    common = {name: value for name, value in mixer.plain().items() if name in _COMMON_SETTINGS}
    return _KINDS[to](kind=to, heads=mixer.heads).changed(**common, **settings)


_MIN_NORM = 1e-30  # avoids dividing an all-zero column by zero


@torch.no_grad()
def factorise(model: Model, rank: int, weights: Tensor | None = None) -> Model:
    """Return a copy whose token table E is its best approximation A · B, (vocabulary, rank) · (rank, width).

    With `weights`, such as token frequencies, it minimises Σ weight · |row of E - row of A · B|²; tokens of weight 0 do
    not influence B. Only the token table is replaced: positions, types and the norm keep their width, and heads over
    the vocabulary use A · B, so at full rank the outputs do not change. At lower ranks continue training, by
    distillation for example, or repair the factors alone (shrinking/embedding_repair.py).
    Shape: weights (vocabulary,).
    """
    table = model.token_table
    full_rank = min(table.shape)
    if not 1 <= rank <= full_rank:
        raise InputError(f"rank is {rank}; allowed: 1 to {full_rank}")
    left, right = _low_rank_factors(table.double(), rank, _check_weights(weights, table))
    root = left.norm(dim=0).clamp_min(_MIN_NORM).sqrt()  # equal norms on both sides, so that both learn at one pace
    encoder = model.config.encoder
    config = model.config.changed(encoder=encoder.changed(embedding=encoder.embedding.changed(rank=rank)))
    small = copy.deepcopy(model)
    small.config = config
    small.encoder.embedding.token_table = nn.Parameter((left / root).to(table))
    small.encoder.embedding.token_factor = nn.Parameter((root[:, None] * right).to(table))
    return small


def _low_rank_factors(table: Tensor, rank: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the two factors, the second with orthonormal rows.

    The optimal row space is spanned by the first right singular vectors of the weighted table; each row is projected
    onto it, whatever its weight.
    """
    weighted = table if weights is None else weights.sqrt()[:, None] * table
    right = torch.linalg.svd(weighted, full_matrices=False)[2][:rank]
    return table @ right.T, right


def _check_weights(weights: Tensor | None, table: Tensor) -> Tensor | None:
    if weights is None:
        return None
    if weights.shape != table.shape[:1]:
        raise InputError(f"weights has shape {tuple(weights.shape)}; allowed: ({len(table)},), one per token")
    weights = weights.to(table.device, torch.float64)
    if not (weights.isfinite().all() and weights.min() >= 0 and weights.max() > 0):
        raise InputError(
            f"weights range from {weights.min():g} to {weights.max():g}; allowed: finite, 0 or more, not all 0"
        )
    return weights


_SHARED = ("token_table", "type_table", "position.", "norm.")  # embedding tensors tied by build.share


def with_encoder(model: Model, tuned: Model) -> Model:
    """Return the model with the encoder and heads of a fine-tuned version of it, plus its own heads and generator.

    For example, a model fine-tuned for text embeddings can still fill masks. Neither argument is modified. If the
    generator shares the embedding (sharing "full"), fine-tuning must have frozen it: encoder.frozen = "embedding".
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
    """Raise InputError unless both have the same architecture and tokenizer."""
    for name in ("encoder", "decoder", "quantisation"):
        own, other = (_without_dropout(one.config.plain()[name]) for one in (model, tuned))
        if own != other:
            raise InputError(f"the two models differ in their {name}; allowed: a model and a fine-tuned version of it")
    tokenizers = [one.tokenizer.hash for one in (model, tuned) if one.tokenizer is not None]
    if len(set(tokenizers)) > 1:
        raise InputError("the two models have different tokenizers; allowed: a model and a fine-tuned version of it")


def _check_shared(model: Model, tuned: Model) -> None:
    own, others = model.encoder.embedding.state_dict(), tuned.encoder.embedding.state_dict()
    for name, tensor in own.items():
        # a model saved in half precision was fine-tuned in float32, which represents its weights exactly
        if name.startswith(_SHARED) and not torch.equal(tensor.cpu(), others[name].to(tensor.dtype).cpu()):
            raise InputError(
                f"fine-tuning changed embedding.{name}, which the model's generator shares; fine-tune with "
                "encoder.frozen = 'embedding'"
            )


def _without_dropout(data: Any) -> Any:
    """Return plain settings without dropout and layer_drop, which only affect training."""
    if isinstance(data, list):
        return [_without_dropout(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        name: _without_dropout(value)
        for name, value in data.items()
        if not name.endswith("dropout") and name != "layer_drop"
    }
