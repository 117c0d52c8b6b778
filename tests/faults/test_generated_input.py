"""Generated recipes, overrides and tables give the right result or an InputError, nothing else.

Generated requests to the service are in tests/unit/serving/http/test_openapi.py.
"""

import csv
import json
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers_finetuning import RECIPE as FINETUNE_RECIPE
from helpers_training import RECIPE as PRETRAIN_RECIPE
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bertsmith.errors import InputError
from bertsmith.tasks.data_source import task_splits
from bertsmith.toml import override, read_toml, to_toml
from bertsmith.training.finetuning import FinetuneSettings
from bertsmith.training.pretraining import PretrainSettings

QUICK: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.explicit, Phase.generate],  # shrinking takes minutes
}
SCALARS = (  # without None, which TOML does not have
    st.booleans()
    | st.integers(-(1 << 65), 1 << 65)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["auto", "none", "../outside", "9" * 400])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, min_size=1, max_size=3),
)
RECIPES = {PretrainSettings: tomllib.loads(PRETRAIN_RECIPE), FinetuneSettings: tomllib.loads(FINETUNE_RECIPE)}
# .tsv files have no quotes, so their cells have neither tabs nor ends of lines
EXCLUDED = {"jsonl": [], "csv": ["\0"], "tsv": [chr(code) for code in (*range(32), *range(127, 160))]}
CELLS = {
    ending: st.text(st.characters(exclude_categories=["Cs"], exclude_characters=excluded), max_size=20)
    for ending, excluded in EXCLUDED.items()
}


def paths(data: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every group and value of a recipe."""
    for key, value in data.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


@pytest.mark.parametrize("kind", RECIPES)
@given(data=st.data())
@settings(max_examples=80, **QUICK)
def test_recipe_with_any_value_is_parsed_or_rejected(kind: type[Any], data: st.DataObject) -> None:
    recipe = json.loads(json.dumps(RECIPES[kind]))
    *groups, name = data.draw(st.sampled_from(list(paths(recipe))))
    node = recipe
    for group in groups:
        node = node[group]
    node[data.draw(st.just(name) | st.text(max_size=8))] = data.draw(VALUES)
    with suppress(InputError):
        parsed = kind.parse(recipe, source="recipe.toml")
        # the recipe that a run writes resumes it
        is_same = kind.parse(tomllib.loads(to_toml(parsed.plain())), source="recipe.toml") == parsed
        assert is_same  # without a comparison of the two by pytest, which takes minutes


@given(text=st.text(max_size=60) | st.binary(max_size=60))
@settings(max_examples=100, **QUICK)
def test_any_file_as_recipe_is_read_or_rejected(text: str | bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
        with suppress(InputError):
            assert isinstance(read_toml(path), dict)


@given(assignment=st.text(max_size=30) | st.tuples(st.text("ab.", max_size=5), st.text(max_size=20)).map("=".join))
@settings(max_examples=200, **QUICK)
def test_any_assignment_is_applied_or_rejected(assignment: str) -> None:
    with suppress(InputError):
        assert override({"a": {"b": 1}}, [assignment]) != {}


@pytest.mark.parametrize("ending", CELLS)
@given(data=st.data())
@settings(max_examples=60, **QUICK)
def test_table_of_any_texts_is_read_unchanged(ending: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(CELLS[ending], CELLS[ending]), min_size=1, max_size=4))
    expected = [{"text": text, "label": label} for text, label in rows]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"dev.{ending}"
        with path.open("w", encoding="utf-8", newline="") as file:
            if ending == "jsonl":
                file.writelines(json.dumps(row, ensure_ascii=len(rows) % 2 == 0) + "\n" for row in expected)
            elif ending == "csv":
                csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *rows])
            else:
                file.writelines("\t".join(row) + "\n" for row in [("text", "label"), *rows])
        read = task_splits(str(path), file_is="dev").read("dev").rows
        assert [{name: row[name] for name in ("text", "label")} for row in read] == expected


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet", "jsonl.gz", "jsonl.xz", "jsonl.zst"])
@given(content=st.binary(max_size=80) | st.text('{}[]",:\n\t ae1\\', max_size=40).map(str.encode))
@settings(max_examples=60, **QUICK)
def test_any_file_as_table_is_read_or_rejected(ending: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"dev.{ending}"
        path.write_bytes(content)
        with suppress(InputError):
            assert isinstance(list(task_splits(str(path), file_is="dev").read("dev").rows), list)
