"""Augmented rows: candidates equal a one-by-one computation, and everything but the words is unchanged."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_augmentation import TEXTS, masked_lm, rows_of

import bertsmith
from bertsmith import InputError, SequenceLayout
from bertsmith.models.config import GeneratorConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.generator import generator_of
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.shrinking import masked_words as shards
from bertsmith.shrinking.augmentation import augment_table
from bertsmith.shrinking.masked_words import ENGLISH, NONE, AugmentationConfig, MaskedWords, Passage
from bertsmith.tasks.choice import Choice
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.embedding import TextEmbedding
from bertsmith.tasks.spans import SpanAnswers
from bertsmith.tasks.tagging import Tagging
from bertsmith.text.rows import table_of

TASK = Classification(labels=("no", "yes"))
PAIRS = Classification(text="first", pair="second", labels=("no", "yes"))


@pytest.fixture(scope="module")
def model() -> Model:
    return masked_lm()


def scores_of(model: Model, tokens: list[int], types: list[int]) -> torch.Tensor:
    """Return the logits at the mask of one sequence, run alone."""
    ids = torch.tensor([tokens])
    position = tokens.index(model.require_tokenizer().mask)
    with torch.no_grad():
        states = model.run(
            EncoderInputs(ids, SequenceLayout.full(1, len(tokens)), torch.tensor([types])),
            Want(masked_positions=torch.tensor([position])),
        ).masked_states
        scores: torch.Tensor = model.head("masked_tokens")(states, model.token_table)[0]
    return scores


def best_words(model: Model, scores: torch.Tensor, word: str, count: int) -> list[str]:
    """Return the most probable tokens that are whole words."""
    subwords = model.require_tokenizer().tokens(scores.argsort(descending=True).tolist())
    whole_words = [token for token in subwords if not token.startswith("##") and len(token) > 1]
    return [token for token in whole_words if token.isalpha() and token != word.lower()][:count]


def candidates_of(words: MaskedWords, text: str) -> dict[str, list[str]]:
    passage = Passage.of(text, ENGLISH)
    rows = words.candidates([passage])
    return {
        text[slice(*position)]: [words.words[token] for token in row.tolist() if token != NONE]
        for position, row in zip(passage.positions, rows, strict=True)
    }


def test_batched_candidates_equal_those_of_single_sequences(model: Model) -> None:
    words = MaskedWords(model, AugmentationConfig(candidates=5))
    passages = [Passage.of(text, ENGLISH) for text in TEXTS]
    batched = iter(words.candidates(passages).tolist())
    count = 0
    for text in TEXTS:
        for match in re.finditer(r"[A-Za-z0-9']+", text):
            word = re.sub("'s$", "", match[0])
            if not word.isalpha() or word.lower() in ENGLISH:
                continue
            masked = text[: match.start()] + "[MASK]" + text[match.start() + len(word) :]
            row = model.require_tokenizer().encode([masked], [text])
            scores = scores_of(model, row["input_ids"][0].tolist(), row["token_type_ids"][0].tolist())
            assert [words.words[token] for token in next(batched)] == best_words(model, scores, word, 5), word
            count += 1
    assert count == sum(len(passage.positions) for passage in passages) > 15
    assert next(batched, None) is None


@pytest.mark.parametrize(("kind", "mark"), [("bytes", "Ġ"), ("unigram", "▁")])
def test_tokens_that_include_the_space_are_masked_whole(kind: Any, mark: str) -> None:
    model = masked_lm(kind, tokens=400)
    tokenizer, text = model.require_tokenizer(), "then the smith forges the seven lanterns by the river"
    words = MaskedWords(model, AugmentationConfig(candidates=4))
    (ids,) = tokenizer.encode_plain([text])
    subwords = tokenizer.tokens(ids)
    found = candidates_of(words, text)
    single = [word for word in found if mark + word in subwords]
    assert single
    for word in single:
        at = subwords.index(mark + word)
        masked = [*ids[:at], tokenizer.mask, *ids[at + 1 :]]
        tokens = [tokenizer.start, *masked, tokenizer.separator, *ids, tokenizer.separator]
        types = [0] * (len(masked) + 2) + [1] * (len(ids) + 1)
        ranked = tokenizer.tokens(scores_of(model, tokens, types).argsort(descending=True).tolist())
        whole = [token[1:] for token in ranked if token.startswith(mark) and token[1:].isalpha() and len(token) > 2]
        assert found[word] == [other for other in whole if other != word][:4]


def test_long_texts_are_truncated_around_the_word() -> None:
    model = masked_lm(max_length=17)
    tokenizer, room = model.require_tokenizer(), 7
    text = "seven old letters weighs the cold iron gate river smith and the clock"
    listed = text.split()
    assert len(tokenizer.encode_plain([text])[0]) == len(listed)
    found = candidates_of(MaskedWords(model, AugmentationConfig(candidates=3)), text)
    for index, word in enumerate(listed):
        if word in ENGLISH:
            continue
        begin = min(max(0, index - room // 2), len(listed) - room)
        near = listed[begin : begin + room]
        masked = [*near[: index - begin], "[MASK]", *near[index - begin + 1 :]]
        row = tokenizer.encode([" ".join(masked)], [" ".join(near)])
        scores = scores_of(model, row["input_ids"][0].tolist(), row["token_type_ids"][0].tolist())
        assert found[word] == best_words(model, scores, word, 3), word


def test_long_words_may_be_kept(model: Model) -> None:
    tokenizer = model.require_tokenizer()
    text = "the smith weighs harbours"
    assert len(tokenizer.encode_plain(["harbours"])[0]) > 1
    assert len(tokenizer.encode_plain(["smith"])[0]) == 1
    without_long = candidates_of(MaskedWords(model, AugmentationConfig(long_words="keep")), text)
    with_long = candidates_of(MaskedWords(model, AugmentationConfig()), text)
    assert without_long["harbours"] == []
    assert len(with_long["harbours"]) == 15
    assert without_long["smith"] == with_long["smith"] != []


def test_generator_fills_the_masks_of_an_electra_model() -> None:
    tokenizer = masked_lm().require_tokenizer()
    config = bertsmith.preset("electra-small", vocabulary=tokenizer.size, width=16, heads=4, layers=1, max_length=64)
    both = config.changed(generator=GeneratorConfig(model=generator_of(config), sharing="none"))
    model = bertsmith.build(both, seed=0)
    model.tokenizer = tokenizer
    assert "masked_tokens" not in model.heads
    assert len(candidates_of(MaskedWords(model, AugmentationConfig()), "the old smith")["smith"]) == 15


def test_only_replaceable_words_change(model: Model) -> None:
    table = rows_of(*TEXTS)
    found = augment_table(table, TASK, model, AugmentationConfig(copies=20))
    new = found.rows[4:]
    assert found.rows[:4] == table.rows
    assert len(new) > 60
    assert len({row["text"] for row in found.rows}) == len(found.rows)
    shape = {text: re.sub(r"(?<![\w'])[A-Za-z]+(?!['\w]*'t)", "w", text) for text in TEXTS}
    for row, number in zip(new, found.numbers[4:], strict=True):
        text = TEXTS[number]
        assert row["label"] == table.rows[number]["label"]
        assert re.sub(r"(?<![\w'])[A-Za-z]+(?!['\w]*'t)", "w", row["text"]) == shape[text]
        for old, other in zip(re.findall(r"\w+", text), re.findall(r"\w+", row["text"]), strict=True):
            if old.lower() in ENGLISH or not old.isalpha():
                assert other == old
            assert other[0].isupper() == old[0].isupper()
            assert other.isupper() == (old == "REPAIRS" or old.isupper())
    assert any("don't" in row["text"] for row in new)


def test_share_is_the_probability_of_replacement(model: Model) -> None:
    text = "smith forges iron gate river anvil lanterns letters clock harbour"
    new = augment_table(rows_of(text), TASK, model, AugmentationConfig(copies=400, share=0.3)).rows[1:]
    changed = np.array([[a != b for a, b in zip(row["text"].split(), text.split(), strict=True)] for row in new])
    assert abs(changed.mean() - 0.3) < 0.03
    first = {row["text"].split()[0] for row in new} - {"smith"}
    assert len(first) == 15


def test_one_text_of_a_pair_is_changed_at_a_time(model: Model) -> None:
    rows = [{"first": TEXTS[0], "second": TEXTS[3], "label": "yes", "id": 7}]
    new = augment_table(table_of(rows, "rows"), PAIRS, model, AugmentationConfig(copies=10)).rows[1:]
    is_first = [row["first"] != TEXTS[0] for row in new]
    assert all((row["second"] == TEXTS[3]) == first for row, first in zip(new, is_first, strict=True))
    assert is_first == sorted(is_first, reverse=True)
    assert 15 < len(new) <= 20
    assert 7 < sum(is_first) <= 10
    assert all(row["id"] == 7 for row in new)


def test_tags_are_unchanged(model: Model) -> None:
    words, tags = ["Ann", "'s", "iron-gate", "", "smith", "weighs", "seven", "anvils", "."], list("abcdefghi")
    task = Tagging(words="tokens", tags="ner", labels=tuple(tags))
    table = table_of([{"tokens": words, "ner": tags}], "rows")
    new = augment_table(table, task, model, AugmentationConfig(copies=20, share=0.8)).rows[1:]
    assert len(new) > 15
    for row in new:
        assert row["ner"] == tags
        assert [row["tokens"][position] for position in (1, 2, 3, 8)] == ["'s", "iron-gate", "", "."]
        assert len(row["tokens"]) == len(words)
    assert all(any(row["tokens"][position] != words[position] for row in new) for position in (0, 4, 5, 6, 7))
    with pytest.raises(InputError, match=r"task\.context is 'document'"):
        augment_table(table, task.changed(context="document"), model)


def test_answer_spans_are_unchanged(model: Model) -> None:
    rows = [{"question": "who forges the iron gate", "context": TEXTS[0]}]
    rows = [{**row, "answers": {"text": ["old smith"], "answer_start": [4]}} for row in rows]
    found = augment_table(table_of(rows, "rows"), SpanAnswers(), model, AugmentationConfig(copies=5))
    assert len(found) > 3
    assert all(row["context"] == TEXTS[0] for row in found)
    assert {(example.begin, example.end) for example in SpanAnswers().examples(found)} == {(4, 13)}


def test_choice_and_embedding_tasks(model: Model) -> None:
    config = AugmentationConfig(copies=4)
    row = {"context": ["a turn", "another"], "question": TEXTS[0], "choices": ["iron", "gate"], "label": 1}
    new = augment_table(table_of([row], "rows"), Choice(context="context", question="question"), model, config).rows[1:]
    assert len(new) > 2
    assert all({**one, "question": TEXTS[0]} == row != one for one in new)
    row = {"anchor": TEXTS[0], "positive": TEXTS[1], "negative": TEXTS[2]}
    task = TextEmbedding(text="anchor", pair="positive", negative="negative")
    new = augment_table(table_of([row], "rows"), task, model, config).rows[1:]
    changed = [[name for name in row if one[name] != row[name]] for one in new]
    assert {name for names in changed for name in names} == set(row)
    assert all(len(names) == 1 for names in changed)
    with pytest.raises(InputError, match=r"task\.kind is 'embedding' and no column of texts is named"):
        augment_table(table_of([row], "rows"), TextEmbedding(), model, config)


def test_rows_depend_on_the_seed(model: Model) -> None:
    config = AugmentationConfig(copies=4)
    one, again, other = (
        augment_table(rows_of(*TEXTS), TASK, model, config.changed(seed=seed)).rows for seed in (1, 1, 2)
    )
    assert one == again != other
    more = augment_table(rows_of(*TEXTS), TASK, model, config.changed(seed=1, copies=6)).rows
    assert all(row in more for row in one)


def test_default_copies_depend_on_the_number_of_rows() -> None:
    rows = {"rte": 2490, "cola": 8551, "sst-2": 67_349, "qnli": 104_743, "qqp": 363_846, "mnli": 392_702}
    copies = [AugmentationConfig().copies_of(count) for count in rows.values()]
    assert copies == [30, 30, 20, 20, 10, 10]
    assert AugmentationConfig(copies=3).copies_of(10) == 3


def test_cached_candidates_are_reused(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SHARD_SIZE", 100)  # one shard per text
    table, config = rows_of(*TEXTS, TEXTS[0]), AugmentationConfig(copies=3)
    whole = augment_table(table, TASK, model, config).rows
    work, asked = MaskedWords.candidates, []

    def interrupted(self: MaskedWords, passages: Any, *more: Any) -> np.ndarray:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append([passage.text for passage in passages])
        return work(self, passages, *more)

    monkeypatch.setattr(MaskedWords, "candidates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        augment_table(table, TASK, model, config, folder=tmp_path)
    assert len(list(tmp_path.glob("candidates-*.npz"))) == 2
    (tmp_path / "candidates-00001.npz").write_bytes(b"PK half of one")
    monkeypatch.setattr(
        MaskedWords, "candidates", lambda self, passages, *more: asked.append(passages) or work(self, passages, *more)
    )
    asked.clear()
    progress: list[tuple[int, int]] = []
    found = augment_table(table, TASK, model, config, folder=tmp_path, watch=lambda *seen: progress.append(seen))
    assert found.rows == whole
    assert [passages[0].text for passages in asked] == TEXTS[1:]  # the first shard is cached; equal texts count once
    assert progress[-1][0] == progress[-1][1] == sum(len(Passage.of(text, ENGLISH).positions) for text in TEXTS)
    asked.clear()
    augment_table(table, TASK, model, config.changed(seed=5, share=0.2), folder=tmp_path)
    assert not asked
    augment_table(table, TASK, model, config.changed(candidates=3), folder=tmp_path)
    assert len(asked) == 4


def test_several_processes_share_the_shards(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SHARD_SIZE", 100)
    table, config = rows_of(*TEXTS), AugmentationConfig(copies=3)
    words, passages = MaskedWords(model, config), [Passage.of(text, ENGLISH) for text in TEXTS]
    seen: list[int] = []

    def others() -> None:
        seen.append(len(list(tmp_path.iterdir())))
        if len(seen) == 1:
            shards.passage_candidates(passages, words, tmp_path, None, shards.Processes(1, 2, others))

    found = augment_table(table, TASK, model, config, folder=tmp_path, processes=shards.Processes(0, 2, others))
    assert seen == [2, 4]
    assert found.rows == augment_table(table, TASK, model, config).rows


def test_models_that_cannot_replace_words_raise(model: Model) -> None:
    config = bertsmith.preset("bert-tiny", vocabulary=160, width=16, heads=2, layers=1)
    other = bertsmith.build(config.changed(heads=(ClassifierConfig(labels=("no", "yes")),)), seed=0)
    with pytest.raises(InputError, match=r"augmentation\.model has no tokenizer"):
        augment_table(rows_of(*TEXTS), TASK, other)
    other.tokenizer = model.tokenizer
    with pytest.raises(InputError, match=r"has no masked_tokens head \(its heads: classifier\)"):
        augment_table(rows_of(*TEXTS), TASK, other)
    with pytest.raises(InputError, match="takes sequences of 6 tokens; at least 7"):
        augment_table(rows_of(*TEXTS), TASK, masked_lm(max_length=6))
    with pytest.raises(InputError, match="rows row 0: field 'text' is int"):
        augment_table(table_of([{"text": 3, "label": "no"}], "rows"), TASK, model)
