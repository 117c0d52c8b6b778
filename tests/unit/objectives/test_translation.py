"""Translation: label smoothing by definition, no leak of future tokens, sums independent of batching."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith.data.loader import SpecialTokens
from bertsmith.data.pairs import PairBatch, PairConfig, PairPlan, PairReader, Pairs
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.objectives.translation import TranslationConfig, target_scores
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tables import read_split

LAYOUTS = ("packed", "padded")


@pytest.fixture(scope="module")
def made(pairs_folder: Path) -> tuple[Model, Pairs]:
    rows = read_split(pairs_folder, "train").rows
    sources, targets = ([row[column] for row in rows] for column in ("forth", "back"))
    tokenizer = learn_tokenizer(sources, "wordpiece", 120, progress=False)
    small = {"width": 32, "layers": 2, "heads": 2, "neurons": 64, "dropout": 0.0, "max_length": 32}
    model = bertsmith.build(bertsmith.preset("transformer-tiny", vocabulary=tokenizer.size, **small), seed=0).double()
    model.tokenizer = tokenizer
    return model, Pairs.tokenise(sources, targets, tokenizer, PairConfig(length=16, micro_tokens=64))


def batches(made: tuple[Model, Pairs], layout: str, micro_tokens: int = 256) -> list[PairBatch]:
    model, pairs = made
    tokenizer = model.require_tokenizer()
    config = PairConfig(length=16, micro_tokens=micro_tokens, layout=layout)
    reader = PairReader(pairs, config, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator))
    return [reader[plan].batch for plan in PairPlan(pairs, config, 0).one_epoch()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_translation_objective_contract(made: tuple[Model, Pairs], layout: str) -> None:
    model, _ = made
    objective = TranslationConfig().build()
    batch = batches(made, layout)[0]
    prepared = objective.prepare(batch, 5)
    counts, sums = objective.counts(prepared), objective(model, prepared)
    assert counts.keys() == sums.keys() == set(objective.terms)
    assert set(sums["next_token"].metrics) == set(objective.terms["next_token"].metrics)
    assert int(counts["next_token"]) == int((batch.expected >= 0).sum()) > 0
    assert 0 <= int(sums["next_token"].metrics["accuracy"].part) <= int(counts["next_token"])
    again = objective(model, objective.prepare(batch, 5))
    assert torch.equal(sums["next_token"].loss, again["next_token"].loss)
    # evaluation is without smoothing
    evaluation = objective.for_evaluation()
    plain = evaluation(model, evaluation.prepare(batch, 0))["next_token"].loss
    assert plain.item() == pytest.approx(sums["next_token"].metrics["nll"].part.item())
    assert plain.item() != pytest.approx(sums["next_token"].loss.item(), rel=1e-3)

    model.zero_grad()
    sums["next_token"].loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "a part that is never trained"
    model.zero_grad()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_does_not_depend_on_batching(made: tuple[Model, Pairs], layout: str) -> None:
    model, _ = made
    objective = TranslationConfig().build()
    totals = []
    for kind, micro_tokens in ((layout, 64), (layout, 700), ("packed", 200)):
        prepared = [objective.prepare(batch, 0) for batch in batches(made, kind, micro_tokens)]
        loss = sum(objective(model, item)["next_token"].loss.item() for item in prepared)
        totals.append((loss, sum(int(item.count) for item in prepared)))
    assert totals[0] == pytest.approx(totals[1], rel=1e-10)
    assert totals[0] == pytest.approx(totals[2], rel=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_future_target_tokens_do_not_leak(made: tuple[Model, Pairs], layout: str) -> None:
    """Changing y_t does not change the scores that predict y_1 … y_t, but the later ones."""
    model, _ = made
    batch = max(batches(made, layout), key=lambda batch: batch.target_layout.max_length)
    position = 3  # the decoder reads [CLS] y_1 y_2 y_3 …: position of y_3, whose scores predict y_4
    positions = batch.target_layout.positions(batch.target)
    changed = torch.where(positions == position, (batch.target + 1) % model.config.encoder.vocabulary, batch.target)
    assert not changed.equal(batch.target)

    def difference(other: PairBatch) -> Tensor:
        with torch.no_grad():
            return (target_scores(model, other) - target_scores(model, batch)).abs().amax(-1)

    moved = difference(replace(batch, target=changed))
    assert moved[positions < position].max() == 0
    real = torch.ones_like(positions, dtype=torch.bool)
    if batch.target_layout.is_token is not None:
        real = batch.target_layout.is_token
    assert moved[(positions >= position) & real].min() > 0
    # another source changes all scores
    source = (batch.source + 1) % model.config.encoder.vocabulary
    assert difference(replace(batch, source=source))[real].min() > 0


def test_model_without_decoder_raises(made: tuple[Model, Pairs]) -> None:
    bert = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=120, layers=1))
    with pytest.raises(InputError, match="this bert model has no decoder"):
        target_scores(bert, batches(made, "packed")[0])
