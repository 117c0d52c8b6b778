"""Shared steps of `evaluate --metric`: read the texts of a split, load the model, write the result."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.checkpoint.store import load
from bertsmith.data.devices import device_type
from bertsmith.models.model import Model
from bertsmith.runs.output import check_out, claim, write_result
from bertsmith.runs.result import OneShotResult
from bertsmith.text.readers import split_documents
from bertsmith.training.word_perplexity import max_context


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """A language model, a split of texts and the output folder."""

    folder: Path
    """Folder of the model."""
    data: str
    split: str
    out: Path
    device: str = "auto"
    force: bool = False

    def read_texts(self, field: str) -> list[str]:
        """Check the output folder and return the texts of the split."""
        check_out(self.out, self.force, self.folder, Path(self.data))
        return split_documents(self.data, self.split, field)

    def load(self) -> Model:
        """Load the model onto the device."""
        return load(self.folder, device=device_type(self.device))

    def write(self, result: OneShotResult) -> None:
        """Write result.json, alone in the output folder."""
        claim(self.out, self.force, self.folder, Path(self.data))
        write_result(self.out, result.to_json())


def split_name(data: str, split: str) -> str:
    """Return the name of the evaluated split: that of the file, if the data is a single one."""
    return Path(data).name if Path(data).is_file() else split


def window_length(model: Model, length: int | None, default: int) -> int:
    """Return the tokens of a window; by default `default` or the model's maximum."""
    return min(default, max_context(model)) if length is None else length
