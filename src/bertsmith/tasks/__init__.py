"""The tasks a model can be fine-tuned for, one file per kind."""

from typing import Annotated, Any

from bertsmith.settings import ByKind
from bertsmith.tasks.base import Task
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.tagging import Tagging

TASKS: dict[str, type[Task[Any]]] = {
    "classification": Classification,
    "tagging": Tagging,
from bertsmith.tasks.spans import SpanAnswers

TASKS: dict[str, type[Task[Any]]] = {
    "classification": Classification,
    "spans": SpanAnswers,
}

AnyTask = Annotated[Task[Any], ByKind(TASKS)]
