"""Tables of cases that the contract tests run over: a new entry is tested without a new test."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.context import ForwardContext, Memory
from bertsmith.layers.elementwise import NormConfig
from bertsmith.layers.mixers import MixerConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.mixers.dynamic_conv import DynamicConvConfig
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.long_short import LongShortConfig
from bertsmith.layers.mixers.multi_linear import MultiLinearConfig
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.layers.mixers.sparse import SparseConfig
from bertsmith.layers.positions import RelativeConfig, token_rotations
from bertsmith.layers.subnet import LayerCut
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.equilibrium import EquilibriumConfig
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS, overridable, preset
from bertsmith.ops import activation, attention, conv, disentangled, favor, multi_linear, token_loss
from bertsmith.ops.dispatch import Implementations
from bertsmith.ops.sparse import SparseMap

WIDTH, HEADS = 24, 4
LENGTH_CASES = {"one": [1], "odd": [7, 3, 1], "mixed": [5, 12, 1, 9, 2], "equal": [6, 6]}
TINY = {
    "width": WIDTH,
    "layers": 3,
    "heads": HEADS,
    "vocabulary": 50,
    "max_length": 16,
    "dropout": 0.0,
    "init_std": 0.3,
    "embedding_width": 12,
    "span": 6,
    "max_distance": 9,
    "window": 3,
}

MIXER_CASES: dict[str, MixerConfig] = {
    "full": FullConfig(heads=HEADS, dropout=0.0),
    "full causal": FullConfig(heads=HEADS, dropout=0.0, is_causal=True),
    "full rotary": FullConfig(heads=HEADS, dropout=0.0, rotary=100.0, has_bias=False),
    "full in a window": FullConfig(heads=HEADS, dropout=0.0, window=2),
    "full rotary in a window, causal": FullConfig(heads=HEADS, dropout=0.0, rotary=100.0, window=3, is_causal=True),
    "full rotary with wider values": FullConfig(
        heads=HEADS, head_width=4, value_width=7, dropout=0.0, rotary=10.0, has_bias=False
    ),
    "full with wider values": FullConfig(heads=HEADS, head_width=3, value_width=7, dropout=0.0),
    "full with a relative bias": FullConfig(heads=HEADS, dropout=0.0, has_relative_bias=True),
    "full with a relative bias, causal": FullConfig(heads=HEADS, dropout=0.0, has_relative_bias=True, is_causal=True),
    "full rotary with a relative bias in a window, causal": FullConfig(
        heads=HEADS, dropout=0.0, rotary=100.0, window=3, has_relative_bias=True, is_causal=True
    ),
    "dynamic_conv": DynamicConvConfig(heads=HEADS, dropout=0.0),
    "dynamic_conv fixed": DynamicConvConfig(heads=HEADS, kernel_size=3, kernel_from="fixed", dropout=0.0),
    "dynamic_conv depthwise": DynamicConvConfig(heads=HEADS, head_width=5, kernel_from="depthwise", dropout=0.0),
    "dynamic_conv ungated": DynamicConvConfig(heads=HEADS, kernel_size=13, is_gated=False, dropout=0.0),
    "dynamic_conv causal": DynamicConvConfig(heads=HEADS, kernel_size=5, dropout=0.0, is_causal=True),
    "dynamic_conv fixed causal": DynamicConvConfig(heads=HEADS, kernel_from="fixed", dropout=0.0, is_causal=True),
    "dynamic_conv depthwise causal": DynamicConvConfig(
        heads=HEADS, kernel_from="depthwise", dropout=0.0, is_causal=True
    ),
    "span_conv": SpanConvConfig(heads=HEADS, dropout=0.0),
    "span_conv wide, one value": SpanConvConfig(
        heads=HEADS, head_width=7, kernel_size=5, shares_value=True, dropout=0.0
    ),
    "span_conv token": SpanConvConfig(heads=HEADS, kernel_from="token", dropout=0.0),
    "span_conv fixed": SpanConvConfig(heads=HEADS, kernel_from="fixed", dropout=0.0),
    "span_conv depthwise": SpanConvConfig(heads=HEADS, kernel_from="depthwise", dropout=0.0),
    "span_conv none": SpanConvConfig(heads=HEADS, kernel_from="none", dropout=0.0),
    "span_conv causal": SpanConvConfig(heads=HEADS, kernel_size=5, dropout=0.0, is_causal=True),
    "span_conv depthwise causal": SpanConvConfig(heads=HEADS, kernel_from="depthwise", dropout=0.0, is_causal=True),
    "span_conv none causal": SpanConvConfig(heads=HEADS, kernel_from="none", dropout=0.0, is_causal=True),
    "long_short": LongShortConfig(heads=HEADS, dropout=0.0),
    "long_short fixed, ungated": LongShortConfig(heads=HEADS, kernel_from="fixed", is_gated=False, dropout=0.0),
    "long_short depthwise, wide": LongShortConfig(
        heads=HEADS, head_width=5, kernel_size=3, kernel_from="depthwise", dropout=0.0
    ),
    "long_short causal": LongShortConfig(heads=HEADS, kernel_size=5, dropout=0.0, is_causal=True),
    "long_short fixed causal": LongShortConfig(heads=HEADS, kernel_from="fixed", dropout=0.0, is_causal=True),
    "multi_linear": MultiLinearConfig(heads=HEADS, dropout=0.0, max_length=20),
    "multi_linear causal": MultiLinearConfig(heads=HEADS, head_width=3, dropout=0.0, max_length=16, is_causal=True),
    "favor": FavorConfig(heads=HEADS, dropout=0.0, features=32),
    "favor causal": FavorConfig(heads=HEADS, dropout=0.0, features=32, is_causal=True),
    "favor relu": FavorConfig(heads=HEADS, dropout=0.0, features=32, feature_map="relu"),
    "favor hyperbolic with wider values": FavorConfig(
        heads=HEADS, head_width=3, value_width=7, dropout=0.0, features=16, feature_map="hyperbolic"
    ),
}
DISENTANGLED = DisentangledConfig(heads=HEADS, dropout=0.0, position_dropout=0.0)
MIXER_CASES |= {
    "disentangled": DISENTANGLED,
    "disentangled causal": DISENTANGLED.model_copy(update={"is_causal": True}),
    "disentangled v1": DISENTANGLED.model_copy(update={"shares_projections": False, "has_key_bias": False}),
    "disentangled own": DISENTANGLED.model_copy(update={"shares_projections": False, "head_width": 5}),
    "disentangled c2p": DISENTANGLED.model_copy(update={"position_to_content": False}),
    "disentangled paper": DISENTANGLED.model_copy(update={"position_to_content_row": "paper"}),
    "disentangled paper causal": DISENTANGLED.model_copy(
        update={"position_to_content_row": "paper", "is_causal": True, "shares_projections": False}
    ),
    "disentangled p2c": DISENTANGLED.model_copy(update={"content_to_position": False, "shares_projections": False}),
}
SPARSEMAX, ENTMAX15, ENTMAX = (SparseConfig(kind=kind) for kind in ("sparsemax", "entmax15", "entmax"))
MIXER_CASES |= {
    "full sparsemax": FullConfig(heads=HEADS, dropout=0.0, sparse=SparseConfig(sparsity=-1.0)),
    "full entmax15 causal": FullConfig(heads=HEADS, dropout=0.0, sparse=ENTMAX15, is_causal=True),
    "full entmax in a window": FullConfig(heads=HEADS, dropout=0.0, window=2, sparse=ENTMAX),
    "full entmax with a relative bias": FullConfig(heads=HEADS, dropout=0.0, has_relative_bias=True, sparse=ENTMAX),
    "span_conv entmax": SpanConvConfig(heads=HEADS, dropout=0.0, sparse=ENTMAX),
    "span_conv none sparsemax": SpanConvConfig(heads=HEADS, kernel_from="none", dropout=0.0, sparse=SPARSEMAX),
    "long_short entmax causal": LongShortConfig(heads=HEADS, dropout=0.0, sparse=ENTMAX, is_causal=True),
    "disentangled sparsemax": DISENTANGLED.model_copy(update={"sparse": SPARSEMAX}),
    "disentangled entmax causal": DISENTANGLED.model_copy(update={"sparse": ENTMAX, "is_causal": True}),
}
ROTARIES = [config.build(WIDTH).rotary for config in MIXER_CASES.values()]
CAUSAL_CASES = [name for name, config in MIXER_CASES.items() if config.is_causal]
MEMORY_CASES = [name for name, config in MIXER_CASES.items() if config.reads_memory and not config.is_causal]


def forward_context(
    layout: SequenceLayout, cut: LayerCut | None = None, memory: Memory | None = None
) -> ForwardContext:
    """Return a context as an encoder builds it, with a relative table and rotations."""
    table = RelativeConfig(span=8, max_distance=10).build(WIDTH).double()
    with torch.no_grad():
        table.table.copy_(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    tokens = torch.empty(layout.batch if layout.starts is None else int(layout.starts[-1]))
    rotations = token_rotations(ROTARIES, tokens, layout)
    return ForwardContext(layout, cut, relative_positions=table(), rotations=rotations, memory=memory)


def tiny_model(name: str, seed: int = 0, layers: int = TINY["layers"]) -> Model:
    """Build a tiny version of a preset, in float64, with weights large enough for every module to matter."""
    name, _, variant = name.partition(" ")
    sizes = {**TINY, "layers": layers}
    config = preset(name, **{key: value for key, value in sizes.items() if key in overridable(name)})
    model = build(VARIANTS[variant](config) if variant else config, seed=seed).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return model


def _pre_norm(config: ModelConfig) -> ModelConfig:
    """Return the config with pre-norm RMSNorm, a final norm, sinusoid positions and gated feed-forwards."""
    encoder, norm = config.encoder, NormConfig(placement="pre", kind="rms")
    feedforward = encoder.layers[0].feedforward.changed(is_gated=True, activation="silu")
    layers = tuple(layer.changed(norm=norm, feedforward=feedforward) for layer in encoder.layers)
    embedding = encoder.embedding.changed(positions="sinusoid", is_scaled=True, has_norm=False)
    return config.changed(encoder=encoder.changed(layers=layers, embedding=embedding, final_norm=norm))


def _reversible(config: ModelConfig) -> ModelConfig:
    """Return the pre-norm config with reversible layers."""
    config = _pre_norm(config)
    return config.changed(encoder=config.encoder.changed(reversible=True))


def _equilibrium(config: ModelConfig) -> ModelConfig:
    """Return the config as an equilibrium, with weights small enough for it to converge."""
    equilibrium = EquilibriumConfig(solver="plain", steps=40, backward_steps=60, tolerance=1e-13)
    return config.changed(encoder=config.encoder.changed(equilibrium=equilibrium, init_std=0.1))


def _shares(sharing: str) -> Callable[[ModelConfig], ModelConfig]:
    """Return a function that makes all layers of a config share modules."""
    return lambda config: config.model_copy(update={"encoder": config.encoder.model_copy(update={"sharing": sharing})})


VARIANTS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "pre-norm": _pre_norm,
    "reversible": _reversible,
    "equilibrium": _equilibrium,
    "sharing mixers": _shares("mixer"),
    "sharing feed-forwards": _shares("feedforward"),
}

# one preset per architecture, and the presets whose settings switch on another part
FAMILIES = sorted({architecture: name for name, (architecture, _) in reversed(PRESETS.items())}.values())
SEQ2SEQ = [name for name in FAMILIES if "transformer" in name]
FAMILIES += ["convbert-medium-small", "dynamicconv-base", "performer-relu-base"]
FAMILIES += [f"bert-tiny {variant}" for variant in VARIANTS]


def orders_of(model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """Return random orders of the heads and neurons of every layer, the same for layers that share them."""
    sharing, units = model.config.encoder.sharing, model.encoder.units
    heads, neurons = [torch.randperm(u.heads) for u in units], [torch.randperm(u.neurons) for u in units]
    return (
        heads[:1] * len(units) if sharing in ("all", "mixer") else heads,
        neurons[:1] * len(units) if sharing in ("all", "feedforward") else neurons,
    )


def packed_layout(lengths: list[int], empty: int = 0) -> SequenceLayout:
    starts = torch.tensor([0, *lengths, *[0] * empty]).cumsum(0).int()
    return SequenceLayout.packed(starts, max(lengths))


def padded_layout(lengths: list[int], extra: int = 0) -> SequenceLayout:
    max_length = max(lengths) + extra
    return SequenceLayout.padded(torch.arange(max_length) < torch.tensor(lengths)[:, None])


def rows_of(items: list[Tensor], extra: int = 0, padding: float = 0.0) -> Tensor:
    """Pad sequences with `padding`."""
    max_length = max(len(item) for item in items) + extra
    rows = torch.full((len(items), max_length, *items[0].shape[1:]), padding, dtype=items[0].dtype)
    for row, item in zip(rows, items, strict=True):
        row[: len(item)] = item
    return rows


@dataclass(frozen=True)
class OpCase:
    """An op, its backends and its inputs."""

    op: Callable[..., Tensor]
    """Takes tensors, and the keyword arguments `layout`, `is_causal` and `backend`."""
    backends: Implementations[Any, Any]
    tensors: Callable[[tuple[int, ...]], list[Tensor]]
    """Return the tensor arguments for a leading shape of (batch, length) or (tokens,)."""


def _numbers(*shape: int) -> Tensor:
    return (0.7 * torch.randn(shape, dtype=torch.float64)).requires_grad_()


def _attended(shape: tuple[int, ...]) -> list[Tensor]:
    return [_numbers(*shape, 3, 8) for _ in range(3)]


def _sparse_attention(shape: tuple[int, ...]) -> list[Tensor]:
    return [*_attended(shape), torch.tensor([1.1, 1.5, 1.9], dtype=torch.float64, requires_grad=True)]


def _with_alpha(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, **options: Any) -> Tensor:
    return attention.attention(query, key, value, sparse=SparseMap(alpha, scale=2.0), **options)


def _attention_with_bias(**settings: Any) -> OpCase:
    def op(query: Tensor, key: Tensor, value: Tensor, by_offset: Tensor, **options: Any) -> Tensor:
        return attention.attention(query, key, value, bias=attention.RelativeBias(by_offset), **settings, **options)

    return OpCase(op, attention.BACKENDS, lambda shape: [*_attended(shape), _numbers(3, 11)])


def _disentangled(
    has_keys: bool, has_queries: bool, has_positions: bool = False, sparse: SparseMap | None = None
) -> OpCase:
    slots = disentangled.bucket_slots(4, 9, clamps_distance=True)

    def op(*tensors: Tensor, backend: str, is_causal: bool, layout: SequenceLayout) -> Tensor:
        query, key, value, *tables = tensors
        positions = torch.arange(query.shape[:-2].numel()).mul(5).remainder(9).view(query.shape[:-2])
        relative = disentangled.RelativePositions(torch.empty(0), slots, positions if has_positions else None)
        rows = iter(tables)
        pair = [next(rows) if has_table else None for has_table in (has_keys, has_queries)]
        options = {"is_causal": is_causal, "backend": backend, "sparse": sparse}
        return disentangled.disentangled(query, key, value, *pair, layout, relative, **options)

    tables = has_keys + has_queries
    return OpCase(
        op, disentangled.BACKENDS, lambda shape: _attended(shape) + [_numbers(8, 3, 8) for _ in range(tables)]
    )


def _favor(feature_map: str) -> OpCase:
    constant = favor.FEATURE_MAPS[feature_map].has_constant_norms
    matrix = favor.draw(20, 8, torch.Generator().manual_seed(0), has_constant_norms=constant)
    features = favor.RandomFeatures(matrix, feature_map)
    return OpCase(partial(favor.favor, features=features, chunk=4), favor.BACKENDS, _attended)


def _multi_linear(shape: tuple[int, ...]) -> list[Tensor]:
    return [*(_numbers(*shape, 6) for _ in range(3)), _numbers(14, 14, 5)]


def _light_conv(is_fixed: bool, **options: bool) -> OpCase:
    def tensors(shape: tuple[int, ...]) -> list[Tensor]:
        return [_numbers(*shape, 3, 2), _numbers(3, 5) if is_fixed else _numbers(*shape, 3, 5)]

    return OpCase(partial(conv.light_conv, **options), conv.BACKENDS, tensors)


def _depthwise(**options: bool) -> OpCase:
    op = partial(conv.depthwise, **options)
    return OpCase(op, conv.DEPTHWISE_BACKENDS, lambda shape: [_numbers(*shape, 6), _numbers(6, 5)])


def _token_loss(smoothing: float) -> OpCase:
    def op(
        hidden: Tensor, table: Tensor, bias: Tensor, *, layout: SequenceLayout, is_causal: bool, backend: str
    ) -> Tensor:
        targets = torch.arange(hidden.shape[:-1].numel()).mul(5).remainder(len(table)).view(hidden.shape[:-1])
        if layout.is_token is not None:
            targets = targets.where(layout.is_token, IGNORED)
        found = token_loss.token_loss(
            hidden.flatten(0, -2), table, bias, targets.flatten(), smoothing=smoothing, backend=backend
        )
        return found.loss.expand(*hidden.shape[:-1], 1)

    return OpCase(op, token_loss.BACKENDS, lambda shape: [_numbers(*shape, 6), _numbers(33, 6), _numbers(33)])


def _activation(name: str) -> OpCase:
    def op(product: Tensor, bias: Tensor, *, backend: str, **_: object) -> Tensor:
        return activation.biased_activation(product, bias, name, backend=backend)

    return OpCase(op, activation.BACKENDS, lambda shape: [_numbers(*shape, 12), _numbers(12)])


OP_CASES: dict[str, OpCase] = {
    "attention": OpCase(attention.attention, attention.BACKENDS, _attended),
    "attention in a window": OpCase(partial(attention.attention, window=2), attention.BACKENDS, _attended),
    "attention with wider values": OpCase(
        attention.attention, attention.BACKENDS, lambda shape: [*_attended(shape)[:2], _numbers(*shape, 3, 5)]
    ),
    "attention with a bias": _attention_with_bias(),
    "attention with a bias in a window": _attention_with_bias(window=2),
    "attention entmax15 with a bias": _attention_with_bias(sparse=SparseMap(1.5)),
    "attention sparsemax": OpCase(partial(attention.attention, sparse=SparseMap(2.0)), attention.BACKENDS, _attended),
    "attention entmax": OpCase(_with_alpha, attention.BACKENDS, _sparse_attention),
    "disentangled": _disentangled(True, True),
    "disentangled entmax15": _disentangled(True, True, sparse=SparseMap(1.5)),
    "disentangled c2p": _disentangled(True, False),
    "disentangled p2c": _disentangled(False, True),
    "disentangled content": _disentangled(False, False),
    "disentangled positions": _disentangled(True, True, has_positions=True),
    "disentangled c2p positions": _disentangled(True, False, has_positions=True),
    "disentangled p2c positions": _disentangled(False, True, has_positions=True),
    "depthwise": _depthwise(),
    "depthwise legacy": _depthwise(legacy_padding=True),
    "light_conv": _light_conv(is_fixed=True),
    "light_conv legacy": _light_conv(is_fixed=True, legacy_padding=True),
    "light_conv by token": _light_conv(is_fixed=False),
    "light_conv by token legacy": _light_conv(is_fixed=False, legacy_padding=True),
    "multi_linear": OpCase(multi_linear.multi_linear, multi_linear.BACKENDS, _multi_linear),
    "token_loss": _token_loss(0.0),
    "token_loss smoothed": _token_loss(0.1),
    **{f"favor {feature_map}": _favor(feature_map) for feature_map in favor.FEATURE_MAPS},
    **{f"activation {name}": _activation(name) for name in activation.FUNCTIONS},
}
