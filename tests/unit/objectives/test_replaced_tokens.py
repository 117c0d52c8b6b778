"""Replaced-token detection against a transcription of ELECTRA's objective, and the rules of shared embeddings."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from choosing import slow_unless
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.checkpoint.source import GeneratorSource, ModelSource
from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import Vocabulary
from bertsmith.models.build import build
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.generator import fold, part_of, unfold
from bertsmith.models.model import Model
from bertsmith.objectives import replaced_tokens
from bertsmith.objectives.base import Term
from bertsmith.objectives.replaced_tokens import (
    GeneratorMaskingConfig,
    ReplacedBatch,
    ReplacedTokenDetection,
    ReplacedTokenDetectionConfig,
)
from bertsmith.training.meter import Meter
from bertsmith.training.optimizer import OptimizerConfig
from bertsmith.training.run_config import RunConfig
from bertsmith.training.starting_model import pretraining_config
from bertsmith.training.step import TrainStep

SHARINGS = ["none", "full", "gradient_disentangled"]
PAD, START, SEPARATOR, MASK, SIZE = 0, 1, 2, 3, 8
TINY = {"width": 16, "layers": 2, "heads": 2, "max_length": 16, "dropout": 0.0, "init_std": 0.3}
PRESETS = {"electra-small": {**TINY, "embedding_width": 8}, "deberta-v3-small": {**TINY, "span": 4, "max_distance": 8}}
LENGTHS = (12, 5, 9)


def make(sharing: str, name: str = "electra-small") -> Model:
    """Return an unfolded model in float64 with non-zero biases and table differences."""
    choice = ModelSource(preset=name, overrides=PRESETS[name])
    generator = GeneratorSource(width=0.5, depth=0.5, sharing=sharing)
    model = build(pretraining_config(choice, generator, ("replaced_tokens",), SIZE), seed=0).double()
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter is model.encoder.embedding.token_table:
                parameter.add_(torch.randn(parameter.shape, generator=draws).double() * 0.2)
        model.generator.heads["masked_tokens"].bias[MASK + 1 : MASK + 3] += 3  # so that some samples equal the original
    return model


def objective(**changes: object) -> ReplacedTokenDetection:
    is_special = torch.arange(SIZE) <= MASK
    masking = GeneratorMaskingConfig(rate=0.4)
    return ReplacedTokenDetection(
        ReplacedTokenDetectionConfig(masking=masking, **changes), Vocabulary(SIZE, MASK, is_special, ~is_special)
    )


def texts() -> list[list[int]]:
    draws = torch.Generator().manual_seed(4)
    inner = [torch.randint(MASK + 1, MASK + 3, (length - 2,), generator=draws).tolist() for length in LENGTHS]
    return [[START, *tokens, SEPARATOR] for tokens in inner]


def batch(layout: str) -> TokenBatch:
    """Return the texts, padded to one length or packed with padding at the end."""
    sample, real = torch.tensor([71, 5, 33]), sum(LENGTHS)
    if layout == "padded":
        rows = torch.tensor([text + [PAD] * (14 - len(text)) for text in texts()])
        return TokenBatch(rows, SequenceLayout.padded(rows != PAD), sample, real)
    tokens = torch.tensor([token for text in texts() for token in text] + [PAD] * 4)
    starts = torch.tensor([0, *LENGTHS, 4]).cumsum(0).int()
    sample = torch.cat([sample, torch.tensor([0])])
    return TokenBatch(tokens, SequenceLayout.packed(starts, 12), sample, real)


def total(task: ReplacedTokenDetection, model: Model, prepared: ReplacedBatch) -> Tensor:
    counts, sums = task.counts(prepared), task(model, prepared)
    return sum(term.weight * sums[name].loss / counts[name] for name, term in task.terms.items())


def gelu(vector: Tensor) -> Tensor:
    return vector * (1 + torch.erf(vector / math.sqrt(2))) / 2


def transcribed(model: Model, prepared: ReplacedBatch) -> tuple[Tensor, list[list[int]]]:
    """Return ELECTRA's loss and labels, one sequence, position and token at a time (Clark et al. 2020, section 2).

    L = Σ over masked positions of −log p_G / positions  +  50 · Σ over tokens of −log p_D(label) / tokens
    """
    generator, generators, finding = model.generator, model.generator.heads["masked_tokens"], model.heads
    masked, starts = masked_by_text(prepared)
    draws = dict(zip(prepared.corrupted.positions.tolist(), prepared.draw.tolist(), strict=True))
    chosen = {
        position: target
        for position, target in zip(
            prepared.corrupted.positions.tolist(), prepared.corrupted.targets.tolist(), strict=True
        )
        if target >= 0
    }
    generating, detecting, labels = 0.0, 0.0, []
    for text, hidden, start in zip(texts(), masked, starts, strict=True):
        positions = [index for index in range(len(text)) if start + index in chosen]
        layout = SequenceLayout.full(1, len(text))
        states = generator.run(
            EncoderInputs(torch.tensor([hidden]), layout), Want(masked_positions=torch.tensor(positions))
        ).masked_states
        sampled = list(text)
        for index, state in zip(positions, states, strict=True):
            assert chosen[start + index] == text[index]
            inner = gelu(generators.transform.weight @ state + generators.transform.bias)
            inner = (inner - inner.mean()) / torch.sqrt(inner.var(unbiased=False) + generators.norm.epsilon)
            inner = inner * generators.norm.weight + generators.norm.bias
            shares = torch.exp(generator.encoder.embedding.token_table @ inner + generators.bias)
            shares = shares / shares.sum()
            generating = generating - torch.log(shares[text[index]])
            height = 0.0
            for token, share in enumerate(shares.tolist()):
                height += share
                if height > draws[start + index]:
                    sampled[index] = token
                    break
        labels.append([int(new != old) for new, old in zip(sampled, text, strict=True)])
        for state, label in zip(detected(model, sampled), labels[-1], strict=True):
            head = finding["replaced_tokens"]
            score = head.score.weight @ gelu(head.transform.weight @ state + head.transform.bias) + head.score.bias
            is_replaced = 1 / (1 + torch.exp(-score[0]))
            detecting = detecting - torch.log(is_replaced if label else 1 - is_replaced)
    return generating / len(chosen) + 50 * detecting / sum(LENGTHS), labels


def masked_by_text(prepared: ReplacedBatch) -> tuple[list[list[int]], list[int]]:
    """Return the masked tokens of each text, and its start in the flattened tokens."""
    flat = prepared.corrupted.tokens.flatten().tolist()
    starts = [0, 14, 28] if prepared.layout.starts is None else prepared.layout.starts.tolist()[:3]
    return [flat[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)], starts


def detected(model: Model, sampled: list[int]) -> list[Tensor]:
    """Return the hidden states that the encoder's head reads: E_D = sg(E_G) + E_Δ if embeddings are disentangled."""
    encoder, head = model.encoder, model.heads["replaced_tokens"]
    tables: dict[str, Tensor] = {}
    if encoder.embedding.is_difference:
        encoder = copy.copy(encoder)
        encoder._modules = {**encoder._modules, "embedding": copy.copy(encoder.embedding)}
        encoder.embedding.is_difference = False
        given = model.generator.encoder.embedding.token_table.detach()
        tables = {"embedding.token_table": given + model.encoder.embedding.token_table}
    states = functional_call(encoder, tables, (torch.tensor([sampled]), SequenceLayout.full(1, len(sampled))))[0]
    return [state if head.norm is None else head.norm(state + states[0]) for state in states]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", PRESETS)
def test_loss_gradients_and_labels_match_the_paper(
    name: str, sharing: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(sharing, name)
    plain, task, seen = copy.deepcopy(model), objective(), []
    insert = replaced_tokens.insert_samples
    monkeypatch.setattr(replaced_tokens, "insert_samples", lambda *given: seen.append(insert(*given)) or seen[-1])
    prepared = task.prepare(batch(layout), 2**62 - 9)
    loss = total(task, model, prepared)
    loss.backward()
    expected, labels = transcribed(plain, prepared)
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    is_replaced = seen[0][1].flatten().tolist()
    _, starts = masked_by_text(prepared)
    for row, start in zip(labels, starts, strict=True):
        assert [int(label) for label in is_replaced[start : start + len(row)]] == row
    assert sum(is_replaced) == sum(map(sum, labels)), "padding counts as replaced"
    is_chosen = prepared.corrupted.targets >= 0
    assert 0 < sum(is_replaced) < int(is_chosen.sum()), "the case needs correct and wrong samples"
    assert (prepared.corrupted.tokens == prepared.tokens).flatten()[prepared.corrupted.positions[is_chosen]].any()
    gradients = {key: parameter.grad for key, parameter in plain.named_parameters()}
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")


def test_masking_defaults_are_electras() -> None:
    config = ReplacedTokenDetectionConfig.parse({"masking": {"rate": 0.25}, "weight": 10.0})
    assert (config.masking.rate, config.masking.mask, config.masking.random) == (0.25, 0.85, 0.0)
    task = objective(weight=10.0)
    assert task.terms["replaced"].weight == 10.0
    assert task.for_evaluation().config.masking == GeneratorMaskingConfig()


def test_draws_depend_on_sequence_and_position() -> None:
    task, found = objective(), []
    for layout in ("packed", "padded"):
        prepared = task.prepare(batch(layout), 3)
        is_chosen = prepared.corrupted.targets >= 0
        found.append(prepared.draw[is_chosen])
    assert torch.equal(*found)
    other = task.prepare(batch("padded"), 4)
    assert not torch.equal(other.draw[:4], prepared.draw[:4])


@pytest.mark.parametrize("sharing", SHARINGS)
def test_each_loss_trains_only_its_network(sharing: str) -> None:
    task = objective()
    prepared = task.prepare(batch("packed"), 0)
    model = make(sharing)
    encoders = {id(parameter) for part in (model.encoder, model.heads) for parameter in part.parameters()}
    generators = {id(parameter) for parameter in model.generator.parameters()}
    assert len(encoders & generators) == (5 if sharing == "full" else 0)  # tokens, positions, types, norm
    for term, own in (("replaced", encoders), ("generator", generators)):
        task(model, prepared)[term].loss.backward()
        updates = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
        assert updates == own
        assert all(parameter.grad is None or parameter.grad.any() for parameter in model.parameters())
        model.zero_grad()


def test_gradient_disentangled_sharing(tmp_path: Path) -> None:
    model, task = make("gradient_disentangled"), objective()
    given, difference = model.generator.encoder.embedding.token_table, model.encoder.embedding.token_table
    prepared = task.prepare(batch("packed"), 0)
    task(model, prepared)["replaced"].loss.backward()
    assert given.grad is None
    assert difference.grad is not None
    assert difference.grad.any()
    model.zero_grad()
    task(model, prepared)["generator"].loss.backward()
    assert difference.grad is None
    assert given.grad.any()

    both = (given + difference).detach()
    before = model(torch.tensor(texts()[:1]))
    bertsmith.save(model, tmp_path / "ours")
    bertsmith.export(model, tmp_path / "theirs")
    assert model.encoder.embedding.is_difference, "an export must not change the model that is trained"
    folded = bertsmith.load(tmp_path / "ours")
    assert torch.equal(folded.encoder.embedding.token_table, both)
    assert torch.equal(folded.generator.encoder.embedding.token_table, given)
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    assert torch.equal(tensors["electra.embeddings.word_embeddings.weight"], both)
    for other in (folded, bertsmith.load(tmp_path / "theirs"), part_of(model, "encoder")):
        torch.testing.assert_close(other(torch.tensor(texts()[:1])), before, rtol=0, atol=1e-12)
    assert part_of(folded, "encoder").config.generator is None


def test_fold_inverts_unfold() -> None:
    model = fold(make("gradient_disentangled"))
    table, config = model.encoder.embedding.token_table.clone(), model.config
    assert unfold(model).encoder.embedding.is_difference
    assert (model.encoder.embedding.token_table - table).abs().max() > 0.1
    fold(model)
    torch.testing.assert_close(model.encoder.embedding.token_table, table, rtol=0, atol=1e-15)
    assert model.config == config
    assert fold(model).config == config
    for sharing in ("none", "full"):
        plain = make(sharing)
        assert unfold(plain).config == make(sharing).config


@pytest.mark.parametrize("sharing", SHARINGS)
def test_two_optimizers_split_the_parameters(sharing: str) -> None:
    model = make(sharing)
    assert len(objective().portions(model)) == 1
    generators, encoders = objective(optimizers="two", generator_rate=0.5).portions(model)
    assert [portion.groups[0].rate for portion in (generators, encoders)] == [0.5, 1.0]
    ids = [[id(parameter) for parameter in portion.parameters] for portion in (generators, encoders)]
    assert not set(ids[0]) & set(ids[1])
    assert sorted(ids[0] + ids[1]) == sorted(map(id, model.parameters()))
    assert id(model.encoder.embedding.token_table) in ids[1]
    built = OptimizerConfig().build([generators, encoders])
    assert {group["rate"] for group in built.param_groups} == {0.5, 1.0}


def test_generator_rate_requires_two_optimizers() -> None:
    with pytest.raises(ValueError, match="allowed with optimizers = 'one': 1"):
        ReplacedTokenDetectionConfig(generator_rate=0.5)


@pytest.mark.parametrize("sharing", slow_unless(("gradient_disentangled",), ["none", "gradient_disentangled"]))
def test_two_optimizers_clip_separately(sharing: str, tmp_path: Path) -> None:
    """A huge gradient of the generator does not affect the encoder's step, unlike with one optimiser."""
    updates = {}
    for optimizers in ("one", "two"):
        for weight in (1.0, 1e7):
            model = make(sharing)
            before = flat(model.encoder)
            task = objective(optimizers=optimizers)
            task.terms["generator"] = Term(("accuracy",), weight=weight)
            method = SimpleNamespace(
                run=RunConfig(), optimizer=OptimizerConfig(clip=0.5)
            )  # the settings that an engine reads
            engine = TrainStep(model, task, method, tmp_path, device="cpu")
            engine.objective.terms = task.terms
            engine.learn([task.prepare(batch("packed"), 1)], [(0,)], 1e-2, Meter(task.terms, engine.device))
            updates[optimizers, weight] = flat(model.encoder) - before
            engine.close()
    assert torch.equal(updates["two", 1.0], updates["two", 1e7])
    assert (updates["one", 1.0] - updates["one", 1e7]).abs().max() > 1e-3


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
