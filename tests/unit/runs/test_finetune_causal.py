"""BERT's ablation "LTR & No NSP" from pre-training to answers: a causal encoder, with and without a BiLSTM."""

import json
from pathlib import Path

import pytest
from helpers_finetune import write_task

import bertsmith
from bertsmith.errors import InputError
from bertsmith.recipes import FILES
from bertsmith.runs.finetuning import FinetuneResult
from bertsmith.runtime import load as load_runtime

RECIPE = FILES["bert-left-to-right"]
SMALL = ["sequences.length=32", "sequences.micro_tokens=256", "batch.tokens=512", "run.evaluate_batches=2"]
SMALL += ["run.steps=4", "run.checkpoint_every=4", "run.evaluate_every=4", "run.log_every=2", "schedule.warmup=1"]
SMALL += ["model.overrides={width=16,layers=2,heads=2,max_length=32,dropout=0.1}"]


@pytest.fixture(scope="module")
def pretrained(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("causal") / "run"
    bertsmith.pretrain(RECIPE, data=corpus_folder, out=out, set=SMALL, device="cpu")
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


SETTINGS = [
    "sequences.length=16",
    "batch.examples=16",
    "run.log_every=1",
    "run.epochs=8",
    "optimizer.learning_rate=1e-2",
]


def finetuned(model: Path, data: Path, out: Path, *changes: str) -> FinetuneResult:
    return bertsmith.finetune(str(model), data=data, out=out, set=[*SETTINGS, *changes], device="cpu")


def test_left_to_right_classifier_from_pretraining_to_onnx(pretrained: Path, data: Path, tmp_path: Path) -> None:
    result = finetuned(pretrained, data, tmp_path / "run")
    model = bertsmith.load(tmp_path / "run")
    assert model.config.is_causal
    assert model.config.heads[-1].pooling == "last"
    assert result["score"] > 80  # both labels are equally frequent
    texts = ["the lovely river", "the broken gate and the sad clock"]
    answers = result.predict(texts)
    with pytest.raises(InputError, match=r"cannot be exported as a Hugging Face bert: .*pooling"):
        bertsmith.export(model, tmp_path / "hf", native="always")
    bertsmith.export(model, tmp_path / "onnx", to="onnx", task=tmp_path / "run")
    assert load_runtime(tmp_path / "onnx").predict(texts) == answers


def test_left_to_right_classifier_with_a_bilstm(pretrained: Path, data: Path, tmp_path: Path) -> None:
    recipe = RECIPE.parent / "finetune" / "left-to-right-bilstm.toml"
    result = bertsmith.finetune(
        str(pretrained),
        recipe=recipe,
        data=data,
        out=tmp_path / "run",
        set=[*SETTINGS, "head.recurrent.width=16"],
        device="cpu",
    )
    head = result.model.config.heads[-1]
    assert (head.pooling, head.recurrent.layers, head.recurrent.width) == ("first", 2, 16)
    assert result["score"] > 80


def test_pooling_of_the_first_token_is_refused_before_anything_is_written(
    pretrained: Path, data: Path, tmp_path: Path
) -> None:
    for pooling in ("first", "pooler"):
        with pytest.raises(InputError, match="in a causal encoder the first token sees itself alone"):
            finetuned(pretrained, data, tmp_path / "run", f"head.pooling={pooling}")
    assert not (tmp_path / "run").exists()


def test_answer_spans_of_a_causal_encoder(pretrained: Path, tmp_path: Path) -> None:
    """Nothing is pooled there; start scores see no right context, which is what the ablation shows."""
    words = ["lovely", "broken", "sad", "dark"] * 4
    answers = [{"text": [word], "answer_start": [4]} for word in words]
    rows = [
        {"id": str(index), "question": "what?", "context": f"the {word} river", "answers": answer}
        for index, (word, answer) in enumerate(zip(words, answers, strict=True))
    ]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = bertsmith.finetune(
        str(pretrained),
        data=tmp_path,
        task="spans",
        out=tmp_path / "run",
        set=["sequences.length=24", "batch.examples=8", "run.epochs=1", "run.log_every=1", "task.stride=4"],
        device="cpu",
    )
    assert 0 <= result["f1"] <= 100
