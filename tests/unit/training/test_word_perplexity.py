"""Word perplexity: every token scored once, independent of the vocabulary, no look at the future."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.data.batch import packed
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.word_perplexity import encode_texts, measure, score_windows, token_log_probabilities

TEXTS = ["The smith forges an iron gate .", "Él pesa  siete faroles !", "a b c d e f g h i j k l m n o p"]
FAMILIES = {"bert-tiny": {}, "deberta-base": {"span": 16}, "performer-small": {"features": 16}}


def causal_model(tokenizer: Tokenizer, name: str = "bert-tiny", max_length: int = 16) -> Model:
    size = {"layers": 2, "width": 32, "heads": 2, "max_length": max_length, **FAMILIES[name]}
    config = bertsmith.preset(name, vocabulary=tokenizer.size, **size)
    model = bertsmith.build(config.causal(), seed=0).double()
    model.tokenizer = tokenizer
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer(TEXTS * 3, "bytes", 300, lowercase=False, progress=False)


def score(model: Model, texts: list[str], length: int, stride: int) -> list[np.ndarray]:
    tokenizer = model.require_tokenizer()
    rows, _ = encode_texts(tokenizer, texts)
    return token_log_probabilities(model, rows, start=tokenizer.start, length=length, stride=stride)


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (8, 1), (8, 3), (8, 8), (64, 5), (5, 5)])
@pytest.mark.parametrize("tokens", [0, 1, 5, 8, 9, 40])
def test_every_token_is_scored_once_with_the_most_context(tokens: int, length: int, stride: int) -> None:
    windows = list(score_windows(tokens, length, stride))
    scored = [token for window in windows for token in range(window.first, window.stop)]
    assert scored == list(range(tokens))
    for number, window in enumerate(windows):
        assert window.begin == number * stride <= window.first
        assert window.stop - window.begin <= length
        if number:  # the window before could not score these tokens
            assert window.first == windows[number - 1].begin + length


def test_uniform_model_has_the_perplexity_of_its_vocabulary(tokenizer: Tokenizer) -> None:
    model = causal_model(tokenizer)
    with torch.no_grad():
        model.encoder.embedding.token_table.zero_()
        for parameter in model.head("masked_tokens").parameters():
            parameter.zero_()
    found = measure(score(model, TEXTS, 8, 4), TEXTS)
    vocabulary = model.config.encoder.vocabulary
    words, size = sum(len(text.split()) for text in TEXTS), sum(len(text.encode()) for text in TEXTS)
    assert (found.words, found.bytes) == (words, size)
    assert found.word_perplexity == pytest.approx(vocabulary ** (found.tokens / words), rel=1e-12)
    assert found.token_perplexity == pytest.approx(vocabulary, rel=1e-12)
    assert found.bits_per_byte == pytest.approx(found.tokens * math.log2(vocabulary) / size, rel=1e-12)


def test_splitting_tokens_with_chained_probabilities_changes_nothing_per_word() -> None:
    """P("ab") as one token equals P("a") · P("b" | "a"): word perplexity is the same, token perplexity is not."""
    whole = [np.log([0.2, 0.1]), np.log([0.3])]
    split = [np.log([0.4, 0.5, 0.25, 0.4]), np.log([0.6, 0.5])]
    originals = ["ab cd", "ef"]
    one, two = measure(whole, originals), measure(split, originals)
    assert one.word_perplexity == pytest.approx(two.word_perplexity, rel=1e-12)
    assert one.bits_per_byte == pytest.approx(two.bits_per_byte, rel=1e-12)
    assert one.token_perplexity > 1.5 * two.token_perplexity


@pytest.mark.parametrize("name", FAMILIES)
def test_stride_one_equals_predicting_token_by_token(name: str, tokenizer: Tokenizer) -> None:
    model = causal_model(tokenizer, name)
    (text,) = tokenizer.encode_plain(TEXTS[:1])
    (found,) = score(model, TEXTS[:1], 6, 1)
    for index in range(len(text)):
        context = text[max(0, index - 5) : index]
        tokens, layout = packed([np.array([tokenizer.start, *context])], 0)
        position = torch.tensor([len(context)])
        with torch.inference_mode(), model.evaluating():
            hidden = model.run(EncoderInputs(tokens, layout, is_causal=True), Want(masked_positions=position))
            scores = model.head("masked_tokens")(hidden.masked_states, model.token_table)
        assert found[index] == pytest.approx(float(scores.log_softmax(-1)[0, text[index]]), abs=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_do_not_depend_on_later_tokens(name: str, tokenizer: Tokenizer) -> None:
    model = causal_model(tokenizer, name)
    row = np.array(tokenizer.encode_plain(TEXTS[2:])[0])
    changed = row.copy()
    changed[9:] = tokenizer.vocabulary["Ġa"]
    before, after = (
        token_log_probabilities(model, [tokens], start=tokenizer.start, length=16, stride=16)[0]
        for tokens in (row, changed)
    )
    np.testing.assert_allclose(before[:9], after[:9], atol=1e-10)
    assert not np.allclose(before[9:], after[9:])


def test_texts_are_scored_apart_and_weigh_by_their_tokens(tokenizer: Tokenizer) -> None:
    model = causal_model(tokenizer)
    together = score(model, TEXTS, 8, 4)
    for text, found in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(score(model, [text], 8, 4)[0], found, atol=1e-12)
    assert measure(together, TEXTS).nats == pytest.approx(-sum(float(each.sum()) for each in together))


def test_model_in_training_mode_is_scored_without_dropout(tokenizer: Tokenizer) -> None:
    model = causal_model(tokenizer).train()
    first, second = (np.concatenate(score(model, TEXTS, 8, 4)) for _ in range(2))
    assert (first == second).all()
    assert model.training


def test_tokenizers_that_change_the_text_are_refused() -> None:
    lower = learn_tokenizer(TEXTS * 3, "bytes", 300, progress=False)
    pieces = learn_tokenizer(TEXTS * 3, "wordpiece", 300, lowercase=False, progress=False)
    unknown = learn_tokenizer(["abc"], "characters", 300, progress=False)
    for lossy in (lower, pieces, unknown):
        with pytest.raises(InputError, match=r"decoding does not restore \d of 3 texts"):
            encode_texts(lossy, TEXTS)
        rows, is_lossless = encode_texts(lossy, TEXTS, allow_lossy=True)
        assert not is_lossless
        assert len(rows) == 3
    exact = learn_tokenizer(TEXTS, "characters", 300, progress=False)
    assert encode_texts(exact, TEXTS)[1]


def test_invalid_windows_raise(tokenizer: Tokenizer) -> None:
    model = causal_model(tokenizer)
    with pytest.raises(InputError, match="length is 17; allowed: 1 to 16"):
        score(model, TEXTS, 17, 8)
    for stride in (0, 9):
        with pytest.raises(InputError, match=f"stride is {stride}; allowed: 1 to length, 8"):
            score(model, TEXTS, 8, stride)
    with pytest.raises(InputError, match="too few for a perplexity per word"):
        measure([np.full(1000, -1.0)], ["x" * 1000]).word_perplexity  # noqa: B018


@pytest.fixture
def wikitext(tmp_path: Path) -> Path:
    folder = tmp_path / "wikitext"
    folder.mkdir()
    lines = ["= Gates =", "The smith forges an iron gate .", "= = Use = =", "A well @-@ known gate , too .", "= End ="]
    (folder / "valid.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), "utf-8")
    return folder


def test_command_writes_the_figures_and_how_they_were_measured(wikitext: Path, tmp_path: Path) -> None:
    tokenizer = learn_tokenizer(["The smith forges an iron gate ."], "bytes", 280, lowercase=False, progress=False)
    bertsmith.save(causal_model(tokenizer).float(), tmp_path / "model")
    call = {"data": wikitext, "metric": "word_perplexity", "device": "cpu"}
    raw = bertsmith.evaluate(tmp_path / "model", out=tmp_path / "raw", **call)
    assert (raw.words, raw.texts, raw.text, raw.unit) == (26, 5, "raw", "documents")
    assert raw.is_lossless
    assert (raw.length, raw.stride) == (16, 8)
    written = json.loads((tmp_path / "raw" / "result.json").read_text())
    assert written["word_perplexity"] == raw.score
    assert raw.word_perplexity == pytest.approx(math.exp(raw.nats / raw.words))
    running = bertsmith.evaluate(
        tmp_path / "model", out=tmp_path / "running", **call, articles=True, detokenise=True, length=8, stride=8
    )
    assert (running.words, running.bytes, running.texts, running.text) == (26, raw.bytes, 2, "detokenised")
    assert running.tokens < raw.tokens


def test_published_count_predicts_line_ends(tmp_path: Path) -> None:
    introduction = "The smith forges an iron gate in a cold winter , which takes him seven days and nights ."
    lines = ["= Gates =", introduction, "= = Use = =", "A gate .", "= Smiths =", introduction]
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), "utf-8")
    tokenizer = learn_tokenizer(lines, "bytes", 300, lowercase=False, progress=False)
    bertsmith.save(causal_model(tokenizer).float(), tmp_path / "model")
    call = {"data": tmp_path / "valid.jsonl", "metric": "word_perplexity", "device": "cpu"}
    plain = bertsmith.evaluate(tmp_path / "model", out=tmp_path / "plain", articles=True, **call)
    found = bertsmith.evaluate(tmp_path / "model", out=tmp_path / "found", articles=True, count="published", **call)
    assert (plain.count, plain.line_ends) == ("words", 0)
    # six lines, two empty ones around each of three headings, one between the articles
    assert (found.count, found.line_ends, found.texts) == ("published", 13, 2)
    assert (found.words, found.bytes) == (plain.words, plain.bytes + 13)
    assert found.word_perplexity == pytest.approx(math.exp(found.nats / (found.words + 13)))
    assert found.tokens > plain.tokens
    for flags in ({}, {"articles": True, "detokenise": True}):
        with pytest.raises(InputError, match="--count published is given with"):
            bertsmith.evaluate(tmp_path / "model", out=tmp_path / "no", count="published", **flags, **call)


def test_command_refuses_masked_models_and_flags_of_others(
    wikitext: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, width=32, heads=2, max_length=16)
    model = bertsmith.build(config, seed=0)
    model.tokenizer = tokenizer
    bertsmith.save(model, tmp_path / "model")
    call = {"data": wikitext, "out": tmp_path / "out", "device": "cpu"}
    with pytest.raises(InputError, match="has no word perplexity: its attention is not causal"):
        bertsmith.evaluate(tmp_path / "model", metric="word_perplexity", **call)
    # trained for next tokens beside masked ones, as its recipe says
    (tmp_path / "model" / "recipe.toml").write_text('[objective]\nkind = "masked_and_causal"\n')
    assert bertsmith.evaluate(tmp_path / "model", metric="word_perplexity", **call).score > 1
    with pytest.raises(InputError, match="--stride is given without --metric; it needs --metric word_perplexity"):
        bertsmith.evaluate(tmp_path / "model", stride=3, **call)
    with pytest.raises(InputError, match="--beam is given with --metric word_perplexity, which does not use it"):
        bertsmith.evaluate(tmp_path / "model", metric="word_perplexity", beam=3, **call)
    with pytest.raises(InputError, match="has no file of the split 'test'"):
        bertsmith.evaluate(tmp_path / "model", metric="word_perplexity", split="test", **{**call, "out": "other"})
