"""The contract of a head: its settings build what stands on an encoder."""

from abc import ABC, abstractmethod

from torch import nn

from bertsmith.settings import Record


class HeadConfig(Record, ABC):
    """The settings of one kind of head."""

    kind: str

    @abstractmethod
    def build(self, width: int, embedding_width: int, vocabulary: int) -> nn.Module: ...
