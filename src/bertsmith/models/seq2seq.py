"""The encoder-decoder model: reads one sequence, writes another (Vaswani et al. 2017)."""

from torch import Tensor, nn

from bertsmith.batches.layout import SequenceLayout
from bertsmith.layers.call import Memory
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import Encoder
from bertsmith.models.model import Model


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
        return self.decoder(tokens, layout, subnet=subnet, backend=backend, memory=memory, table=self._table())

    def scores(self, states: Tensor) -> Tensor:
        """The scores of every token of the target vocabulary: (…, width) -> (…, vocabulary)."""
        table = self.decoder.embedding.token_table
        return self.head("next_token")(states, self.token_table if table is None else table)

    def _table(self) -> Tensor | None:
        """The encoder's token vectors, if the decoder has none of its own."""
        return self.token_table if self.decoder.embedding.token_table is None else None
