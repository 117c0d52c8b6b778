"""What Hugging Face's folders say of a tokenizer: the numbers of tokens in config.json, and tokenizer_config.json."""

from typing import Any

from bertsmith.models.model import Model


def token_ids(model: Model) -> dict[str, Any]:
    """The numbers of the tokens that config.json names."""
    if model.tokenizer is None:
        return {}
    ids = {"pad_token_id": model.tokenizer.pad}
    if model.config.decoder is None:
        return ids
    start, end = model.tokenizer.start, model.tokenizer.separator
    return {**ids, "decoder_start_token_id": start, "eos_token_id": end, "forced_eos_token_id": end}


def tokenizer_config(model: Model) -> dict[str, Any]:
    """What tokenizer_config.json says beside tokenizer.json."""
    tokenizer = model.require_tokenizer()
    roles = {
        "pad_token": tokenizer.pad,
        "unk_token": tokenizer.unknown,
        "cls_token": tokenizer.start,
        "sep_token": tokenizer.separator,
        "mask_token": tokenizer.mask,
    }
    names = {role: tokenizer.pieces([index])[0] for role, index in roles.items()}
    longest = model.config.encoder.embedding.longest
    inputs = ["input_ids", *(["token_type_ids"] if model.config.encoder.embedding.types else []), "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, "padding_side": "right"}
    return {**settings, "model_input_names": inputs, **names}
