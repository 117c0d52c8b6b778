"""Register our models with the Auto classes of `transformers`, so that it opens our folders.

    import bertsmith.hf
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained("exported")

No other module imports that library.
"""

try:
    import transformers  # noqa: F401
except ImportError:
    raise ImportError("bertsmith.hf needs transformers, which is not installed: pip install 'bertsmith[hf]'") from None

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from bertsmith.hf.base import BertsmithConfig
from bertsmith.hf.encoders import (
    BertsmithForCausalLM,
    BertsmithForMaskedLM,
    BertsmithForPreTraining,
    BertsmithForSeq2SeqLM,
    BertsmithModel,
)
from bertsmith.hf.tasks import (
    BertsmithForMultipleChoice,
    BertsmithForQuestionAnswering,
    BertsmithForSequenceClassification,
    BertsmithForTokenClassification,
)

__all__ = [
    "BertsmithConfig",
    "BertsmithForCausalLM",
    "BertsmithForMaskedLM",
    "BertsmithForMultipleChoice",
    "BertsmithForPreTraining",
    "BertsmithForQuestionAnswering",
    "BertsmithForSeq2SeqLM",
    "BertsmithForSequenceClassification",
    "BertsmithForTokenClassification",
    "BertsmithModel",
]

CLASSES = {
    AutoModel: BertsmithModel,
    AutoModelForCausalLM: BertsmithForCausalLM,
    AutoModelForMaskedLM: BertsmithForMaskedLM,
    AutoModelForMultipleChoice: BertsmithForMultipleChoice,
    AutoModelForPreTraining: BertsmithForPreTraining,
    AutoModelForQuestionAnswering: BertsmithForQuestionAnswering,
    AutoModelForSeq2SeqLM: BertsmithForSeq2SeqLM,
    AutoModelForSequenceClassification: BertsmithForSequenceClassification,
    AutoModelForTokenClassification: BertsmithForTokenClassification,
}
"""Our class for each Auto class."""

AutoConfig.register(BertsmithConfig.model_type, BertsmithConfig, exist_ok=True)
for _auto, _own in CLASSES.items():
    _auto.register(BertsmithConfig, _own, exist_ok=True)
