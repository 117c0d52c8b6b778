"""The openai and huggingface_hub clients, unmodified, against a service on loopback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient
from serving_cases import TEXTS, schedulers, serving
from task_cases import TASK_CASES

import bertsmith
from bertsmith.serving.settings import Limits, ServeSettings


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")


def _unit(folder: Path, texts: list[str]) -> np.ndarray:
    vectors = bertsmith.load(folder).encode(texts).numpy()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_openai_client_embeds(url: str, folders: dict[str, Path]) -> None:
    expected = _unit(folders["encoder"], TEXTS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model="encoder", input=TEXTS)  # base64 by default
        plain = client.embeddings.create(model="encoder", input=TEXTS, encoding_format="float")
        for response in (packed, plain):
            assert np.abs(np.array([one.embedding for one in response.data]) - expected).max() < 1e-5
            assert [one.index for one in response.data] == [0, 1, 2, 3]
        counts = [len(row) for row in bertsmith.load(folders["encoder"]).require_tokenizer().encode_plain(TEXTS)]
        assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(counts) + 2 * len(TEXTS)
        short = client.embeddings.create(model="encoder", input=TEXTS[0], dimensions=4)
        assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-5)
        for rows in ([[5, 6], [7]], [5, 6]):  # LangChain's default: ids of OpenAI's tokenizer
            with pytest.raises(openai.UnprocessableEntityError, match="input: token ids are not accepted"):
                client.embeddings.create(model="encoder", input=rows)


@pytest.mark.parametrize("strict", [False, True])
def test_a_single_model_answers_to_every_name_unless_names_are_strict(folders: dict[str, Path], strict: bool) -> None:
    settings = ServeSettings(strict_names=strict)
    with (
        schedulers({"encoder": folders["encoder"]}) as models,
        serving(models, settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        if strict:
            with pytest.raises(openai.NotFoundError, match="not served here"):
                client.embeddings.create(model="text-embedding-3-small", input="a")
        else:
            assert client.embeddings.create(model="text-embedding-3-small", input="a").model == "encoder"
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.models.retrieve("text-embedding-3-small")


@pytest.fixture(scope="module")
def only(folders: dict[str, Path]) -> Iterator[tuple[str, np.ndarray]]:
    """The address of a service of one model for OpenAI's clients, and the vectors of TEXTS."""
    with schedulers({"encoder": folders["encoder"]}) as models, serving(models) as url:
        yield f"{url}/v1", _unit(folders["encoder"], TEXTS)


def test_langchain_embeds(only: tuple[str, np.ndarray]) -> None:
    langchain = pytest.importorskip("langchain_openai")
    client = langchain.OpenAIEmbeddings(base_url=only[0], api_key="none", check_embedding_ctx_length=False)
    assert np.abs(np.array(client.embed_documents(TEXTS)) - only[1]).max() < 1e-5
    assert np.abs(np.array(client.embed_query(TEXTS[0])) - only[1][0]).max() < 1e-5


def test_llama_index_embeds(only: tuple[str, np.ndarray]) -> None:
    llama_index = pytest.importorskip("llama_index.embeddings.openai_like")
    client = llama_index.OpenAILikeEmbedding(model_name="any", api_base=only[0], api_key="none")
    assert np.abs(np.array(client.get_text_embedding_batch(TEXTS)) - only[1]).max() < 1e-5


def test_haystack_embeds(only: tuple[str, np.ndarray]) -> None:
    haystack = pytest.importorskip("haystack")
    embedders = pytest.importorskip("haystack.components.embedders")
    key = pytest.importorskip("haystack.utils").Secret.from_token("none")
    client = embedders.OpenAIDocumentEmbedder(api_base_url=only[0], api_key=key, progress_bar=False)
    documents = client.run([haystack.Document(content=text) for text in TEXTS])["documents"]
    assert np.abs(np.array([one.embedding for one in documents]) - only[1]).max() < 1e-5


def test_openai_client_lists_models(url: str, folders: dict[str, Path]) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == list(folders)
        assert client.models.retrieve("encoder").id == "encoder"


def test_openai_client_raises_the_matching_errors(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="model is 'other', which is not served here; allowed: choice"):
            client.embeddings.create(model="other", input="a text")
        with pytest.raises(openai.UnprocessableEntityError, match="input is empty"):
            client.embeddings.create(model="encoder", input=[])
        with pytest.raises(
            openai.UnprocessableEntityError, match="dimensions is 400; the vectors of 'encoder' have 16"
        ):
            client.embeddings.create(model="encoder", input="a text", dimensions=400)


def test_openai_client_sends_the_key(folders: dict[str, Path]) -> None:
    settings = ServeSettings(key="open sesame".replace(" ", "-"), limits=Limits(texts=2))
    with schedulers({"encoder": folders["encoder"]}) as models, serving(models, settings) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="open-sesame", max_retries=0) as client:
            assert client.embeddings.create(model="encoder", input="a text").data
            with pytest.raises(openai.APIStatusError, match="input has 3 texts; at most 2") as caught:
                client.embeddings.create(model="encoder", input=TEXTS[:3])
            assert caught.value.status_code == 413
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="Bearer"),
        ):
            client.embeddings.create(model="encoder", input="a text")
        response = InferenceClient(f"{url}/embed", token="open-sesame").feature_extraction("a text")
        assert response.shape == (1, 16)


def test_hugging_face_extracts_features(url: str, folders: dict[str, Path]) -> None:
    model = bertsmith.load(folders["encoder"])
    client = InferenceClient(f"{url}/models/encoder")
    expected = model.encode(TEXTS[:1]).numpy()
    assert np.abs(client.feature_extraction(TEXTS[0]) - expected).max() < 1e-5
    assert (
        np.abs(client.feature_extraction(TEXTS[0], normalize=True) - _unit(folders["encoder"], TEXTS[:1])).max() < 1e-5
    )
    # the URL of an endpoint works as well; /embed normalises vectors
    vectors = InferenceClient(f"{url}/embed").feature_extraction(TEXTS[0], truncate=True)
    assert np.linalg.norm(vectors) == pytest.approx(1, abs=1e-5)


def test_hugging_face_compares_sentences(url: str, folders: dict[str, Path]) -> None:
    vectors = _unit(folders["encoder"], TEXTS)
    response = InferenceClient(f"{url}/models/encoder").sentence_similarity(TEXTS[0], TEXTS[1:])
    assert response == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)


def test_hugging_face_classifies(url: str, folders: dict[str, Path]) -> None:
    (expected,) = bertsmith.Predictor.load(folders["classification"]).details(TEXTS[:1])
    response: Any = InferenceClient(url).text_classification(TEXTS[0])  # the first model
    assert {one.label: pytest.approx(one.score, abs=1e-5) for one in response} == expected["scores"]
    assert response[0].label == expected["answer"]
    (best,) = InferenceClient(url).text_classification(TEXTS[0], top_k=1)  # type: ignore[misc]
    assert best.label == expected["answer"]
    raw: Any = InferenceClient(url).text_classification(TEXTS[0], function_to_apply="none")
    assert raw[0].score - raw[1].score == pytest.approx(np.log(response[0].score / response[1].score), abs=1e-4)
    (value,) = InferenceClient(f"{url}/models/regression").text_classification(TEXTS[0])  # type: ignore[misc]
    assert value.score == pytest.approx(bertsmith.Predictor.load(folders["regression"]).predict(TEXTS[:1])[0], abs=1e-5)


def test_hugging_face_tags_words(url: str, folders: dict[str, Path]) -> None:
    text = "in New Rome, Bert Smith forgets Anna and Oslo"
    (expected,) = bertsmith.Predictor.load(folders["tagging"]).details([text])
    client = InferenceClient(f"{url}/models/tagging")
    response = client.token_classification(text)
    entities = [(one.entity_group, one.word, one.start, one.end) for one in response]
    assert entities == [(one["type"], one["text"], one["begin"], one["end"]) for one in expected["entities"]]
    assert entities
    words = client.token_classification(text, aggregation_strategy="none", ignore_labels=[])
    assert [one.entity for one in words] == expected["answer"]
    assert [text[one.start : one.end] for one in words] == expected["words"]


def test_hugging_face_answers_questions(url: str, folders: dict[str, Path]) -> None:
    row = TASK_CASES["spans"].rows[0]
    inputs = {name: row[name] for name in ("question", "context")}
    (expected,) = bertsmith.Predictor.load(folders["spans"]).details([inputs])
    client = InferenceClient(f"{url}/models/spans")
    response: Any = client.question_answering(**inputs)
    assert (response.answer, response.start, response.end) == (expected["answer"], expected["begin"], expected["end"])
    assert response.score == pytest.approx(expected["score"], abs=1e-5)
    best: Any = client.question_answering(**inputs, top_k=3)
    assert best[0].answer == expected["answer"]
    assert len(best) == 3


def test_hugging_face_fills_masks(url: str, folders: dict[str, Path]) -> None:
    text = "the smith forges an iron [MASK]"
    (expected,) = bertsmith.load(folders["encoder"]).fill_mask(text, top_k=2)
    response = InferenceClient(f"{url}/models/encoder/pipeline/fill-mask").fill_mask(text, top_k=2)
    assert [(one.token_str, pytest.approx(one.score, abs=1e-5)) for one in response] == expected
    with schedulers({"encoder": folders["encoder"]}) as models, serving(models) as address:
        response = InferenceClient(f"{address}/fill-mask").fill_mask(text, targets=["the", "no"])
        assert {one.token_str for one in response} == {"the", "no"}
        client = InferenceClient(address, provider="hf-inference")
        assert client.health_check()
        assert client.get_endpoint_info()["model_id"] == "encoder"
