"""Text vectors: order, windows, streaming, precision and invalid input."""

from collections.abc import Iterator

import pytest
import torch

import bertsmith
from bertsmith.data import inference
from bertsmith.data.batch import packed
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs
from bertsmith.models.model import Model
from bertsmith.text.learn import learn_tokenizer

TEXTS = [" ".join(["forge", "iron", "gate", "river"][: 1 + row % 4]) + " smith" * (row * 7 % 23) for row in range(60)]


@pytest.fixture(scope="module")
def model() -> Model:
    tokenizer = learn_tokenizer(TEXTS, "wordpiece", 80, progress=False)
    config = bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, width=32, heads=2, layers=2, max_length=24)
    model = bertsmith.build(config, seed=0)
    model.tokenizer = tokenizer
    return model


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "FIRST_WINDOW", 4)
    monkeypatch.setattr(inference, "MAX_WINDOW", 8)
    monkeypatch.setattr(inference, "CPU_TOKENS", 64)


@pytest.mark.parametrize("batch_size", [None, 1, 3, 1000])
@pytest.mark.usefixtures("small_windows")
def test_vectors_are_in_the_order_of_the_texts(model: Model, batch_size: int | None) -> None:
    alone = torch.cat([model.encode([text]) for text in TEXTS])
    torch.testing.assert_close(model.encode(TEXTS, batch_size=batch_size), alone, rtol=0, atol=1e-5)
    streamed = torch.cat(list(model.encode_stream(iter(TEXTS), batch_size=batch_size)))
    torch.testing.assert_close(streamed, alone, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("small_windows")
def test_batches_obey_the_token_budget(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    vectors = model.vectors

    def record(inputs: EncoderInputs) -> torch.Tensor:
        shapes.append(tuple(inputs.tokens.shape))
        return vectors(inputs)

    monkeypatch.setattr(model, "vectors", record)
    model.encode(TEXTS, batch_size=5)
    assert sum(rows for rows, _ in shapes) == len(TEXTS)
    assert all(rows * length <= 64 and rows <= 5 for rows, length in shapes)
    assert len(shapes) < len(TEXTS) / 2


def test_no_text_gives_no_vectors(model: Model) -> None:
    assert model.encode([]).shape == (0, 32)
    assert list(model.encode_stream([])) == []


def test_empty_and_very_long_texts(model: Model) -> None:
    vectors = model.encode(["", "iron " * 100_000, "iron " * 22, "iron"])
    assert vectors.isfinite().all()
    torch.testing.assert_close(vectors[1], vectors[2], rtol=0, atol=1e-5)  # truncated to the maximum length
    assert (vectors[0] - vectors[3]).abs().max() > 1e-3


@pytest.mark.usefixtures("small_windows")
def test_a_stream_is_read_as_far_as_it_is_computed(model: Model) -> None:
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        while True:  # endless: only constant memory gets past the first window
            read += 1
            yield TEXTS[read % len(TEXTS)]

    stream, yielded = model.encode_stream(texts()), 0
    for _ in range(6):
        yielded += len(next(stream))
        assert read <= yielded + 2 * 8  # the window before, and two that the thread has begun
    stream.close()


def test_mode_and_autocast_do_not_leak_from_a_stream(model: Model) -> None:
    model.train()
    stream = model.encode_stream(TEXTS, precision="bfloat16")
    next(stream)
    assert model.training
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()


def test_precision_is_a_setting(model: Model) -> None:
    exact, half = model.encode(TEXTS, precision="float32"), model.encode(TEXTS, precision="bfloat16")
    assert exact.dtype == half.dtype == torch.float32
    assert torch.equal(model.encode(TEXTS), exact)  # the default on a CPU
    assert not torch.equal(half, exact)
    assert (half - exact).abs().max() < 5e-2


def test_packed_and_padded_vectors_are_equal(model: Model) -> None:
    encoded = model.require_tokenizer().encode(TEXTS, max_length=24, padding=False)["input_ids"]
    with torch.inference_mode(), model.evaluating():
        vectors = model.vectors(EncoderInputs(*packed(encoded, 0)))
    torch.testing.assert_close(vectors, model.encode(TEXTS), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": "a text"}, "encode takes a list of texts, not a string"),
        ({"texts": ["a", 3]}, r"texts\[1\] is a int; it must be a string"),
        ({"texts": ["a"], "batch_size": 0}, "batch_size is 0; allowed: 1 or more"),
        ({"texts": ["a"], "precision": "half"}, "precision is 'half'; allowed: auto, float32, bfloat16"),
    ],
)
def test_invalid_arguments_raise(model: Model, arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.encode(**arguments)


def test_invalid_streams_raise(model: Model) -> None:
    with pytest.raises(InputError, match="encode_stream takes an iterable of texts, not a string"):
        model.encode_stream("a text")
    with pytest.raises(InputError, match="precision is 'half'"):
        model.encode_stream(["a"], precision="half")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"texts\[1\] is a int"):
        list(model.encode_stream(["a", 3]))  # type: ignore[list-item]


@pytest.mark.gpu
def test_a_window_does_not_wait_for_the_gpu(model: Model) -> None:
    expected = model.encode(TEXTS)
    on_gpu = model.to("cuda")
    try:
        on_gpu.encode(TEXTS)  # warm-up: kernels are compiled and tuned
        torch.cuda.set_sync_debug_mode("error")
        vectors = on_gpu.encode(TEXTS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        model.cpu()
    assert vectors.is_cuda
    assert (vectors.cpu() - expected).abs().max() < 5e-2
