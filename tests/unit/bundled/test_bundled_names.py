"""A bundled name stands wherever a model does, means the same everywhere, and is what recipes keep."""

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
    """A folder with eight rows to learn from and in dev."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)
    for part in ("train", "dev"):
        (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A file of texts."""
    file = tmp_path / "desk.txt"
    file.write_text("\n\n".join(f"Order {i} has not come. Where is my parcel, please?" for i in range(60)))
    return file


def test_a_text_is_a_name_and_a_path_a_folder(boxed: Path) -> None:
    assert model_folder("small") == boxed
    assert model_folder("./small") == model_folder(Path("small")) == Path("small")
    for given in ("small", "./small", Path("small"), Path("runs/small")):
        assert model_folder(model_text(given)) == model_folder(given)
    assert bertsmith.load("small").generator is not None
    for given in ("./small", Path("small")):
        with pytest.raises(InputError, match=r"config\.json' does not exist"):
            bertsmith.load(given)


def test_names_are_known_without_pytorch() -> None:
    code = "import sys, bertsmith.bundled; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_there_is_told_beside_what_is(boxed: Path, data: Path) -> None:
    with pytest.raises(InputError, match="'smal' does not exist; did you mean the bundled model 'small'"):
        bertsmith.load("smal")
    with pytest.raises(InputError, match="'runs/sst2' does not exist; bundled models: small"):
        bertsmith.load("runs/sst2")
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
def test_commands_know_the_name(boxed: Path, desk: Path, command: list[str]) -> None:
    main([*command, "--out", "out"])
    assert Path("out/result.json").is_file()
    assert [path.name for path in Path("small").iterdir()] == []
    with pytest.raises(SystemExit):
        main([*("./small" if word == "small" else word for word in command), "--out", "other"])


def test_it_is_served_by_its_name(boxed: Path) -> None:
    served = ServedModel.open("small", device="cpu", threads=1)
    assert served.name == "small"
    assert served.operations == {"vectors", "fill_mask"}


def test_a_fine_tuning_keeps_the_name_and_goes_on(boxed: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: dict[str, Any] = {"data": str(data), "set": TUNING, "device": "cpu"}
    bertsmith.finetune("small", out=Path("straight"), **run)
    assert read_toml(Path("straight/recipe.toml"))["model"]["folder"] == "small"
    real = Trainer._step

    def until(self: Trainer, *arguments: object) -> None:
        if self.progress.step == 3:
            raise KeyboardInterrupt
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until)
        with pytest.raises(KeyboardInterrupt):
            bertsmith.finetune("small", out=Path("broken"), **run)
    bertsmith.finetune(out=Path("broken"), resume=True, device="cpu")
    assert Path("broken/model.safetensors").read_bytes() == Path("straight/model.safetensors").read_bytes()
    # a folder of the bundled name is an ordinary folder to write to, and to read from when it is called a folder
    bertsmith.finetune("small", out=Path("small"), **run)
    assert bertsmith.Predictor.load("./small").predict(["the sad day"])[0] in ("good", "bad")
    bertsmith.finetune(Path("small"), out=Path("further"), **run)
    assert read_toml(Path("further/recipe.toml"))["model"]["folder"] == "./small"


def test_pre_training_goes_on_with_generator_and_head(boxed: Path, desk: Path) -> None:
    """Nothing is fresh: what the run begins with is what the folder holds, its generator counted in."""
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
    assert settings.inputs == (Path("corpus"), boxed)
    loaded = bertsmith.load("small")
    model, notices = settings.start(loaded.require_tokenizer())
    assert notices == []
    begun, kept = model.state_dict(), loaded.state_dict()
    assert begun.keys() == kept.keys()
    assert all(torch.equal(begun[name], kept[name]) for name in kept)
    assert any(name.startswith("generator.") for name in begun)
    Path("recipe.toml").write_text(
        '[model]\nfolder = "small"\n[objective]\nkind = "replaced_tokens"\n[sequences]\nlength = 32\n'
        "micro_tokens = 64\n[batch]\ntokens = 64\n[run]\nsteps = 2\n"
    )
    bertsmith.pretrain(Path("recipe.toml"), data=Path("corpus"), out=Path("run"), device="cpu")
    assert read_toml(Path("run/recipe.toml"))["model"]["folder"] == "small"
    log = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert [row for row in log if row["kind"] == "notice"] == []
    assert bertsmith.load("./run").fill_mask("where is my [MASK]?")


def test_it_teaches(boxed: Path, data: Path) -> None:
    """A student of a general distillation; a task it does not know, and says so."""
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
