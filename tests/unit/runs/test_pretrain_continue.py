"""Continued pre-training: runs start with the loss of the imported model and end as one that transformers loads."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*torch.jit.script")  # raised by third-party code at import
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        DebertaV2Config,
        DebertaV2ForMaskedLM,
        ElectraConfig,
        ElectraForMaskedLM,
        ElectraForPreTraining,
        PreTrainedModel,
    )

import bertsmith
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.build_corpus import build_corpus
from bertsmith.layers.elementwise import TokenDropout
from bertsmith.models.vocabulary import add_tokens
from bertsmith.objectives.replaced_tokens import insert_samples
from bertsmith.ops.token_loss import sample
from bertsmith.text.extend import extend_tokenizer, new_tokens
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.toml import to_toml
from bertsmith.training.pretraining import PretrainSettings, make_trainer
from bertsmith.training.trainer import Trainer

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
RUN = {
    "sequences": {"length": 32, "micro_tokens": 256},
    "batch": {"tokens": 256},
    "optimizer": {"learning_rate": 1e-2},
    "run": {"steps": 3, "log_every": 1, "evaluate_batches": 1, "checkpoint_every": 2, "workers": 0},
}
MASKED = {"kind": "masked_lm"}
REPLACED = {"kind": "replaced_tokens"}


def folder_of(kind: type[PreTrainedModel], config: object, tokenizer: Tokenizer, folder: Path) -> Path:
    """Save a tiny transformers model with a tokenizer."""
    torch.manual_seed(len(folder.name))
    kind(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus_folder: Path) -> Tokenizer:
    return Tokenizer.load(corpus_folder)


@pytest.fixture(scope="module")
def folders(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home, size = tmp_path_factory.mktemp("folders"), {"vocab_size": tokenizer.size, **TINY}
    electra = ElectraConfig(**size, embedding_size=16)
    narrow = ElectraConfig(**{**size, "hidden_size": 8, "intermediate_size": 8}, embedding_size=16)
    made: list[tuple[str, type[PreTrainedModel], object]] = [
        ("bert", BertForMaskedLM, BertConfig(**size)),
        ("electra", ElectraForPreTraining, electra),
        ("electra-generator", ElectraForMaskedLM, narrow),
        ("deberta", DebertaV2ForMaskedLM, DebertaV2Config(**size, **DEBERTA)),
    ]
    return {name: folder_of(kind, config, tokenizer, home / name) for name, kind, config in made}


@pytest.fixture(scope="module")
def domain(texts: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with words outside the vocabulary, tokenized with an extension of the tokenizer."""
    home = tmp_path_factory.mktemp("domain")
    stories = (texts / "stories.txt").read_text().replace("lanterns", "phosphatase kinase").replace("anvil", "receptor")
    (home / "domain.txt").write_text(stories)
    extension = extend_tokenizer(tokenizer, stories.split("\n\n"), 3)
    build_corpus([home / "domain.txt"], extension.tokenizer, home / "corpus", held_out=0.1, workers=1)
    return home / "corpus"


def settings_of(corpus: Path, folder: Path, objective: dict, **more: dict) -> PretrainSettings:
    model = {"folder": str(folder), "overrides": {"dropout": 0.0}}
    return PretrainSettings.parse({"data": str(corpus), "model": model, "objective": objective, **RUN, **more})


def trainer_of(corpus: Path, folder: Path, objective: dict, out: Path, **more: dict) -> Trainer:
    out.mkdir()
    return make_trainer(settings_of(corpus, folder, objective, **more), out, device="cpu", show=False)


def first_batch(trainer: Trainer) -> object:
    plan, reader = trainer.data.held_out_plan, trainer.data.held_out_reader
    assert plan is not None
    assert reader is not None
    return trainer.train_step.evaluation.prepare(reader[next(plan.one_epoch())].batch, 0)


def rows(flat: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
    """Split a packed batch into sequences of shape (1, length)."""
    bounds = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return [flat[start:end][None] for start, end in bounds if end > start]


def masked_loss(theirs: PreTrainedModel, prepared: object) -> float:
    corrupted, starts = prepared.corrupted, prepared.layout.starts
    logits = torch.cat([theirs(tokens).logits[0] for tokens in rows(corrupted.tokens, starts)])
    return cross_entropy(logits[corrupted.positions], corrupted.targets, ignore_index=IGNORED).item()


@pytest.mark.parametrize(("name", "kind"), [("bert", BertForMaskedLM), ("deberta", DebertaV2ForMaskedLM)])
def test_masked_lm_starts_at_the_imported_loss(
    name: str, kind: type, folders: dict[str, Path], corpus_folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(corpus_folder, folders[name], MASKED, tmp_path / "first")
    with torch.no_grad():
        expected = masked_loss(kind.from_pretrained(folders[name]).eval(), first_batch(trainer))
    found = trainer.evaluate()
    assert found is not None
    assert found["loss"] == pytest.approx(expected, abs=1e-5)
    trainer.close()
    plain = settings_of(corpus_folder, folders[name], MASKED).plain()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(plain))
    metrics = bertsmith.pretrain(recipe, out=tmp_path / "run", device="cpu")
    assert metrics["held_out"]["masked_tokens_loss"] < expected
    bertsmith.export(bertsmith.load(tmp_path / "run"), tmp_path / "hf")
    back = kind.from_pretrained(tmp_path / "hf").eval()
    moved = back.get_input_embeddings().weight - kind.from_pretrained(folders[name]).get_input_embeddings().weight
    assert 0 < moved.abs().max() < 0.1


def test_replaced_tokens_start_at_the_imported_losses(
    folders: dict[str, Path], corpus_folder: Path, tmp_path: Path
) -> None:
    generator = {"folder": str(folders["electra-generator"]), "sharing": "gradient_disentangled"}
    generator["overrides"] = {"dropout": 0.0}
    trainer = trainer_of(corpus_folder, folders["electra"], REPLACED, tmp_path / "run", generator=generator)
    assert trainer.notices == []
    prepared = first_batch(trainer)
    starts, corrupted = prepared.layout.starts, prepared.corrupted
    guesser = ElectraForMaskedLM.from_pretrained(folders["electra-generator"]).eval()
    finder = ElectraForPreTraining.from_pretrained(folders["electra"]).eval()
    with torch.no_grad():
        scores = torch.cat([guesser(tokens).logits[0] for tokens in rows(corrupted.tokens, starts)])[
            corrupted.positions
        ]
        guesses = sample(scores, prepared.draw, 1.0)
        guessed, is_replaced = insert_samples(prepared.tokens, corrupted, guesses)
        logits = torch.cat([finder(tokens).logits[0] for tokens in rows(guessed, starts)])
    real = prepared.is_real
    found = trainer.evaluate()
    assert found is not None
    wanted = cross_entropy(scores, corrupted.targets, ignore_index=IGNORED)
    assert found["generator_loss"] == pytest.approx(wanted.item(), abs=1e-5)
    binary = binary_cross_entropy_with_logits(logits[real[: len(logits)]], is_replaced[real].float())
    assert found["replaced_loss"] == pytest.approx(binary.item(), abs=1e-5)
    trainer.run()
    trainer.close()
    # the run's folder includes the generator, which the next run uses by default
    bertsmith.save(bertsmith.load(tmp_path / "run" / "checkpoints" / "step-00000003"), tmp_path / "ours")
    bertsmith.export(bertsmith.load(tmp_path / "ours"), tmp_path / "hf")
    ElectraForPreTraining.from_pretrained(tmp_path / "hf")
    shutil.copy(corpus_folder / "tokenizer.json", tmp_path / "ours")
    second = trainer_of(corpus_folder, tmp_path / "ours", REPLACED, tmp_path / "second")
    assert second.notices == []
    assert second.model.config.generator is not None
    assert second.model.config.generator.sharing == "gradient_disentangled"
    again = second.evaluate()
    assert again is not None
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert again["loss"] == pytest.approx(last["loss"], abs=1e-4)
    second.close()


@pytest.mark.parametrize("sharing", ["none", "full", "gradient_disentangled"])
def test_fresh_generator_copies_the_model_embedding(
    sharing: str, folders: dict[str, Path], corpus_folder: Path, tmp_path: Path
) -> None:
    generator = {"sharing": sharing, "width": 0.5, "depth": 0.5}
    trainer = trainer_of(corpus_folder, folders["electra"], REPLACED, tmp_path / "run", generator=generator)
    assert trainer.notices == ["the generator is fresh (layers: 1, width: 8): its first predictions are nearly random"]
    model, imported = trainer.model, bertsmith.load(folders["electra"])
    assert model.generator is not None
    torch.testing.assert_close(model.token_table, imported.token_table, rtol=0, atol=1e-7)
    is_same = torch.equal(model.generator.token_table, imported.token_table)
    assert is_same == (sharing != "none")
    trainer.close()


def test_fresh_model_copies_the_generator_embedding(
    folders: dict[str, Path], corpus_folder: Path, tmp_path: Path
) -> None:
    """The generator's table may have more rows than the tokenizer has tokens, like DeBERTa v3's."""
    generator = bertsmith.load(folders["electra-generator"])
    rows = generator.config.encoder.vocabulary + 4
    add_tokens(generator, {rows - 1: [7]})
    bertsmith.save(generator, tmp_path / "generator")
    settings = settings_of(corpus_folder, tmp_path, REPLACED, generator={"folder": str(tmp_path / "generator")})
    size = {"width": 16, "layers": 1, "heads": 2, "max_length": 32, "embedding_width": 16}
    fresh = PretrainSettings.parse({**settings.plain(), "model": {"preset": "electra-small", "overrides": size}})
    model, notices = fresh.start(Tokenizer.load(corpus_folder))
    assert notices == []
    assert torch.equal(model.token_table, generator.token_table)
    assert model.token_table.shape == (rows, 16)


def test_fresh_and_dropped_heads_give_notices(folders: dict[str, Path], corpus_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(corpus_folder, folders["electra"], MASKED, tmp_path / "run")
    name = str(folders["electra"])
    assert trainer.notices == [
        f"{name!r} lacks the head masked_tokens: it starts with fresh weights",
        f"heads of {name!r} that the objective does not train are left out: replaced_tokens",
    ]
    trainer.close()
    generator = {"sharing": "gradient_disentangled"}
    trainer = trainer_of(corpus_folder, folders["deberta"], REPLACED, tmp_path / "v3", generator=generator)
    assert trainer.model.config.heads[0].adds_first, "a fresh head is as its family has it"
    trainer.close()


def test_dropout_is_the_folders_unless_overridden(folders: dict[str, Path], corpus_folder: Path) -> None:
    tokenizer = Tokenizer.load(corpus_folder)
    model = {"folder": str(folders["deberta"])}
    default, _ = PretrainSettings.parse({"model": model, **RUN}).start(tokenizer)
    none, _ = settings_of(corpus_folder, folders["deberta"], MASKED).start(tokenizer)
    for start, rate in ((default, 0.1), (none, 0.0)):
        rates = {module.rate for module in start.modules() if isinstance(module, TokenDropout)}
        assert rates == {rate}
        assert start.config.encoder.layers[0].mixer.dropout == rate
    assert all(
        torch.equal(a, b) for a, b in zip(default.state_dict().values(), none.state_dict().values(), strict=True)
    )


def test_extended_vocabulary_adds_rows(
    folders: dict[str, Path], tokenizer: Tokenizer, domain: Path, tmp_path: Path
) -> None:
    imported, extended = bertsmith.load(folders["bert"]), Tokenizer.load(domain)
    trainer = trainer_of(domain, folders["bert"], MASKED, tmp_path / "run")
    assert "3 tokens of the corpus's tokenizer are new" in trainer.notices[0]
    model = trainer.model
    assert model.config.encoder.vocabulary == extended.size == tokenizer.size + 3
    old = {key: torch.from_numpy(value) for key, value in tokenizer.encode(["the smith forges seven gates"]).items()}
    new = {key: torch.from_numpy(value) for key, value in extended.encode(["a phosphatase kinase"]).items()}
    with torch.no_grad(), model.evaluating():
        assert torch.equal(model(**old), imported(**old))
        assert model(**new).isfinite().all()
        head, states = model.head("masked_tokens"), model(**old)
        scores, before = head(states, model.token_table), imported.head("masked_tokens")(states, imported.token_table)
    parts = new_tokens(tokenizer, extended)
    assert all(len(ids) > 1 for ids in parts.values())
    torch.testing.assert_close(scores[..., : tokenizer.size], before)
    for token, ids in parts.items():
        torch.testing.assert_close(model.token_table[token], imported.token_table[ids].mean(0))
        torch.testing.assert_close(scores[..., token], before[..., ids].mean(-1), atol=1e-5, rtol=1e-5)
    first = model.token_table[[*parts]].detach().clone()
    trainer.run()
    assert (model.token_table[[*parts]] - first).abs().amax(-1).min() > 1e-4
    trainer.close()
    bertsmith.export(bertsmith.load(tmp_path / "run" / "checkpoints" / "step-00000003"), tmp_path / "hf")
    back = BertForMaskedLM.from_pretrained(tmp_path / "hf")
    assert back.get_input_embeddings().weight.shape[0] == extended.size
    assert Tokenizer.load(tmp_path / "hf").hash == extended.hash


@pytest.mark.parametrize("sharing", ["none", "full", "gradient_disentangled"])
def test_extended_vocabulary_adds_rows_to_the_generator(
    sharing: str, folders: dict[str, Path], corpus_folder: Path, domain: Path, tmp_path: Path
) -> None:
    """Start from the folder of a run whose generator has its own rows or shares the model's."""
    base = bertsmith.load(folders["electra"])
    generator = {"sharing": sharing}
    first = trainer_of(corpus_folder, folders["electra"], REPLACED, tmp_path / "a", generator=generator)
    bertsmith.save(first.model, tmp_path / "ours")
    first.close()
    trainer = trainer_of(domain, tmp_path / "ours", REPLACED, tmp_path / "b")
    guesser, size = trainer.model.generator, base.config.encoder.vocabulary + 3
    assert guesser is not None
    assert guesser.token_table.shape[0] == trainer.model.token_table.shape[0] == size
    assert guesser.heads["masked_tokens"].bias.shape == (size,)
    torch.testing.assert_close(trainer.model.token_table[:-3], base.token_table, rtol=0, atol=1e-6)
    trainer.run()
    trainer.close()
    assert bertsmith.load(tmp_path / "b" / "checkpoints" / "step-00000003").config.encoder.vocabulary == size


def test_unused_rows_are_filled_before_new_ones(folders: dict[str, Path]) -> None:
    """DeBERTa v3 has 128,100 rows for 128,001 tokens."""
    model = bertsmith.load(folders["bert"])
    rows, table = model.config.encoder.vocabulary, model.token_table.detach().clone()
    add_tokens(model, {rows - 2: [5, 6], rows - 1: [], rows: [7]})
    assert model.config.encoder.vocabulary == rows + 1
    torch.testing.assert_close(model.token_table[rows - 2], table[[5, 6]].mean(0))
    torch.testing.assert_close(model.token_table[rows - 1], table.mean(0))
    assert torch.equal(model.token_table[rows], table[7])
    assert torch.equal(model.token_table[: rows - 2], table[: rows - 2])


def test_resumed_run_does_not_need_the_folder(folders: dict[str, Path], corpus_folder: Path, tmp_path: Path) -> None:
    """The run is interrupted after step 2; then the folder is deleted."""
    folder = tmp_path / "folder"
    shutil.copytree(folders["electra"], folder)
    generator = {"sharing": "gradient_disentangled", "width": 0.5}
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(settings_of(corpus_folder, folder, REPLACED, generator=generator).plain()))
    straight, out = tmp_path / "straight", tmp_path / "run"
    bertsmith.pretrain(recipe, out=straight, device="cpu")
    shutil.copytree(straight, out)
    shutil.rmtree(out / "checkpoints" / "step-00000003")
    for name in ("result.json", "model.safetensors", "config.json"):
        (out / name).unlink()
    shutil.rmtree(folder)
    bertsmith.pretrain(out=out, resume=True, device="cpu")
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
