"""The encoder-decoder model: reads one sequence, writes another (Vaswani et al. 2017)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.data.random import key
from bertsmith.layers.context import Memory
from bertsmith.layers.subnet import Subnet
from bertsmith.models import decoding as beam
from bertsmith.models.config import ModelConfig
from bertsmith.models.decoding import GenerationConfig, Steps, write
from bertsmith.models.encoder import Encoder
from bertsmith.models.model import Model, check_texts


class Seq2Seq(Model):
    """A model whose decoder looks at its encoder's states; calling it gives the encoder's states, as for any model."""

    def __init__(self, config: ModelConfig, encoder: Encoder, decoder: Encoder, heads: dict[str, nn.Module]) -> None:
        super().__init__(config, encoder, heads)
        self.decoder = decoder

    def decode(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        memory: Memory,
        *,
        subnet: Subnet | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """The decoder's states for whole target sequences, each token seeing those before it.

        Shape: tokens (batch, length), or (tokens,) when packed; the result has one more axis, the width.
        """
        return self.decoder(tokens, layout, subnet=subnet, backend=backend, memory=memory, table=self._borrowed_table())

    def scores(self, states: Tensor) -> Tensor:
        """The scores of every token of the target vocabulary: (…, width) -> (…, vocabulary)."""
        table = self.decoder.embedding.token_table
        return self.head("next_token")(states, self.token_table if table is None else table)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        config: GenerationConfig | None = None,
        *,
        start: int | None = None,
        end: int | None = None,
        subnet: Subnet | None = None,
    ) -> list[list[int]]:
        """The sequence written for each row, without its start and end; these default to the tokenizer's.

        Shape: input_ids, attention_mask (batch, length).
        """
        config = config or GenerationConfig()
        start = self.require_tokenizer().start if start is None else start
        end = self.require_tokenizer().separator if end is None else end
        with self.evaluating():
            states = self(input_ids, attention_mask, subnet=subnet)
            layout = SequenceLayout.rows(input_ids, attention_mask)
            limits = layout.lengths(input_ids.device) + config.extra_length
            if self.decoder.embedding.position is not None:
                limits = limits.clamp(max=self.decoder.embedding.longest)
            table = self._borrowed_table()
            steps = Steps(self.decoder, self.scores, Memory(states, layout), table=table, subnet=subnet)
            make = beam.search if config.method == "beam" else write
            return make(steps, config, start, end, limits)

    def translate(
        self,
        texts: Sequence[str],
        config: GenerationConfig | None = None,
        *,
        batch_size: int = 32,
        progress: Callable[[int], None] = lambda texts: None,
    ) -> list[str]:
        """One text for each text; `progress` gets the number of texts just done."""
        check_texts("translate", texts, batch_size)
        tokenizer = self.require_tokenizer()
        # texts of like length together: rows that are done wait for the longest
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        results = [""] * len(texts)
        for first in range(0, len(order), batch_size):
            places = order[first : first + batch_size]
            batch = self._batch([texts[place] for place in places])
            written = self.generate(batch["input_ids"], batch["attention_mask"], config)
            for place, tokens in zip(places, written, strict=True):
                results[place] = tokenizer.decode(tokens)
            progress(len(places))
        return results

    def attention_maps(self, source: Tensor, target: Tensor) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """The maps of the encoder's layers and of the decoder's, where "cross_attention" aligns target and source.

        Shape: source and target (batch, length), rows without pads; maps (batch, heads, length, length looked at).
        """
        layout, target_layout = SequenceLayout.full(*source.shape), SequenceLayout.full(*target.shape)
        memory = Memory(self.encoder(source, layout), layout)
        reading = self.encoder.attention_maps(source, layout)
        table = self._borrowed_table()
        return reading, self.decoder.attention_maps(target, target_layout, memory=memory, table=table)

    def renew(self, step: int, seed: int) -> None:
        super().renew(step, seed)
        self.decoder.renew(step, key(seed, 1))  # draws of its own

    def _borrowed_table(self) -> Tensor | None:
        """The encoder's token vectors, if the decoder has none of its own."""
        return self.token_table if self.decoder.embedding.token_table is None else None
