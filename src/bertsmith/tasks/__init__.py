"""The tasks a model can be fine-tuned for, one file per kind."""

from typing import Annotated, Any

from bertsmith.settings import ByKind
from bertsmith.tasks.base import Task
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.multi_label import MultiLabel
from bertsmith.tasks.regression import Regression
from bertsmith.tasks.spans import SpanAnswers
from bertsmith.tasks.tagging import Tagging

TASKS: dict[str, type[Task[Any]]] = {
    "classification": Classification,
    "regression": Regression,
    "multi_label": MultiLabel,
    "tagging": Tagging,
    "spans": SpanAnswers,
}

AnyTask = Annotated[Task[Any], ByKind(TASKS)]
