"""Bertsmith encoders for transformers in one file: it needs PyTorch and transformers, and nothing of Bertsmith.

`bertsmith export --to hf` copies this file into folders that no class of transformers can open, and

    AutoModel.from_pretrained(folder, trust_remote_code=True)

runs it. "model" in config.json describes the network: embedding, layers (a mixer and a feed-forward each) and heads.
Everything is computed on padded rows, (batch, length, width), with plain operations. Bertsmith has faster kernels, and
continues pre-training, cuts and quantises the same folder; the tensor names are the same in both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    CausalLMOutput,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

Settings = dict[str, Any]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda hidden: functional.gelu(hidden, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class BertsmithConfig(PreTrainedConfig):
    """config.json of a folder that Bertsmith exported; "model" holds the network's own config."""

    model_type = "bertsmith"

    bertsmith: int | None = None
    model: Settings | None = None
    not_standalone: str | None = None
    """Why this file cannot run the network; None if it can."""
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    eos_token_id: int | None = None
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config_dict: Settings, **others: Any) -> Any:
        """Create it from the content of config.json; raise if this file cannot run the network."""
        refusal = config_dict.get("not_standalone")
        if refusal:
            raise ImportError(
                f"this model has {refusal}, which modeling_bertsmith.py does not compute: pip install "
                "'bertsmith[hf]', `import bertsmith.hf` and leave out trust_remote_code"
            )
        return super().from_dict(config_dict, **others)


# ---- parts -----------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """LayerNorm or RMSNorm, with or without a bias."""

    def __init__(self, width: int, epsilon: float, kind: str = "layer", *, has_bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None
        self.epsilon, self.kind = epsilon, kind

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kind == "layer":
            return functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)
        scaled = functional.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        return scaled if self.bias is None else scaled + self.bias


def layer_norm(width: int, settings: Settings) -> Norm:
    return Norm(width, settings["epsilon"], settings["kind"], has_bias=settings["has_bias"])


class Stacked(nn.Module):
    """Several projections of the same input in one matrix, such as query, key and value; some may have no bias."""

    def __init__(self, width: int, inner: int, biased: Sequence[bool]) -> None:
        super().__init__()
        self.biased = tuple(biased)
        self.weight = nn.Parameter(torch.empty(len(biased) * inner, width))
        self.bias = nn.Parameter(torch.zeros(sum(biased) * inner)) if any(biased) else None

    def forward(self, hidden: Tensor, parts: slice = slice(None)) -> Tensor:
        """Return some of the projections side by side: (…, width) -> (…, parts · inner)."""
        rows = list(self.weight.chunk(len(self.biased)))[parts]
        biases = iter(() if self.bias is None else self.bias.chunk(sum(self.biased)))
        zeros = self.weight.new_zeros(len(rows[0]))
        whole = [next(biases) if has_bias else zeros for has_bias in self.biased][parts]
        return functional.linear(hidden, torch.cat(rows), None if self.bias is None else torch.cat(whole))


class Grouped(nn.Module):
    """A linear layer with a block-diagonal matrix."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, inputs // groups, outputs // groups))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        blocks = hidden.unflatten(-1, (len(self.weight), -1))
        return torch.einsum("...gi,gio->...go", blocks, self.weight).flatten(-2) + self.bias


def sinusoids(positions: Tensor, width: int, *, in_halves: bool = False) -> Tensor:
    """Return the sinusoidal embedding of positions (Vaswani et al. 2017): (positions,) -> (positions, width)."""
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    angle = positions[:, None].double() / 10000 ** (pair / width)
    if in_halves:
        return torch.cat([angle.sin(), angle.cos()[:, : width // 2]], dim=-1)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


class PositionTable(nn.Module):
    """One learned vector per position."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_length, width))


class Embedding(nn.Module):
    """The sum of token, position and type vectors, normalised and mapped to the encoder's width."""

    def __init__(self, settings: Settings, vocabulary: int, width: int) -> None:
        super().__init__()
        inner = settings["width"] or width
        self.settings, self.inner = settings, inner
        self.token_table = nn.Parameter(torch.empty(vocabulary, settings["rank"] or inner))
        self.token_factor = nn.Parameter(torch.empty(settings["rank"], inner)) if settings["rank"] else None
        self.position = PositionTable(settings["max_length"], inner) if settings["positions"] == "learned" else None
        self.type_table = nn.Parameter(torch.empty(settings["types"], inner)) if settings["types"] else None
        has_bias = settings["has_bias"]
        norm = Norm(inner, settings["epsilon"], settings["norm"], has_bias=has_bias)
        self.norm = norm if settings["has_norm"] else nn.Identity()
        self.dropout = nn.Dropout(settings["dropout"])
        self.widen = nn.Linear(inner, width, bias=has_bias) if inner != width else nn.Identity()

    @property
    def table(self) -> Tensor:
        """The vectors of all tokens, (vocabulary, embedding width)."""
        return self.token_table if self.token_factor is None else self.token_table @ self.token_factor

    def forward(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        length, kind = tokens.shape[1], self.settings["positions"]
        if kind != "none" and length > self.settings["max_length"]:
            raise ValueError(f"a row has {length} tokens; this model takes at most {self.settings['max_length']}")
        vectors = functional.embedding(tokens, self.token_table)
        if self.token_factor is not None:
            vectors = vectors @ self.token_factor
        if self.settings["is_scaled"]:
            vectors = vectors * self.inner**0.5
        if self.position is not None:
            vectors = vectors + self.position.table[:length]
        elif kind != "none":
            positions = torch.arange(length, device=tokens.device)
            vectors = vectors + sinusoids(positions, self.inner, in_halves=kind == "sinusoid_halves").to(vectors.dtype)
        if self.type_table is not None:
            vectors = vectors + (self.type_table[0] if types is None else functional.embedding(types, self.type_table))
        hidden: Tensor = self.widen(self.dropout(self.norm(vectors)))
        return hidden


class RelativePositions(nn.Module):
    """A vector for each relative position (DeBERTa), or a bias for each head and relative position (T5, MPNet).

    `rows` is the row of every offset query − key from −reach to reach.
    """

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(2 * settings["span"], settings["heads"] or width))
        self.norm = Norm(width, settings["epsilon"]) if settings["has_norm"] else None
        self.rows = relative_rows(settings)

    def vectors(self) -> Tensor:
        return self.table if self.norm is None else self.norm(self.table)

    def row_of(self, queries: int, keys: int) -> Tensor:
        """Return the row of every pair, (queries, keys)."""
        device, reach = self.table.device, len(self.rows) // 2
        offsets = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
        return torch.tensor(self.rows, device=device)[offsets.clamp(-reach, reach) + reach]


def relative_rows(settings: Settings) -> list[int]:
    """Return the row of every offset: one per distance, or logarithmic buckets of distances.

    Powers of integers instead of logarithms, because a rounding error at the edge of a bucket selects another row.
    """
    span, far, near = settings["span"], settings["max_distance"], settings["span"] // 2
    if settings["heads"] is not None:  # T5: distances to earlier keys first, then those to later ones
        buckets = list(range(span)) if far is None else [_t5_bucket(distance, span, far) for distance in range(far)]
        return [bucket + span for bucket in buckets[:0:-1]] + buckets
    if far is None:  # DeBERTa v1
        return [min(offset + span, 2 * span - 1) for offset in range(-span, span + 1)]
    buckets, step = list(range(near + 1)), 0
    for distance in range(near + 1, (far - 1 if settings["clamp"] == "official" else far) + 1):
        while (far - 1) ** step * near ** (near - 1) < distance ** (near - 1) * near**step:
            step += 1
        buckets.append(near + step)
    offsets = [-bucket for bucket in buckets[:0:-1]] + buckets
    return [min(max(offset + span, 0), 2 * span - 1) for offset in offsets]


def _t5_bucket(distance: int, buckets: int, far: int) -> int:
    near, step = buckets // 2, 0
    if distance < near:
        return distance
    while far ** (step + 1) * near ** (buckets - near - step - 1) <= distance ** (buckets - near):
        step += 1
    return min(near + step, buckets - 1)


@dataclass(frozen=True)
class Rows:
    """Inputs of all layers besides the hidden states."""

    is_token: Tensor
    """True at tokens, False at padding: (batch, length)."""
    relative: RelativePositions | None = None

    def allowed(self, settings: Settings) -> Tensor:
        """Return the mask of keys that a query attends to, (batch, 1, queries or 1, keys)."""
        length, device = self.is_token.shape[1], self.is_token.device
        offsets = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
        allowed = self.is_token[:, None, None, :]
        if settings["is_causal"]:
            allowed = allowed & (offsets >= 0)
        if settings.get("window") is not None:
            allowed = allowed & (offsets.abs() <= settings["window"])
        return allowed


def softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the attention weights over the last axis."""
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)


# ---- mixers ----------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Base of mixers with queries, keys and values; `width` is the width of the hidden states."""

    def __init__(self, settings: Settings, width: int, head_width: int, biased: Sequence[bool]) -> None:
        super().__init__()
        self.settings, self.heads, self.head_width = settings, settings["heads"], head_width
        self.value_width = settings.get("value_width") or head_width
        has_own_value = self.value_width != head_width
        self.project = Stacked(width, self.heads * head_width, biased[:2] if has_own_value else biased)
        self.project_value = nn.Linear(width, self.heads * self.value_width, bias=biased[2]) if has_own_value else None
        self.dropout = nn.Dropout(settings["dropout"])

    def parts(self, hidden: Tensor, memory: Tensor) -> list[Tensor]:
        """Return queries, keys and values, (batch, length, heads, head_width) each; keys and values of the memory."""
        if memory is hidden:
            joint = self.project(hidden)
        else:
            joint = torch.cat([self.project(hidden, slice(0, 1)), self.project(memory, slice(1, None))], dim=-1)
        parts = list(joint.unflatten(-1, (-1, self.heads, self.head_width)).unbind(-3))
        if self.project_value is not None:
            parts.append(self.project_value(memory).unflatten(-1, (self.heads, self.value_width)))
        return parts

    def mix(self, weights: Tensor, value: Tensor) -> Tensor:
        """Return the weighted sums of the values, (batch, length, heads, value_width)."""
        return torch.einsum("bhqk,bkhd->bqhd", self.dropout(weights), value)


class Full(Attending):
    """Softmax attention with optional rotary positions, window and relative bias."""

    bias_heads: Tensor

    def __init__(self, settings: Settings, width: int) -> None:
        head_width, has_bias = settings["head_width"] or width // settings["heads"], settings.get("has_bias", True)
        super().__init__(settings, width, head_width, (has_bias,) * 3)
        self.output = nn.Linear(self.heads * self.value_width, width, bias=has_bias)
        if settings.get("has_relative_bias"):
            self.register_buffer("bias_heads", torch.arange(self.heads))

    def forward(self, hidden: Tensor, rows: Rows, memory: Tensor) -> Tensor:
        query, key, value = self.parts(hidden, memory)
        if self.settings.get("rotary") is not None:
            query, key = self._rotated(query), self._rotated(key)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / self.head_width**0.5
        if self.settings.get("has_relative_bias") and rows.relative is not None:
            biases = rows.relative.vectors().T[self.bias_heads]  # (heads, rows of the table)
            scores = scores + biases[:, rows.relative.row_of(*scores.shape[-2:])]
        mixed = self.mix(softmax(scores, rows.allowed(self.settings)), value)
        projected: Tensor = self.output(mixed.flatten(-2))
        return projected

    def _rotated(self, vectors: Tensor) -> Tensor:
        """Rotate the channel pairs i and i + head_width / 2 by their position (Su et al. 2021)."""
        device = vectors.device
        speed = 1 / self.settings["rotary"] ** (torch.arange(0, self.head_width, 2, device=device) / self.head_width)
        angle = (torch.arange(vectors.shape[1], device=device)[:, None] * speed)[:, None]  # (length, 1, pairs)
        cosine, sine = angle.cos(), angle.sin()
        first, second = vectors.chunk(2, dim=-1)
        rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return rotated.to(vectors.dtype)


class Disentangled(Attending):
    """DeBERTa's attention: scores of contents, of content and position, and of position and content."""

    def __init__(self, settings: Settings, width: int) -> None:
        has_key_bias = settings["has_key_bias"]
        head_width = settings["head_width"] or width // settings["heads"]
        super().__init__(settings, width, head_width, (True, has_key_bias, True))
        inner, shares = self.heads * head_width, settings["shares_projections"]
        self.by_key, self.by_query = settings["content_to_position"], settings["position_to_content"]
        self.position_key = nn.Linear(width, inner, bias=has_key_bias) if self.by_key and not shares else None
        self.position_query = nn.Linear(width, inner) if self.by_query and not shares else None
        self.position_dropout = nn.Dropout(settings["position_dropout"])
        self.output = nn.Linear(inner, width)

    def forward(self, hidden: Tensor, rows: Rows, memory: Tensor) -> Tensor:
        query, key, value = self.parts(hidden, memory)
        scale = (self.head_width * (1 + self.by_key + self.by_query)) ** -0.5
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
        if rows.relative is not None and (self.by_key or self.by_query):
            vectors = self.position_dropout(rows.relative.vectors())
            row = rows.relative.row_of(*scores.shape[-2:]).expand(scores.shape)
            if self.by_key:
                by_row = torch.einsum("bqhd,rhd->bhqr", query, self._positions(vectors, self.position_key, 1))
                scores = scores + by_row.gather(-1, row)
            if self.by_query:
                by_row = torch.einsum("bkhd,rhd->bhkr", key, self._positions(vectors, self.position_query, 0))
                is_printed = self.settings["position_to_content_row"] == "paper"  # the row of key − query
                scores = scores + by_row.gather(-1, row if is_printed else row.mT).mT
        mixed = self.mix(softmax(scores * scale, rows.allowed(self.settings)), value)
        projected: Tensor = self.output(mixed.flatten(-2))
        return projected

    def _positions(self, vectors: Tensor, own: nn.Linear | None, part: int) -> Tensor:
        projected: Tensor = self.project(vectors, slice(part, part + 1)) if own is None else own(vectors)
        return projected.unflatten(-1, (self.heads, self.head_width))


class Kernel(nn.Module):
    """The convolution kernel of every head: predicted from a vector of each token, or learned."""

    def __init__(self, settings: Settings, head_width: int, *, has_bias: bool) -> None:
        super().__init__()
        self.settings, self.size = settings, settings["kernel_size"]
        heads, source = settings["heads"], settings["kernel_from"]
        inner = heads * head_width
        self.is_fixed, self.is_depthwise = source == "fixed", source == "depthwise"
        if self.is_fixed or self.is_depthwise:
            self.table = nn.Linear(self.size, heads if self.is_fixed else inner, bias=False)
        else:
            self.table = nn.Linear(inner, heads * self.size, bias=has_bias)

    def mix(self, value: Tensor, source: Tensor, rows: Rows) -> Tensor:
        """Return the weighted sum of each token's neighbours, (batch, length, heads, head_width)."""
        if self.is_depthwise:
            mixed = depthwise(value.flatten(-2), self.table.weight, rows, self.settings)
            return mixed.view(value.shape)
        if self.is_fixed:
            weights = self.table.weight.softmax(-1).expand(*value.shape[:2], -1, -1)
        else:
            weights = self.table(source).unflatten(-1, (-1, self.size)).softmax(-1)
        return torch.einsum("blhdk,blhk->blhd", neighbours(value, self.size, rows, self.settings), weights)


def neighbours(hidden: Tensor, size: int, rows: Rows, settings: Settings) -> Tensor:
    """Return the tokens around each token, 0 outside the sequence: (batch, length, …) -> (batch, length, …, size)."""
    before = size - 1 if settings["is_causal"] else size // 2
    if not settings.get("legacy_padding"):
        is_token = rows.is_token.view(*rows.is_token.shape, *[1] * (hidden.dim() - 2))
        hidden = hidden.masked_fill(~is_token, 0.0)
    around = functional.pad(hidden, (0, 0) * (hidden.dim() - 2) + (before, size - 1 - before))
    return around.unfold(1, size, 1)


def depthwise(hidden: Tensor, kernel: Tensor, rows: Rows, settings: Settings) -> Tensor:
    """Return a convolution with one kernel per channel: (batch, length, width), kernel (width, size)."""
    return (neighbours(hidden, kernel.shape[-1], rows, settings) * kernel).sum(-1)


class SpanKey(nn.Module):
    """ConvBERT's span key: a depthwise convolution of the hidden states, then a linear layer."""

    def __init__(self, settings: Settings, width: int, inner: int) -> None:
        super().__init__()
        self.settings = settings
        self.depthwise = nn.Parameter(torch.empty(width, settings["kernel_size"]))
        self.pointwise = nn.Linear(width, inner)

    def forward(self, hidden: Tensor, rows: Rows) -> Tensor:
        key: Tensor = self.pointwise(depthwise(hidden, self.depthwise, rows, self.settings))
        return key


class SpanConv(Attending):
    """ConvBERT's mixed attention: attention heads beside as many convolution heads."""

    def __init__(self, settings: Settings, width: int) -> None:
        head_width = settings["head_width"] or width // (2 * settings["heads"])
        super().__init__(settings, width, head_width, (True,) * (3 if settings["shares_value"] else 4))
        inner = self.heads * head_width
        self.span = SpanKey(settings, width, inner) if settings["kernel_from"] == "span" else None
        self.kernel = Kernel(settings, head_width, has_bias=True)
        self.output = nn.Linear(2 * inner, width)

    def forward(self, hidden: Tensor, rows: Rows, memory: Tensor) -> Tensor:
        parts = self.parts(hidden, memory)
        query, key, value = parts[:3]
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / self.head_width**0.5
        attended = self.mix(softmax(scores, rows.allowed(self.settings)), value)
        source = query.flatten(-2) if self.span is None else query.flatten(-2) * self.span(hidden, rows)
        convolved = self.kernel.mix(parts[-1], source, rows)
        projected: Tensor = self.output(torch.cat([attended, convolved], dim=-2).flatten(-2))
        return projected


class DynamicConv(nn.Module):
    """Lightweight and dynamic convolution (Wu et al. 2019)."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        head_width = settings["head_width"] or width // settings["heads"]
        inner, self.heads, self.is_gated = settings["heads"] * head_width, settings["heads"], settings["is_gated"]
        self.project = nn.Linear(width, (2 if self.is_gated else 1) * inner)
        self.kernel = Kernel(settings, head_width, has_bias=False)
        self.output = nn.Linear(inner, width)

    def forward(self, hidden: Tensor, rows: Rows, memory: Tensor) -> Tensor:
        inner = self.project(hidden)
        inner = functional.glu(inner) if self.is_gated else inner
        mixed = self.kernel.mix(inner.unflatten(-1, (self.heads, -1)), inner, rows)
        projected: Tensor = self.output(mixed.flatten(-2))
        return projected


class LongShort(nn.Module):
    """Attention on the first half of the channels, a convolution on the second (Lite Transformer)."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        settings = {**settings, "head_width": settings["head_width"] or width // (2 * settings["heads"])}
        self.attention, self.convolution = Full(settings, width // 2), DynamicConv(settings, width // 2)

    def forward(self, hidden: Tensor, rows: Rows, memory: Tensor) -> Tensor:
        far, near = hidden.chunk(2, dim=-1)
        return torch.cat([self.attention(far, rows, far), self.convolution(near, rows, near)], dim=-1)


def _sines(u: Tensor) -> Tensor:
    first, second = u.chunk(2, -1)
    return torch.cat([first.sin(), second.cos()], -1)


# name: (ε, factor of ‖x‖² in the exponent, curve or None for exp, signs of the copies of the random matrix)
FEATURE_MAPS: dict[str, tuple[float, float, Callable[[Tensor], Tensor] | None, tuple[float, ...]]] = {
    "softmax": (1e-6, -0.5, None, (1.0,)),
    "hyperbolic": (1e-6, -0.5, None, (1.0, -1.0)),
    "regularised": (1e-6, -0.5, None, (1.0,)),
    "trigonometric": (0.0, 0.5, _sines, (1.0, 1.0)),
    "exp": (1e-6, 0.0, None, (1.0,)),
    "relu": (1e-3, 0.0, torch.relu, (1.0,)),
    "relu_squared": (1e-3, 0.0, lambda u: u.relu().square(), (1.0,)),
    "elu": (1e-3, 0.0, lambda u: functional.elu(u) + 1, (1.0,)),
    "gelu": (1e-3, 0.0, functional.gelu, (1.0,)),
    "sigmoid": (1e-3, 0.0, torch.sigmoid, (1.0,)),
    "abs": (1e-3, 0.0, torch.abs, (1.0,)),
    "tanh": (1e-3, 0.0, torch.tanh, (1.0,)),
    "cos": (1e-3, 0.0, torch.cos, (1.0,)),
    "identity": (1e-3, 0.0, lambda u: u, (1.0,)),
}


class Favor(Attending):
    """FAVOR+ (Choromanski et al. 2021): attention by random features, here as the matrix of all pairs."""

    projection: Tensor

    def __init__(self, settings: Settings, width: int) -> None:
        head_width = settings["head_width"] or width // settings["heads"]
        super().__init__({**settings, "dropout": 0.0}, width, head_width, (True,) * 3)
        self.output = nn.Linear(self.heads * self.value_width, width)
        self.output_dropout = nn.Dropout(settings["dropout"])
        rows = settings["features"] or head_width
        self.register_buffer("projection", torch.zeros(rows, head_width))

    def forward(self, hidden: Tensor, rows: Rows, memory: Tensor) -> Tensor:
        query, key, value = self.parts(hidden, memory)
        is_key = rows.is_token[:, None, :, None]
        queries, keys = self._exponent(query), self._exponent(key)
        keys = (keys[0].masked_fill(~is_key, -torch.inf), keys[1])
        level = keys[0].amax(-1, keepdim=True)  # (batch, heads, length, 1)
        level = level.cummax(-2).values if self.settings["is_causal"] else level.amax(-2, keepdim=True)
        level = level.clamp(min=torch.finfo(level.dtype).min)
        scores = self._features(queries, queries[0].amax(-1, keepdim=True)) @ (self._features(keys, level) * is_key).mT
        if self.settings["is_causal"]:
            length = scores.shape[-1]
            is_future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores * (level.mT - level).masked_fill(is_future, -torch.inf).exp()
        total = scores.sum(-1, keepdim=True)
        weights = scores / torch.where(total == 0, 1.0, total)
        mixed = self.mix(weights, value.to(weights.dtype)).to(value.dtype)
        projected: Tensor = self.output(self.output_dropout(mixed.flatten(-2)))
        return projected

    def _exponent(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the exponent of the features and their factor, (batch, heads, length, features or 1)."""
        wide = vectors if vectors.dtype == torch.float64 else vectors.float()
        x = (wide * self.head_width**-0.25).transpose(1, 2)
        _, norm, curve, signs = FEATURE_MAPS[self.settings["feature_map"]]
        matrix = torch.cat([sign * self.projection.to(x.dtype) for sign in signs])
        u = x @ matrix.mT if self.settings["features"] else torch.cat([sign * x for sign in signs], dim=-1)
        squares = norm * x.square().sum(-1, keepdim=True)
        return (u + squares, None) if curve is None else (squares, curve(u))

    def _features(self, side: tuple[Tensor, Tensor | None], level: Tensor) -> Tensor:
        epsilon = self.settings["epsilon"]
        scale = (side[0] - level).exp()
        features = scale if side[1] is None else side[1] * scale
        return features + (FEATURE_MAPS[self.settings["feature_map"]][0] if epsilon is None else epsilon)


MIXERS: dict[str, Callable[[Settings, int], nn.Module]] = {
    "full": Full,
    "disentangled": Disentangled,
    "span_conv": SpanConv,
    "dynamic_conv": DynamicConv,
    "long_short": LongShort,
    "favor": Favor,
}


def build_mixer(settings: Settings, width: int) -> nn.Module:
    if settings["kind"] == "span_conv" and settings["kernel_from"] == "none":
        head_width = settings["head_width"] or width // (2 * settings["heads"])
        return Full({**settings, "head_width": head_width}, width)
    return MIXERS[settings["kind"]](settings, width)


# ---- the encoder -----------------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    """Two linear layers with an activation, or a gated linear unit, between them."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        neurons, groups, has_bias = settings["neurons"], settings["groups"], settings["has_bias"]
        self.activation, self.is_gated = ACTIVATIONS[settings["activation"]], settings["is_gated"]
        if groups > 1:
            self.expand: nn.Module = Grouped(width, neurons, groups)
            self.contract: nn.Module = Grouped(neurons, width, groups)
        else:
            self.expand = nn.Linear(width, (2 if self.is_gated else 1) * neurons, bias=has_bias)
            self.contract = nn.Linear(neurons, width, bias=has_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.expand(hidden)
        if self.is_gated:
            inner, factor = inner.chunk(2, dim=-1)
            inner = self.activation(inner) * factor
        else:
            inner = self.activation(inner)
        projected: Tensor = self.contract(inner)
        return projected


class Branch(nn.Module):
    """DeBERTa v2's convolution beside a layer."""

    def __init__(self, settings: Settings, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.size, self.activation = settings["kernel_size"], ACTIVATIONS[settings["activation"]]
        self.settings = {"is_causal": is_causal}
        self.weight = nn.Parameter(torch.empty(width, self.size * width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.dropout = nn.Dropout(settings["dropout"])
        self.norm = Norm(width, settings["epsilon"])

    def forward(self, layer_input: Tensor, layer_output: Tensor, rows: Rows) -> Tensor:
        span = neighbours(layer_input, self.size, rows, self.settings).mT.flatten(-2)  # (…, size · width)
        convolved = self.dropout(functional.linear(span, self.weight, self.bias))
        normed: Tensor = self.norm(layer_output + self.activation(convolved))
        return normed


class Block(nn.Module):
    """One layer: mixer, then feed-forward; parts that all layers share belong to the first layer."""

    def __init__(self, settings: Settings, width: int, owned: Sequence[str]) -> None:
        super().__init__()
        mixer, norm = settings["mixer"], settings["norm"]
        if "mixer" in owned:
            self.mixer = build_mixer(mixer, width)
            self.mixer_norm = layer_norm(width, norm) if settings["has_mixer_norm"] else nn.Identity()
        if "feedforward" in owned:
            self.feedforward, self.feedforward_norm = (
                FeedForward(settings["feedforward"], width),
                layer_norm(width, norm),
            )
        has_branch = settings["branch"] is not None and "branch" in owned
        self.branch = Branch(settings["branch"], width, is_causal=mixer["is_causal"]) if has_branch else None
        self.is_pre_norm = norm["placement"] == "pre"
        self.dropout = nn.Dropout(settings["dropout"])

    def mixed(self, hidden: Tensor, rows: Rows, memory: Tensor | None = None) -> Tensor:
        """Return the output of the mixer; `memory`, if given, holds the normalised keys and values."""
        entering = self.mixer_norm(hidden) if self.is_pre_norm else hidden
        output: Tensor = self.dropout(self.mixer(entering, rows, entering if memory is None else memory))
        return output

    def fed(self, hidden: Tensor) -> Tensor:
        """Return the output of the feed-forward."""
        output: Tensor = self.dropout(self.feedforward(self.feedforward_norm(hidden) if self.is_pre_norm else hidden))
        return output


class Halting(nn.Module):
    """Halting probabilities of a Universal Transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.chance = nn.Linear(width, 1)


class Encoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, width, sharing = settings, settings["width"], settings["sharing"]
        self.embedding = Embedding(settings["embedding"], settings["vocabulary"], width)
        self.relative = RelativePositions(settings["relative"], width) if settings["relative"] else None
        own = {"none": ("mixer", "feedforward", "branch"), "mixer": ("feedforward", "branch")}
        own |= {"feedforward": ("mixer", "branch"), "all": ()}
        layers = [
            Block(layer, width, own["none"] if index == 0 else own[sharing])
            for index, layer in enumerate(settings["layers"])
        ]
        self.blocks = nn.ModuleList(layers)
        self.final_norm = layer_norm(width, settings["final_norm"]) if settings["final_norm"] else nn.Identity()
        universal = settings["universal"]
        self.halting = Halting(width) if universal and universal["halting"] else None

    def forward(self, tokens: Tensor, is_token: Tensor, types: Tensor | None) -> list[Tensor]:
        """Return the input of every layer and the output of the last, before the final norm."""
        hidden, rows = self.embedding(tokens, types), Rows(is_token, self.relative)
        if self.settings["universal"]:
            return self._steps(hidden, rows)
        if self.settings["reversible"]:
            return self._streams(hidden, rows)
        states = [hidden]
        for index in range(len(self.blocks)):
            states.append(self.layer(index, states[-1], rows))
        return states

    def layer(self, index: int, hidden: Tensor, rows: Rows, memory: Tensor | None = None) -> Tensor:
        """Return the output of a layer; `memory`: keys and values other than the hidden states."""
        own, first, sharing = self._block(index), self._block(0), self.settings["sharing"]
        mixing = first if sharing in ("mixer", "all") else own
        feeding = first if sharing in ("feedforward", "all") else own
        entering = hidden
        hidden = hidden + mixing.mixed(hidden, rows, memory)
        hidden = hidden if own.is_pre_norm else mixing.mixer_norm(hidden)
        hidden = hidden + feeding.fed(hidden)
        hidden = hidden if own.is_pre_norm else feeding.feedforward_norm(hidden)
        branch = first.branch if sharing == "all" else own.branch
        return hidden if branch is None or memory is not None else branch(entering, hidden, rows)

    def _block(self, index: int) -> Block:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def _steps(self, hidden: Tensor, rows: Rows) -> list[Tensor]:
        """Run the layers as steps of a Universal Transformer (Dehghani et al. 2019)."""
        length, width, device = *hidden.shape[1:], hidden.device
        signal = sinusoids(torch.arange(length, device=device), width)
        steps = sinusoids(torch.arange(1, len(self.blocks) + 1, device=device), width)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        spent = torch.zeros_like(hidden[..., 0], dtype=wide)
        mixture, is_running = torch.zeros_like(hidden, dtype=wide), torch.ones_like(spent, dtype=torch.bool)
        states: list[Tensor] = []
        for index in range(len(self.blocks)):
            entering = hidden + (signal + steps[index]).to(hidden.dtype)
            output = self.layer(index, entering, rows)
            states.append(entering)
            if self.halting is None:
                hidden = output
                continue
            hidden = torch.where(is_running[..., None], output, hidden)
            chance = self.halting.chance(entering).squeeze(-1).to(wide).sigmoid()
            is_last = index + 1 == len(self.blocks)
            halts = is_running & (is_last | (spent + chance >= self.settings["universal"]["halting"]["threshold"]))
            weight = torch.where(halts, 1 - spent, chance) * is_running
            mixture, spent = mixture + weight[..., None] * output, spent + weight
            is_running = is_running & ~halts
        return [*states, hidden if self.halting is None else mixture.to(hidden.dtype)]

    def _streams(self, hidden: Tensor, rows: Rows) -> list[Tensor]:
        """Run reversible layers (Gomez et al. 2017), which keep two streams."""
        first = second = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        states: list[Tensor] = []
        shares_mixer = self.settings["sharing"] in ("mixer", "all")
        shares_feeding = self.settings["sharing"] in ("feedforward", "all")
        for index in range(len(self.blocks)):
            states.append(second.to(hidden.dtype))
            first = first + self._block(0 if shares_mixer else index).mixed(second.to(hidden.dtype), rows)
            second = second + self._block(0 if shares_feeding else index).fed(first.to(hidden.dtype))
        return [*states, ((first + second) / 2).to(hidden.dtype)]


# ---- heads -----------------------------------------------------------------------------------------------------------


class Features(nn.Module):
    """The hidden states that a task head reads: the last layers, combined, and a BiLSTM over them."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        self.settings, layers = settings["features"], settings["features"]["layers"]
        is_weighted = self.settings["combine"] == "weighted" and layers > 1
        self.layer_weights = nn.Parameter(torch.zeros(layers)) if is_weighted else None
        self.scale = nn.Parameter(torch.ones(())) if is_weighted else None
        self.width = width * max(1, layers) if self.settings["combine"] == "concatenate" else width
        self.recurrent, lstm = None, settings["recurrent"]
        if lstm is not None:
            half = lstm["width"] // 2
            self.recurrent = nn.LSTM(self.width, half, lstm["layers"], batch_first=True, bidirectional=True)
            self.width = 2 * half

    def forward(self, states: list[Tensor], norm: nn.Module, is_token: Tensor) -> Tensor:
        layers, skip = self.settings["layers"], self.settings["skip"]
        chosen = states[:1] if layers == 0 else states[len(states) - layers - skip : len(states) - skip]
        chosen = [norm(hidden) for hidden in chosen]
        if len(chosen) == 1:
            combined = chosen[0]
        elif self.settings["combine"] == "concatenate":
            combined = torch.cat(chosen, dim=-1)
        elif self.layer_weights is None or self.scale is None:
            combined = torch.stack(chosen).sum(0)
        else:
            combined = self.scale * torch.tensordot(self.layer_weights.softmax(0), torch.stack(chosen), dims=1)
        if self.recurrent is None:
            return combined
        lengths = is_token.sum(-1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(combined, lengths, batch_first=True, enforce_sorted=False)
        outputs = self.recurrent(packed)[0]
        return nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True, total_length=combined.shape[1])[0]


def pooled(hidden: Tensor, is_token: Tensor, pooling: str, pooler: nn.Module | None) -> Tensor:
    """Return one vector per row: (batch, length, width) -> (batch, width)."""
    mask = is_token[..., None].to(hidden.dtype)
    count = mask.sum(1).clamp(min=1)
    if pooling == "last":
        last = (is_token.sum(-1) - 1).clamp(min=0)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
    if pooling == "max":
        return hidden.masked_fill(~is_token[..., None], -torch.inf).amax(1)
    if pooling == "weighted_mean":
        mask = mask * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None].to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)
    if pooling in ("mean", "mean_sqrt"):
        return (hidden * mask).sum(1) / (count if pooling == "mean" else count.sqrt())
    first = hidden[:, 0]
    return pooler(first) if pooling == "pooler" and pooler is not None else first


class Scores(nn.Module):
    """A task head with scores: an optional hidden layer, dropout, a linear layer."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        self.features = Features(settings, width)
        self.pooling, width = settings.get("pooling"), self.features.width
        hidden = settings["hidden"]
        plain: Settings = {"has_bias": True, "norm": None, "drops_input": True}
        self.layer: Settings | None = {**plain, "activation": hidden} if isinstance(hidden, str) else hidden
        self.hidden = nn.Linear(width, width, bias=self.layer["has_bias"]) if self.layer else None
        self.norm = layer_norm(width, self.layer["norm"]) if self.layer and self.layer["norm"] else None
        outputs = 2 if settings["kind"] == "spans" else len(settings["labels"])
        self.dropout, self.score = nn.Dropout(settings["dropout"]), nn.Linear(width, outputs)

    def forward(self, states: list[Tensor], norm: nn.Module, is_token: Tensor, pooler: nn.Module | None) -> Tensor:
        vectors = self.features(states, norm, is_token)
        if self.pooling is not None:
            vectors = pooled(vectors, is_token, self.pooling, pooler)
        if self.hidden is not None and self.layer is not None:
            vectors = self.hidden(self.dropout(vectors) if self.layer["drops_input"] else vectors)
            vectors = ACTIVATIONS[self.layer["activation"]](vectors)
        vectors = vectors if self.norm is None else self.norm(vectors)
        scores: Tensor = self.score(self.dropout(vectors))
        return scores


class Embedder(nn.Module):
    """One vector per row for similarity."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        self.settings, self.features = settings, Features(settings, width)
        widths = [settings["projection"] or self.features.width, *(layer["width"] for layer in settings["dense"])]
        self.projection = nn.Linear(self.features.width, widths[0]) if settings["projection"] else None
        layers = zip(widths[:-1], settings["dense"], strict=True)
        self.dense = nn.ModuleList(nn.Linear(a, layer["width"], bias=layer["has_bias"]) for a, layer in layers)

    def forward(self, states: list[Tensor], norm: nn.Module, is_token: Tensor, pooler: nn.Module | None) -> Tensor:
        vectors = pooled(self.features(states, norm, is_token), is_token, self.settings["pooling"], pooler)
        vectors = vectors if self.projection is None else self.projection(vectors)
        for layer, settings in zip(self.dense, self.settings["dense"], strict=True):
            vectors = layer(vectors)
            vectors = vectors if settings["activation"] is None else ACTIVATIONS[settings["activation"]](vectors)
        return functional.normalize(vectors, dim=-1) if self.settings["is_normalised"] else vectors


class Pooler(nn.Module):
    """A linear layer and an activation on the first token's hidden state."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        self.activation, self.project = ACTIVATIONS[settings["activation"]], nn.Linear(width, width)

    def forward(self, first: Tensor) -> Tensor:
        return self.activation(self.project(first))


class MaskedTokens(nn.Module):
    """Scores over the vocabulary, with the token table as the last matrix."""

    def __init__(self, settings: Settings, width: int, embedding_width: int, vocabulary: int) -> None:
        super().__init__()
        self.activation, has_bias = ACTIVATIONS[settings["activation"]], settings["has_bias"]
        self.transform = nn.Linear(width, embedding_width, bias=has_bias)
        self.norm = Norm(embedding_width, settings["epsilon"], has_bias=has_bias)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        return functional.linear(self.norm(self.activation(self.transform(hidden))), table, self.bias)


class NextToken(nn.Module):
    """Scores over the vocabulary for the next token."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if settings["has_bias"] else None

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        return functional.linear(hidden, table, self.bias)


class ReplacedTokens(nn.Module):
    """One score per token: above 0 means "replaced"."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[settings["activation"]]
        self.norm = Norm(width, settings["epsilon"]) if settings["adds_first"] else None
        self.transform, self.score = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.norm is None else self.norm(hidden + hidden[:, :1])
        scores: Tensor = self.score(self.activation(self.transform(hidden)))
        return scores.squeeze(-1)


class MaskDecoder(nn.Module):
    """DeBERTa's enhanced mask decoder: absolute positions, and the last layer again."""

    def __init__(self, settings: Settings, width: int) -> None:
        super().__init__()
        self.settings, self.table = settings, nn.Parameter(torch.empty(settings["max_length"], width))

    def forward(self, encoder: Encoder, below: Tensor, is_token: Tensor) -> Tensor:
        last, rows = len(encoder.blocks) - 1, Rows(is_token, encoder.relative)
        block = encoder._block(0 if encoder.settings["sharing"] in ("mixer", "all") else last)
        normalises = block.is_pre_norm and self.settings["normalises_memory"]
        memory = block.mixer_norm(below) if normalises else below
        positions = self.table[: below.shape[1]]
        has_hidden = self.settings["queries"] == "hidden_and_positions"
        queries = below + positions if has_hidden else positions.expand_as(below)
        for _ in range(self.settings["steps"]):
            queries = encoder.layer(last, queries, rows, memory)
        normed: Tensor = encoder.final_norm(queries)
        return normed


TASK_KINDS = ("classifier", "tagger", "spans", "embedder")


def build_heads(network: Settings) -> nn.ModuleDict:
    """Return the heads by kind, without heads that only Bertsmith reads, such as early exits."""
    encoder, heads = network["encoder"], dict[str, nn.Module]()
    width, vocabulary = encoder["width"], encoder["vocabulary"]
    for settings in network["heads"]:
        kind = settings["kind"]
        if kind in ("classifier", "tagger", "spans"):
            heads[kind] = Scores(settings, width)
        elif kind == "embedder":
            heads[kind] = Embedder(settings, width)
        elif kind == "pooler":
            heads[kind] = Pooler(settings, width)
        elif kind == "masked_tokens":
            heads[kind] = MaskedTokens(settings, width, encoder["embedding"]["width"] or width, vocabulary)
        elif kind == "next_token":
            heads[kind] = NextToken(settings, vocabulary)
        elif kind == "replaced_tokens":
            heads[kind] = ReplacedTokens(settings, width)
        elif kind == "next_sentence":
            heads[kind] = nn.Linear(width, 2)
        elif kind == "mask_decoder":
            heads[kind] = MaskDecoder(settings, width)
    return nn.ModuleDict(heads)


# ---- classes of transformers -----------------------------------------------------------------------------------------


class BertsmithPreTrainedModel(PreTrainedModel):
    """Base of the classes: builds the network of config.json, with a fresh task head if the class needs one."""

    config_class = BertsmithConfig
    config: BertsmithConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _keys_to_ignore_on_load_unexpected: list[str] = [r"^heads\.", r"^generator\."]  # noqa: RUF012 (declared there so)
    head_kinds: ClassVar[tuple[str, ...]] = ()
    """The class needs one of these heads; empty if it needs none."""

    def __init__(self, config: BertsmithConfig) -> None:
        super().__init__(config)
        if not isinstance(config.model, dict):
            raise ValueError("config.json has no 'model'; export the folder with bertsmith export --to hf")
        network = dict(config.model)
        heads = [self.with_labels(head) if head["kind"] in self.head_kinds else head for head in network["heads"]]
        if self.head_kinds and not {head["kind"] for head in heads} & set(self.head_kinds):
            heads = [head for head in heads if head["kind"] not in TASK_KINDS] + [self.fresh_head(network)]
        config.model = network = {**network, "heads": heads, "generator": None}
        self.encoder = Encoder(network["encoder"])
        self.heads = build_heads(network)
        config.model = {**network, "heads": [head for head in heads if head["kind"] in self.heads]}
        self.post_init()

    def with_labels(self, head: Settings) -> Settings:
        """Return the settings of the class's head with the labels of config.json."""
        return head

    def fresh_head(self, network: Settings) -> Settings:
        """Return the settings of a head for a model that has none."""
        kinds = ", ".join(head["kind"] for head in network["heads"]) or "none"
        raise ValueError(
            f"{type(self).__name__} needs a head of kind {' or '.join(self.head_kinds)}; this model's heads: {kinds}"
        )

    def head(self, *kinds: str) -> nn.Module:
        return next(self.heads[kind] for kind in kinds if kind in self.heads)

    def states(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, token_type_ids: Tensor | None, others: Settings
    ) -> tuple[list[Tensor], Tensor]:
        """Return the hidden states of all layers, and where the tokens are; raise for inputs that are not read."""
        given = [name for name in ("inputs_embeds", "position_ids", "past_key_values") if others.get(name) is not None]
        if given or input_ids is None or input_ids.dim() != 2:
            raise ValueError(f"{given[0] if given else 'input_ids'} is not read here; allowed: input_ids of two axes")
        if others.get("output_attentions"):
            raise ValueError("output_attentions is true; this file returns none, bertsmith.hf does")
        is_token = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if (is_token[:, 1:] & ~is_token[:, :-1]).any():
            raise ValueError("attention_mask has padding before a token; pad at the end of rows (padding_side='right')")
        return self.encoder(input_ids, is_token, token_type_ids), is_token

    def task(self, states: list[Tensor], is_token: Tensor) -> Tensor:
        """Return the outputs of the task head."""
        pooler = self.heads["pooler"] if "pooler" in self.heads else None  # noqa: SIM401
        outputs: Tensor = self.head(*TASK_KINDS)(states, self.encoder.final_norm, is_token, pooler)
        return outputs

    def packed(self, kind: type[ModelOutput], states: list[Tensor], others: Settings, **values: Any) -> Any:
        """Return a named output, or a tuple on request; with the hidden states of all layers on request."""
        wanted, named = others.get("output_hidden_states"), others.get("return_dict")
        if getattr(self.config, "output_hidden_states", False) if wanted is None else wanted:
            values["hidden_states"] = (*states[:-1], self.encoder.final_norm(states[-1]))
        output = kind(**values)
        return output if (self.config.return_dict if named is None else named) else output.to_tuple()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise tensors that the files lack."""
        network = self.config.model
        std = network["encoder"]["init_std"] if network else 0.02
        for name, tensor in module.named_parameters(recurse=False):
            if getattr(tensor, "_is_hf_initialized", False):
                continue
            if tensor.dim() > 1:
                tensor.normal_(std=std)
            else:
                tensor.fill_(1.0 if name in ("weight", "scale") else 0.0)
        for name, buffer in module.named_buffers(recurse=False):
            if getattr(buffer, "_is_hf_initialized", False):
                continue
            if name == "bias_heads":
                buffer.copy_(torch.arange(len(buffer)))
            else:
                buffer.normal_()


class BertsmithModel(BertsmithPreTrainedModel):
    """The last hidden states; `pooler_output` is the vector of the embedder or pooler, if the model has one."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **others: Any,
    ) -> Any:
        states, is_token = self.states(input_ids, attention_mask, token_type_ids, others)
        last, vectors = self.encoder.final_norm(states[-1]), None
        if "embedder" in self.heads:
            vectors = self.task(states, is_token)
        elif "pooler" in self.heads:
            vectors = self.heads["pooler"](last[:, 0])
        return self.packed(BaseModelOutputWithPooling, states, others, last_hidden_state=last, pooler_output=vectors)


class BertsmithForMaskedLM(BertsmithPreTrainedModel):
    """Scores over the vocabulary at every token, from the mask decoder if the model has one."""

    head_kinds = ("masked_tokens",)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        states, is_token = self.states(input_ids, attention_mask, token_type_ids, others)
        if "mask_decoder" in self.heads:
            hidden = self.heads["mask_decoder"](self.encoder, states[-2], is_token)
        else:
            hidden = self.encoder.final_norm(states[-1])
        logits = self.heads["masked_tokens"](hidden, self.encoder.embedding.table)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return self.packed(MaskedLMOutput, states, others, loss=loss, logits=logits)


class BertsmithForCausalLM(BertsmithPreTrainedModel):
    """Scores over the vocabulary for the token after each; has no `generate`."""

    head_kinds = ("next_token", "masked_tokens")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        states, _ = self.states(input_ids, attention_mask, token_type_ids, others)
        hidden = self.encoder.final_norm(states[-1])
        logits = self.head("next_token", "masked_tokens")(hidden, self.encoder.embedding.table)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return self.packed(CausalLMOutput, states, others, loss=loss, logits=logits)


class BertsmithForPreTraining(BertsmithPreTrainedModel):
    """Replaced-token detection: a score for every token, above 0 for "replaced"."""

    head_kinds = ("replaced_tokens",)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        states, is_token = self.states(input_ids, attention_mask, token_type_ids, others)
        logits = self.heads["replaced_tokens"](self.encoder.final_norm(states[-1]))
        loss = None
        if labels is not None:
            targets = labels[is_token].to(logits.dtype)
            loss = functional.binary_cross_entropy_with_logits(logits[is_token], targets)
        return self.packed(TokenClassifierOutput, states, others, loss=loss, logits=logits)


class _ForTask(BertsmithPreTrainedModel):
    """A class with a task head."""

    def labels(self) -> list[str]:
        return [name for _, name in sorted((self.config.id2label or {}).items())]

    def with_labels(self, head: Settings) -> Settings:
        return {**head, "labels": self.labels()} if "labels" in head else head

    def fresh_head(self, network: Settings) -> Settings:
        kind = self.head_kinds[0]
        head: Settings = {"kind": kind, "dropout": network["encoder"]["embedding"]["dropout"], "hidden": None}
        head |= {"features": {"layers": 1, "skip": 0, "combine": "sum"}, "recurrent": None}
        if kind == "classifier":
            is_causal = all(layer["mixer"]["is_causal"] for layer in network["encoder"]["layers"])
            head["pooling"] = "last" if is_causal else "first"
        return head if kind == "spans" else {**head, "labels": self.labels()}


class BertsmithForSequenceClassification(_ForTask):
    """Sequence classification, multi-label classification or regression."""

    head_kinds = ("classifier",)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        states, is_token = self.states(input_ids, attention_mask, token_type_ids, others)
        logits = self.task(states, is_token)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return self.packed(SequenceClassifierOutput, states, others, loss=loss, logits=logits)


class BertsmithForTokenClassification(_ForTask):
    """Token classification."""

    head_kinds = ("tagger",)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        states, is_token = self.states(input_ids, attention_mask, token_type_ids, others)
        logits = self.task(states, is_token)
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return self.packed(TokenClassifierOutput, states, others, loss=loss, logits=logits)


class BertsmithForQuestionAnswering(_ForTask):
    """Start and end of the answer."""

    head_kinds = ("spans",)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **others: Any,
    ) -> Any:
        states, is_token = self.states(input_ids, attention_mask, token_type_ids, others)
        start, end = (part.contiguous() for part in self.task(states, is_token).unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        values = {"loss": loss, "start_logits": start, "end_logits": end}
        return self.packed(QuestionAnsweringModelOutput, states, others, **values)


class BertsmithForMultipleChoice(_ForTask):
    """Multiple choice among the sequences of an item."""

    head_kinds = ("classifier",)

    def labels(self) -> list[str]:
        return ["choice"]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        if input_ids is None or input_ids.dim() != 3:
            raise ValueError("input_ids has not the shape (batch, choices, length)")
        ids, mask, types = (
            None if given is None else given.flatten(0, 1) for given in (input_ids, attention_mask, token_type_ids)
        )
        states, is_token = self.states(ids, mask, types, others)
        logits = self.task(states, is_token).view(input_ids.shape[:2])
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return self.packed(MultipleChoiceModelOutput, states, others, loss=loss, logits=logits)
