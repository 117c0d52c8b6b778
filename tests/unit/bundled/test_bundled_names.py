"""Bundled names are accepted wherever a model is, and recipes store them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bertsmith
from bertsmith.bundled import model_folder, model_text
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.objectives.distillation.terms import CosineTerm
from bertsmith.serving.model import ServedModel
from bertsmith.toml import read_toml
from bertsmith.training.distillation import GeneralDistillationConfig, make_student
from bertsmith.training.pretraining import PretrainSettings
from bertsmith.training.trainer import Trainer

ROWS = [(f"the {word} day", label) for label in ("good", "bad") for word in ("fine", "sad", "dark", "happy")]
TUNING = ["sequences.length=16", "batch.examples=4", "run.epochs=2", "run.log_every=1"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the same eight rows in train and dev."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)
    for split in ("train", "dev"):
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A text file with 60 messages."""
    file = tmp_path / "desk.txt"
    file.write_text("\n\n".join(f"Order {i} has not come. Where is my parcel, please?" for i in range(60)))
    return file


def test_string_is_a_bundled_name_and_path_is_a_folder(tiny_bundled: Path) -> None:
    assert model_folder("small") == tiny_bundled
    assert model_folder("./small") == model_folder(Path("small")) == Path("small")
    for name in ("small", "./small", Path("small"), Path("runs/small")):
        assert model_folder(model_text(name)) == model_folder(name)
    assert bertsmith.load("small").generator is not None
    for folder in ("./small", Path("small")):
        with pytest.raises(InputError, match=r"config\.json' does not exist"):
            bertsmith.load(folder)


def test_bundled_names_do_not_import_pytorch() -> None:
    code = "import sys, bertsmith.bundled; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_error_for_missing_model_suggests_bundled_models(tiny_bundled: Path, data: Path) -> None:
    with pytest.raises(InputError, match="'smal' does not exist; did you mean the bundled model 'small'"):
        bertsmith.load("smal")
    with pytest.raises(InputError, match=r"'\./runs/sst2' does not exist; bundled models: small"):
        bertsmith.load("./runs/sst2")
    with pytest.raises(InputError, match=r"'smal', which is neither a bundled model .*; did you mean 'small'"):
        bertsmith.finetune("smal", data=str(data), out=Path("run"))
    with pytest.raises(InputError, match="'smal' does not exist; did you mean the bundled model 'small'"):
        ServedModel.open("smal")
    with pytest.raises(InputError, match=r"'small' has no task\.json.*use bertsmith finetune; .* is './small'"):
        bertsmith.Predictor.load("small")
    for command in (bertsmith.shrink, bertsmith.fit):
        with pytest.raises(InputError, match=r"'small' has no task\.json, so its model was not fine-tuned"):
            command("small", data=str(data), out=Path("run"), **({"size_mb": 9} if command is bertsmith.fit else {}))


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "small", "--text", "my parcel is late"],
        ["import", "small"],
        ["export", "small", "--to", "hf"],
        ["tokenizer", "desk.txt", "--extend", "small", "--tokens", "2"],
        ["corpus", "desk.txt", "--tokenizer", "small", "--workers", "1"],
    ],
    ids=lambda command: command[0],
)
def test_commands_accept_the_bundled_name(tiny_bundled: Path, desk: Path, command: list[str]) -> None:
    main([*command, "--out", "out"])
    assert Path("out/result.json").is_file()
    assert [path.name for path in Path("small").iterdir()] == []
    with pytest.raises(SystemExit):
        main([*("./small" if word == "small" else word for word in command), "--out", "other"])


def test_bundled_model_is_served_under_its_name(tiny_bundled: Path) -> None:
    served = ServedModel.open("small", device="cpu", threads=1)
    assert served.name == "small"
    assert served.operations == {"vectors", "fill_mask"}


def test_fine_tuning_stores_the_name_and_resumes(
    tiny_bundled: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: dict[str, Any] = {"data": str(data), "set": TUNING, "device": "cpu"}
    bertsmith.finetune("small", out=Path("uninterrupted"), **run)
    assert read_toml(Path("uninterrupted/recipe.toml"))["model"]["folder"] == "small"
    real = Trainer._step

    def step_or_interrupt(self: Trainer, *arguments: object) -> None:
        if self.progress.step == 3:
            raise KeyboardInterrupt
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            bertsmith.finetune("small", out=Path("resumed"), **run)
    bertsmith.finetune(out=Path("resumed"), resume=True, device="cpu")
    assert Path("resumed/model.safetensors").read_bytes() == Path("uninterrupted/model.safetensors").read_bytes()
    # an output folder with the bundled name is an ordinary folder; ./small or a Path reads it
    bertsmith.finetune("small", out=Path("small"), **run)
    assert bertsmith.Predictor.load("./small").predict(["the sad day"])[0] in ("good", "bad")
    bertsmith.finetune(Path("small"), out=Path("further"), **run)
    assert read_toml(Path("further/recipe.toml"))["model"]["folder"] == "./small"


def test_continued_pretraining_keeps_generator_and_head(tiny_bundled: Path, desk: Path) -> None:
    """No weights are newly initialised: the run starts with all weights of the folder, including the generator."""
    bertsmith.corpus([desk], tokenizer="small", out=Path("corpus"), workers=1)
    plain = {
        "data": "corpus",
        "model": {"folder": "small"},
        "objective": {"kind": "replaced_tokens"},
        "sequences": {"length": 32, "micro_tokens": 64},
        "batch": {"tokens": 64},
        "run": {"steps": 2},
    }
    settings = PretrainSettings.parse(plain)
    assert settings.inputs == (Path("corpus"), tiny_bundled)
    loaded = bertsmith.load("small")
    model, notices = settings.start(loaded.require_tokenizer())
    assert notices == []
    initial, stored = model.state_dict(), loaded.state_dict()
    assert initial.keys() == stored.keys()
    assert all(torch.equal(initial[name], stored[name]) for name in stored)
    assert any(name.startswith("generator.") for name in initial)
    Path("recipe.toml").write_text(
        '[model]\nfolder = "small"\n[objective]\nkind = "replaced_tokens"\n[sequences]\nlength = 32\n'
        "micro_tokens = 64\n[batch]\ntokens = 64\n[run]\nsteps = 2\n"
    )
    bertsmith.pretrain(Path("recipe.toml"), data=Path("corpus"), out=Path("run"), device="cpu")
    assert read_toml(Path("run/recipe.toml"))["model"]["folder"] == "small"
    log = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert [row for row in log if row["kind"] == "notice"] == []
    assert bertsmith.load("./run").fill_mask("where is my [MASK]?")


def test_bundled_model_can_be_a_teacher(tiny_bundled: Path, data: Path) -> None:
    """It is a teacher for general distillation, but not for a task, because it was not fine-tuned."""
    config = GeneralDistillationConfig(teacher="small", terms=(CosineTerm(),))
    assert config.teacher_config == bertsmith.load("small").config
    with pytest.raises(InputError, match=r"distillation\.teacher 'small' was not fine-tuned for a task"):
        bertsmith.finetune("small", teacher="small", data=str(data), out=Path("run"), device="cpu", set=TUNING)
    masked = PretrainSettings.parse({"model": {"preset": "bert-tiny"}, "objective": {"kind": "masked_lm"}})
    student = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=300), seed=0)
    student.tokenizer = bertsmith.load("small").require_tokenizer()
    fitted, objective = make_student(config, student, masked.objective.build(student.tokenizer, None), seed=0)
    assert "teacher_width" in fitted.heads
    assert objective.teacher.config.family == "convbert"
