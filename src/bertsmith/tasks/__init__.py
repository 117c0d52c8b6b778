"""The tasks a model can be fine-tuned for, one file per kind."""

from typing import Annotated, Any

from bertsmith.settings import ByKind
from bertsmith.tasks.base import Task
from bertsmith.tasks.classification import Classification

TASKS: dict[str, type[Task[Any]]] = {
    "classification": Classification,
}

AnyTask = Annotated[Task[Any], ByKind(TASKS)]
