"""Shared fixtures: fixed seeds, deterministic algorithms, and uninitialised memory filled with NaN."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

# before PyTorch is imported: one thread is faster for networks this small
os.environ.setdefault("OMP_NUM_THREADS", "1")
# before the first matrix product on a GPU: cuBLAS is deterministic only with a fixed workspace
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# before Triton is imported: without a GPU, its interpreter runs the kernels
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small synthetic corpus: short stories from a few words."""
    folder = tmp_path_factory.mktemp("texts")
    subjects = ["the smith", "a traveller", "the old clerk", "my neighbour", "the captain"]
    verbs = ["forges", "carries", "repairs", "forgets", "describes", "weighs"]
    objects = ["an iron gate", "the letter", "seven lanterns", "a broken clock", "the heavy anvil", "nothing at all"]
    settings = ["by the river", "in the cold workshop", "near the harbour", "before sunrise"]
    stories = []
    for index in range(120):
        lines = []
        for line in range(3 + index % 9):
            k = index * 7 + line * 13
            words = [subjects[k % 5], verbs[(k // 2) % 6], objects[(k // 3) % 6], settings[(k // 5) % 4]]
            lines.append(" ".join(words).capitalize() + ".")
        stories.append(" ".join(lines))
    (folder / "stories.txt").write_text("\n\n".join(stories), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus_folder(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small corpus, tokenised."""
    from bertsmith.data.build_corpus import build_corpus
    from bertsmith.text.learn import learn_tokenizer
    from bertsmith.text.readers import find_files, read_documents

    files = find_files([texts])
    tokenizer = learn_tokenizer(read_documents(files), "wordpiece", 160, progress=False)
    out = tmp_path_factory.mktemp("corpus") / "corpus"
    build_corpus(files, tokenizer, out, held_out=0.1, workers=1, shard_megabytes=0.01)
    return out


@pytest.fixture(scope="session")
def pairs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small translation task: phrases of two to seven words, and the same words in reverse order."""
    folder = tmp_path_factory.mktemp("pairs")
    words = ["the", "smith", "weighs", "seven", "old", "lanterns", "near", "a", "cold", "river"]
    for split, start, end in (("train", 0, 160), ("dev", 160, 180), ("test", 180, 190)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for index in range(start, end):
                chosen = [words[(index * 7 + position * (3 + index // 10)) % 10] for position in range(2 + index % 6)]
                file.write(json.dumps({"forth": " ".join(chosen), "back": " ".join(chosen[::-1])}) + "\n")
    return folder


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported objects from garbage collection, because every trainer run ends with a full collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
