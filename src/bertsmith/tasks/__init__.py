"""The kinds of task a model can be fine-tuned for, one file each."""

from typing import Annotated, Any

from bertsmith.settings import ByKind
from bertsmith.tasks.base import Task
from bertsmith.tasks.choice import Choice
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.embedding import TextEmbedding
from bertsmith.tasks.multi_label import MultiLabel
from bertsmith.tasks.parsing import Parsing
from bertsmith.tasks.regression import Regression
from bertsmith.tasks.spans import SpanAnswers
from bertsmith.tasks.tagging import Tagging
from bertsmith.tasks.translation import Translation

# recognition takes the first kind whose columns match
TASKS: dict[str, type[Task[Any]]] = {
    "choice": Choice,
    "spans": SpanAnswers,
    "parsing": Parsing,
    "tagging": Tagging,
    "classification": Classification,
    "regression": Regression,
    "multi_label": MultiLabel,
    "embedding": TextEmbedding,
    "translation": Translation,
}

AnyTask = Annotated[Task[Any], ByKind(TASKS)]
