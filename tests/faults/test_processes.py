"""Two processes give the same result as one, replicated (DDP) and sharded (FSDP2), for every kind of network."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from choosing import slow_unless
from helpers_training import command, run
from launched import run_case

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.errors import InputError
from bertsmith.training import sharding

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
# two micro-batches per process and step, an odd number of held-out micro-batches
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
COPIES = ["bert", "layer-drop", "gradient-disentangled", "two-optimizers", "random-features"]  # also with DDP
QUICK = ["bert"]


@pytest.fixture(scope="module")
def quick_runs(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(QUICK, recipe, corpus_folder, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def other_runs(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(sorted(CASES.keys() - QUICK), recipe, corpus_folder, tmp_path_factory.mktemp("others"))


@pytest.fixture
def runs(name: str, request: pytest.FixtureRequest) -> Path:
    """Folder with the runs of a case."""
    folder: Path = request.getfixturevalue("quick_runs" if name in QUICK else "other_runs")
    return folder


def run_cases(names: list[str], recipe: Path, corpus_folder: Path, folder: Path) -> Path:
    """Run cases in one process, in two with DDP and in two with FSDP2; return their folder."""
    chosen = {name: CASES[name] for name in names}
    for name, changes in chosen.items():
        run_case({"out": folder / f"{name}-one", "changes": [*SHORT, *changes]}, recipe, corpus_folder)
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
    """Read the log without values that depend on the machine or, with several processes, are estimated (tokens)."""
    excluded = ("seconds", "tokens_per_second", "data_wait", "tokens", "flops")
    lines = (out / "log.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in excluded} for line in lines]


def assert_close(out: Path, expected: Path) -> None:
    """Assert equal logs and weights up to rounding: sums over processes are in another order."""
    assert [set(row) for row in rows(out)] == [set(row) for row in rows(expected)]
    for row, other in zip(rows(out), rows(expected), strict=True):
        assert row == pytest.approx(other, abs=1e-5), row["step"]
    weights, others = (read_tensors(folder / "model.safetensors") for folder in (out, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("name", slow_unless(QUICK, COPIES))
def test_ddp_equals_one_process(name: str, runs: Path) -> None:
    assert json.loads((runs / f"{name}-copies" / "share.json").read_text())["share"] == 1
    assert_close(runs / f"{name}-copies", runs / f"{name}-one")


@pytest.mark.parametrize("name", slow_unless(QUICK, CASES))
def test_fsdp_equals_one_process(name: str, runs: Path) -> None:
    out = runs / f"{name}-sharded"
    assert json.loads((out / "result.json").read_text())["processes"] == 2
    assert json.loads((out / "share.json").read_text())["share"] == pytest.approx(0.5, abs=0.02)
    assert_close(out, runs / f"{name}-one")
    assert bertsmith.load(out).encode(["the smith weighs nothing at all"]).isfinite().all()


@pytest.mark.parametrize("name", slow_unless(QUICK, ["bert", "gradient-disentangled"]))
def test_sharded_run_resumes_in_one_process(name: str, runs: Path, tmp_path: Path) -> None:
    """A sharded run writes the same checkpoint files as one process."""
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
    assert_close(out, runs / f"{name}-one")


@pytest.mark.slow
def test_ddp_command_equals_one_process(recipe: Path, corpus_folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """`accelerate launch -m bertsmith`."""
    out = tmp_path / "run"
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes.yaml"), *command(recipe, corpus_folder, out)[1:]])
    assert json.loads((out / "result.json").read_text())["processes"] == 2
    assert_close(out, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_run_of_which_one_process_is_killed_ends_and_resumes(
    killed: int, recipe: Path, corpus_folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out, output = tmp_path / "run", tmp_path / "output.txt"
    launch = [*LAUNCH, str(CONFIGS / "cpu-two-processes.yaml"), *command(recipe, corpus_folder, out)[1:]]
    slow = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "slow"), *filter(None, sys.path)])}
    with (
        output.open("w") as file,
        subprocess.Popen(launch, env=slow, stdout=file, stderr=file, start_new_session=True) as launcher,
    ):
        while not (out / "checkpoints" / "step-00000005" / "seal.json").exists():
            assert launcher.poll() is None, output.read_text()
            time.sleep(0.05)
        processes = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(processes[killed]), signal.SIGKILL)
        assert launcher.wait(timeout=60) != 0
        assert not Path(f"/proc/{processes[1 - killed]}").exists()
    message = "the connection to another process of the run broke, which has probably ended; checkpoint step-"
    assert message in output.read_text()
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes.yaml"), *command(None, None, out, "--resume")[1:]])
    assert_close(out, uninterrupted)


@pytest.mark.slow
def test_run_of_one_process_resumes_sharded(uninterrupted: Path, tmp_path: Path) -> None:
    """`accelerate launch -m bertsmith --resume`: two FSDP2 processes finish a run that one process started."""
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    (out / "result.json").unlink()
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes-fsdp2.yaml"), *command(None, None, out, "--resume")[1:]])
    assert json.loads((out / "result.json").read_text())["processes"] == 2
    assert_close(out, uninterrupted)


@pytest.fixture(scope="module")
def uninterrupted(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps in one process."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")
    return out


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_valid_for_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    config = load_config_from_file(str(path))
    assert config.num_processes >= 2 * config.num_machines
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "-m", "bertsmith"])
    arguments, _, _ = _validate_launch_command(arguments)
    # accelerate starts several processes for both kinds
    assert arguments.multi_gpu != arguments.use_fsdp
    assert arguments.use_fsdp == ("fsdp2" in path.stem)
    if arguments.use_fsdp:
        assert arguments.fsdp_version == 2
    assert f"configs/accelerate/{path.name}" in path.read_text()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FSDP_VERSION", "1", "fsdp_version: 1; allowed: 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params: true; allowed: false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "fsdp_activation_checkpointing: true; allowed: false"),
    ],
)
def test_unsupported_fsdp_options_raise(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(variable, value)
    assert not sharding.is_requested()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match=message):
        sharding.is_requested()
