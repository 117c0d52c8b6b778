"""Heads for pre-training and tasks: hidden states → token scores, sequence scores or vectors."""

from typing import Annotated

from bertsmith.models.heads.base import HeadConfig
from bertsmith.models.heads.chart import ChartConfig
from bertsmith.models.heads.decoder_exits import DecoderExitsConfig
from bertsmith.models.heads.exits import ExitsConfig
from bertsmith.models.heads.gates import GatesConfig
from bertsmith.models.heads.pretraining import (
    MaskDecoderConfig,
    MaskedTokensConfig,
    NextSentenceConfig,
    NextTokenConfig,
    PoolerConfig,
    ReplacedTokensConfig,
    TeacherWidthConfig,
)
from bertsmith.models.heads.task import TASK_HEADS, Pooling, SequenceHeadConfig, TaskHead, TaskHeadConfig
from bertsmith.settings import ByKind

HEADS: dict[str, type[HeadConfig]] = {
    "masked_tokens": MaskedTokensConfig,
    "next_token": NextTokenConfig,
    "pooler": PoolerConfig,
    "next_sentence": NextSentenceConfig,
    "replaced_tokens": ReplacedTokensConfig,
    "mask_decoder": MaskDecoderConfig,
    "teacher_width": TeacherWidthConfig,
    "gates": GatesConfig,
    **TASK_HEADS,
    "chart": ChartConfig,
    "exits": ExitsConfig,
    "decoder_exits": DecoderExitsConfig,
}

AnyHead = Annotated[HeadConfig, ByKind(HEADS)]

__all__ = [
    "HEADS",
    "AnyHead",
    "ChartConfig",
    "DecoderExitsConfig",
    "ExitsConfig",
    "GatesConfig",
    "HeadConfig",
    "MaskDecoderConfig",
    "MaskedTokensConfig",
    "NextSentenceConfig",
    "NextTokenConfig",
    "PoolerConfig",
    "Pooling",
    "ReplacedTokensConfig",
    "SequenceHeadConfig",
    "TaskHead",
    "TaskHeadConfig",
    "TeacherWidthConfig",
]
