"""The engine at its work: every answer is that of its own sequences, whatever stands with them in a batch."""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from scheduler_cases import Held, of_length, sequences, tiny_folder

import bertsmith
from bertsmith.data.batch import packed
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.generator import attach, generator_of
from bertsmith.models.model import Model
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation, RequestResult, TokenSequence
from bertsmith.serving.scheduler import Scheduler, SchedulerLimits

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@contextmanager
def running(served: ServedModel, **limits: int | float) -> Iterator[Scheduler]:
    engine = Scheduler(served, SchedulerLimits(**limits))  # type: ignore[arg-type]
    engine.start()
    try:
        yield engine
    finally:
        if isinstance(served, Held):
            served.free()
        engine.close()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.open(
        tiny_folder(tmp_path_factory.mktemp("models") / "elastic", "classification", is_elastic=True)
    )


@pytest.fixture
def held(classifier: ServedModel) -> Held:
    return Held(classifier)


def alone(model: Model, work: Operation, asked: TokenSequence, subnet: Subnet | None = None) -> np.ndarray:
    """What the model says of one sequence by itself."""
    tokens, layout = packed([asked.tokens], 0)
    types = None if asked.types is None else torch.from_numpy(asked.types)
    with torch.inference_mode():
        if work == "task":
            outputs = model.outputs(tokens, layout, types, subnet=subnet)
            return (outputs if model.is_for_tokens else outputs[0]).numpy()
        return model.encoder(tokens, layout, types, subnet=subnet).mean(0).numpy()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_answers_of_many_callers_are_their_own(tmp_path: Path, task: str, workers: int) -> None:
    """Calls of different works, sizes and lengths come at once; each output is what the model says to it alone."""
    served = ServedModel.open(tiny_folder(tmp_path / "model", task))
    assert served.model is not None
    random, asked = np.random.default_rng(1), sequences(150)
    sizes = [None, None, Subnet(width=0.5), Subnet(depth=0.5)]
    works: list[Operation] = ["task", "vectors"]

    async def call(
        engine: Scheduler, own: list[TokenSequence]
    ) -> tuple[list[TokenSequence], Operation, Subnet | None, RequestResult]:
        await asyncio.sleep(random.uniform(0, 0.05))
        work, subnet = works[random.integers(2)], sizes[random.integers(4)]
        return own, work, subnet, await engine.submit(work, own, subnet=subnet)

    async def all_calls(engine: Scheduler) -> list[tuple[list[TokenSequence], Operation, Subnet | None, RequestResult]]:
        cuts = np.sort(random.integers(0, 150, size=60)).tolist()
        parts = [asked[begin:end] for begin, end in zip([0, *cuts], [*cuts, 150], strict=True)]
        return await asyncio.gather(*(call(engine, part) for part in parts if part))

    with running(served, batch_tokens=64, workers=workers) as engine:
        found = asyncio.run(all_calls(engine))
        counts = engine.stats()
    assert sum(len(own) for own, *_ in found) == 150
    for own, work, subnet, answered in found:
        assert answered.subnet == subnet
        for one, output in zip(own, answered.outputs, strict=True):
            np.testing.assert_allclose(output, alone(served.model, work, one, subnet), **CLOSE)
    assert counts.answered == len(found)
    assert counts.batched_sequences == 150
    assert counts.waiting_tokens == counts.waiting_sequences == counts.running_tokens == 0
    assert counts.batches < 150  # some stood together


def test_vectors_are_those_of_encode(tmp_path: Path) -> None:
    for task in (None, "embedding"):
        served = ServedModel.open(tiny_folder(tmp_path / f"{task}", task))
        texts = ["good words", "a bad day", "fine", "awful awful awful day"]
        made = served.tokenizer.encode(texts, None, 32, padding=False)
        asked = [TokenSequence(*own) for own in zip(made["input_ids"], made["token_type_ids"], strict=True)]
        with running(served) as engine:
            answered = asyncio.run(engine.submit("vectors", asked))
        assert served.model is not None
        np.testing.assert_allclose(np.stack(answered.outputs), served.model.encode(texts).numpy(), **CLOSE)


@pytest.mark.parametrize("preset", ["bert-tiny", "deberta-base", "electra-small"])
def test_masks_are_filled_as_the_model_fills_them(tmp_path: Path, preset: str) -> None:
    """By its own head, by a mask decoder, or by the generator beside it."""
    folder = tiny_folder(tmp_path / "model", preset=preset)
    if preset == "electra-small":
        model = bertsmith.load(folder)
        attach(model, bertsmith.build(generator_of(model.config), seed=1).eval(), "none")
        bertsmith.save(model, folder, force=True)
    served = ServedModel.open(folder)
    model = served.model
    assert model is not None
    assert served.works == {"vectors", "fill_mask"}
    texts = ["good [MASK] day", "[MASK]", "a [MASK] [MASK] of words"]
    made = served.tokenizer.encode(texts, None, 32, padding=False)["input_ids"]
    asked = [TokenSequence(own, None, np.flatnonzero(own == served.tokenizer.mask)) for own in made]
    with running(served, workers=1) as engine:
        for places in (None, np.array([9]), np.array([-1]), np.array([1, 1]), np.array([], dtype=np.int64)):
            with pytest.raises(InputError, match="places must"):
                asyncio.run(engine.submit("fill_mask", [TokenSequence(asked[0].tokens, None, places)]))
        answered = asyncio.run(engine.submit("fill_mask", asked))
        batches = engine.stats().batches
    assert batches == 1
    for text, shares in zip(texts, answered.outputs, strict=True):
        wanted = model.fill_mask(text, top=3)
        assert len(shares) == len(wanted)
        for own, best in zip(shares, wanted, strict=True):
            order = np.argsort(-own)[:3]
            assert served.tokenizer.pieces(order.tolist()) == [piece for piece, _ in best]
            np.testing.assert_allclose(own[order], [share for _, share in best], **CLOSE)


async def _started(held: Held) -> None:
    """Waits until a worker has begun a batch."""
    assert await asyncio.to_thread(held.began.acquire, timeout=10)


def test_what_gathers_while_a_batch_runs_is_the_next_one_in_order(held: Held) -> None:
    async def play(engine: Scheduler) -> list[RequestResult]:
        held.hold()
        calls = [asyncio.create_task(engine.submit("task", [of_length(3)]))]
        await _started(held)
        for length in (9, 1, 20, 4):
            calls.append(asyncio.create_task(engine.submit("task", [of_length(length)])))
        await asyncio.sleep(0.01)
        assert engine.stats().waiting_sequences == 4
        assert engine.stats().waiting_tokens == 34
        assert engine.stats().running_tokens == 3
        held.free()
        return list(await asyncio.gather(*calls))

    with running(held, batch_tokens=100, workers=1) as engine:
        answered = asyncio.run(play(engine))
        counts = engine.stats()
    assert [len(one.outputs[0]) for one in answered] == [3, 9, 1, 20, 4]
    assert counts.batches == 2
    assert counts.batched_tokens == 37


def lengths_of_batches(
    held: Held, calls: list[list[TokenSequence]], works: list[Operation] | None = None, **limits: int
) -> list:
    """The batches in which calls are worked on that all came while the first one was."""

    async def play(engine: Scheduler) -> None:
        held.hold()
        first = asyncio.create_task(engine.submit("task", [of_length(1)]))
        await _started(held)
        made = []
        for own, work in zip(calls, works or ["task"] * len(calls), strict=True):
            made.append(asyncio.create_task(engine.submit(work, own)))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        held.let.release(100)
        await asyncio.gather(first, *made)

    with running(held, workers=1, **limits) as engine:
        asyncio.run(play(engine))
    return held.batches[1:]


def test_a_long_sequence_is_not_passed_by(held: Held) -> None:
    """The first that does not fit ends the batch, and is the first of the next."""
    calls = [[of_length(length)] for length in (6, 5, 2, 3, 12, 1)]
    batches = [lengths for _, lengths, _ in lengths_of_batches(held, calls, batch_tokens=10)]
    assert batches == [[6], [5, 2, 3], [12], [1]]


def test_a_call_may_be_spread_over_batches(held: Held) -> None:
    batches = [lengths for _, lengths, _ in lengths_of_batches(held, [[of_length(4)] * 5], batch_tokens=8)]
    assert batches == [[4, 4], [4, 4], [4]]


def test_works_are_batched_apart_and_none_starves(held: Held) -> None:
    calls = [[of_length(length)] for length in (1, 2, 3, 4)]
    found = lengths_of_batches(held, calls, ["task", "vectors", "task", "vectors"], batch_tokens=100)
    assert [(work, lengths) for work, lengths, _ in found] == [("task", [1, 3]), ("vectors", [2, 4])]


def test_free_workers_share_what_waits(held: Held) -> None:
    async def play(engine: Scheduler) -> None:
        held.hold()
        calls = [asyncio.create_task(engine.submit("task", [of_length(20)] * 5)) for _ in range(2)]
        await _started(held)
        await _started(held)
        held.free()
        await asyncio.gather(*calls)

    with running(held, batch_tokens=1000, workers=2) as engine:
        asyncio.run(play(engine))
    assert [len(lengths) for _, lengths, _ in held.batches] == [5, 5]


def test_many_masks_count_as_more_tokens(tmp_path: Path) -> None:
    """What is said of each is as long as the vocabulary, so a batch must hold few of them."""
    served = ServedModel.open(tiny_folder(tmp_path / "model"))
    asked = [TokenSequence(np.ones(4, dtype=np.int64), None, np.arange(4))] * 4
    with running(served, workers=1, batch_tokens=8) as engine:
        answered = asyncio.run(engine.submit("fill_mask", asked))
        counts = engine.stats()
    assert counts.batches == 4
    assert [len(own) for own in answered.outputs] == [4] * 4


def test_under_load_an_elastic_model_answers_in_a_smaller_size_and_says_so(
    classifier: ServedModel, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "elastic", "classification", is_elastic=True)
    served = ServedModel.open(folder, floor=0.9)
    small = Subnet(width=0.5, depth=0.5)
    assert served.networks.keys() == {Subnet(width=0.5), small}
    assert served.model is not None
    # a size that shares what is not cut takes no memory for it twice
    assert served.networks[small].encoder.embedding is served.model.encoder.embedding
    assert served.networks[small].encoder.blocks[0] is served.networks[Subnet(width=0.5)].encoder.blocks[1]
    asked = sequences(60)

    async def play(engine: Scheduler) -> list[RequestResult]:
        return list(await asyncio.gather(*(engine.submit("task", [own, own]) for own in asked)))

    with running(served, workers=1, batch_tokens=32, wait_target=1e-6, quiet_seconds=60.0) as engine:
        answered = asyncio.run(play(engine))
        vectors = asyncio.run(engine.submit("vectors", asked))
        asked_for = asyncio.run(engine.submit("task", asked[:3], subnet=Subnet(width=0.75)))
        assert engine.stats().subnet == small
    assert {one.subnet for one in answered} == {Subnet(width=0.5), small}
    assert vectors.subnet is None  # the record says nothing of them
    assert asked_for.subnet == Subnet(width=0.75)
    for own, one in zip(asked, answered, strict=True):
        for output in one.outputs:
            np.testing.assert_allclose(output, alone(served.model, "task", own, one.subnet), **CLOSE)


def test_without_a_floor_the_whole_model_answers(classifier: ServedModel) -> None:
    with running(classifier, workers=1, batch_tokens=32, wait_target=1e-6) as engine:
        answered = asyncio.run(engine.submit("task", sequences(40)))
    assert answered.subnet is None


def test_a_sequence_that_cannot_be_worked_on_is_refused_before_it_spoils_a_batch(classifier: ServedModel) -> None:
    bad = {
        "shape": of_length(33),
        "0 to": of_length(3, token=10**6),
        "types": TokenSequence(np.ones(3, dtype=np.int64), np.full(3, 7)),
        "1 to": TokenSequence(np.empty(0, dtype=np.int64)),
    }
    with running(classifier) as engine:
        for word, asked in bad.items():
            with pytest.raises(InputError, match=word):
                asyncio.run(engine.submit("task", [of_length(2), asked]))
        with pytest.raises(InputError, match="does task, vectors"):
            asyncio.run(engine.submit("fill_mask", [of_length(2)]))
        with pytest.raises(InputError, match=r"subnet\.heads"):
            asyncio.run(engine.submit("task", [of_length(2)], subnet=Subnet(heads=(9, 9))))
        assert engine.stats().batches == 0


def test_figures_are_of_the_last_seconds(held: Held) -> None:
    now = [0.0]
    engine = Scheduler(held, SchedulerLimits(workers=1, batch_tokens=100), clock=lambda: now[0])
    engine.start()
    assert engine.stats().median_seconds is None
    now[0] = 100.0
    asyncio.run(engine.submit("task", [of_length(10)] * 2))
    found = engine.stats()
    assert (found.sequences_per_second, found.tokens_per_second) == (0.2, 2.0)
    assert found.median_seconds == found.slowest_seconds == 0.0
    now[0] = 200.0
    later = engine.stats()
    assert dataclasses.replace(later, answered=0) == dataclasses.replace(
        found, answered=0, sequences_per_second=0.0, tokens_per_second=0.0, median_seconds=None, slowest_seconds=None
    )
    engine.close()
