"""Bad input prints one sentence to standard error, exits with code 2 and changes no files."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.recipes import FILES

RECIPE = str(FILES["bert-tiny-cpu"])


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=40, width=16, heads=2, max_length=8), seed=0)
    bertsmith.save(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "absent.toml", "--out", "X"], "recipe 'absent.toml' does not exist"),
        (["pretrain", "--out", "X"], "no recipe is given"),
        (["pretrain", RECIPE, "--out", "X"], "data is not given: pass --data"),
        (["pretrain", RECIPE, "--data", "nowhere", "--out", "X"], "'nowhere'"),
        (["pretrain", RECIPE, "--resume", "--out", "X"], "contains no run to resume"),
        (["pretrain", RECIPE, "--explain", "--set", "model.preset=bert-tinny"], "did you mean 'bert-tiny'"),
        (["pretrain", RECIPE, "--explain", "--set", "optimizer.learning_rat=1"], "did you mean 'learning_rate'"),
        (["pretrain", RECIPE, "--explain", "--set", "run.steps=-1"], "run.steps is -1"),
        (["pretrain", RECIPE, "--explain", "--set", "schedule.kind=wds"], "schedule.kind is 'wds'"),
        (["pretrain", RECIPE, "--explain", "--set", "model.overrides.layer=3"], "layer is not a known setting"),
        (["pretrain", RECIPE, "--explain", "--set", "objective.next_sentence=true"], "sentence_pairs"),
        (["pretrain", RECIPE, "--explain", "--set", "sequences.cut=segment"], "sequences.cut is 'segment'"),
        (
            ["pretrain", RECIPE, "--explain", "--set", 'objective.masking={draw = "with_replacement", unit = "word"}'],
            "objective.masking: draw is 'with_replacement', but unit is 'word'; allowed: 'token'",
        ),
        (["pretrain", RECIPE, "--explain", "--set", "sequences.length=8192"], "micro_tokens 4096 is less than"),
        (["pretrain", RECIPE, "--explain", "--set", "sequences.length=256"], "the model takes at most 128"),
        (["inspect", "nowhere", "--text", "a", "--out", "X"], "model folder 'nowhere' does not exist"),
        (["import", "nowhere", "--out", "X"], "model folder 'nowhere' does not exist"),
        (["tokenizer", "nowhere", "--out", "X"], "nowhere"),
        (["pretrian"], "pretrian"),
        (["pretrain", RECIPE, "--sett", "a=b"], "--sett"),
        (["inspect", "m", "--out", "X"], "--text"),
    ],
)
def test_bad_arguments_print_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith("bertsmith: ")
    assert message in output
    assert "Traceback" not in output
    assert len(output.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_output_is_overwritten_only_with_force(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    main(["export", str(model_folder), "--out", str(out)])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(SystemExit):
        main(["export", str(model_folder), "--out", str(out)])
    assert "--force" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    main(["export", str(model_folder), "--out", str(out), "--force"])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit):
        main(["export", str(model_folder), "--out", str(foreign), "--force"])
    assert (foreign / "thesis.txt").read_text() == "years of work"


def test_force_does_not_delete_inputs(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["import", str(model_folder), "--out", str(tmp_path / "ours")])
    folder = tmp_path / "ours"
    before = sorted(path.name for path in folder.iterdir())
    for arguments in (["export", str(folder), "--out", str(folder)], ["export", str(folder), "--out", str(tmp_path)]):
        with pytest.raises(SystemExit):
            main([*arguments, "--force"])
        assert "inside each other" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_force_keeps_old_output_if_the_command_fails(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer"
    main(["tokenizer", str(texts), "--out", str(out), "--vocabulary", "160"])
    before = (out / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit):
        main(["tokenizer", str(texts), "--out", str(out), "--vocabulary", "3", "--force"])
    assert (out / "tokenizer.json").read_bytes() == before


def test_save_does_not_overwrite_other_files(model_folder: Path, tmp_path: Path) -> None:
    model = bertsmith.load(model_folder)
    with pytest.raises(InputError, match="is not empty"):
        bertsmith.save(model, model_folder)
    bertsmith.save(model, model_folder, force=True)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"holds more than a model \('thesis.txt'\)"):
        bertsmith.save(model, precious, force=True)
    assert (precious / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.overrides.vocabulary=50"], "the model's vocabulary is 50; the corpus needs"),
        (["model.overrides.layers=abc"], "layers is 'abc': input should be a valid integer"),
        (["batch.tokens=300", "sequences.micro_tokens=256"], "not a multiple of sequences.micro_tokens 256"),
        (["optimizer.betas=[2.0, 3.0]"], "optimizer.betas"),
        (["run.seed=99999999999999999999"], "run.seed"),
        (["run.steps=2020-01-01"], "not JSON serializable"),
        (["run.track=['trackio']"], "run.track names 'trackio', which is not installed"),
    ],
)
def test_invalid_settings_create_no_folder(
    changes: list[str], message: str, corpus_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        bertsmith.pretrain(RECIPE, data=str(corpus_folder), out=str(tmp_path / "run"), set=changes, device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_device_raises(corpus_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this machine has no GPU"):
        bertsmith.pretrain(RECIPE, data=corpus_folder, out=tmp_path / "run", device="cuda")


@pytest.mark.parametrize("change", [{"hidden_size": "16"}, {"num_attention_heads": 3}, {"hidden_act": {}}])
def test_invalid_hugging_face_config_raises(change: dict, model_folder: Path, tmp_path: Path) -> None:
    bertsmith.export(bertsmith.load(model_folder), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=r"config\.json"):
        bertsmith.load(tmp_path / "hf")


def copy_folder(folder: Path, name: str, tmp_path: Path) -> Path:
    copy = tmp_path / name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("seal.json"))  # else the seal names the damage
    return copy


def test_damaged_model_folder_raises(model_folder: Path, tmp_path: Path) -> None:
    weights = "model.safetensors"

    truncated = copy_folder(model_folder, "truncated", tmp_path)
    content = (truncated / weights).read_bytes()
    (truncated / weights).write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="is not a complete safetensors file"):
        bertsmith.load(truncated)

    lacking = copy_folder(model_folder, "lacking", tmp_path)
    tensors = load_file(lacking / weights)
    del tensors["encoder.embedding.token_table"]
    save_file(tensors, lacking / weights)
    with pytest.raises(
        InputError, match=r"lacks 1 tensors of this model, the first is 'encoder.embedding.token_table'"
    ):
        bertsmith.load(lacking)

    foreign = copy_folder(model_folder, "foreign", tmp_path)
    save_file({**load_file(model_folder / weights), "surprise": torch.ones(2)}, foreign / weights)
    with pytest.raises(InputError, match="has 1 tensors that this model does not have, the first is 'surprise'"):
        bertsmith.load(foreign)

    mismatching = copy_folder(model_folder, "mismatching", tmp_path)
    data = json.loads((mismatching / "config.json").read_text())
    data["model"]["encoder"]["vocabulary"] = 41
    (mismatching / "config.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"has shape \(40.*the config requires \(41"):
        bertsmith.load(mismatching)

    misspelt = copy_folder(model_folder, "misspelt", tmp_path)
    data["model"]["encoder"]["widht"] = 16
    (misspelt / "config.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="widht is not a known setting; did you mean 'width'"):
        bertsmith.load(misspelt)

    newer = copy_folder(model_folder, "newer", tmp_path)
    (newer / "config.json").write_text(json.dumps({"bertsmith": 99}))
    with pytest.raises(InputError, match="has format 99; this version reads 1"):
        bertsmith.load(newer)

    broken = copy_folder(model_folder, "broken", tmp_path)
    (broken / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        bertsmith.load(broken)


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (tmp_path.joinpath("sprung").write_text, ("x",))

    folder = tmp_path / "pickled"
    folder.mkdir()
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "intermediate_size": 16, **settings}))
    torch.save(Trap(), folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"'pytorch_model.bin', a pickle"):
        bertsmith.load(folder)
    assert not (tmp_path / "sprung").exists()


def test_unsupported_hugging_face_folder_raises(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel, ElectraConfig, ElectraForMultipleChoice

    tiny = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(InputError, match="model_type is 'gpt2', which has no adapter; allowed: albert, bert, "):
        bertsmith.load(tmp_path / "gpt")

    # no Bertsmith head has this form: the rates of its two dropouts differ
    ElectraForMultipleChoice(ElectraConfig(**tiny)).save_pretrained(tmp_path / "classifier")
    with pytest.raises(InputError, match=r"the first is 'classifier.bias'; skip them with ignore=\('classifier',\)"):
        bertsmith.load(tmp_path / "classifier")
    assert not list(bertsmith.load(tmp_path / "classifier", ignore=("classifier", "sequence_summary")).heads)

    BertModel(BertConfig(**tiny)).save_pretrained(tmp_path / "decoder")
    path = tmp_path / "decoder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "add_cross_attention": True}))
    with pytest.raises(InputError, match="add_cross_attention is True; allowed: False"):
        bertsmith.load(tmp_path / "decoder")


def test_export_error_explains_why_a_cut_model_is_not_native(model_folder: Path, tmp_path: Path) -> None:
    small = bertsmith.load(model_folder, subnet=bertsmith.Subnet(width=0.5))
    with pytest.raises(InputError, match="cannot be exported as a Hugging Face bert: its heads do not fill its width"):
        bertsmith.export(small, tmp_path / "out", native="always")
    assert not (tmp_path / "out").exists()


def test_invalid_model_inputs_raise(model_folder: Path) -> None:
    model = bertsmith.load(model_folder)
    with pytest.raises(InputError, match="may have 9 tokens; this model takes at most 8"):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(InputError, match="this model has no tokenizer"):
        model.encode(["a"])
    with pytest.raises(InputError, match="attention_mask has shape"):
        model(torch.zeros(2, 5, dtype=torch.long), torch.ones(1, 5))
    with pytest.raises(InputError, match=r"allowed: \(batch, length\)"):
        model(torch.zeros(5, dtype=torch.long))
    with pytest.raises(InputError, match="no 'replaced_tokens' head"):
        model.head("replaced_tokens")
