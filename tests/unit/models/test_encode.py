"""Text vectors: order, windows, streaming, precision and invalid input."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers_gpu import no_synchronisation

import bertsmith
from bertsmith.data import inference
from bertsmith.data.batch import packed
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs
from bertsmith.models.model import Model
from bertsmith.models.search import SearchIndex
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
        ({"texts": ["a"], "normalise": True}, "encode has no argument 'normalise'; did you mean 'normalize'"),
        ({"texts": ["a"], "convert_to": "list"}, "convert_to is 'list'; allowed: tensor, numpy"),
        ({"texts": ["a"], "prompt": "b", "prompt_name": "c"}, "prompt and prompt_name are given; allowed: one of them"),
        ({"texts": ["a", 3]}, r"texts\[1\] is int; it must be a string"),
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
    with pytest.raises(InputError, match=r"texts\[1\] is int"):
        list(model.encode_stream(["a", 3]))  # type: ignore[list-item]


@pytest.mark.gpu
def test_a_window_does_not_wait_for_the_gpu(model: Model) -> None:
    expected = model.encode(TEXTS)
    on_gpu = model.to("cuda")
    try:
        on_gpu.encode(TEXTS)  # warm-up: kernels are compiled and tuned
        with no_synchronisation():
            vectors = on_gpu.encode(TEXTS)
    finally:
        model.cpu()
    assert vectors.is_cuda
    assert (vectors.cpu() - expected).abs().max() < 5e-2


def test_one_text_generators_and_names_of_sentence_transformers(model: Model) -> None:
    vectors = model.encode(TEXTS)
    assert torch.equal(model.encode(text for text in TEXTS), vectors)
    torch.testing.assert_close(model.encode(TEXTS[0]), vectors[0], rtol=0, atol=1e-5)
    array = model.encode(TEXTS, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=True)
    expected = torch.nn.functional.normalize(vectors, dim=-1).numpy()
    np.testing.assert_allclose(array, expected, rtol=0, atol=1e-6)
    assert isinstance(model.encode(TEXTS[0], convert_to="numpy"), np.ndarray)
    assert torch.equal(model.encode(TEXTS, convert_to_tensor=True), vectors)


def test_max_seq_length_truncates_texts(model: Model) -> None:
    text = " ".join(["forge"] * 9)
    whole, length = model.encode(text), model.max_seq_length
    try:
        model.max_seq_length = 4
        short = model.encode(text)
    finally:
        model.max_seq_length = length
    assert not torch.allclose(short, whole)
    torch.testing.assert_close(short, model.encode("forge forge"), rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=f"max_seq_length is {length + 1}; allowed: 1 to {length}"):
        model.max_seq_length = length + 1


def test_search_returns_the_most_similar_texts(model: Model) -> None:
    index = SearchIndex(model, TEXTS)
    similarity = model.similarity(TEXTS[:2], TEXTS)
    assert similarity.shape == (2, len(TEXTS))
    for row, hits in zip(similarity, index.search(TEXTS[:2], top_k=3), strict=True):
        best = row.topk(3)
        assert [hit.text for hit in hits] == [TEXTS[place] for place in best.indices]
        assert [hit.score for hit in hits] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert model.rank(TEXTS[1], TEXTS)[0].text == TEXTS[1]
    assert len(model.rank(TEXTS[1], TEXTS)) == len(TEXTS)
    assert index.search([]) == []
    with pytest.raises(InputError, match="top_k is 0; allowed: 1 or more, or None for all"):
        index.search("a", top_k=0)
