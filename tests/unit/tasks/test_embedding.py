"""Text embedding: columns, targets, answers, and a training run for every loss."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_choices import WORDS, encoding, finetune_small

import bertsmith
from bertsmith.answers.embedding import EmbeddingExample
from bertsmith.errors import InputError
from bertsmith.objectives.embedding import Contrastive, InBatch, Ranking, Similarity, TargetVectors
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.embedding import TextEmbedding
from bertsmith.tasks.predictor import Predictor
from bertsmith.text.rows import table_of

POSITIVES = [{"anchor": f"{a} {b}", "positive": f"{b} {a}"} for a, b in pairwise(WORDS)]
TRIPLES = [{**row, "negative": f"stone {row['anchor']}"} for row in POSITIVES]
GRADED = [
    {"sentence1": f"{a} {b}", "sentence2": f"{a} {c}", "label": 1.0 + 2 * (b == c)}
    for a, b, c in zip(WORDS, WORDS[1:], [*WORDS[1:6], *WORDS], strict=False)
]
BINARY = [{**row, "label": int(row["label"] > 2)} for row in GRADED]  # type: ignore[operator]
TEXTS = [{"text": f"{a} {b}"} for a in WORDS[:4] for b in WORDS[4:8]]
VECTORS = [  # one dimension per word
    {"text": f"{a} {b}", "vector": [float(word in (a, b)) for word in WORDS]} for a in WORDS[:4] for b in WORDS[4:8]
]
ROWS = {
    "positives": POSITIVES,
    "triples": TRIPLES,
    "graded": GRADED,
    "binary": BINARY,
    "texts": TEXTS,
    "vectors": VECTORS,
}


def resolve(rows: list[dict[str, Any]], **settings: Any) -> TextEmbedding:
    table = table_of(rows, "train")
    return TextEmbedding.parse(recognise(table, "embedding", [], settings)).resolve(table)


@pytest.mark.parametrize(
    ("form", "loss", "objective"),
    [
        ("positives", "in_batch", InBatch),
        ("triples", "in_batch", InBatch),
        ("graded", "similarity", Similarity),
        ("binary", "contrastive", Contrastive),
        ("texts", "dropout", InBatch),
        ("vectors", "vector", TargetVectors),
    ],
)
def test_default_loss_depends_on_the_columns(form: str, loss: str, objective: type) -> None:
    task = resolve(ROWS[form])
    assert task.loss == loss
    assert type(task.objective([])) is objective
    assert TextEmbedding.parse(task.plain()) == task


def test_only_anchor_and_vector_columns_are_recognised() -> None:
    assert recognise(table_of(TRIPLES, "train"), None, [], {}) == {
        "kind": "embedding",
        "text": "anchor",
        "pair": "positive",
        "negative": "negative",
    }
    assert recognise(table_of(VECTORS, "train"), None, [], {}) == {
        "kind": "embedding",
        "text": "text",
        "vector": "vector",
    }
    assert [TextEmbedding.find_columns(rows[0]) for rows in (GRADED, BINARY, TEXTS)] == [None] * 3


def test_scores_are_rescaled_to_0_to_1() -> None:
    task = resolve(GRADED)
    assert {example.value for example in task.examples(table_of(GRADED, "train"))} == {0.0, 1.0}
    assert task.examples(table_of([{**GRADED[0], "label": 2}], "dev"))[0].value == 0.5
    wider = resolve(GRADED, lowest=0.0, highest=6.0, loss="ranking", scale=7.0)
    assert wider.examples(table_of([{**GRADED[0], "label": 3}], "dev"))[0].value == 0.5
    assert wider.objective([]) == Ranking(scale=7.0)


def test_targets_identify_equal_texts() -> None:
    task = resolve(TRIPLES)
    examples = [EmbeddingExample(("red", "iron", "gold")), EmbeddingExample(("iron", "rain", "red"))]
    features = task.features(examples, encoding(WORDS))
    assert features.items.tolist() == [0, 3, 6]
    assert list(features.targets) == ["texts"]
    assert np.asarray(features.targets["texts"]).tolist() == [[0, 1, 2], [1, 3, 0]]
    assert features.tokens[1].tolist() == features.tokens[3].tolist()


def test_in_batch_trains_on_similar_pairs_only() -> None:
    task = resolve(BINARY, loss="in_batch")
    examples = task.examples(table_of(BINARY, "train"))
    similar = task.augment(examples)
    assert 0 < len(similar) < len(examples)
    assert {example.value for example in similar} == {1.0}
    dropped = len(examples) - len(similar)
    assert task.notices(examples) == [f"{dropped} of {len(examples)} training pairs are not similar and are left out"]


def test_dropout_pairs_every_text_with_itself_once() -> None:
    task = resolve(GRADED, loss="dropout")
    pairs = task.augment(task.examples(table_of(GRADED, "train")))
    assert all(first == second for first, second in (example.texts for example in pairs))
    assert len({example.texts for example in pairs}) == len(pairs)
    assert all(math.isnan(example.value) for example in pairs)


def test_single_texts_are_evaluated_on_pairs() -> None:
    task = resolve(TEXTS)
    examples = task.examples(table_of(GRADED, "dev"))
    assert [len(example.texts) for example in examples] == [2] * len(GRADED)
    evaluation = task.evaluate(examples, [{"answer": example.value} for example in examples])
    assert evaluation.metric == "spearman"
    assert evaluation.score == pytest.approx(100)


def test_positives_are_evaluated_on_scored_pairs_of_another_file(tmp_path: Path) -> None:
    rows = [{**row, "label": 0.5 * index} for index, row in enumerate(GRADED)]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = finetune_small(POSITIVES, dev=tmp_path / "dev.jsonl", out=tmp_path / "run")
    assert result["metric"] == "spearman"
    answers = [json.loads(line) for line in (tmp_path / "run" / "dev.predictions.jsonl").read_text().splitlines()]
    assert not any("rank" in answer for answer in answers)
    task = Predictor.load(tmp_path / "run").task
    assert [example.value for example in task.examples(table_of(rows, "dev"))] == pytest.approx(np.linspace(0, 1, 11))
    with pytest.raises(InputError, match="rows of dev are given as well"):
        finetune_small(POSITIVES, dev=POSITIVES, settings=["dev=elsewhere"])


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{**BINARY[0], "label": 2}, *BINARY], {}, "has the labels 0, 1, 2; set task.alike"),
        (
            BINARY,
            {"alike": ["yes"]},
            "task.alike is yes, but no row of train has such a label in 'label'; its labels are 0, 1",
        ),
        (
            [*GRADED, {**GRADED[0], "label": "much"}],
            {},
            "train row 11: field 'label' is 'much'; it must be a finite number",
        ),
        ([*BINARY, {**BINARY[0], "label": None}], {}, "train row 11: 'label' is null; a label must be a string"),
        (TEXTS, {"loss": "in_batch"}, "task.loss is 'in_batch', which needs task.pair"),
        (TEXTS, {"loss": "vector"}, "task.loss is 'vector', which needs task.vector"),
        ([{"text": "a", "vector": ["b"]}], {}, "train row 0: field 'vector' is not a vector; allowed: a list of"),
        ([{"text": "a", "vector": "AAAA"}], {}, "field 'vector' is not a vector; allowed: a list of finite numbers"),
        ([{"text": "a", "vector": "AH4="}], {}, "field 'vector' is not a vector; allowed: a list of finite numbers"),
        (POSITIVES, {"loss": "ranking"}, "task.loss is 'ranking', which needs task.label"),
        ([{"words": "a"}], {}, "train has the columns words; select the text with --column text="),
        ([GRADED[-1]], {}, "column 'label' ranges from 1 to 1; at least 2 different numbers"),
    ],
)
def test_invalid_data_or_settings_raise(rows: list[dict[str, Any]], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        resolve(rows, **settings)


def test_invalid_rows_raise() -> None:
    task = resolve(POSITIVES)
    with pytest.raises(InputError, match=r"dev row 0 has no field 'positive'"):
        task.examples(table_of([{"anchor": "a"}], "dev"))
    with pytest.raises(InputError, match=r"dev row 0: field 'positive' is null"):
        task.examples(table_of([{"anchor": "a", "positive": None}], "dev"))
    with pytest.raises(InputError, match=r"dev row 0: field 'vector' has 2 numbers; the first row has"):
        resolve(VECTORS).examples(table_of([{"text": "a", "vector": [1, 2]}], "dev"))


CASES = [(form, None) for form in ROWS] + [("graded", "ranking"), ("binary", "in_batch"), ("graded", "dropout")]
METRICS = {
    "positives": "mrr",
    "triples": "mrr",
    "graded": "spearman",
    "binary": "average_precision",
    "vectors": "cosine",
}


@pytest.mark.parametrize(("form", "loss"), CASES)
def test_training_with_every_loss(form: str, loss: str | None) -> None:
    settings = ["model.overrides.dropout=0.1"] if loss == "dropout" or form == "texts" else []
    settings += [] if loss is None else [f"task.loss={loss}"]
    result = finetune_small(
        ROWS[form], "embedding", ["task.kind=embedding", *settings], epochs=32 if form == "vectors" else 8
    )
    assert result["metric"] == METRICS.get(form, "uniformity")
    # single texts have no target, and pairs of equal texts do not train word order
    assert result["score"] > (0 if form == "texts" or loss == "dropout" else 80)
    texts = ["red iron", "gold", "rain snow wind"]
    vectors = torch.tensor(result.predict(texts))
    torch.testing.assert_close(vectors, result.predictor.model.encode(texts), rtol=0, atol=2e-6)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))
    (cosine,) = result.predict([("red iron", "gold")])
    assert cosine == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)


def test_encode_uses_the_trained_head(tmp_path: Path) -> None:
    head = ["head.pooling=first", "head.features.layers=2", 'head.features.combine="concatenate"']
    finetune_small(TRIPLES, settings=["model.overrides.layers=2", *head], out=tmp_path / "run")
    model = bertsmith.load(tmp_path / "run")
    vectors = model.encode(["red iron", "gold"])
    predictor = Predictor.load(tmp_path / "run")
    assert vectors.shape == (2, 32)
    assert model.encode([]).shape == (0, 32)
    torch.testing.assert_close(vectors, torch.tensor(predictor.predict(["red iron", "gold"])), rtol=0, atol=2e-6)


def test_target_vectors_are_regressed_and_evaluated_on_scored_pairs_too() -> None:
    result = finetune_small(VECTORS, settings=["run.evaluations=1"], dev=GRADED, epochs=8)
    assert result["metric"] == "spearman"
    assert result.predictor.model.encode(["red iron"]).shape == (1, len(WORDS))
