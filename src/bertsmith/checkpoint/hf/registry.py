"""The table of families that Hugging Face has a model type for."""

from bertsmith.checkpoint.hf.adapter import Twin
from bertsmith.checkpoint.hf.albert import ALBERT
from bertsmith.checkpoint.hf.bert import BERT
from bertsmith.checkpoint.hf.convbert import CONVBERT
from bertsmith.checkpoint.hf.deberta import DEBERTA, DEBERTA_V2
from bertsmith.checkpoint.hf.electra import ELECTRA
from bertsmith.checkpoint.hf.marian import MARIAN
from bertsmith.checkpoint.hf.modernbert import MODERNBERT
from bertsmith.errors import InputError
from bertsmith.models.model import Model

_ALL = (BERT, ELECTRA, ALBERT, CONVBERT, DEBERTA, DEBERTA_V2, MARIAN, MODERNBERT)
TWINS: dict[str, Twin] = {twin.model_type: twin for twin in _ALL}


def twin_of(model: Model) -> Twin:
    """The twin of a model's family."""
    by_family = {twin.family: twin for twin in TWINS.values()}
    if model.config.family not in by_family:
        raise InputError(f"family is {model.config.family!r}; Hugging Face twins exist for: {', '.join(by_family)}")
    return by_family[model.config.family]
