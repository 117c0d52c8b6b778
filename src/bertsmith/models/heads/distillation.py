"""The head of a student in training: its states made as wide as a teacher's, to be compared with them."""

from typing import Literal

from pydantic import Field
from torch import nn

from bertsmith.models.heads.base import HeadConfig


class TeacherWidthConfig(HeadConfig):
    """One linear layer for the states of all layers; it stays behind when the training ends."""

    kind: Literal["teacher_width"] = "teacher_width"
    teacher: int = Field(gt=0)
    """The teacher's width."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> nn.Module:
        # none of the model's own layers, so that it is not rounded where these are
        return nn.Linear(width, self.teacher)
