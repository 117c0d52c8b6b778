"""A killed corpus build can be resumed, and damaged or incompatible folders raise."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_training import RECIPE
from killing import Killed, kill_at

from bertsmith.cli import main
from bertsmith.data import build_corpus as build_corpus_module
from bertsmith.data.build_corpus import build_corpus
from bertsmith.data.shards import JOURNAL, MANIFEST, TokenCorpus
from bertsmith.errors import InputError
from bertsmith.runs.corpus import corpus as corpus_command
from bertsmith.runs.output import claim
from bertsmith.runs.tokenizer import tokenizer as tokenizer_command
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer

SENTENCES = [
    "The ferry leaves the harbour at noon.",
    "Nobody saw the grey cat on the roof.",
    "Rain fell on the market, and the traders packed their tents!",
    "Where does the old road end?",
]
SETTINGS = {"shard_megabytes": 0.02, "held_out": 0.05}
BUILD = """
import sys
from pathlib import Path
from bertsmith.data.build_corpus import build_corpus
from bertsmith.text.tokenizer import Tokenizer
folder = Path(sys.argv[1])
build_corpus([folder / "data.jsonl"], Tokenizer.load(folder), Path(sys.argv[2]), workers=2, **{settings!r})
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = (" ".join([f"Entry {number}.", *SENTENCES[number % 4 :]]) for number in range(20_000))
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    learn_tokenizer(SENTENCES, "wordpiece", 120, minimum_frequency=1, progress=False).save(folder)
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Folder of an uninterrupted build with one worker."""
    out = tmp_path_factory.mktemp("whole") / "out"
    build_corpus([data / "data.jsonl"], Tokenizer.load(data), out, workers=1, **SETTINGS)
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def start(data: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", BUILD.format(settings=SETTINGS), str(data), str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, env=environment)


@pytest.mark.parametrize("blocks", [1, 12])
def test_killed_build_resumes_to_the_same_folder(data, whole, tmp_path, blocks):
    out = tmp_path / "out"
    process = start(data, out)
    limit = time.monotonic() + 60
    while time.monotonic() < limit and process.poll() is None:
        if (out / JOURNAL).is_file() and (out / JOURNAL).read_bytes().count(b"\n") > blocks:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / MANIFEST).exists(), "the build ended before it could be killed"
    # only shards in the journal count as finished; its last line may be incomplete
    entries = [json.loads(line) for line in (out / JOURNAL).read_text().split("\n")[1:-1]]
    assert len(entries) >= blocks
    files = [out / entry["train"]["file"] for entry in entries]
    finished = {file: file.stat().st_mtime_ns for file in files}
    with pytest.raises(InputError, match="is unfinished"):
        TokenCorpus(out)
    # leftovers of a kill during a write
    with (out / JOURNAL).open("a") as journal:
        journal.write('{"block": 3, "tra')
    (out / ".train-000099.shard.1234").write_bytes(b"half")
    build_corpus([data / "data.jsonl"], Tokenizer.load(data), out, workers=2, **SETTINGS)
    assert content(out) == content(whole)
    assert {file: file.stat().st_mtime_ns for file in files} == finished, "a finished shard was written again"


def test_number_of_workers_does_not_matter(data, whole, tmp_path):
    build_corpus([data / "data.jsonl"], Tokenizer.load(data), tmp_path / "out", workers=3, **SETTINGS)
    assert content(tmp_path / "out") == content(whole)


def test_finished_folder_is_returned_unchanged(data, whole):
    before = content(whole)
    manifest = build_corpus([data / "data.jsonl"], Tokenizer.load(data), whole, workers=1, **SETTINGS)
    assert manifest.splits["train"].documents + manifest.splits["held_out"].documents == 20_000
    assert content(whole) == before


def test_resuming_with_another_tokenizer_or_setting_raises(data, whole, tmp_path):
    other = learn_tokenizer(SENTENCES, "wordpiece", 90, progress=False)
    with pytest.raises(InputError, match="contains a corpus of another tokenizer_hash"):
        build_corpus([data / "data.jsonl"], other, whole, workers=1, **SETTINGS)
    out = tmp_path / "out"
    out.mkdir()
    manifest = json.loads((whole / MANIFEST).read_text())
    (out / JOURNAL).write_text(json.dumps(manifest) + "\n")
    with pytest.raises(InputError, match=r"another seed \(0 there, 5 here\)"):
        build_corpus([data / "data.jsonl"], Tokenizer.load(data), out, seed=5, **SETTINGS)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_damaged_shard_raises(whole, tmp_path, split):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shard = sorted(out.glob(f"{split}-*.shard"))[1]
    healthy = shard.read_bytes()
    shard.write_bytes(healthy[:-1] + bytes([healthy[-1] ^ 1]))
    with pytest.raises(InputError, match=rf"{shard.name}' is damaged"):
        TokenCorpus(out, split).verify()
    shard.write_bytes(healthy[:-2])
    with pytest.raises(InputError, match=rf"{shard.name}' has {len(healthy) - 2} bytes instead of {len(healthy)}"):
        TokenCorpus(out, split)
    shard.unlink()
    with pytest.raises(InputError, match=rf"{shard.name}' is missing"):
        TokenCorpus(out, split)


def shards(folder: Path, split: str) -> list[Path]:
    return sorted(folder.glob(f"{split}-*.shard"))


def rewrite_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


FAULTS = {
    "-000001.shard' is missing; build the corpus again": lambda folder: shards(folder, "train")[1].unlink(),
    "held_out-000000.shard' is missing": lambda folder: shards(folder, "held_out")[0].unlink(),
    "bytes instead of": lambda folder: os.truncate(shards(folder, "train")[-1], 100),
    "contains no corpus": lambda folder: (folder / MANIFEST).unlink(),
    "is unfinished; run the same": lambda folder: (folder / MANIFEST).rename(folder / JOURNAL),
    "is not valid JSON": lambda folder: os.truncate(folder / MANIFEST, 300),
    "has format 7; this version reads format 2": lambda folder: rewrite_manifest(folder, format=7),
    "tokenizer.json is not the tokenizer the shards were made with": lambda folder: learn_tokenizer(
        SENTENCES, "wordpiece", 90, progress=False
    ).save(folder),
    "tokenizer.json": lambda folder: (folder / "tokenizer.json").unlink(),
    "does not exist": shutil.rmtree,
}


@pytest.mark.parametrize("message", FAULTS)
def test_training_on_a_damaged_corpus_raises_and_writes_nothing(corpus_folder, tmp_path, capsys, message):
    folder, out, recipe = tmp_path / "corpus", tmp_path / "out", tmp_path / "recipe.toml"
    shutil.copytree(corpus_folder, folder)
    recipe.write_text(RECIPE)
    FAULTS[message](folder)
    with pytest.raises(SystemExit) as exit_info:
        main(["pretrain", str(recipe), "--data", str(folder), "--out", str(out), "--device", "cpu"])
    output = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert output.startswith("bertsmith: ")
    assert message in output
    assert len(output.strip().splitlines()) == 1
    assert not out.exists()


def test_invalid_row_is_reported_and_stops_all_workers(data, tmp_path, monkeypatch):
    started = []
    popen = subprocess.Popen

    def recorded_popen(*arguments, **settings):
        started.append(popen(*arguments, **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded_popen)
    file = tmp_path / "data.jsonl"
    file.write_text((data / "data.jsonl").read_text() + "{broken\n")
    with pytest.raises(InputError, match="line 20001 is not valid JSON"):
        build_corpus([file], Tokenizer.load(data), tmp_path / "out", workers=2, **SETTINGS)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_dead_worker_is_reported(data, tmp_path, monkeypatch):
    monkeypatch.setattr("bertsmith.data.executor._START", "import os; os._exit(9)")
    with pytest.raises(InputError, match="ended with exit code 9; run the same command again"):
        build_corpus([data / "data.jsonl"], Tokenizer.load(data), tmp_path / "out", workers=2, **SETTINGS)


def test_workers_never_import_torch():
    code = "import sys, bertsmith.data.build_corpus, bertsmith.text.learn; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_commands_write_results_and_protect_folders(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(SENTENCES))
    vocabulary, out = tmp_path / "tokenizer", tmp_path / "corpus"
    tokenizer_command([text], out=vocabulary, vocabulary=120)
    assert json.loads((vocabulary / "result.json").read_text())["documents"] == 4
    metrics = corpus_command([text], tokenizer=vocabulary, out=out, workers=1)
    assert json.loads((out / "result.json").read_text()) == metrics.to_json()
    assert metrics["documents"] == metrics["sentences"] == 4
    assert metrics["held_out_documents"] == 1
    assert metrics["peak_memory_mb"] > 10
    assert f"{metrics['tokens']} tokens" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"not empty.*--force"):
        corpus_command([text], tokenizer=vocabulary, out=out, workers=1)
    again = corpus_command([text], tokenizer=vocabulary, out=out, workers=1, force=True)
    assert again["tokens"] == metrics["tokens"]
    (out / "result.json").unlink()  # killed after the manifest
    assert corpus_command([text], tokenizer=vocabulary, out=out, workers=1)["tokens"] == metrics["tokens"]
    with pytest.raises(InputError, match="was not made by a bertsmith command"):
        claim(tmp_path, force=True)
    assert text.exists()


def test_edited_source_of_equal_size_is_another_corpus(data, whole, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text((data / "data.jsonl").read_text().replace("grey cat", "grey dog", 1))
    assert file.stat().st_size == (data / "data.jsonl").stat().st_size
    with pytest.raises(InputError, match="contains a corpus of other files or a changed file"):
        build_corpus([file], Tokenizer.load(data), whole, workers=1, **SETTINGS)


def test_damaged_journal_lines_and_shards_are_built_again(corpus_folder, texts, tmp_path, monkeypatch):
    settings = {"held_out": 0.1, "workers": 1, "shard_megabytes": 0.01}
    files, tokenizer, out = [texts / "stories.txt"], Tokenizer.load(corpus_folder), tmp_path / "out"

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.data.build_corpus._manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            build_corpus(files, tokenizer, out, **settings)
    header, first, second, *rest = (out / JOURNAL).read_text().splitlines()
    first = json.dumps({**json.loads(first), "train": {**json.loads(first)["train"], "tokens": 1}})
    (out / JOURNAL).write_text("\n".join([header, first, "[" * 100_000, "{}", second, *rest]) + "\n")
    shard = out / json.loads(second)["train"]["file"]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    build_corpus(files, tokenizer, out, **settings)
    assert content(out) == content(corpus_folder)


def test_corpus_killed_after_its_manifest_is_finished_by_the_same_call(corpus_folder, texts, tmp_path, monkeypatch):
    arguments = [texts / "stories.txt"], Tokenizer.load(corpus_folder), tmp_path / "out"
    settings = {"held_out": 0.1, "workers": 1, "shard_megabytes": 0.01}
    with monkeypatch.context() as patch:
        kill_at(patch, build_corpus_module, "_remove_leftovers", after=1, before_it=True)
        with pytest.raises(Killed):
            build_corpus(*arguments, **settings)
    assert (tmp_path / "out" / JOURNAL).exists()
    build_corpus(*arguments, **settings)
    assert content(tmp_path / "out") == content(corpus_folder)


def test_command_killed_before_its_journal_can_be_repeated(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(SENTENCES))
    tokenizer_command([text], out=tmp_path / "tokenizer", vocabulary=120)
    out = tmp_path / "c[/x]"  # also: a name that looks like markup
    claim(out, force=False)
    assert corpus_command([text], tokenizer=tmp_path / "tokenizer", out=out, workers=1)["documents"] == 4


PARENT = """
import subprocess, sys, time
child = "import time; from bertsmith.data.parent import exit_with_parent; exit_with_parent(); print(1, flush=True)"
process = subprocess.Popen([sys.executable, "-c", child + "; time.sleep(60)"], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(60)
"""


FORK_SERVER = """
import multiprocessing, time
from pathlib import Path
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["bertsmith.data.fork_server"])
process = context.Process(target=time.sleep, args=(60,), daemon=True)
process.start()
print(process.pid, flush=True)
time.sleep(60)
"""


def is_running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("script", [PARENT, FORK_SERVER])
def test_worker_ends_with_its_parent(script):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(worker)
