"""What the settings of all methods of shrinking have in common: a fine-tuned model, its task and its data."""

from bertsmith.data.examples import ExampleConfig
from bertsmith.settings import Record
from bertsmith.tasks import AnyTask
from bertsmith.tasks.predictor import TaskRecord


class ShrinkSettings(Record):
    """A fine-tuned model and what it was fine-tuned for; a method adds what it depends on itself."""

    method: str
    data: str | None = None
    """A folder with the parts of the task, a file, or a name on the hub."""
    model: str
    """The folder of the fine-tuned model."""
    task: AnyTask
    sequences: ExampleConfig = ExampleConfig()

    @property
    def task_record(self) -> TaskRecord:
        """What is kept of them beside the model."""
        return TaskRecord(task=self.task, sequences=self.sequences)
