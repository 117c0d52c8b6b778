"""Messages for bad input stay readable if names are long."""

import pytest

from bertsmith.errors import InputError, nearest
from bertsmith.tasks.classification import Classification
from bertsmith.text.rows import table_of

LONG = "x" * 3000


def test_long_names_are_shortened() -> None:
    assert nearest("a", ["b", LONG]) == f"allowed: b, {'x' * 79}…"
    assert nearest(LONG, [LONG + "y"]) == f"did you mean '{'x' * 79}…'?"


def test_unknown_long_label_is_not_printed_whole() -> None:
    task = Classification(labels=("bad", "good"), text="text", label="label")
    with pytest.raises(InputError, match="which is not a label of this task; allowed: bad, good") as caught:
        task.examples(table_of([{"text": "it works", "label": LONG}], "rows"))
    assert len(str(caught.value)) < 250
