"""Aligned training of decoder exits: its loss, its oracle, and what has a gradient."""

from pathlib import Path

import pytest
import torch
from test_translation import LAYOUTS, batches
from torch import Tensor

import bertsmith
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.pairs import PairConfig, Pairs
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.heads.decoder_exits import Choose, DecoderExitsConfig
from bertsmith.models.model import Model
from bertsmith.objectives import depth
from bertsmith.objectives.depth import (
    DepthLearning,
    ExitScores,
    OracleConfig,
    oracle_exits,
    smooth_over_neighbours,
    sum_by_sequence,
)
from bertsmith.objectives.translation import TranslationConfig, target_scores
from bertsmith.ops.token_loss import from_scores
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tables import read_split


@pytest.fixture(scope="module")
def made(pairs_folder: Path) -> tuple[Model, Pairs]:
    rows = read_split(pairs_folder, "train").rows
    sources, targets = ([row[column] for row in rows] for column in ("forth", "back"))
    tokenizer = learn_tokenizer(sources, "wordpiece", 120, progress=False)
    small = {"width": 32, "layers": 2, "heads": 2, "neurons": 64, "dropout": 0.0, "max_length": 32}
    model = bertsmith.build(bertsmith.preset("transformer-tiny", vocabulary=tokenizer.size, **small), seed=0).double()
    model.tokenizer = tokenizer
    return model, Pairs.tokenise(sources, targets, tokenizer, PairConfig(length=16, micro_tokens=64))


def with_exits(model: Model, choose: Choose = "confidence", layers: tuple[int, ...] = (1,)) -> Model:
    config = DecoderExitsConfig(layers=layers, choose=choose)
    return fit_heads(model, model.config.changed(heads=(*model.config.heads, config)), "m", seed=1)[0].double()


def learning(model: Model, **options: object) -> DepthLearning:
    config = next((head for head in model.config.heads if isinstance(head, DecoderExitsConfig)), None)
    return DepthLearning(config, depth=2, **{"smoothing": 0.1, **options})


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: each for name, each in zip(parameters, found, strict=True) if each is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_head_is_translation(made: tuple[Model, Pairs], layout: str) -> None:
    model, batch = made[0], batches(made, layout)[0]
    theirs = TranslationConfig(smoothing=0.1).build()
    own = learning(model)
    expected = theirs(model, theirs.prepare(batch, 0))["next_token"]
    sums = own(model, own.prepare(batch, 0))["next_token"]
    torch.testing.assert_close(sums.loss, expected.loss)
    for name in ("accuracy", "nll"):
        torch.testing.assert_close(sums.metrics[name].part.double(), expected.metrics[name].part.double())
    first, second = (gradients(model, one.loss) for one in (sums, expected))
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], msg=name)


@pytest.mark.parametrize("weighting", ["even", "by_depth"])
def test_aligned_loss_is_the_mean_over_heads(made: tuple[Model, Pairs], weighting: str) -> None:
    model, batch = with_exits(made[0]), batches(made, "packed")[0]
    objective = learning(model, weighting=weighting)
    loss = objective(model, objective.prepare(batch, 0))["next_token"].loss
    _, output = depth.teacher_forced(model, batch)
    exit_loss = from_scores(model.exit_scores(1, output.normalised(1)), batch.expected, 0.1).loss
    last = from_scores(target_scores(model, batch), batch.expected, 0.1).loss
    weights = (1, 1) if weighting == "even" else (1, 2)
    torch.testing.assert_close(loss, (weights[0] * exit_loss + weights[1] * last) / sum(weights))


def test_answers_are_soft_targets_without_a_gradient(made: tuple[Model, Pairs]) -> None:
    model, batch = with_exits(made[0]), batches(made, "packed")[0]
    objective = learning(model, learn_from="answers")
    loss = objective(model, objective.prepare(batch, 0))["next_token"].loss
    _, output = depth.teacher_forced(model, batch)
    scores, last = model.exit_scores(1, output.normalised(1)), target_scores(model, batch)
    is_target = batch.expected != IGNORED
    soft = torch.nn.functional.cross_entropy(scores[is_target], last[is_target].softmax(-1).detach(), reduction="sum")
    expected = (soft + from_scores(last, batch.expected, 0.1).loss) / 2
    torch.testing.assert_close(loss, expected)
    own, theirs = gradients(model, loss), gradients(model, expected)
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(own[parameter], gradient)


def test_evaluation_compares_all_heads_with_the_right_tokens(made: tuple[Model, Pairs]) -> None:
    model, batch = with_exits(made[0]), batches(made, "packed")[0]
    sums = []
    for learn_from in ("answers", "labels"):
        objective = learning(model, learn_from=learn_from).for_evaluation()
        sums.append(objective(model, objective.prepare(batch, 0))["next_token"].loss)
    torch.testing.assert_close(*sums, rtol=0, atol=0)


@pytest.mark.parametrize("learn_from", ["labels", "answers"])
def test_chunks_change_nothing(made: tuple[Model, Pairs], learn_from: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = with_exits(made[0], "geometric"), batches(made, "packed")[0]
    objective = learning(model, learn_from=learn_from)
    whole = objective(model, objective.prepare(batch, 0))
    monkeypatch.setattr(depth, "CHUNK_SCORES", {"cpu": 3 * model.config.decoder.vocabulary})
    monkeypatch.setattr(depth, "KEPT_SCORES", 0)
    chunked = objective(model, objective.prepare(batch, 0))
    for name, sums in whole.items():
        torch.testing.assert_close(chunked[name].loss, sums.loss)
        own, theirs = gradients(model, chunked[name].loss), gradients(model, sums.loss)
        for parameter, gradient in theirs.items():
            torch.testing.assert_close(own[parameter], gradient)


@pytest.mark.parametrize("choose", ["sequence", "multinomial", "geometric"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chooser_has_no_gradient_into_the_decoder(made: tuple[Model, Pairs], choose: Choose, layout: str) -> None:
    model, batch = with_exits(made[0], choose), batches(made, layout)[0]
    objective = learning(model)
    prepared = objective.prepare(batch, 0)
    sums = objective(model, prepared)["chooser"]
    assert {name.split(".")[2] for name in gradients(model, sums.loss)} == {"chooser"}
    assert int(objective.counts(prepared)["chooser"]) == (
        batch.target_layout.batch if choose == "sequence" else int((batch.expected != IGNORED).sum())
    )


@pytest.mark.parametrize("choose", ["sequence", "multinomial", "geometric"])
def test_sums_do_not_depend_on_the_layout(made: tuple[Model, Pairs], choose: Choose) -> None:
    model = with_exits(made[0], choose)
    objective = learning(model, oracle=OracleConfig(neighbours=2.0, extra_cost=0.3))
    totals = []
    for layout in LAYOUTS:
        sums = [objective(model, objective.prepare(batch, 0)) for batch in batches(made, layout)]
        totals.append(torch.stack([torch.stack([one[name].loss for name in one]) for one in sums]).sum(0))
    torch.testing.assert_close(*totals)


def test_oracle_by_hand() -> None:
    # three tokens, exits after 1 and 2 of 3 blocks
    values = torch.tensor([[-2.0, -0.5, -1.0], [-1.0, -0.45, -0.9], [-0.2, -0.4, -0.1]])
    assert oracle_exits(values, (1, 2, 3), 0.0).tolist() == [2, 2, 2]
    assert oracle_exits(values, (1, 2, 3), 0.1).tolist() == [2, 0, 2]
    assert oracle_exits(values, (1, 2, 3), 0.85).tolist() == [1, 0, 0]
    assert oracle_exits(values, (1, 2, 3), 1e6).tolist() == [0, 0, 0]
    layout = SequenceLayout.packed(torch.tensor([0, 2, 3], dtype=torch.int32), 2)
    tokens = torch.zeros(3, dtype=torch.long)
    summed = sum_by_sequence(values, layout, tokens)
    torch.testing.assert_close(summed, torch.tensor([[-2.5, -1.0], [-1.45, -0.9], [-0.6, -0.1]]))
    near = torch.exp(torch.tensor(-1 / 2.0))
    smoothed = smooth_over_neighbours(values, layout, tokens, 2.0)
    expected = torch.stack(
        [values[:, 0] + near * values[:, 1], values[:, 1] + near * values[:, 0], values[:, 2]], dim=1
    )
    torch.testing.assert_close(smoothed, expected)


def test_agreement_is_with_the_last_head() -> None:
    predictions = torch.tensor([[7, 4, 2], [7, 3, 9], [7, 3, 5]])  # of three heads for three tokens
    rows = torch.zeros(3, 3)
    values = ExitScores(torch.zeros(3), rows, rows, rows.bool(), predictions).values("agreement")
    assert values.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert oracle_exits(values, (1, 2, 3), 0.1).tolist() == [0, 1, 2]  # the first exit that agrees


@pytest.mark.parametrize("score", ["likelihood", "correctness", "agreement"])
def test_very_costly_blocks_teach_the_first_exit(made: tuple[Model, Pairs], score: str) -> None:
    model, batch = with_exits(made[0], "multinomial"), batches(made, "packed")[0]
    objective = learning(model, oracle=OracleConfig(extra_cost=1e6, score=score))
    prepared = objective.prepare(batch, 0)
    share = objective(model, prepared)["chooser"].metrics["oracle_blocks"]
    assert int(share.part) == int(share.whole) == int(prepared.count)


def test_evaluation_has_no_smoothing(made: tuple[Model, Pairs]) -> None:
    model, batch = with_exits(made[0]), batches(made, "packed")[0]
    objective = learning(model).for_evaluation()
    assert objective.smoothing == 0.0
    scores = depth.exit_scores(model, depth.teacher_forced(model, batch)[1], batch, (1,), 0.0)
    torch.testing.assert_close(-scores.log_likelihoods.sum(-1), scores.loss)
    assert bool((scores.probabilities >= scores.log_likelihoods.exp() - 1e-12).all())
