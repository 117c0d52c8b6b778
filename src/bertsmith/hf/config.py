"""The settings of a model of ours as `transformers` keeps them."""

from typing import Any

from transformers import PreTrainedConfig

from bertsmith.checkpoint.hf.wrapped import MODEL_TYPE, wrapped_settings
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig


class BertsmithConfig(PreTrainedConfig):
    """config.json of a folder that `bertsmith.export` wrote for `bertsmith.hf`: our config stands under "model"."""

    model_type = MODEL_TYPE

    # None where the files say something else, so that they are written again
    bertsmith: int | None = None
    model: dict[str, Any] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    eos_token_id: int | None = None
    tie_word_embeddings: bool = False
    """Of their loader: what is shared here is one module, and heads over the vocabulary read the table itself."""

    @classmethod
    def of(cls, config: ModelConfig, architecture: str, **others: Any) -> "BertsmithConfig":
        """That of a model of ours."""
        return cls(**{**wrapped_settings(config, architecture), **others})

    @property
    def network(self) -> ModelConfig:
        """Our config."""
        if not isinstance(self.model, dict):
            raise InputError("this BertsmithConfig has no 'model'; make one with BertsmithConfig.of or from a folder")
        return ModelConfig.parse(self.model, source="config.json")
