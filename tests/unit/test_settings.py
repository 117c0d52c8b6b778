"""Strict settings: round trips, overrides, and a clear error for each kind of mistake."""

from pathlib import Path
from typing import Annotated, Literal

import pytest

from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.published import preset
from bertsmith.settings import RENAMED, ByKind, Record
from bertsmith.toml import override, read_toml, to_toml


class Shape(Record):
    kind: str


class Square(Shape):
    kind: Literal["square"] = "square"
    side: int = 1


class Circle(Shape):
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


class Drawing(Record):
    title: str = "none"
    shapes: tuple[Annotated[Shape, ByKind({"square": Square, "circle": Circle})], ...] = ()


def test_records_by_kind_round_trip() -> None:
    drawing = Drawing.parse({"shapes": [{"kind": "circle", "radius": 2}, {"kind": "square", "side": 3, "repeat": 2}]})
    assert drawing.shapes == (Circle(radius=2.0), Square(side=3), Square(side=3))
    assert Drawing.parse(drawing.plain()) == drawing


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"titel": "x"}, "titel is not a known setting; did you mean 'title'?"),
        ({"title": 3}, "title is 3: input should be a valid string"),
        ({"shapes": [{"kind": "sqare"}]}, "shapes.0.kind is 'sqare'; did you mean 'square'? (all: square, circle)"),
        ({"shapes": [{"side": 2}]}, "shapes.0.kind is required but not given"),
        ({"shapes": [{"kind": "square", "sied": 2}]}, "shapes.0.sied is not a known setting; did you mean 'side'?"),
        ({"shapes": [{"kind": "square", "side": "2"}]}, "shapes.0.side is '2': input should be a valid integer"),
        ({"shapes": [{"kind": "square", "repeat": 0}]}, "repeat is 0; allowed: 1 to 1024"),
    ],
)
def test_invalid_settings_raise(data: dict, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        Drawing.parse(data, source="file")
    assert str(error.value).removeprefix("file: ") == sentence


def test_records_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Square().side = 4  # type: ignore[misc]


def test_changed_validates_the_record() -> None:
    encoder = preset("bert-tiny").encoder
    assert encoder.changed(width=256, init_std=1.0) == EncoderConfig.parse(
        {**encoder.plain(), "width": 256, "init_std": 1.0}
    )
    with pytest.raises(InputError, match=r"width 127 is not a multiple of heads 2"):
        encoder.changed(width=127)
    with pytest.raises(InputError, match=r"^widht is not a known setting; did you mean 'width'"):
        encoder.changed(widht=256)
    with pytest.raises(InputError, match=r"^init_std is 0: input should be greater than 0"):
        encoder.changed(init_std=0)


OLD_KEYS = {
    "objective.masking.longest_ngram=2": "objective.masking.max_ngram",
    "objective.masking.most=20": "objective.masking.max_predictions",
    "model.overrides.longest=64": "max_length",
    "model.overrides.deviation=0.02": "init_std",
}


@pytest.mark.parametrize(("assignment", "new_key"), OLD_KEYS.items())
def test_error_for_renamed_setting_gives_the_new_name(
    assignment: str, new_key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old_key = assignment.partition("=")[0]
    plain = {"model": {"preset": "bert-tiny"}, "objective": {"kind": "masked_lm"}}
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(override(plain, [assignment])), encoding="utf-8")
    for words in ([str(recipe)], ["bert-tiny", "--set", assignment]):
        with pytest.raises(SystemExit) as exit_info:
            main(["pretrain", *words, "--explain"])
        assert exit_info.value.code == 2
        expected = f"{old_key.removeprefix('model.overrides.')} is not a known setting; it was renamed to {new_key}"
        assert expected in capsys.readouterr().err


def test_new_names_of_renamed_settings_exist() -> None:
    import bertsmith.runs.fit
    import bertsmith.runs.pretrain
    import bertsmith.runs.shrink  # noqa: F401

    fields = {name for record in _subclasses(Record) for name in record.model_fields}
    assert {name for names in RENAMED.values() for name in names} <= fields


def _subclasses(record: type[Record]) -> list[type[Record]]:
    return [record, *(child for subclass in record.__subclasses__() for child in _subclasses(subclass))]


@pytest.mark.parametrize(
    ("words", "new_flag"),
    [
        (["fit", "model", "--out", "out", "--part", "dev"], "--split"),
        (["predict", "model", "--out", "out", "--part=dev"], "--split"),
        (["tokenizer", "texts", "--out", "out", "--pieces", "8"], "--tokens"),
        (["shrink", "model", "--out", "out", "--pieces", "8"], "--tokens"),
        (["pairs", "texts", "--out", "out", "--longest", "8"], "--max-words"),
    ],
)
def test_error_for_renamed_flag_gives_the_new_flag(
    words: list[str], new_flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    assert f"; use {new_flag}" in capsys.readouterr().err


def test_overrides() -> None:
    data = override({"a": {"b": 1}}, ["a.b=2", "a.c = [1, 2]", "d=word", "e=true"])
    assert data == {"a": {"b": 2, "c": [1, 2]}, "d": "word", "e": True}
    with pytest.raises(InputError, match="not of the form"):
        override({}, ["novalue"])
    with pytest.raises(InputError, match="is a value, not a group"):
        override({"a": 1}, ["a.b=2"])


@pytest.mark.parametrize("name", ["bert-mini", "electra-small"])
def test_toml_round_trip(name: str, tmp_path) -> None:
    config = preset(name)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config.plain()), encoding="utf-8")
    assert ModelConfig.parse(read_toml(path)) == config


def test_invalid_toml_raises(tmp_path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("a = = 1")
    with pytest.raises(InputError, match="not valid TOML"):
        read_toml(path)
    with pytest.raises(InputError, match="does not exist"):
        read_toml(tmp_path / "absent.toml")


def test_help_texts_become_comments(tmp_path) -> None:
    from bertsmith.data.corruption import MaskingConfig

    config = MaskingConfig()
    text = to_toml({"masking": config.plain()}, {f"masking.{name}": note for name, note in config.help().items()})
    assert "rate = 0.15  # Fraction of a sequence's tokens" in text
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    assert MaskingConfig.parse(read_toml(path)["masking"]) == config


def test_strings_round_trip_through_toml(tmp_path) -> None:
    path = tmp_path / "recipe.toml"
    data = {"data": '/tmp/\U0001f600 \x7f "quoted" \n', "run": {"steps": 3}}
    path.write_text(to_toml(data), encoding="utf-8")
    assert read_toml(path) == data


def test_records_built_in_python_raise_one_sentence() -> None:
    with pytest.raises(InputError, match=r"^width is 'x': input should be a valid number$"):
        Subnet(width="x")
    with pytest.raises(InputError, match=r"^widht is not a known setting; did you mean 'width'\?$"):
        Subnet(widht=0.5)
