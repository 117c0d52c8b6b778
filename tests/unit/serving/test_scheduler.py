"""The scheduler: outputs do not depend on the other sequences of a batch; batching order, sizes and statistics."""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from scheduler_cases import BlockingModel, of_length, sequences, tiny_folder

import bertsmith
from bertsmith.data.batch import packed
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.generator import attach, generator_of
from bertsmith.models.model import Model
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation, RequestResult, TokenSequence
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import SchedulerLimits

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@contextmanager
def running(served: ServedModel, **limits: int | float) -> Iterator[Scheduler]:
    scheduler = Scheduler(served, SchedulerLimits(**limits))  # type: ignore[arg-type]
    scheduler.start()
    try:
        yield scheduler
    finally:
        if isinstance(served, BlockingModel):
            served.unblock()
        scheduler.close()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.open(
        tiny_folder(tmp_path_factory.mktemp("models") / "elastic", "classification", is_elastic=True)
    )


@pytest.fixture
def blocking(classifier: ServedModel) -> BlockingModel:
    return BlockingModel(classifier)


def alone(model: Model, operation: Operation, sequence: TokenSequence, subnet: Subnet | None = None) -> np.ndarray:
    """Return the output of the model for one sequence alone."""
    tokens, layout = packed([sequence.tokens], 0)
    types = None if sequence.types is None else torch.from_numpy(sequence.types)
    with torch.inference_mode():
        if operation == "task":
            outputs = model.outputs(tokens, layout, types, subnet=subnet)
            return (outputs if model.is_for_tokens else outputs[0]).numpy()
        return model.encoder(tokens, layout, types, subnet=subnet).mean(0).numpy()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_concurrent_requests_get_their_own_outputs(tmp_path: Path, task: str, workers: int) -> None:
    """Concurrent requests of different operations, sizes and lengths: each output equals a forward pass alone."""
    served = ServedModel.open(tiny_folder(tmp_path / "model", task))
    assert served.model is not None
    random, inputs = np.random.default_rng(1), sequences(150)
    sizes = [None, None, Subnet(width=0.5), Subnet(depth=0.5)]
    operations: list[Operation] = ["task", "vectors"]

    async def call(
        scheduler: Scheduler, request: list[TokenSequence]
    ) -> tuple[list[TokenSequence], Operation, Subnet | None, RequestResult]:
        await asyncio.sleep(random.uniform(0, 0.05))
        operation, subnet = operations[random.integers(2)], sizes[random.integers(4)]
        return request, operation, subnet, await scheduler.submit(operation, request, subnet=subnet)

    async def all_calls(
        scheduler: Scheduler,
    ) -> list[tuple[list[TokenSequence], Operation, Subnet | None, RequestResult]]:
        cuts = np.sort(random.integers(0, 150, size=60)).tolist()
        requests = [inputs[begin:end] for begin, end in zip([0, *cuts], [*cuts, 150], strict=True)]
        return await asyncio.gather(*(call(scheduler, request) for request in requests if request))

    with running(served, batch_tokens=64, workers=workers) as scheduler:
        results = asyncio.run(all_calls(scheduler))
        counts = scheduler.stats()
    assert sum(len(request) for request, *_ in results) == 150
    for request, operation, subnet, result in results:
        assert result.subnet == subnet
        for sequence, output in zip(request, result.outputs, strict=True):
            np.testing.assert_allclose(output, alone(served.model, operation, sequence, subnet), **CLOSE)
    assert counts.answered == len(results)
    assert counts.batched_sequences == 150
    assert counts.waiting_tokens == counts.waiting_sequences == counts.running_tokens == 0
    assert counts.batches < 150


def test_vectors_equal_encode(tmp_path: Path) -> None:
    for task in (None, "embedding"):
        served = ServedModel.open(tiny_folder(tmp_path / f"{task}", task))
        texts = ["good words", "a bad day", "fine", "awful awful awful day"]
        encoded = served.tokenizer.encode(texts, None, 32, padding=False)
        inputs = [TokenSequence(*pair) for pair in zip(encoded["input_ids"], encoded["token_type_ids"], strict=True)]
        with running(served) as scheduler:
            result = asyncio.run(scheduler.submit("vectors", inputs))
        assert served.model is not None
        np.testing.assert_allclose(np.stack(result.outputs), served.model.encode(texts).numpy(), **CLOSE)


@pytest.mark.parametrize("preset", ["bert-tiny", "deberta-base", "electra-small"])
def test_mask_probabilities_equal_those_of_fill_mask(tmp_path: Path, preset: str) -> None:
    """Masks are filled by the model's own head, by a mask decoder, or by the generator."""
    folder = tiny_folder(tmp_path / "model", preset=preset)
    if preset == "electra-small":
        model = bertsmith.load(folder)
        attach(model, bertsmith.build(generator_of(model.config), seed=1).eval(), "none")
        bertsmith.save(model, folder, force=True)
    served = ServedModel.open(folder)
    model = served.model
    assert model is not None
    assert served.operations == {"vectors", "fill_mask"}
    texts = ["good [MASK] day", "[MASK]", "a [MASK] [MASK] of words"]
    encoded = served.tokenizer.encode(texts, None, 32, padding=False)["input_ids"]
    inputs = [TokenSequence(row, None, np.flatnonzero(row == served.tokenizer.mask)) for row in encoded]
    with running(served, workers=1) as scheduler:
        for positions in (np.array([9]), np.array([-1]), np.array([1, 1]), np.array([], dtype=np.int64)):
            with pytest.raises(InputError, match="mask_positions must"):
                asyncio.run(scheduler.submit("fill_mask", [TokenSequence(inputs[0].tokens, None, positions)]))
        result = asyncio.run(scheduler.submit("fill_mask", inputs))
        batches = scheduler.stats().batches
    assert batches == 1
    for text, probabilities in zip(texts, result.outputs, strict=True):
        expected = model.fill_mask(text, top_k=3)
        assert len(probabilities) == len(expected)
        for row, best in zip(probabilities, expected, strict=True):
            order = np.argsort(-row)[:3]
            assert served.tokenizer.tokens(order.tolist()) == [token for token, _ in best]
            np.testing.assert_allclose(row[order], [probability for _, probability in best], **CLOSE)


async def _wait_for_batch(blocking: BlockingModel) -> None:
    """Wait until a worker has started a batch."""
    assert await asyncio.to_thread(blocking.started.acquire, timeout=10)


def test_requests_that_arrive_during_a_batch_form_the_next_one(blocking: BlockingModel) -> None:
    async def scenario(scheduler: Scheduler) -> list[RequestResult]:
        blocking.block()
        calls = [asyncio.create_task(scheduler.submit("task", [of_length(3)]))]
        await _wait_for_batch(blocking)
        for length in (9, 1, 20, 4):
            calls.append(asyncio.create_task(scheduler.submit("task", [of_length(length)])))
        await asyncio.sleep(0.01)
        assert scheduler.stats().waiting_sequences == 4
        assert scheduler.stats().waiting_tokens == 34
        assert scheduler.stats().running_tokens == 3
        blocking.unblock()
        return list(await asyncio.gather(*calls))

    with running(blocking, batch_tokens=100, workers=1) as scheduler:
        result = asyncio.run(scenario(scheduler))
        counts = scheduler.stats()
    assert [len(one.outputs[0]) for one in result] == [3, 9, 1, 20, 4]
    assert counts.batches == 2
    assert counts.batched_tokens == 37


def lengths_of_batches(
    blocking: BlockingModel, calls: list[list[TokenSequence]], operations: list[Operation] | None = None, **limits: int
) -> list:
    """Return the batches of requests that all arrive during the first batch."""

    async def scenario(scheduler: Scheduler) -> None:
        blocking.block()
        first = asyncio.create_task(scheduler.submit("task", [of_length(1)]))
        await _wait_for_batch(blocking)
        encoded = []
        for sequence, operation in zip(calls, operations or ["task"] * len(calls), strict=True):
            encoded.append(asyncio.create_task(scheduler.submit(operation, sequence)))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        blocking.permits.release(100)
        await asyncio.gather(first, *encoded)

    with running(blocking, workers=1, **limits) as scheduler:
        asyncio.run(scenario(scheduler))
    return blocking.batches[1:]


def test_long_sequence_is_not_overtaken(blocking: BlockingModel) -> None:
    calls = [[of_length(length)] for length in (6, 5, 2, 3, 12, 1)]
    batches = [lengths for _, lengths, _ in lengths_of_batches(blocking, calls, batch_tokens=10)]
    assert batches == [[6], [5, 2, 3], [12], [1]]


def test_request_may_span_batches(blocking: BlockingModel) -> None:
    batches = [lengths for _, lengths, _ in lengths_of_batches(blocking, [[of_length(4)] * 5], batch_tokens=8)]
    assert batches == [[4, 4], [4, 4], [4]]


def test_operations_are_batched_separately(blocking: BlockingModel) -> None:
    calls = [[of_length(length)] for length in (1, 2, 3, 4)]
    results = lengths_of_batches(blocking, calls, ["task", "vectors", "task", "vectors"], batch_tokens=100)
    assert [(operation, lengths) for operation, lengths, _ in results] == [("task", [1, 3]), ("vectors", [2, 4])]


def test_free_workers_share_the_queue(blocking: BlockingModel) -> None:
    async def scenario(scheduler: Scheduler) -> None:
        blocking.block()
        calls = [asyncio.create_task(scheduler.submit("task", [of_length(20)] * 5)) for _ in range(2)]
        await _wait_for_batch(blocking)
        await _wait_for_batch(blocking)
        blocking.unblock()
        await asyncio.gather(*calls)

    with running(blocking, batch_tokens=1000, workers=2) as scheduler:
        asyncio.run(scenario(scheduler))
    assert [len(lengths) for _, lengths, _ in blocking.batches] == [5, 5]


def test_many_masks_count_as_more_tokens(tmp_path: Path) -> None:
    served = ServedModel.open(tiny_folder(tmp_path / "model"))
    inputs = [TokenSequence(np.ones(4, dtype=np.int64), None, np.arange(4))] * 4
    with running(served, workers=1, batch_tokens=8) as scheduler:
        result = asyncio.run(scheduler.submit("fill_mask", inputs))
        counts = scheduler.stats()
    assert counts.batches == 4
    assert [len(sequence) for sequence in result.outputs] == [4] * 4


def test_elastic_model_answers_with_a_smaller_size_under_load(classifier: ServedModel, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "elastic", "classification", is_elastic=True)
    served = ServedModel.open(folder, floor=0.9)
    small = Subnet(width=0.5, depth=0.5)
    assert served.networks.keys() == {Subnet(width=0.5), small}
    assert served.model is not None
    assert served.networks[small].encoder.embedding is served.model.encoder.embedding
    assert served.networks[small].encoder.blocks[0] is served.networks[Subnet(width=0.5)].encoder.blocks[1]
    inputs = sequences(60)

    async def scenario(scheduler: Scheduler) -> list[RequestResult]:
        return list(await asyncio.gather(*(scheduler.submit("task", [sequence, sequence]) for sequence in inputs)))

    with running(served, workers=1, batch_tokens=32, wait_target=1e-6, quiet_seconds=60.0) as scheduler:
        result = asyncio.run(scenario(scheduler))
        vectors = asyncio.run(scheduler.submit("vectors", inputs))
        requested = asyncio.run(scheduler.submit("task", inputs[:3], subnet=Subnet(width=0.75)))
        assert scheduler.stats().subnet == small
    assert {one.subnet for one in result} == {Subnet(width=0.5), small}
    assert vectors.subnet is None  # the record has no scores for them
    assert requested.subnet == Subnet(width=0.75)
    for sequence, one in zip(inputs, result, strict=True):
        for output in one.outputs:
            np.testing.assert_allclose(output, alone(served.model, "task", sequence, one.subnet), **CLOSE)


def test_whole_model_answers_without_a_floor(classifier: ServedModel) -> None:
    with running(classifier, workers=1, batch_tokens=32, wait_target=1e-6) as scheduler:
        result = asyncio.run(scheduler.submit("task", sequences(40)))
    assert result.subnet is None


def test_invalid_sequence_is_rejected_before_it_enters_a_batch(classifier: ServedModel) -> None:
    bad = {
        "shape": of_length(33),
        "0 to": of_length(3, token=10**6),
        "types": TokenSequence(np.ones(3, dtype=np.int64), np.full(3, 7)),
        "1 to": TokenSequence(np.empty(0, dtype=np.int64)),
    }
    with running(classifier) as scheduler:
        for word, inputs in bad.items():
            with pytest.raises(InputError, match=word):
                asyncio.run(scheduler.submit("task", [of_length(2), inputs]))
        with pytest.raises(InputError, match="supports task, vectors"):
            asyncio.run(scheduler.submit("fill_mask", [of_length(2)]))
        with pytest.raises(InputError, match=r"subnet\.heads"):
            asyncio.run(scheduler.submit("task", [of_length(2)], subnet=Subnet(heads=(9, 9))))
        assert scheduler.stats().batches == 0


def test_stats_cover_the_last_seconds(blocking: BlockingModel) -> None:
    now = [0.0]
    scheduler = Scheduler(blocking, SchedulerLimits(workers=1, batch_tokens=100), clock=lambda: now[0])
    scheduler.start()
    assert scheduler.stats().median_seconds is None
    now[0] = 100.0
    asyncio.run(scheduler.submit("task", [of_length(10)] * 2))
    stats = scheduler.stats()
    assert (stats.sequences_per_second, stats.tokens_per_second) == (0.2, 2.0)
    assert stats.median_seconds == stats.slowest_seconds == 0.0
    now[0] = 200.0
    later = scheduler.stats()
    assert dataclasses.replace(later, answered=0) == dataclasses.replace(
        stats, answered=0, sequences_per_second=0.0, tokens_per_second=0.0, median_seconds=None, slowest_seconds=None
    )
    scheduler.close()
