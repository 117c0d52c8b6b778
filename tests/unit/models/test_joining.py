"""`with_encoder`: a pre-trained model with the encoder of its fine-tuned version."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import bertsmith
from bertsmith.errors import InputError
from bertsmith.models.convert import with_encoder
from bertsmith.models.generator import attach, generator_of
from bertsmith.models.model import Model
from bertsmith.text.learn import learn_tokenizer

WORDS = ("red", "green", "blue", "iron", "gold", "rain", "snow", "wind", "tree", "bird", "fish", "stone")
PAIRS = [{"anchor": f"{a} {b}", "positive": f"{b} {a}", "kind": "near"} for a, b in pairwise(WORDS)]
GRADED = [
    {"sentence1": f"{a} {b}", "sentence2": f"{a} {a}", "label": 0.5 * i} for i, (a, b) in enumerate(pairwise(WORDS))
]
TEXTS = ["red iron", "gold", "rain snow wind"]
SETTINGS = ["batch.examples=8", "optimizer.learning_rate=0.01", "run.precision=float32", "sequences.length=16"]


def pretrained(sharing: str = "full") -> Model:
    tokenizer = learn_tokenizer([*WORDS, "[MASK]"] * 9, "wordpiece", 120, progress=False)
    config = bertsmith.preset("electra-small", vocabulary=tokenizer.size, width=32, layers=2, heads=2, max_length=16)
    config = config.changed(encoder=config.encoder.changed(embedding=config.encoder.embedding.changed(width=16)))
    model = bertsmith.build(config, seed=0)
    model = attach(model, bertsmith.build(generator_of(config, width=0.5, depth=0.5), seed=1), sharing).eval()
    model.tokenizer = tokenizer
    return model


def tuned(model: Model, frozen: str = "embedding", **more: Any) -> Model:
    arguments = {"train": PAIRS, "dev": GRADED, "task": "embedding", "epochs": 2, **more}
    result = bertsmith.finetune(model, set=[*SETTINGS, f"encoder.frozen={frozen}"], device="cpu", **arguments)
    assert result["metric"] == ("accuracy" if "label" in arguments["train"][0] else "spearman")
    return result.model


def test_joined_model_encodes_and_fills_masks(tmp_path: Path) -> None:
    model = pretrained()
    predictions = model.fill_mask("red [MASK] wind")
    learned = tuned(model)
    joined = with_encoder(model, learned)
    assert list(joined.heads) == ["replaced_tokens", "embedder"]
    assert not torch.equal(joined.encoder.blocks[0].mixer.output.weight, model.encoder.blocks[0].mixer.output.weight)
    assert all(parameter.requires_grad for parameter in joined.parameters())
    assert joined.generator is not None
    assert joined.generator.encoder.embedding.token_table is joined.encoder.embedding.token_table
    bertsmith.save(joined, tmp_path / "joined")
    for whole in (joined, bertsmith.load(tmp_path / "joined")):
        assert torch.equal(whole.encode(TEXTS), learned.encode(TEXTS))
        assert whole.fill_mask("red [MASK] wind") == predictions
    assert not torch.allclose(joined.encode(TEXTS), model.encode(TEXTS), atol=1e-3)


def test_vectors_without_the_head_differ_in_norm_only() -> None:
    model = pretrained()
    joined = with_encoder(model, tuned(model))
    vectors = joined.encode(TEXTS)
    del joined.heads["embedder"]
    plain = joined.encode(TEXTS)
    torch.testing.assert_close(plain / plain.norm(dim=-1, keepdim=True), vectors)


def test_half_precision_model_can_be_joined() -> None:
    model = pretrained().half()
    joined = with_encoder(model, tuned(model))
    assert next(joined.parameters()).dtype == torch.float32


def test_changed_shared_embedding_raises() -> None:
    model = pretrained()
    changed = tuned(model, "none")
    with pytest.raises(InputError, match=r"fine-tuning changed embedding\.token_table.*encoder\.frozen = 'embedding'"):
        with_encoder(model, changed)
    own = pretrained("none")
    assert with_encoder(own, changed).fill_mask("red [MASK]") == own.fill_mask("red [MASK]")


def test_different_architectures_raise() -> None:
    model = pretrained()
    with pytest.raises(InputError, match="differ in their encoder"):
        with_encoder(model, bertsmith.extract(model, bertsmith.Subnet(depth=0.5)))


def test_finetuning_another_task_drops_the_embedder() -> None:
    model = pretrained()
    learned = tuned(model)
    rows = [{"text": row["anchor"], "label": "a" if index % 2 else "b"} for index, row in enumerate(PAIRS)]
    for start in (with_encoder(model, learned), learned):
        found = tuned(start, "none", train=rows, dev=rows, task="classification")
        assert list(found.heads) == ["classifier"]
        assert found.generator is None
        assert not torch.equal(found.encoder.embedding.token_table, start.encoder.embedding.token_table)
