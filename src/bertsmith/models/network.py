"""The network of a model: an encoder and its heads, from tokens to tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from bertsmith.answers.chart import SpanWeights
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.random import key
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import FINAL_HIDDEN_STATES, Encoder, EncoderInputs, EncoderOutput, Want
from bertsmith.models.heads import TaskHead
from bertsmith.models.heads.chart import ChartHead
from bertsmith.models.heads.pretraining import MaskedTokens
from bertsmith.ops.token_loss import Sampling, TokenLoss


class Network(nn.Module):
    """An encoder with heads, and a generator if it was pre-trained with one."""

    has_early_exits = False
    mean_layers: float | None = None

    def __init__(
        self, config: ModelConfig, encoder: Encoder, heads: dict[str, nn.Module], generator: "Network | None" = None
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.heads = nn.ModuleDict(heads)
        self.generator = generator

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Return the final hidden states, (batch, length, width); padding (attention_mask 0) is at the ends of rows.

        Shape: input_ids, attention_mask, token_type_ids (batch, length).
        """
        if input_ids.dim() != 2:
            raise InputError(f"input_ids has shape {tuple(input_ids.shape)}; allowed: (batch, length)")
        for name, tensor in (("attention_mask", attention_mask), ("token_type_ids", token_type_ids)):
            if tensor is not None and tensor.shape != input_ids.shape:
                shapes = f"{tuple(tensor.shape)} and input_ids {tuple(input_ids.shape)}"
                raise InputError(f"{name} has shape {shapes}; they must be equal")
        layout = SequenceLayout.rows(input_ids, attention_mask)
        return self.run(EncoderInputs(input_ids, layout, token_type_ids, subnet, backend)).last

    def run(self, inputs: EncoderInputs, want: Want = FINAL_HIDDEN_STATES) -> EncoderOutput:
        """Run the encoder and the heads on a batch and return the requested outputs."""
        inputs = replace(inputs, table=self.given_table)
        if want.masked_positions is not None:
            return self._run_masked(inputs, want, want.masked_positions)
        if not want.task:
            return self.encoder.run(inputs, want)
        head = self.task_head
        output = self.encoder.run(inputs, replace(want, layers=head.layers))
        return replace(output, task=head(output.last_layers(head.layers), inputs.layout, self.pooler))

    def outputs(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        backend: str = "auto",
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of the task head for every sequence or token: the short form of `run`.

        `sizes` is part of the contract of runners (engines/base.py) and has no effect without early exits.
        Shape: tokens and types (batch, length) or (tokens,).
        """
        return self.run(EncoderInputs(tokens, layout, types, subnet, backend), Want(task=True)).outputs

    @property
    def pooler(self) -> nn.Module | None:
        """The pooler head, or None."""
        return self.heads["pooler"] if "pooler" in self.heads else None  # noqa: SIM401 (a ModuleDict has no get)

    def vectors(self, inputs: EncoderInputs) -> Tensor:
        """Return one vector per sequence: the embedder's output, or the mean of the hidden states.

        Shape: (sequences, width).
        """
        if "embedder" in self.heads:
            return self.run(inputs, Want(task=True)).outputs
        return inputs.layout.means(self.run(inputs).last)

    def mask_probabilities(self, inputs: EncoderInputs, positions: Tensor) -> Tensor:
        """Return the probability of every vocabulary entry at some positions of the flattened tokens.

        A model without a masked_tokens head uses its generator, which has no sub-networks.
        Shape: positions (positions,) -> (positions, vocabulary).
        """
        if "masked_tokens" not in self.heads and self.generator is not None:
            return self.generator.mask_probabilities(replace(inputs, subnet=None), positions)
        hidden = self.run(inputs, Want(masked_positions=positions)).masked_states
        scores: Tensor = self.heads["masked_tokens"](hidden, self.token_table)
        return scores.float().softmax(-1)

    def masked_loss(self, hidden: Tensor, targets: Tensor, sampling: Sampling | None = None) -> TokenLoss:
        """Return the cross-entropy of the masked_tokens head, and samples from its scores.

        Shape: hidden (targets, width), targets (targets,), of which IGNORED ones do not count.
        """
        head = self.head("masked_tokens")
        assert isinstance(head, MaskedTokens)
        return head.loss(hidden, self.token_table, targets, sampling)

    @property
    def has_subnets(self) -> bool:
        """Whether sub-networks can be run: quantised weights cannot be cut."""
        return self.config.quantisation is None

    @property
    def can_fill_masks(self) -> bool:
        """Whether the model or its generator has a masked_tokens head."""
        generator = self.generator
        return "masked_tokens" in self.heads or (generator is not None and "masked_tokens" in generator.heads)

    @property
    def task_head(self) -> TaskHead:
        """The head of the task that the model was fine-tuned for; raises InputError if the model has no task head."""
        for head in self.heads.values():
            if isinstance(head, TaskHead):
                return head
        kinds = ", ".join(self.heads) or "none"
        raise InputError(f"this model was not fine-tuned for a task (its heads: {kinds}); bertsmith finetune does that")

    @property
    def is_for_tokens(self) -> bool:
        """Whether the task head has outputs for every token, not for whole sequences."""
        return self.task_head.is_for_tokens

    @property
    def span_weights(self) -> SpanWeights | None:
        """The weights of a chart head that turn outputs of tokens into scores of spans; None for other heads."""
        heads = [head for head in self.heads.values() if isinstance(head, ChartHead)]
        return heads[0].scorer.weights() if heads else None

    def head(self, kind: str) -> nn.Module:
        """Return a head of the model; raise InputError with the names of its heads if it has none of this kind."""
        if kind not in self.heads:
            kinds = ", ".join(self.heads) or "none"
            raise InputError(f"this model has no {kind!r} head (its heads: {kinds})")
        return self.heads[kind]

    def redraw_features(self, step: int, seed: int) -> None:
        """Redraw random features where it is time; the trainer calls it before every optimiser step."""
        self.encoder.redraw_features(step, seed)
        if self.generator is not None:
            self.generator.redraw_features(step, key(seed, 7))

    @property
    def given_table(self) -> Tensor | None:
        """The generator's token vectors if the encoder's table holds the difference from them, else None."""
        if self.generator is None or not self.encoder.embedding.is_difference:
            return None
        return self.generator.token_table

    @property
    def token_table(self) -> Tensor:
        """The encoder's token vectors, (vocabulary, embedding width), which heads over the vocabulary share."""
        embedding = self.encoder.embedding
        table, factor = embedding.rows.whole(embedding.token_table), embedding.token_factor
        if self.given_table is not None:
            return self.given_table.detach() + table
        return table if factor is None else table @ factor

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to eval mode, and back to the previous mode on exit."""
        was_training = self.training
        if any(module.training for module in self.modules()):  # setting the mode of every module takes far longer
            self.eval()
        try:
            yield
        finally:
            if was_training:
                self.train()

    def _run_masked(self, inputs: EncoderInputs, want: Want, positions: Tensor) -> EncoderOutput:
        """Run the encoder and select the masked positions, by the mask decoder if the model has one."""
        if "mask_decoder" not in self.heads:
            output = self.encoder.run(inputs, want)
            # (batch, length, width) or (tokens, width) -> (positions, width)
            return replace(output, masked=output.last.flatten(0, -2).index_select(0, positions))
        output = self.encoder.run(inputs, replace(want, last_block=want.all_hidden_states))
        (block, context), norm = output.blocks[-1], self.encoder.final_norm
        entering = output.hidden_states[-2 if want.all_hidden_states else -1]
        output = replace(output, masked=norm(self.heads["mask_decoder"](entering, block, context, positions)))
        is_missing = want.final and output.final is None
        return replace(output, final=norm(block(entering, context))) if is_missing else output
