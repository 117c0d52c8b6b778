"""`modeling_bertsmith.py`, which exported folders contain: transformers opens them without our package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import HEADS, MIXER_CASES, tiny_model
from hf_cases import inputs, opened_alone, ours, task_model, theirs
from torch import Tensor

import bertsmith
from bertsmith.checkpoint.hf.wrapped import standalone_refusal
from bertsmith.checkpoint.hf.writing import HfExport, plan_hf
from bertsmith.data.layout import SequenceLayout
from bertsmith.hf import modeling_bertsmith
from bertsmith.layers.positions import RelativeConfig
from bertsmith.layers.quantised import QuantisationConfig
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import MaskDecoderConfig, MaskedTokensConfig
from bertsmith.models.heads.base import FeaturesConfig, RecurrentConfig
from bertsmith.models.heads.task import ClassifierConfig, DenseConfig, EmbedderConfig, HiddenLayerConfig, TaggerConfig
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer

ALONE = """
import json, sys
sys.modules["bertsmith"] = None  # importing it fails from here on
import torch, transformers
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, pipeline

transformers.logging.set_verbosity_error()
classifier, embedder, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options = {"trust_remote_code": True}
found = pipeline("text-classification", classifier, top_k=None, **options)(texts)
model = AutoModelForSequenceClassification.from_pretrained(classifier, **options)
tokenizer = AutoTokenizer.from_pretrained(classifier, **options)
rows = [{**tokenizer(text), "labels": index % 2} for index, text in enumerate(texts)]
before = model.heads["classifier"].score.weight.detach().clone()
settings = TrainingArguments(
    output_dir=classifier + "-trained", max_steps=1, report_to="none", use_cpu=True, learning_rate=0.1,
    per_device_train_batch_size=2, disable_tqdm=True,
)
trainer = Trainer(model, settings, train_dataset=rows, processing_class=tokenizer)
trainer.train()
moved = float((model.heads["classifier"].score.weight.detach() - before).abs().max())
trainer.save_model(classifier + "-saved")
vectors = SentenceTransformer(embedder, device="cpu", trust_remote_code=True).encode(texts).tolist()
print(json.dumps([found, moved, vectors, [name for name in sys.modules if name.startswith("bertsmith")]]))
"""
"""A program that opens two exported folders where our package cannot be imported."""
TEXTS = ["The smith forges seven lanterns.", "My neighbour weighs nothing at all before sunrise."]


def written(model: Model, folder: Path) -> HfExport:
    plan = plan_hf(model, native="never")
    folder.mkdir()
    plan.write(folder)
    return plan


def test_pipeline_trainer_and_sentence_transformers_without_bertsmith(tmp_path: Path, corpus_folder: Path) -> None:
    tokenizer = Tokenizer.load(corpus_folder)
    sizes = {"width": 24, "layers": 2, "heads": 2, "max_length": 40, "embedding_width": 12, "init_std": 0.3}
    config = bertsmith.preset("disentangled-small", vocabulary=tokenizer.size, **sizes)
    models = {}
    for name, head in {"classifier": ClassifierConfig(labels=("no", "yes")), "embedder": EmbedderConfig()}.items():
        base = bertsmith.build(config, seed=0)
        base.tokenizer = tokenizer
        models[name] = with_task_head(base, head, seed=0).eval()
        remark = str(bertsmith.export(models[name], tmp_path / name))
        assert "which transformers opens with trust_remote_code=True, or after `import bertsmith.hf`" in remark
        assert "trust_remote_code=True" in (tmp_path / name / "README.md").read_text(encoding="utf-8")
    folders = [str(tmp_path / name) for name in models]
    program = [sys.executable, "-W", "ignore", "-c", ALONE, *folders, json.dumps(TEXTS)]
    environment = {"HF_HOME": str(tmp_path / "cache"), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found, moved, vectors, imported = json.loads(done.stdout.splitlines()[-1])
    assert imported == ["bertsmith"]
    assert moved > 0
    torch.testing.assert_close(torch.tensor(vectors), models["embedder"].encode(TEXTS), rtol=0, atol=1e-5)
    for text, answers in zip(TEXTS, found, strict=True):
        ids = torch.from_numpy(tokenizer.encode([text])["input_ids"])
        with torch.inference_mode():
            shares = models["classifier"].outputs(ids, SequenceLayout.full(*ids.shape))[0].softmax(-1)
        assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(
            dict(zip(("no", "yes"), shares.tolist(), strict=True)), abs=1e-5
        )
    assert (tmp_path / "classifier-saved" / "modeling_bertsmith.py").is_file()
    assert bertsmith.load(tmp_path / "classifier-saved").config.heads[-1].labels == ("no", "yes")


@pytest.mark.parametrize("name", [name for name, config in MIXER_CASES.items() if config.kind != "multi_linear"])
def test_every_mixer(name: str, tmp_path: Path) -> None:
    mixer, base = MIXER_CASES[name], tiny_model("bert-tiny", layers=2).config
    relative = RelativeConfig(span=6, max_distance=9, heads=HEADS if mixer.reads_biases else None)
    layers = tuple(layer.changed(mixer=mixer) for layer in base.encoder.layers)
    encoder = base.encoder.changed(layers=layers, relative=relative)
    config = base.changed(encoder=encoder, heads=(TaggerConfig(labels=("a", "b")),))
    if getattr(mixer, "sparse", None) is not None:
        assert standalone_refusal(config) == "sparse attention"
        return
    model = build(config, seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    given, plan = inputs("tagging"), written(model, tmp_path / "hf")
    alone = opened_alone(plan, tmp_path / "hf")
    torch.testing.assert_close(theirs(alone, "tagging", given), ours(model, given), rtol=0, atol=1e-6)


_MIXED = FeaturesConfig(layers=2, combine="weighted")
HEAD_CASES = {
    "several layers": ClassifierConfig(labels=("a", "b"), pooling="mean", features=_MIXED),
    "concatenated layers and a BiLSTM": TaggerConfig(
        labels=("a", "b"), features=FeaturesConfig(layers=2, combine="concatenate"), recurrent=RecurrentConfig(width=8)
    ),
    "the embedding": ClassifierConfig(labels=("a", "b"), pooling="max", features=FeaturesConfig(layers=0)),
    "a hidden layer": ClassifierConfig(
        labels=("a", "b"), pooling="last", hidden=HiddenLayerConfig(activation="silu", has_bias=False)
    ),
    "dense layers": EmbedderConfig(projection=7, dense=(DenseConfig(width=5, activation="tanh"),)),
    "weighted mean": EmbedderConfig(pooling="weighted_mean", is_normalised=False),
    "mean over the root": EmbedderConfig(pooling="mean_sqrt"),
}


@pytest.mark.parametrize("name", HEAD_CASES)
def test_heads(name: str, tmp_path: Path) -> None:
    head = HEAD_CASES[name]
    task = {"tagger": "tagging", "classifier": "classification", "embedder": "embedding"}[head.kind]
    model = with_task_head(tiny_model("bert-tiny pre-norm", layers=2), head, seed=0).double().eval()
    given, plan = inputs(task), written(model, tmp_path / "hf")
    alone = opened_alone(plan, tmp_path / "hf")
    torch.testing.assert_close(theirs(alone, task, given), ours(model, given), rtol=0, atol=1e-6)


def mask_scores(model: Model, given: dict[str, Tensor]) -> Tensor:
    layout, positions = SequenceLayout.rows(*given.values()), torch.tensor([2, 9, 20])
    states = model.run(EncoderInputs(given["input_ids"], layout), Want(masked_positions=positions)).masked_states
    return model.head("masked_tokens")(states, model.token_table)


@pytest.mark.parametrize(
    "name", ["bert-tiny", "deberta-base", "deberta-v2-xlarge", "disentangled-small", "albert-base"]
)
def test_fill_mask(name: str, tmp_path: Path) -> None:
    model, given = tiny_model(name, layers=2), inputs("")
    if name == "disentangled-small":  # pre-norm, which normalises the memory of the mask decoder
        heads = (MaskDecoderConfig(max_length=16), MaskedTokensConfig())
        model = build(model.config.changed(heads=heads), seed=0).double().eval()
    alone = opened_alone(written(model, tmp_path / "hf"), tmp_path / "hf")
    assert type(alone).__name__ == "BertsmithForMaskedLM"
    logits = alone(**given).logits.flatten(0, 1)[[2, 9, 20]]
    torch.testing.assert_close(logits, mask_scores(model, given), rtol=0, atol=1e-6)


def test_replaced_tokens_and_hidden_states(tmp_path: Path) -> None:
    model, given = tiny_model("convbert-small", layers=2), inputs("")
    alone = opened_alone(written(model, tmp_path / "hf"), tmp_path / "hf")
    output = alone(**given, output_hidden_states=True)
    real = given["attention_mask"].bool()
    torch.testing.assert_close(
        output.logits[real], model.head("replaced_tokens")(model(**given))[real], rtol=0, atol=1e-6
    )
    assert len(output.hidden_states) == 3
    torch.testing.assert_close(output.hidden_states[-1][real], model(**given)[real], rtol=0, atol=1e-6)


def test_other_networks_name_the_package(tmp_path: Path) -> None:
    config = task_model("bert-tiny", "classification").config.changed(quantisation=QuantisationConfig())
    plan = written(build(config, seed=0), tmp_path / "hf")
    assert "opens after `import bertsmith.hf`, because" in plan.remark
    with pytest.raises(ImportError, match=r"has simulated quantisation, which .* pip install 'bertsmith\[hf\]'"):
        modeling_bertsmith.BertsmithForSequenceClassification.from_pretrained(tmp_path / "hf")


def test_fresh_head_is_trained_and_saved(tmp_path: Path) -> None:
    model = tiny_model("performer-small", layers=1)
    written(model, tmp_path / "hf")
    kind = modeling_bertsmith.BertsmithForTokenClassification
    alone = kind.from_pretrained(tmp_path / "hf", id2label={0: "O", 1: "B", 2: "I"})
    loss = alone(**inputs(""), labels=inputs("")["input_ids"] % 3).loss
    loss.backward()
    assert alone.heads["tagger"].score.weight.grad.abs().sum() > 0
    alone.save_pretrained(tmp_path / "saved")
    back = bertsmith.load(tmp_path / "saved")
    assert back.config.heads[-1].labels == ("O", "B", "I")
    assert torch.equal(back.heads["tagger"].score.weight, alone.heads["tagger"].score.weight)


def test_file_needs_nothing_of_ours() -> None:
    source = Path(modeling_bertsmith.__file__).read_text(encoding="utf-8")
    assert "from bertsmith" not in source
    assert "\nimport bertsmith" not in source
