"""Continued pre-training from an unsuitable folder prints one sentence and writes nothing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.pretraining import PretrainSettings

SIZE = {"width": 16, "layers": 1, "heads": 2, "max_length": 32}
SMALL = "\n[sequences]\nlength = 32\nmicro_tokens = 256\n[batch]\ntokens = 256\n[run]\nsteps = 2\n"


def save_model(folder: Path, preset: str, tokenizer: Tokenizer | None, seed: int = 0, **changes: Any) -> Path:
    size = {"vocabulary": 160 if tokenizer is None else tokenizer.size, **SIZE, **changes}
    model = bertsmith.build(bertsmith.preset(preset, **size), seed=seed)
    model.tokenizer = tokenizer
    bertsmith.save(model, folder)
    return folder


@pytest.fixture(scope="module")
def home(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders; only the first is usable with the corpus."""
    home, tokenizer = tmp_path_factory.mktemp("folders"), Tokenizer.load(corpus_folder)
    save_model(home / "good", "bert-tiny", tokenizer)
    other = learn_tokenizer(["seven lanterns by the river, a broken clock"] * 9, "wordpiece", 90, progress=False)
    save_model(home / "other-words", "bert-tiny", other)
    cased = json.loads(json.dumps(tokenizer.content))
    cased["normalizer"]["lowercase"] = False
    save_model(home / "cased", "bert-tiny", Tokenizer.from_json(json.dumps(cased)))
    save_model(home / "few-rows", "bert-tiny", None, vocabulary=50)
    save_model(home / "wide", "electra-small", tokenizer, embedding_width=16)
    save_model(home / "guesser", "bert-tiny", tokenizer, seed=1)
    save_model(home / "narrow-guesser", "bert-tiny", tokenizer, width=8)
    save_model(home / "translator", "transformer-tiny", tokenizer, layers=1, neurons=16)
    return home


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("nowhere", "", "model folder '{home}/nowhere' does not exist"),
        ("other-words", "", "the corpus's tokenizer differs from the tokenizer of '{home}/other-words': id "),
        ("other-words", "", "make the corpus with `bertsmith corpus --tokenizer {home}/other-words`"),
        ("cased", "", "all tokens are the same, but its normalizer differs"),
        ("few-rows", "", "tokens and '{home}/few-rows', which holds no tokenizer, 50 rows"),
        ("translator", "", "'{home}/translator' has a decoder; allowed: encoders"),
        ("good", "sequences.length=64", "sequences.length is 64; the model takes at most 32 tokens"),
        ("good", "model.overrides.max_length=64", "overrides.max_length belongs to the weights of the folder"),
        ("good", "model.overrides.dropout=2.0", "dropout is 2.0"),
        ("good", "generator.folder={home}/guesser", "generator is given with objective.kind 'masked_lm'"),
        (
            "wide",
            "objective.kind=replaced_tokens generator.folder={home}/narrow-guesser",
            "the encoder's embedding width is 16 and its generator's 8; generator.sharing = 'full' requires equal",
        ),
        (
            "wide",
            "objective.kind=replaced_tokens generator.folder={home}/guesser",
            "generator.sharing is 'full', and the model's token_table is not the generator's",
        ),
        (
            "wide",
            "objective.kind=replaced_tokens generator.folder={home}/other-words",
            "the corpus's tokenizer differs from the tokenizer of '{home}/other-words'",
        ),
        (
            "wide",
            "objective.kind=replaced_tokens generator.folder={home}/guesser generator.width=0.5",
            "width and depth narrow the model's own layers",
        ),
        (
            "wide",
            "objective.kind=replaced_tokens generator.overrides.dropout=0.5",
            "overrides change a preset or a folder; give one",
        ),
    ],
)
def test_unsuitable_folder_prints_one_sentence(
    model: str,
    more: str,
    message: str,
    home: Path,
    corpus_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[model]\nfolder = {str(home / model)!r}\n{SMALL}")
    arguments = [
        "pretrain",
        str(recipe),
        "--data",
        str(corpus_folder),
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    ]
    for change in more.format(home=home).split():
        arguments += ["--set", change]
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    output = capsys.readouterr().err.strip()
    assert message.format(home=home) in output
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_sharing_of_a_stored_generator_cannot_change(home: Path, corpus_folder: Path, tmp_path: Path) -> None:
    plain = {"model": {"folder": str(home / "wide")}, "objective": {"kind": "replaced_tokens"}}
    tokenizer = Tokenizer.load(corpus_folder)
    sequences = {"length": 32, "micro_tokens": 256}
    settings = PretrainSettings.parse({**plain, "generator": {"sharing": "none"}, "sequences": sequences})
    model, _ = settings.start(tokenizer)
    model.tokenizer = tokenizer
    bertsmith.save(model, tmp_path / "pair")
    plain["model"]["folder"] = str(tmp_path / "pair")
    again = PretrainSettings.parse({**plain, "generator": {"sharing": "full"}, "sequences": sequences})
    with pytest.raises(InputError, match=re.escape("generator.sharing is 'full' and the generator in")):
        again.start(tokenizer)


def test_force_does_not_delete_the_model_folder(home: Path, corpus_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(home / "good", folder)
    (folder / ".bertsmith").touch()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[model]\nfolder = {str(folder)!r}\n{SMALL}")
    with pytest.raises(InputError, match="lie inside each other"):
        bertsmith.pretrain(recipe, data=corpus_folder, out=folder, force=True, device="cpu")
    assert (folder / "model.safetensors").exists()


def test_folder_without_tokenizer_gives_a_notice(corpus_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(corpus_folder)
    folder = save_model(tmp_path / "bare", "bert-tiny", None, vocabulary=tokenizer.size + 7)
    sequences = {"length": 32, "micro_tokens": 256}
    _, notices = PretrainSettings.parse({"model": {"folder": str(folder)}, "sequences": sequences}).start(tokenizer)
    assert (
        notices[0]
        == f"{str(folder)!r} holds no tokenizer: the corpus's {tokenizer.size} tokens are taken to be its own"
    )
