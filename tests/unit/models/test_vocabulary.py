"""A model with a reduced vocabulary has the same outputs for texts in the kept tokens."""

from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith import InputError, SequenceLayout, factorise
from bertsmith.layers.context import Memory
from bertsmith.models.config import GeneratorConfig, ModelConfig
from bertsmith.models.cost import parameters
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.generator import fold, generator_of, unfold
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.models.vocabulary import keep_tokens
from bertsmith.text.learn import learn_tokenizer

SIZES = {"width": 24, "heads": 4, "layers": 2, "vocabulary": 60, "max_length": 16, "dropout": 0.0, "init_std": 0.3}
SIZES |= {"embedding_width": 12}
FAMILIES = ["bert-tiny", "albert-base", "electra-small", "deberta-v3-small", "convbert-small", "modern-base"]
IDS = [3, 1, 0, 58, 40, 17, 22, 59, 8]


def config_of(name: str) -> ModelConfig:
    return bertsmith.preset(name, **{field: value for field, value in SIZES.items() if field in overridable(name)})


def model_of(name: str, **changes: object) -> Model:
    model = bertsmith.build(config_of(name).changed(**changes), seed=0).eval()
    for head in model.heads.values():
        if isinstance(getattr(head, "bias", None), torch.Tensor):
            torch.nn.init.normal_(head.bias)  # fresh biases are 0
    return model


def tokens_of() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids of the small model, and the same tokens as ids of the whole model."""
    small = torch.randint(0, len(IDS), (3, 7))
    return small, torch.tensor(IDS)[small]


@pytest.mark.parametrize("name", [*FAMILIES, "bert-tiny of rank 6"])
def test_hidden_states_and_outputs_do_not_change(name: str, tmp_path: Path) -> None:
    heads = (*config_of(name.split()[0]).heads, ClassifierConfig(labels=("a", "b", "c")))
    model = model_of(name.split()[0], heads=heads)
    if "rank" in name:
        model = factorise(model, 6)
    small = keep_tokens(model, IDS)
    new, old = tokens_of()
    assert torch.equal(small(new), model(old))
    layout = SequenceLayout.full(3, 7)
    assert torch.equal(small.outputs(new, layout), model.outputs(old, layout))
    assert torch.equal(small.token_table, model.token_table[IDS])
    count = sum(parameter.numel() for parameter in small.parameters())
    assert count == parameters(small.config) < parameters(model.config)
    assert model.config.encoder.vocabulary == model.token_table.shape[0] == 60
    bertsmith.save(small, tmp_path / "small")
    assert torch.equal(bertsmith.load(tmp_path / "small")(new), model(old))


@pytest.mark.parametrize("name", ["bert-tiny", "albert-base", "deberta-v3-small-generator", "convbert-small-generator"])
def test_token_scores_do_not_change(name: str) -> None:
    model = model_of(name)
    small = keep_tokens(model, IDS)
    new, old = tokens_of()
    layout, positions = SequenceLayout.full(3, 7), torch.tensor([2, 9, 20])
    scores = []
    for part, tokens in ((small, new), (model, old)):
        states = part.run(EncoderInputs(tokens, layout), Want(masked_positions=positions)).masked_states
        scores.append(part.head("masked_tokens")(states, part.token_table))
    # sums over the vocabulary have another order
    torch.testing.assert_close(scores[0], scores[1][..., IDS], rtol=0, atol=1e-5)
    assert torch.equal(small.head("masked_tokens").bias, model.head("masked_tokens").bias[IDS])


@pytest.mark.parametrize("sharing", ["none", "full", "gradient_disentangled"])
@pytest.mark.parametrize("name", ["electra-small", "deberta-v3-small"])
def test_generator_vocabulary_is_reduced(name: str, sharing: str, tmp_path: Path) -> None:
    config = config_of(name)
    kept = GeneratorConfig(model=generator_of(config, width=0.5, depth=0.5), sharing=sharing)
    model = fold(bertsmith.build(config.changed(generator=kept), seed=0).eval())
    torch.nn.init.normal_(model.encoder.embedding.token_table)
    small = keep_tokens(model, IDS)
    assert small.generator is not None
    new, old = tokens_of()
    assert torch.equal(small(new), model(old))
    assert torch.equal(small.generator(new), model.generator(old))
    assert torch.equal(
        small.generator.head("masked_tokens").bias, model.generator.head("masked_tokens").bias[torch.tensor(IDS)]
    )
    shares = small.generator.encoder.embedding.token_table is small.encoder.embedding.token_table
    assert shares == (sharing == "full")
    bertsmith.save(small, tmp_path / "small")
    loaded = bertsmith.load(tmp_path / "small")
    assert torch.equal(loaded(new), model(old))
    assert torch.equal(loaded.generator(new), model.generator(old))
    # an unfolded model is returned folded and is not modified
    unfolded = unfold(model)
    expected = unfolded(old)
    assert torch.equal(keep_tokens(unfolded, IDS)(new), expected)
    assert unfolded.encoder.embedding.is_difference == (sharing == "gradient_disentangled")


@pytest.mark.parametrize("table", ["given", "own"])
def test_decoder_vocabulary_is_reduced(table: str) -> None:
    config = config_of("transformer-tiny")
    assert config.decoder is not None
    decoder = config.decoder.changed(embedding=config.decoder.embedding.changed(table=table))
    heads = tuple(head.changed(has_bias=True) if head.kind == "next_token" else head for head in config.heads)
    model = model_of("transformer-tiny", decoder=decoder, heads=heads)
    small = keep_tokens(model, IDS)
    assert isinstance(small, Seq2Seq)
    assert isinstance(model, Seq2Seq)
    new, old = tokens_of()
    layout = SequenceLayout.full(3, 7)
    ends = [part.decode(tokens, layout, Memory(part(tokens), layout)) for part, tokens in ((small, new), (model, old))]
    assert torch.equal(*ends)
    torch.testing.assert_close(small.scores(ends[0]), model.scores(ends[1])[..., IDS], rtol=0, atol=1e-5)
    assert small.config.decoder.vocabulary == small.config.encoder.vocabulary == len(IDS)


def test_tokenizer_must_match_the_ids() -> None:
    model = model_of("bert-tiny")
    model.tokenizer = learn_tokenizer(["a bee sees a sea"] * 9, "wordpiece", 60, progress=False)
    size = model.tokenizer.size
    small = keep_tokens(model, [*range(size)], model.tokenizer)
    assert small.tokenizer is model.tokenizer
    assert keep_tokens(model, IDS).tokenizer is None
    with pytest.raises(InputError, match=f"the tokenizer has {size} tokens and ids 9 entries; they must be equal"):
        keep_tokens(model, IDS, model.tokenizer)


def test_invalid_inputs_raise() -> None:
    model = model_of("bert-tiny")
    for ids in ([], [1, 1], [0, 60], [-1, 2]):
        with pytest.raises(InputError, match=f"ids has {len(ids)} entries; allowed: one or more of 0 to 59"):
            keep_tokens(model, ids)
    with pytest.raises(InputError, match=r"embedding\.rank is 10; allowed: up to 9"):
        keep_tokens(factorise(model, 10), IDS)


def test_weights_determine_the_accuracy_of_rows() -> None:
    model = model_of("bert-tiny").double()
    table = model.token_table.detach()
    weights = torch.rand(60, dtype=torch.float64) ** 4
    weights[::7] = 0
    plain, weighted = factorise(model, 6).token_table, factorise(model, 6, weights).token_table
    errors = [(weights * (table - near).square().sum(1)).sum() for near in (plain, weighted)]
    assert errors[1] < 0.8 * errors[0]
    # Eckart and Young 1936 for the weighted rows
    sizes = torch.linalg.svdvals(weights.sqrt()[:, None] * table)
    torch.testing.assert_close(errors[1], sizes[6:].square().sum())
    assert (weighted[::7] - table[::7]).norm() < table[::7].norm()
    torch.testing.assert_close(factorise(model, 6, torch.ones(60)).token_table, plain)
    # the rank exceeds the number of rows with weight
    few = torch.zeros(60)
    few[:3] = 1
    torch.testing.assert_close(factorise(model, 6, few).token_table[:3], table[:3])
    with pytest.raises(InputError, match=r"weights has shape \(3,\); allowed: \(60,\)"):
        factorise(model, 6, torch.ones(3))
    with pytest.raises(InputError, match="weights range from 0 to 0; allowed: finite, 0 or more, not all 0"):
        factorise(model, 6, torch.zeros(60))
