"""Pre-training heads: masked token, next token, replaced token, next sentence, and DeBERTa's enhanced mask decoder."""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import embedding

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.layers.context import ForwardContext, Memory
from bertsmith.layers.elementwise import ACTIVATIONS, Activation, Norm
from bertsmith.layers.embedding import token_scores
from bertsmith.layers.linear import ElasticLinear
from bertsmith.models.heads.base import HeadConfig
from bertsmith.ops.token_loss import Sampling, TokenLoss, token_loss


class MaskDecoder(nn.Module):
    """DeBERTa's enhanced mask decoder: a table P of absolute positions, applied with the encoder's last layer.

    I = H + P[position], then `steps` times I = layer(queries I, keys and values H), where H is the input of the last
    layer. With P = 0 and one step the result equals the last layer's output.
    """

    def __init__(self, config: "MaskDecoderConfig", width: int) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Parameter(torch.empty(config.max_length, width))

    def forward(self, below: Tensor, block: Block, context: ForwardContext, positions: Tensor) -> Tensor:
        """Return the hidden states at `positions` only, (positions, width), in the given order.

        On a CPU `positions` may repeat. On a GPU and in a compiled step they must be distinct, as in training and
        `fill_mask`: reading the largest number of queries per sequence would synchronise, so it is bounded instead.
        Shape: below (batch, length, width) or (tokens, width); positions (positions,) index its flattened tokens.
        """
        layout, max_length = context.layout, self.table.shape[0]
        if layout.max_length > max_length:
            raise InputError(
                f"a sequence may have {layout.max_length} tokens; this mask decoder takes at most {max_length}"
            )
        index, order = positions.sort()
        in_sequence = layout.positions(below[..., 0]).flatten()[index]
        queries = self._queries(below.flatten(0, -2).index_select(0, index), in_sequence)
        sequence = layout.sequence_index(below[..., 0]).flatten()[index]
        relative = context.relative_positions
        if relative is not None:
            are_distinct = below.is_cuda or torch.compiler.is_compiling()
            relative = replace(relative, query_positions=in_sequence, are_distinct=are_distinct)
        context = replace(
            context,
            layout=_query_layout(sequence, layout),
            memory=self._memory(below, block, layout),
            relative_positions=relative,
        )
        for _ in range(self.config.steps):
            queries = block(queries, context)
        return queries.index_select(0, order.argsort())

    def everywhere(self, below: Tensor, block: Block, context: ForwardContext) -> Tensor:
        """Return the hidden states at every position of padded rows, (batch, length, width)."""
        queries = self._queries(below, context.layout.positions(below[..., 0]))
        context = replace(context, memory=self._memory(below, block, context.layout))
        for _ in range(self.config.steps):
            queries = block(queries, context)
        return queries

    def _queries(self, below: Tensor, positions: Tensor) -> Tensor:
        """Return the first queries: H + P[position], or P[position] alone."""
        vectors = embedding(positions, self.table)
        return vectors if self.config.queries == "positions" else below + vectors

    def _memory(self, below: Tensor, block: Block, layout: SequenceLayout) -> Memory:
        """Return H as keys and values, normalised as the mixer of a pre-norm block expects them."""
        return Memory(block.mixer_input(below) if self.config.normalises_memory else below, layout)


def _query_layout(sequence: Tensor, layout: SequenceLayout) -> SequenceLayout:
    """Return the packed layout of sorted queries, given the sequence index of each, (queries,)."""
    bounds = torch.arange(layout.batch + 1, device=sequence.device)
    starts = torch.searchsorted(sequence, bounds)
    if not (sequence.is_cuda or torch.compiler.is_compiling()):
        return SequenceLayout.packed(starts.int(), max(1, int(starts.diff().max())))
    # reading the maximum would synchronise, and a compiled step needs a fixed shape: bound it by the sequence length
    max_length = min(layout.max_length, sequence.shape[0])
    torch._assert_async((starts.diff() <= max_length).all(), "positions contains a position more than once")
    return SequenceLayout.packed(starts.int(), max_length)


class MaskedTokensConfig(HeadConfig):
    """Scores over the vocabulary."""

    kind: Literal["masked_tokens"] = "masked_tokens"
    activation: Activation = "gelu"
    epsilon: float = Field(default=1e-12, gt=0)
    has_bias: bool = True
    """Biases of the layer before the vocabulary and of its norm; token scores always have one."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "MaskedTokens":
        return MaskedTokens(width, embedding_width, vocabulary, self.activation, self.epsilon, has_bias=self.has_bias)


class PoolerConfig(HeadConfig):
    """One vector per sequence."""

    kind: Literal["pooler"] = "pooler"
    activation: Activation = "tanh"

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Pooler":
        return Pooler(width, self.activation)


class NextSentenceConfig(HeadConfig):
    """Two scores: whether the second segment follows the first in its document."""

    kind: Literal["next_sentence"] = "next_sentence"

    def build(self, width: int, embedding_width: int, vocabulary: int) -> nn.Module:
        return ElasticLinear(width, 2)


class ReplacedTokensConfig(HeadConfig):
    """One score per token: whether it was replaced (ELECTRA, DeBERTa v3)."""

    kind: Literal["replaced_tokens"] = "replaced_tokens"
    activation: Activation = "gelu"
    adds_first: bool = False
    """Add the hidden state of the sequence's first token to every token's and normalise, as DeBERTa v3 does."""
    epsilon: float = Field(default=1e-7, gt=0)
    """Epsilon of that norm."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "ReplacedTokens":
        return ReplacedTokens(width, self.activation, self.epsilon if self.adds_first else None)


class MaskDecoderConfig(HeadConfig):
    """DeBERTa's enhanced mask decoder: reapplies the last layer with absolute positions for the masked_tokens head."""

    kind: Literal["mask_decoder"] = "mask_decoder"
    max_length: int = Field(default=512, gt=0)
    """Rows of the position table: the maximum sequence length."""
    steps: int = Field(default=2, gt=0)
    """Number of times the last layer is applied."""
    queries: Literal["hidden_and_positions", "positions"] = "hidden_and_positions"
    """First queries of the decoder: hidden states plus positions, as in the released code and weights, or positions
    alone, as printed in the paper (He et al. 2021, section 3.2)."""
    normalises_memory: bool = True
    """Whether keys and values are normalised in a pre-norm network, as in its last layer. Only false for weights that
    were trained without it; without effect in a post-norm network."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "MaskDecoder":
        return MaskDecoder(self, width)


class NextTokenConfig(HeadConfig):
    """Scores over the vocabulary for the next token."""

    kind: Literal["next_token"] = "next_token"
    has_bias: bool = False

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "NextToken":
        return NextToken(vocabulary if self.has_bias else None)


class MaskedTokens(nn.Module):
    """Transform, then product with the embedding table, which the caller passes in (tied weights)."""

    def __init__(
        self,
        width: int,
        embedding_width: int,
        vocabulary: int,
        activation: Activation,
        epsilon: float,
        *,
        has_bias: bool,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.transform = ElasticLinear(width, embedding_width, bias=has_bias)
        self.norm = Norm(embedding_width, epsilon, has_bias=has_bias)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Return the scores over the vocabulary.

        Shape: hidden (…, width), table (vocabulary, embedding width) -> (…, vocabulary). On a GPU the last axis is
        padded to a multiple of 64 with scores of -inf, because tensor cores need aligned rows.
        """
        return token_scores(self._transformed(hidden), table, self.bias)

    def loss(self, hidden: Tensor, table: Tensor, targets: Tensor, sampling: Sampling | None = None) -> TokenLoss:
        """Return the cross-entropy of the scores, and samples from them: hidden (targets, width), targets (targets,).

        It never materialises scores in float32.
        """
        return token_loss(self._transformed(hidden), table, self.bias, targets, sampling=sampling)

    def _transformed(self, hidden: Tensor) -> Tensor:
        transformed: Tensor = self.norm(ACTIVATIONS[self.activation](self.transform(hidden)))
        return transformed


class NextToken(nn.Module):
    """Product with the embedding table, which the caller passes in."""

    def __init__(self, vocabulary: int | None) -> None:
        super().__init__()
        self.bias = None if vocabulary is None else nn.Parameter(torch.zeros(vocabulary))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Return the scores over the vocabulary, shaped as in `MaskedTokens`."""
        return token_scores(hidden, table, self.bias)


class Pooler(nn.Module):
    """A linear layer on the first token's hidden state, then an activation."""

    def __init__(self, width: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.project = ElasticLinear(width, width)

    def forward(self, first: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](self.project(first))


class ReplacedTokens(nn.Module):
    """One score per token: above 0 means "replaced"."""

    def __init__(self, width: int, activation: Activation, epsilon: float | None) -> None:
        super().__init__()
        self.activation = activation
        self.norm = None if epsilon is None else Norm(width, epsilon)
        self.transform = ElasticLinear(width, width)
        self.score = ElasticLinear(width, 1)

    def forward(self, hidden: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """Return the scores, (batch, length) or (tokens,); `adds_first` needs the layout."""
        if self.norm is not None:
            if layout is None:
                raise InputError("this replaced_tokens head has adds_first = true; pass it the layout")
            first = layout.first_tokens(hidden).index_select(0, layout.sequence_index(hidden[..., 0]).flatten())
            hidden = self.norm(hidden + first.view_as(hidden))  # (tokens, width) -> shape of hidden
        return self.score(ACTIVATIONS[self.activation](self.transform(hidden))).squeeze(-1)


class TeacherWidthConfig(HeadConfig):
    """Linear projection of every layer's hidden states to the teacher's width; removed after training."""

    kind: Literal["teacher_width"] = "teacher_width"
    teacher: int = Field(gt=0)
    """The teacher's width."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> nn.Module:
        # nn.Linear, not ElasticLinear: it must not be quantised with the model
        return nn.Linear(width, self.teacher)
