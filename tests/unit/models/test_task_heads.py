"""Task heads: the hidden states they read, the BiLSTM, and a frozen encoder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith.data.examples import TaskBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import NormConfig
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.base import FeaturesConfig, LayerFeatures, RecurrentConfig
from bertsmith.models.heads.task import (
    ClassifierConfig,
    DenseConfig,
    EmbedderConfig,
    HiddenLayerConfig,
    SpansConfig,
    TaggerConfig,
)
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.objectives.supervised import Tags
from bertsmith.tasks.default_heads import classifier_head, spans_head, tagger_head
from bertsmith.training.finetuning import HeadChoice
from bertsmith.training.trainer import Trainer

LENGTHS = [5, 9, 1, 3]
LAYERS = 3
CHOICES: dict[str, FeaturesConfig] = {
    "last": FeaturesConfig(),
    "second to last": FeaturesConfig(skip=1),
    "embedding": FeaturesConfig(layers=0),
    "sum of two": FeaturesConfig(layers=2),
    "sum of two below the last": FeaturesConfig(layers=2, skip=1),
    "all side by side": FeaturesConfig(layers=LAYERS, combine="concatenate"),
    "weighted": FeaturesConfig(layers=LAYERS, combine="weighted"),
}
RECURRENT = {"linear": None, "BiLSTM": RecurrentConfig(layers=2, width=12)}


def _model(head: HeadConfig, name: str = "bert-tiny", **overrides: Any) -> Model:
    sizes = {"layers": LAYERS, "width": 16, "heads": 2, "vocabulary": 40, "init_std": 0.3, "dropout": 0.1}
    return with_task_head(build(preset(name, **{**sizes, **overrides}), seed=0), head, seed=1).eval()


def _tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, 40, (length,), generator=generator) for length in LENGTHS]


def _packed(rows: list[Tensor], empty: int = 0) -> tuple[Tensor, SequenceLayout]:
    lengths = torch.tensor([0, *map(len, rows), *[0] * empty])
    return torch.cat(rows), SequenceLayout.packed(lengths.cumsum(0).int(), max(map(len, rows)))


def _padded(rows: list[Tensor]) -> tuple[Tensor, SequenceLayout]:
    lengths = torch.tensor(list(map(len, rows)))
    is_token = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.full(is_token.shape, 7)
    tokens[is_token] = torch.cat(rows)
    return tokens, SequenceLayout.padded(is_token)


@pytest.mark.parametrize("recurrent", RECURRENT)
@pytest.mark.parametrize("choice", CHOICES)
def test_outputs_are_the_same_packed_padded_and_alone(choice: str, recurrent: str) -> None:
    rows = _tokens()
    heads = {"features": CHOICES[choice], "recurrent": RECURRENT[recurrent]}
    normed = HiddenLayerConfig(norm=NormConfig(epsilon=1e-5), has_bias=False, drops_input=False)
    for head in (
        TaggerConfig(labels=("a", "b", "c"), **heads),
        SpansConfig(**heads),
        SpansConfig(hidden=normed, **heads),
    ):
        model = _model(head)
        packed = model.outputs(*_packed(rows))
        tokens, layout = _padded(rows)
        assert layout.is_token is not None
        assert torch.allclose(model.outputs(tokens, layout)[layout.is_token], packed, atol=1e-5)
        alone = [model.outputs(row[None], SequenceLayout.full(1, len(row)))[0] for row in rows]
        assert torch.allclose(torch.cat(alone), packed, atol=1e-5)
    for pooled in (
        ClassifierConfig(labels=("a", "b"), pooling="mean", **heads),
        ClassifierConfig(labels=("a", "b"), pooling="mean", hidden=normed, **heads),
        EmbedderConfig(**heads),
        EmbedderConfig(projection=5, **heads),
        EmbedderConfig(pooling="max", **heads),
        EmbedderConfig(pooling="mean_sqrt", is_normalised=False, **heads),
        EmbedderConfig(pooling="weighted_mean", dense=(DenseConfig(width=5, activation="tanh"),), **heads),
    ):
        model = _model(pooled)
        packed = model.outputs(*_packed(rows))
        assert torch.allclose(model.outputs(*_padded(rows)), packed, atol=1e-5)
        alone = [model.outputs(row[None], SequenceLayout.full(1, len(row))) for row in rows]
        assert torch.allclose(torch.cat(alone), packed, atol=1e-5)


def test_projection_maps_the_pooled_vector() -> None:
    tokens, layout = _padded(_tokens())
    model = _model(EmbedderConfig(projection=5, features=FeaturesConfig(layers=0)))
    means = layout.means(model.encoder.final_norm(model.encoder.embedding(tokens, layout)))
    head = model.heads["embedder"]
    mapped = means @ head.projection.weight.T + head.projection.bias
    torch.testing.assert_close(model.outputs(tokens, layout), torch.nn.functional.normalize(mapped, dim=-1))
    assert model.encode([]).shape == (0, 5)
    assert _model(EmbedderConfig()).encode([]).shape == (0, model.config.encoder.width)


def test_bilstm_supports_trailing_empty_sequences() -> None:
    rows = _tokens()
    model = _model(TaggerConfig(labels=("a", "b"), recurrent=RecurrentConfig(width=8)))
    assert torch.allclose(model.outputs(*_packed(rows, empty=2)), model.outputs(*_packed(rows)), atol=1e-6)


def _states(model: Model, tokens: Tensor, layout: SequenceLayout) -> list[Tensor]:
    """Return the hidden states of the embedding and of every layer."""
    return [
        model.encoder.final_norm(states)
        for states in model.encoder.run(EncoderInputs(tokens, layout), Want(all_hidden_states=True)).hidden_states
    ]


@pytest.mark.parametrize("name", ["bert-tiny", "modern-small"])
def test_head_reads_the_requested_layers(name: str) -> None:
    def made(config: FeaturesConfig) -> Tensor:
        model = _model(TaggerConfig(labels=("a",), features=config), name, **overrides)
        head = model.task_head
        if head.features.layer_weights is not None and head.features.scale is not None:
            with torch.no_grad():
                head.features.layer_weights.copy_(torch.tensor([0.5, -1.0, 2.0]))
                head.features.scale.fill_(1.5)
        given: list[Tensor] = []
        head.features.register_forward_hook(lambda module, inputs, output: given.append(output))
        model.outputs(tokens, layout)
        return given[0]

    overrides = {} if name == "bert-tiny" else {"window": 3}
    tokens, layout = _packed(_tokens())
    embedding, first, second, third = _states(_model(TaggerConfig(labels=("a",)), name, **overrides), tokens, layout)
    weights = torch.tensor([0.5, -1.0, 2.0]).softmax(0)
    expected = {
        "last": third,
        "second to last": second,
        "embedding": embedding,
        "sum of two": second + third,
        "sum of two below the last": first + second,
        "all side by side": torch.cat([first, second, third], -1),
        "weighted": 1.5 * (weights[0] * first + weights[1] * second + weights[2] * third),
    }
    for choice, states in expected.items():
        assert torch.allclose(made(CHOICES[choice]), states, atol=1e-5), choice


def test_too_many_layers_raise() -> None:
    model = _model(TaggerConfig(labels=("a",), features=FeaturesConfig(layers=3, skip=1)))
    with pytest.raises(InputError, match="hidden states of 4 layers are requested; this encoder has 3"):
        model.outputs(*_packed(_tokens()))
    with pytest.raises(InputError, match="skip is 2, but layers is 0"):
        FeaturesConfig.parse({"layers": 0, "skip": 2})


def test_layer_weights_start_equal() -> None:
    states = [torch.randn(2, 3, 4) for _ in range(3)]
    features = LayerFeatures(4, FeaturesConfig(layers=3, combine="weighted"), None)
    assert torch.allclose(features(states, SequenceLayout.full(2, 3)), sum(states) / 3, atol=1e-6)  # type: ignore[arg-type]


def test_head_settings_are_applied() -> None:
    choice = HeadChoice(dropout=0.3, features=CHOICES["all side by side"], recurrent=RECURRENT["BiLSTM"])
    head = choice.applied(TaggerConfig(labels=("a",)))
    assert head == TaggerConfig(
        labels=("a",), dropout=0.3, features=CHOICES["all side by side"], recurrent=RECURRENT["BiLSTM"]
    )
    with pytest.raises(InputError, match=r"head\.pooling is 'mean', but a head of kind 'tagger' has no pooling"):
        HeadChoice(pooling="mean").applied(TaggerConfig(labels=("a",)))
    with pytest.raises(InputError, match=r"head\.hidden is 'gelu', but a head of kind 'embedder' has no hidden"):
        HeadChoice(hidden="gelu").applied(EmbedderConfig())


SHORT, LONG = {"hidden": "gelu"}, {"hidden": {"activation": "relu", "norm": {"epsilon": 1e-5, "has_bias": False}}}


def test_hidden_layer_has_a_short_form() -> None:
    """An activation alone, as in earlier config.json files and recipes, is a layer with biases and no norm."""
    short = HeadChoice.parse(SHORT).hidden
    assert short == HiddenLayerConfig(activation="gelu", has_bias=True, norm=None, drops_input=True)
    assert HeadChoice.parse({"hidden": {"activation": "gelu"}}).plain()["hidden"] == "gelu"
    for choice in (HeadChoice(), HeadChoice.parse(LONG)):
        assert choice.help()["hidden"].endswith("(allowed: gelu, gelu_tanh, relu, silu, tanh, none)")
    assert "hidden.kind" not in HeadChoice.parse(LONG).help()
    for given in (SHORT, LONG, {"hidden": "none"}):
        choice = HeadChoice.parse(given)
        assert HeadChoice.parse(choice.plain()) == choice
    for kind in (ClassifierConfig(labels=("a",)), TaggerConfig(labels=("a",)), SpansConfig()):
        head = HeadChoice.parse(LONG).applied(kind)
        assert head.hidden == HiddenLayerConfig(activation="relu", norm=NormConfig(epsilon=1e-5, has_bias=False))
        assert type(head).parse(head.plain()) == head
        assert HeadChoice(hidden="none").applied(head) == kind
        assert HeadChoice().applied(head) == head
        config = _model(head).config
        assert ModelConfig.parse(config.plain()) == config


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        ("gleu", r"^settings: hidden\.activation is 'gleu': input should be 'gelu'"),
        ({"bias": True}, r"^settings: hidden\.bias is not a known setting; did you mean 'has_bias'\?$"),
        ({"norm": {"placement": "pre"}}, r"^settings: hidden: norm\.placement is 'pre'; allowed: 'post', after the"),
    ],
)
def test_invalid_hidden_layer_raises(hidden: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        HeadChoice.parse({"hidden": hidden})


@pytest.mark.parametrize("name", ["bert-tiny", "modern-small"])
def test_default_heads(name: str) -> None:
    config = _model(EmbedderConfig(), name, dropout=0.0).config
    norm = config.encoder.layers[0].norm
    expected = HiddenLayerConfig(
        activation="gelu",
        has_bias=False,
        norm=NormConfig(epsilon=norm.epsilon, has_bias=False),
        drops_input=False,
    )
    heads = [classifier_head(config, ("a", "b")), tagger_head(config, ("a",)), spans_head(config)]
    assert [head.hidden for head in heads] == [expected if name == "modern-small" else None] * 3
    assert heads[0].pooling == ("mean" if name == "modern-small" else "first")


ROWS = [
    {"tokens": ["Anna", "sees", "Rome", "again"][: 2 + index % 3], "tags": ["A", "B", "C", "B"][: 2 + index % 3]}
    for index in range(12)
]
SETTINGS = [
    "model.overrides={layers=3, width=16, heads=2, dropout=0.1}",
    "tokenizer.vocabulary=270",
    "batch.examples=4",
    "encoder.frozen=all",
    'run.choose="last"',
    "optimizer.learning_rate=1e-2",
]


@pytest.mark.parametrize(
    ("choice", "recurrent"), [("embedding", "linear"), ("all side by side", "BiLSTM"), ("weighted", "linear")]
)
def test_frozen_encoder_keeps_its_weights_while_the_head_is_trained(
    choice: str, recurrent: str, tmp_path: Path
) -> None:
    features, lstm = CHOICES[choice], RECURRENT[recurrent]
    chosen = [
        f"head.features={{layers={features.layers}, skip={features.skip}, combine={features.combine!r}}}",
        *([] if lstm is None else [f"head.recurrent={{layers={lstm.layers}, width={lstm.width}}}"]),
    ]
    runs = {
        epochs: bertsmith.finetune(
            "bert-tiny",
            train=ROWS,
            device="cpu",
            out=tmp_path / str(epochs),
            set=[*SETTINGS, *chosen, f"run.epochs={epochs}"],
        ).predictor.model
        for epochs in (1, 3)
    }
    short, long = (dict(runs[epochs].named_parameters()) for epochs in (1, 3))
    for name, weight in long.items():
        is_same = torch.equal(weight, short[name])
        assert is_same == name.startswith("encoder."), name
        assert weight.requires_grad != name.startswith("encoder.")
    loaded = bertsmith.load(tmp_path / "3")
    assert all(torch.equal(weight, long[name]) for name, weight in loaded.named_parameters())
    assert loaded.config.heads == runs[3].config.heads


def test_frozen_encoder_has_no_dropout_and_is_reproducible() -> None:
    model = _model(TaggerConfig(labels=("a", "b"), dropout=0.0, recurrent=RecurrentConfig(width=8)), dropout=0.5)
    tokens, layout = _packed(_tokens())
    item = torch.arange(len(LENGTHS))
    batch = TaskBatch(tokens, layout, None, item, {"tags": torch.zeros_like(tokens)}, len(tokens))
    objective = Tags(frozen="all")
    objective.portions(model)
    model.train()
    first, second = objective.outputs(model, batch), objective.outputs(model, batch)
    assert torch.equal(first, second)
    assert model.encoder.training
    objective.sums(first, batch).loss.backward()
    assert all(weight.grad is None for weight in model.encoder.parameters())
    assert all(weight.grad is not None for weight in model.task_head.parameters())
    loose = Tags(frozen="none")
    assert not torch.equal(loose.outputs(model, batch), loose.outputs(model, batch))


def test_resumed_run_with_a_frozen_encoder_is_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for part in ("train", "dev"):
        (data / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    chosen = ["head.features={layers=2, combine='weighted'}", "head.recurrent={width=12}", "run.epochs=3"]

    def run(name: str) -> Any:
        return bertsmith.finetune(
            "bert-tiny", data=str(data), out=tmp_path / name, device="cpu", set=[*SETTINGS, *chosen]
        )

    real = Trainer._step

    def until(self: Trainer, *arguments: Any) -> None:
        if self.progress.step == 7:
            raise KeyboardInterrupt
        real(self, *arguments)

    run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until)
        with pytest.raises(KeyboardInterrupt):
            run("broken")
    bertsmith.finetune(out=tmp_path / "broken", resume=True, device="cpu")
    whole, broken = (dict(bertsmith.load(tmp_path / name).named_parameters()) for name in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert all(torch.equal(weight, broken[name]) for name, weight in whole.items())
