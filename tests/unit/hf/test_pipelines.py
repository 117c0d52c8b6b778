"""The pipelines of `transformers` on exported folders say what our own models say, in a class of theirs and in ours."""

from pathlib import Path

import pytest
import torch
from cases import tiny_model
from hf_cases import ENCODERS, LABELS, TASK_HEADS, auto_class
from transformers import AutoTokenizer, Trainer, TrainingArguments, pipeline

import bertsmith
from bertsmith.checkpoint.hf.wrapped import standalone_refusal
from bertsmith.checkpoint.hf.writing import plan_hf
from bertsmith.data.layout import SequenceLayout
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer

TEXTS = ["The smith forges seven lanterns.", "My neighbour weighs nothing at all before sunrise."]
SIZE = {"width": 24, "layers": 2, "heads": 2, "max_length": 40, "dropout": 0.0, "init_std": 0.3}
FORMS = {"bert-tiny": "native", "performer-small": "bertsmith"}


@pytest.fixture(scope="module")
def tokenizer(corpus_folder: Path) -> Tokenizer:
    return Tokenizer.load(corpus_folder)


@pytest.fixture(params=FORMS)
def base(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Model:
    model = bertsmith.build(bertsmith.preset(request.param, vocabulary=tokenizer.size, **SIZE), seed=0).eval()
    model.tokenizer = tokenizer
    return model


def exported(model: Model, task: str | None, folder: Path) -> tuple[Model, Path]:
    """The model with the head of a task, and its folder."""
    if task is not None:
        tokenizer = model.tokenizer
        model = with_task_head(model, TASK_HEADS[task](model.config), seed=0).eval()
        model.tokenizer = tokenizer
    said = bertsmith.export(model, folder)
    assert said is not None
    is_native = "opens without Bertsmith" in said
    assert is_native == (model.config.family == "bert")
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert ("import bertsmith.hf" in card) == (not is_native)
    assert said[1:] in card
    return model, folder


def shares(model: Model, text: str) -> torch.Tensor:
    ids = torch.from_numpy(model.require_tokenizer().encode([text])["input_ids"])
    with torch.inference_mode():
        return model.outputs(ids, SequenceLayout.full(*ids.shape))[0].softmax(-1)


def test_text_classification(base: Model, tmp_path: Path) -> None:
    model, folder = exported(base, "classification", tmp_path / "hf")
    for text, found in zip(TEXTS, pipeline("text-classification", str(folder), top_k=None)(TEXTS), strict=True):
        expected = shares(model, text)
        assert {answer["label"] for answer in found} == set(LABELS)
        for answer in found:
            assert answer["score"] == pytest.approx(expected[LABELS.index(answer["label"])].item(), abs=1e-5)


def test_token_classification(base: Model, tmp_path: Path) -> None:
    model, folder = exported(base, "tagging", tmp_path / "hf")
    found = pipeline("token-classification", str(folder), aggregation_strategy="none")(TEXTS[0])
    best = shares(model, TEXTS[0])[1:-1]
    assert [answer["entity"] for answer in found] == [LABELS[number] for number in best.argmax(-1).tolist()]
    assert [answer["score"] for answer in found] == pytest.approx(best.amax(-1).tolist(), abs=1e-5)
    assert TEXTS[0][found[1]["start"] : found[1]["end"]].lower() == found[1]["word"].removeprefix("##").lower()


def test_fill_mask_and_features(base: Model, tmp_path: Path) -> None:
    model, folder = exported(base, None, tmp_path / "hf")
    text = f"The smith forges {model.require_tokenizer().tokens([model.require_tokenizer().mask])[0]} lanterns."
    found = pipeline("fill-mask", str(folder), top_k=3)(text)
    for answer, (piece, share) in zip(found, model.fill_mask(text, top_k=3)[0], strict=True):
        assert AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(answer["token"]) == piece
        assert answer["score"] == pytest.approx(share, abs=1e-5)
    features = torch.tensor(pipeline("feature-extraction", str(folder))(TEXTS[1]))
    ids = torch.from_numpy(model.require_tokenizer().encode([TEXTS[1]])["input_ids"])
    torch.testing.assert_close(features, model(ids).detach(), rtol=0, atol=1e-4)


def test_tokenizer_gives_the_inputs_of_the_model(base: Model, tmp_path: Path) -> None:
    model, folder = exported(base, "tagging", tmp_path / "hf")
    made = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    assert set(made) == {"input_ids", "token_type_ids", "attention_mask"}
    expected = model.require_tokenizer().encode(TEXTS)
    assert all(made[name].tolist() == array.tolist() for name, array in expected.items())


@pytest.mark.slow  # every family
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("task", ["classification", "tagging", "spans"])
def test_every_family_in_trainer_and_pipeline(name: str, task: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In a class of theirs, else in the class of the folder's own file."""
    base = tiny_model(name, layers=2).config
    encoder = base.encoder.changed(vocabulary=tokenizer.size, embedding=base.encoder.embedding.changed(max_length=40))
    model = bertsmith.build(base.changed(encoder=encoder, heads=()), seed=0)
    model.tokenizer = tokenizer
    model = with_task_head(model, TASK_HEADS[task](model.config), seed=0).float().eval()
    plan = plan_hf(model)
    plan.write(tmp_path)
    options = {} if plan.form == "native" or standalone_refusal(model.config) else {"trust_remote_code": True}
    there = auto_class(plan).from_pretrained(tmp_path, **options)
    labels = {"classification": {"labels": 1}, "spans": {"start_positions": 1, "end_positions": 2}}
    rows = [AutoTokenizer.from_pretrained(tmp_path)(text, padding="max_length", max_length=20) for text in TEXTS * 2]
    rows = [{**row, **labels.get(task, {"labels": [1] * 20})} for row in rows]
    settings = TrainingArguments(str(tmp_path / "run"), max_steps=1, use_cpu=True, report_to=[], save_strategy="no")
    trained = Trainer(there, settings, train_dataset=rows).train()
    assert trained.training_loss > 0
    if task == "classification":
        (found,) = pipeline("text-classification", str(tmp_path), top_k=None, **options)([TEXTS[0]])
        expected = shares(model, TEXTS[0])
        for answer in found:
            assert answer["score"] == pytest.approx(expected[LABELS.index(answer["label"])].item(), abs=1e-5)
