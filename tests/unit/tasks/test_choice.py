"""Multiple choice: row formats, truncation, answers, and a training run."""

import numpy as np
import pytest
from helpers_choices import WORDS, encoding, finetune_small

from bertsmith.errors import InputError
from bertsmith.tasks.choice import Choice
from bertsmith.tasks.data_source import recognise
from bertsmith.text.rows import table_of

DIALOGUE = {"context": ["red iron", "gold"], "question": "rain snow", "choices": ["wind", "tree bird"], "label": 1}
SWAG = {"sent1": "red", "sent2": "iron", "ending0": "gold", "ending1": "rain", "ending2": "snow", "label": "2"}
TASK = Choice(context="context", question="question")


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"id": 1, "context": "a", "choices": ["b", "c"], "label": 0}, {"context": "context", "choices": "choices"}),
        ({"question": "a", "choices": ["b", "c"], "label": 0}, {"question": "question", "choices": "choices"}),
        (DIALOGUE, {"context": "context", "question": "question", "choices": "choices"}),
        (SWAG, {"context": "sent1", "start": "sent2", "choices": "ending"}),
        ({"premise": "a", "choice1": "b", "choice2": "c", "label": 0}, {"context": "premise", "choices": "choice"}),
    ],
)
def test_row_formats_are_recognised(row: dict[str, object], columns: dict[str, str]) -> None:
    assert recognise(table_of([row], "train"), None, [], {}) == {"kind": "choice", **columns, "label": "label"}


def test_other_tasks_are_not_recognised_as_choice() -> None:
    assert Choice.find_columns({"question": "a", "passage": "b", "label": 1}) is None
    assert Choice.find_columns({"choices": ["a", "b"], "label": 1}) is None


def test_swag_choices_continue_the_second_sentence() -> None:
    task = Choice(context="sent1", start="sent2", choices="ending")
    (example,) = task.examples(table_of([SWAG], "train"))
    assert (example.context, example.choices) == ("red", ("iron gold", "iron rain", "iron snow"))
    assert example.label == 2


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram"])
def test_sequences_equal_the_tokenizers_pairs(kind: str) -> None:
    rows = [DIALOGUE, {**DIALOGUE, "choices": ["fish", "stone", "tree"], "label": "C"}]
    task, text_encoding = TASK.resolve(table_of(rows, "train")), encoding(WORDS, kind=kind)
    examples = task.examples(table_of(rows, "train"))
    features = task.features(examples, text_encoding)
    choices = [choice for row in rows for choice in row["choices"]]  # type: ignore[attr-defined]
    expected = text_encoding.tokenizer.encode(["red iron gold rain snow"] * 5, choices, padding=False)
    assert features.types is not None
    for index in range(5):
        assert features.tokens[index].tolist() == expected["input_ids"][index].tolist()
        assert features.types[index].tolist() == expected["token_type_ids"][index].tolist()
    assert features.items.tolist() == [0, 2, 5]
    assert features.cut == 0
    targets = {name: np.asarray(target).tolist() for name, target in features.targets.items()}
    assert targets == {"label": [1, 2], "is_choice": [[True, True, False], [True, True, True]]}


@pytest.mark.parametrize(
    ("length", "keep", "before", "after"),
    [
        (9, "end", "iron gold rain snow", "tree bird"),
        (9, "beginning", "red iron rain snow", "tree bird"),
        (6, "end", "snow", "tree bird"),
        (5, "end", "", "tree bird"),
        (4, "end", "", "tree"),
    ],
)
def test_context_is_truncated_first(length: int, keep: str, before: str, after: str) -> None:
    task, text_encoding = TASK.changed(keep=keep), encoding(WORDS, length)
    features = task.features(task.examples(table_of([DIALOGUE], "train")), text_encoding)
    expected = text_encoding.tokenizer.encode([before], [after], padding=False)["input_ids"][0]
    assert features.tokens[1].tolist() == expected.tolist()
    assert len(features.tokens[1]) == length
    assert features.cut == (1 if length == 9 else 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": ["one"]}, "train row 1: 'choices' has 1 choices; at least 2 are needed"),
        ({"choices": "one, two"}, "train row 1: 'choices' is 'one, two'; it must be a list of texts"),
        ({"choices": ["one", None]}, r"train row 1: 'choices' is \['one', None\]; it must be a list of texts"),
        ({"label": 2}, "train row 1: 'label' is 2; the row has 2 choices; allowed: 0 to 1, or A to B"),
        ({"label": "C"}, "train row 1: 'label' is 'C'; the row has 2 choices"),
        ({"label": None}, "train row 1: 'label' is None"),
        ({"label": True}, "train row 1: 'label' is True"),
        ({"context": [1]}, "train row 1: field 'context' is list; it must be a string"),
    ],
)
def test_invalid_rows_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.examples(table_of([DIALOGUE, {**DIALOGUE, **change}], "train"))


def test_missing_columns_raise() -> None:
    with pytest.raises(InputError, match=r"task\.context and task\.question are not set"):
        Choice().resolve(table_of([DIALOGUE], "train"))
    with pytest.raises(InputError, match=r"train row 0 has no field 'ends'"):
        TASK.changed(choices="ends").examples(table_of([DIALOGUE], "train"))


def test_training_with_varying_numbers_of_choices() -> None:
    draw = np.random.default_rng(0)
    rows = []
    for index in range(60):
        words = draw.permutation(WORDS)[: 2 + index % 3].tolist()
        label = index % len(words)
        words[label] = f"{words[label]} red"
        rows.append({"context": "which is red", "choices": words, "label": label})
    result = finetune_small(rows, epochs=6)
    assert result["metric"] == "accuracy"
    assert result["score"] > 90
    (details,) = result.predictor.details([("which is red", ["iron", "gold red", "wind", "snow"])])
    assert (details["answer"], details["text"]) == (1, "gold red")
    assert details["score"] == max(details["scores"])
    assert sum(details["scores"]) == pytest.approx(1)
