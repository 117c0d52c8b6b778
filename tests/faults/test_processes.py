"""Two processes against one: whole copies (DDP) and shares of the weights (FSDP2), for every kind of network."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from choosing import slow_unless
from helpers_training import command, run
from launched import carry_out

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.errors import InputError
from bertsmith.training import sharding

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
# two micro-batches for each process and step, an odd number of held-out ones
SHORT = ["batch.tokens=1024", "run.steps=4", "run.checkpoint_every=2", "run.evaluate_every=4"]
REPLACED = ['objective={kind="replaced_tokens"}', "generator.width=0.5"]


def network(preset: str, more: str = "") -> list[str]:
    size = f"width=16,layers=2,heads=2,max_length=32,dropout=0.1{more}"
    return [f"model.preset={preset}", f"model.overrides={{{size}}}"]


CASES = {
    "bert": [*network("bert-tiny"), "run.average_last=2"],
    "full-sharing": [*network("electra-small"), *REPLACED, "generator.sharing=full", "objective.optimizers=two"],
    "gradient-disentangled": [
        *network("deberta-v3-small", ",span=16"),
        *REPLACED,
        "generator.sharing=gradient_disentangled",
    ],
    "two-optimizers": [
        *network("electra-small", ",embedding_width=16"),
        *REPLACED,
        "generator.sharing=gradient_disentangled",
        "objective.optimizers=two",
    ],
    "mask-decoder": network("deberta-base", ",span=16"),
    "shared-layers": network("albert-base"),
    "random-features": network("performer-base"),
    "layer-drop": network("bert-tiny", ",layer_drop=0.5"),
}
COPIES = ["bert", "layer-drop", "gradient-disentangled", "two-optimizers", "random-features"]  # with DDP, too
QUICK = ["bert"]


@pytest.fixture(scope="module")
def quick_runs(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_ways(QUICK, recipe, corpus_folder, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def other_runs(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_ways(sorted(CASES.keys() - QUICK), recipe, corpus_folder, tmp_path_factory.mktemp("others"))


@pytest.fixture
def runs(name: str, request: pytest.FixtureRequest) -> Path:
    """The folder with the runs of a case."""
    folder: Path = request.getfixturevalue("quick_runs" if name in QUICK else "other_runs")
    return folder


def all_ways(names: list[str], recipe: Path, corpus_folder: Path, folder: Path) -> Path:
    """The folder with cases run by one process, by two with copies, and by two with shares."""
    chosen = {name: CASES[name] for name in names}
    for name, changes in chosen.items():
        carry_out({"out": folder / f"{name}-one", "changes": [*SHORT, *changes]}, recipe, corpus_folder)
    launched = [
        {"out": str(folder / f"{name}-{kind}"), "changes": [*SHORT, *changes], "is_sharded": kind == "sharded"}
        for kind in ("copies", "sharded")
        for name, changes in chosen.items()
        if kind == "sharded" or name in COPIES
    ]
    cases = folder / "cases.json"
    cases.write_text(json.dumps({"recipe": str(recipe), "corpus": str(corpus_folder), "cases": launched}))
    script = Path(__file__).parent / "launched.py"
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes-fsdp2.yaml"), str(script), str(cases)])
    return folder


def rows(out: Path) -> list[dict]:
    """The log without what depends on the machine and, with several processes, is estimated (the tokens)."""
    unlike = ("seconds", "tokens_per_second", "data_wait", "tokens", "flops")
    lines = (out / "log.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in unlike} for line in lines]


def assert_like(out: Path, expected: Path) -> None:
    """The same log and the same weights to within rounding: sums over processes have another order."""
    assert [set(row) for row in rows(out)] == [set(row) for row in rows(expected)]
    for row, other in zip(rows(out), rows(expected), strict=True):
        assert row == pytest.approx(other, abs=1e-5), row["step"]
    weights, others = (read_tensors(folder / "model.safetensors") for folder in (out, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("name", slow_unless(QUICK, COPIES))
def test_two_copies_equal_one(name: str, runs: Path) -> None:
    assert json.loads((runs / f"{name}-copies" / "share.json").read_text())["share"] == 1
    assert_like(runs / f"{name}-copies", runs / f"{name}-one")


@pytest.mark.parametrize("name", slow_unless(QUICK, CASES))
def test_two_shares_equal_one(name: str, runs: Path) -> None:
    out = runs / f"{name}-sharded"
    assert json.loads((out / "result.json").read_text())["processes"] == 2
    assert json.loads((out / "share.json").read_text())["share"] == pytest.approx(0.5, abs=0.02)
    assert_like(out, runs / f"{name}-one")
    assert bertsmith.load(out).encode(["the smith weighs nothing at all"]).isfinite().all()


@pytest.mark.parametrize("name", slow_unless(QUICK, ["bert", "gradient-disentangled"]))
def test_a_run_of_two_goes_on_with_one(name: str, runs: Path, tmp_path: Path) -> None:
    """From the checkpoint in the middle of a sharded run, whose files are those of one process."""
    files = [
        sorted(path.name for path in (runs / f"{name}-{kind}" / "checkpoints" / "step-00000002").iterdir())
        for kind in ("one", "sharded")
    ]
    assert files[0] == files[1]
    out = tmp_path / "run"
    shutil.copytree(runs / f"{name}-sharded", out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    (out / "result.json").unlink()
    bertsmith.pretrain(out=out, resume=True, device="cpu")
    assert_like(out, runs / f"{name}-one")


@pytest.mark.slow
def test_the_command_with_copies(recipe: Path, corpus_folder: Path, straight: Path, tmp_path: Path) -> None:
    """`accelerate launch -m bertsmith`, from the first step."""
    out = tmp_path / "run"
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes.yaml"), *command(recipe, corpus_folder, out)[1:]])
    assert json.loads((out / "result.json").read_text())["processes"] == 2
    assert_like(out, straight)


@pytest.mark.slow
def test_a_run_of_one_goes_on_with_two(straight: Path, tmp_path: Path) -> None:
    """`accelerate launch -m bertsmith --resume`: what one process began, two with shares bring to its end."""
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    (out / "result.json").unlink()
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes-fsdp2.yaml"), *command(None, None, out, "--resume")[1:]])
    assert json.loads((out / "result.json").read_text())["processes"] == 2
    assert_like(out, straight)


@pytest.fixture(scope="module")
def straight(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps by one process."""
    out = tmp_path_factory.mktemp("straight") / "run"
    bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")
    return out


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_one_of_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    config = load_config_from_file(str(path))
    assert config.num_processes >= 2 * config.num_machines
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "-m", "bertsmith"])
    arguments, _, _ = _validate_launch_command(arguments)
    # both kinds are started by accelerate's launcher of several processes
    assert arguments.multi_gpu != arguments.use_fsdp
    assert arguments.use_fsdp == ("fsdp2" in path.stem)
    if arguments.use_fsdp:
        assert arguments.fsdp_version == 2
    assert f"configs/accelerate/{path.name}" in path.read_text()


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("FSDP_VERSION", "1", "fsdp_version: 1; allowed: 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params: true; allowed: false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "fsdp_activation_checkpointing: true; allowed: false"),
    ],
)
def test_what_is_not_done_is_refused(variable: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(variable, value)
    assert not sharding.is_asked_for()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match=sentence):
        sharding.is_asked_for()
