"""Tagging: words and their pieces, windows, schemes, what is wrong with rows, answers."""

from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import bertsmith
from bertsmith.answers.sequences import IGNORED, Features
from bertsmith.answers.tagging import TaggedWords, split_words, word_tokens
from bertsmith.errors import InputError
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.tagging import Tagging
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.rows import Table, table_of
from bertsmith.text.tokenizer import SPECIAL_TOKENS, Tokenizer

KINDS = {"Anna": "PER", "Bert": "PER", "Rome": "LOC", "Oslo": "LOC"}
WORDS = ["the", "smith", "forges", "all-round", "gates", "near", ",", "unbreakable", "."]
SETTINGS = [
    "model.overrides={layers=2, width=32, heads=2, dropout=0.0}",
    "tokenizer.vocabulary=300",
    "batch.examples=8",
    "sequences.length=24",
    "optimizer.learning_rate=1e-2",
]


def _rows(count: int, seed: int = 0, max_length: int = 9) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = [str(word) for word in random.choice([*KINDS, *WORDS], random.integers(1, max_length + 1))]
        rows.append({"tokens": words, "ner": [f"B-{KINDS[word]}" if word in KINDS else "O" for word in words]})
    return rows


def _without_prefix() -> Tokenizer:
    """Byte-level BPE as GPT-2's: the first word of a text has no space before it, every other has."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([" ".join(row["tokens"]) for row in _rows(60)], trainer)
    return Tokenizer(backend)


@pytest.fixture(scope="module", params=["wordpiece", "bytes", "unigram", "bytes without a prefix"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes without a prefix":
        return _without_prefix()
    texts = [" ".join(row["tokens"]) for row in _rows(60)]
    return learn_tokenizer(texts, request.param, 330, lowercase=False, progress=False)


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    texts = [" ".join(row["tokens"]) for row in _rows(60)]
    return learn_tokenizer(texts, "wordpiece", 120, lowercase=False, progress=False)


def _asked(features: Features, examples: list[TaggedWords]) -> list[list[int]]:
    """How often each word of each example is asked for."""
    counts = [[0] * len(example.words) for example in examples]
    for item, example in enumerate(features.example.tolist()):
        for word in features.targets["word"][item]:
            if word != IGNORED:
                counts[example][word] += 1
    return counts


def test_pieces_are_those_of_running_text(tokenizer: Tokenizer) -> None:
    for row in _rows(40, seed=1):
        ((ids, owners),) = word_tokens(tokenizer, [row["tokens"]])
        assert ids.tolist() == tokenizer.encode_plain([" ".join(row["tokens"])])[0]
        for index, word in enumerate(row["tokens"]):
            assert tokenizer.decode(ids[owners == index]).replace(" ", "") == word
        assert (np.diff(owners) >= 0).all()


def test_a_space_belongs_to_the_word_after_it(tokenizer: Tokenizer) -> None:
    """Letters the tokenizer has not seen leave the mark of a space as a piece of its own."""
    words = ["Anna", "Ωmega", "日本", "Rome", "éé"]
    ((ids, owners),) = word_tokens(tokenizer, [words])
    for index, word in enumerate(words[1:], start=1):
        # with a space in front, which only a tokenizer that puts none of its own in front of a text takes notice of
        expected = {tuple(tokenizer.encode_plain([text])[0]) for text in (word, f" {word}")}
        assert tuple(ids[owners == index].tolist()) in expected
    starts = tokenizer.starts_word[ids[[np.searchsorted(owners, index) for index in range(1, len(words))]]]
    assert starts.all()


def test_a_word_without_a_piece_is_asked_for(tokenizer: Tokenizer) -> None:
    words = ("\x01", "Anna", "", "\u200d", "Rome", "")
    ((_, owners),) = word_tokens(tokenizer, [words])
    assert sorted(set(owners.tolist())) == list(range(len(words)))
    features = Tagging().features([TaggedWords(words)], Encoding(tokenizer, 64, has_types=True))
    assert _asked(features, [TaggedWords(words)]) == [[1] * len(words)]


@pytest.mark.parametrize("context", ["sentence", "document"])
@pytest.mark.parametrize("length", [4, 7, 16, 40])
def test_every_word_is_asked_for_once_whatever_the_length(tokenizer: Tokenizer, length: int, context: str) -> None:
    table = table_of([{**row, "document": index // 5} for index, row in enumerate(_rows(25, 2, 40))], "rows")
    task = Tagging(context=context).resolve(table)  # type: ignore[arg-type]
    examples = task.examples(table)
    features = task.features(examples, Encoding(tokenizer, length, has_types=True))
    assert _asked(features, examples) == [[1] * len(example.words) for example in examples]
    assert features.lengths.max() <= length
    first = {(index, word): None for index, example in enumerate(examples) for word in range(len(example.words))}
    encoded = word_tokens(tokenizer, [example.words for example in examples])
    for item, example in enumerate(features.example.tolist()):
        tokens, words, tags = features.tokens[item], features.targets["word"][item], features.targets["tags"][item]
        assert (tokens[0], tokens[-1]) == (tokenizer.start, tokenizer.separator)
        ids, owners = encoded[example]
        for position in np.flatnonzero(words != IGNORED):
            assert tags[position] == examples[example].tags[words[position]]
            assert tokens[position] == ids[np.searchsorted(owners, words[position])]
            first.pop((example, int(words[position])))
        assert ((tags == IGNORED) == (words == IGNORED)).all()
    assert not first


def test_a_word_longer_than_a_sequence_is_cut_and_counted(wordpiece: Tokenizer) -> None:
    example = TaggedWords(("Anna", "unbreakable" * 9, "Rome"))
    features = Tagging().features([example], Encoding(wordpiece, 12, has_types=False))
    assert features.cut == 1
    assert features.types is None
    assert _asked(features, [example]) == [[1, 1, 1]]


def test_the_document_fills_the_sequence_on_both_sides(wordpiece: Tokenizer) -> None:
    rows = [{"tokens": ["gates"] * 3 + [name], "ner": ["O"] * 3 + ["B-X"], "document": "a"} for name in [*KINDS] * 3]
    rows += [{"tokens": ["smith"] * 4, "ner": ["O"] * 4, "document": "b"}]
    table = table_of(rows, "rows")
    task = Tagging(context="document").resolve(table)
    encoding = Encoding(wordpiece, 30, has_types=True)
    examples = task.examples(table)
    features = task.features(examples, encoding)
    tokens = [len(ids) for ids, _ in word_tokens(wordpiece, [example.words for example in examples])]
    middle = 6
    asked = np.flatnonzero(features.targets["word"][middle] != IGNORED)
    before, after = asked[0] - 1, len(features.tokens[middle]) - 2 - (asked[0] - 1) - tokens[middle]
    assert abs(before - after) <= max(tokens)
    assert before + tokens[middle] + after > 28 - max(tokens)
    # at the beginning all the room goes to the right
    assert np.flatnonzero(features.targets["word"][0] != IGNORED)[0] == 1
    assert len(features.tokens[0]) > 30 - max(tokens)
    # no other document enters
    alone = Tagging(context="sentence", labels=task.labels).features(examples[-1:], encoding)
    assert features.tokens[len(features) - 1].tolist() == alone.tokens[0].tolist()


def test_documents_are_named_marked_or_one() -> None:
    def numbers(rows: list[dict[str, Any]]) -> list[int]:
        return [example.document for example in Tagging().examples(table_of(rows, "rows"), has_targets=False)]

    assert numbers([{"tokens": ["a"]}] * 3) == [0, 0, 0]
    assert numbers([{"tokens": ["a"], "document": name} for name in "xxyx"]) == [0, 0, 1, 2]
    assert numbers([{"tokens": [word]} for word in ("a", "-DOCSTART-", "b", "-DOCSTART-")]) == [0, 1, 1, 2]
    assert numbers([Tagging().row("a b"), Tagging().row(["a"])]) == [0, 1]
    table = table_of(_rows(8), "rows")
    task = Tagging(context="document").resolve(table)
    assert any("'document'" in notice for notice in task.notices(task.examples(table)))


def test_what_rows_are_recognised() -> None:
    row = {"tokens": ["a"], "pos": ["NN"], "chunk": ["B-NP"], "ner": ["O"]}
    assert Tagging.find_columns(row) == {"words": "tokens", "tags": "ner"}
    assert Tagging.find_columns({"words": ["a"], "tags": ["O"]}) == {"words": "words", "tags": "tags"}
    assert Tagging.find_columns({"text": "a", "tags": ["O"]}) is None
    assert Tagging.find_columns({"tokens": ["a"], "label": "x"}) is None
    found = recognise(table_of([row], "rows"), None, ["tags=pos"], {})
    assert found == {"kind": "tagging", "words": "tokens", "tags": "pos"}


def test_iob1_is_read_as_iob2_and_said() -> None:
    table = table_of([{"tokens": list("abcd"), "ner": ["I-A", "I-A", "B-A", "O"]}], "rows")
    task = Tagging().resolve(table)
    assert (task.scheme, task.labels) == ("iob", ("O", "B-A", "I-A"))
    examples = task.examples(table)
    assert task.gold(examples[0]) == ["B-A", "I-A", "B-A", "O"]
    assert task.notices(examples) == ["tags are IOB1 in 1 of 1 sentences and are read as IOB2"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"tokens": ["a", "b"], "ner": ["O"]}, "rows row 1 has 2 words in 'tokens' and 1 tags in 'ner'"),
        ({"tokens": [], "ner": []}, "rows row 1: 'tokens' is empty"),
        ({"tokens": "a b", "ner": ["O"]}, "rows row 1: 'tokens' is 'a b'; it must be a list"),
        ({"tokens": ["a", 7], "ner": ["O", "O"]}, "rows row 1: 'tokens' has 7 as word 2"),
        ({"tokens": ["a"], "ner": [None]}, "rows row 1: 'ner' has None for word 1"),
        ({"tokens": ["a"], "ner": "O"}, "rows row 1: 'ner' is 'O'; it must be a list"),
        ({"tokens": ["a"], "nerr": ["O"]}, "rows row 1 has no field 'ner'; did you mean 'nerr'"),
        ({"tokens": ["a", "Po"], "ner": ["O", "B-LOK"]}, "rows row 1: 'ner' has 'B-LOK' for word 2, 'Po', which no"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_place(row: dict[str, Any], sentence: str) -> None:
    good = {"tokens": ["a", "b"], "ner": ["B-LOC", "O"]}
    task = Tagging().resolve(table_of([good], "rows"))
    with pytest.raises(InputError) as raised:
        task.examples(table_of([good, row], "rows"))
    assert sentence in str(raised.value)


def test_one_tag_alone_is_refused() -> None:
    with pytest.raises(InputError, match="one tag only, 'NN'"):
        Tagging().resolve(table_of([{"tokens": ["a"], "ner": ["NN"]}], "rows"))


def test_a_metric_that_tags_do_not_have_is_refused_before_anything_is_learned() -> None:
    plain = table_of([{"tokens": ["a", "b"], "ner": ["NN", "VB"]}], "rows")
    with pytest.raises(InputError, match=r"task\.metric is 'f1'; allowed: accuracy"):
        Tagging(metric="f1").resolve(plain)
    with pytest.raises(InputError, match=r"task\.metric is 'recal'; did you mean 'recall'"):
        Tagging(metric="recal", labels=("O", "B-A", "I-A")).resolve(plain)


def test_a_place_that_training_lacks_is_known_in_dev() -> None:
    task = Tagging().resolve(table_of([{"tokens": ["a", "b"], "ner": ["B-A", "O"]}], "rows"))
    (example,) = task.examples(table_of([{"tokens": ["a", "b"], "ner": ["B-A", "I-A"]}], "rows"))
    assert task.gold(example) == ["B-A", "I-A"]


def test_weights_count_words() -> None:
    table = table_of([{"tokens": list("abcd"), "ner": ["A", "A", "A", "B"]}], "rows")
    task = Tagging(class_weights="balanced").resolve(table)
    assert task.objective(task.examples(table)).weights == pytest.approx((4 / 6, 2.0))
    given = task.changed(class_weights=(1.0, 2.0, 3.0))
    with pytest.raises(InputError, match=r"task\.class_weights has 3 numbers; the task has 2 labels"):
        given.objective(task.examples(table))


def _said(task: Tagging, table: Table, wrong: dict[int, int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The answers of a head that is right but at some words of the first example, where it says another tag."""
    examples = task.examples(table)
    features = task.features(examples, Encoding(tokenizer, 16, has_types=True))
    outputs = []
    for item in range(len(features)):
        tags, words = features.targets["tags"][item].copy(), features.targets["word"][item]
        for word, tag in wrong.items():
            tags[(words == word) & (features.example[item] == 0)] = tag
        scores = np.zeros((len(tags), len(task.labels)), dtype=np.float32)
        scores[np.flatnonzero(tags >= 0), tags[tags >= 0]] = 4.0
        outputs.append(scores)
    return task.answers(examples, features, outputs)


def test_answers_across_windows_and_what_is_made_of_them(wordpiece: Tokenizer) -> None:
    rows = [{"tokens": ["Anna", "Bert", "gates"] * 12, "ner": ["B-PER", "I-PER", "O"] * 12}, *_rows(3)]
    table = table_of(rows, "rows")
    task = Tagging().resolve(table)
    examples = task.examples(table)
    right = _said(task, table, {}, wordpiece)
    assert [answer["answer"] for answer in right] == [task.gold(example) for example in examples]
    assert task.evaluate(examples, right).score == 100.0
    assert [task.error(*pair) for pair in zip(examples, right, strict=True)] == [0.0] * 4
    answers = _said(task, table, {1: task.labels.index("B-LOC")}, wordpiece)
    share = np.exp(4) / (np.exp(4) + len(task.labels) - 1)
    assert answers[0]["entities"][:2] == [
        {"type": "PER", "begin": 0, "end": 1, "text": "Anna", "score": pytest.approx(share)},
        {"type": "LOC", "begin": 1, "end": 2, "text": "Bert", "score": pytest.approx(share)},
    ]
    assert task.error(examples[0], answers[0]) == pytest.approx(share)
    labels, counts = task.confusion(examples, answers)
    assert counts[labels.index("I-PER"), labels.index("B-LOC")] == 1
    assert counts.sum() == sum(len(example.words) for example in examples)
    assert np.trace(counts) == counts.sum() - 1
    file = task.files(examples, answers)["predictions.conll"]
    assert file.split("\n")[:2] == ["Anna B-PER B-PER", "Bert I-PER B-LOC"]
    assert file.count("\n\n") == 3
    assert task.describe(examples[0]).startswith("Anna Bert gates Anna")


def test_running_text_is_split_and_entities_carry_its_characters(wordpiece: Tokenizer) -> None:
    task = Tagging(labels=("O", "B-PER", "I-PER"))
    table = table_of([task.row("  Anna  Bert's gates."), task.row(["Anna"]), task.row("")], "inputs")
    examples = task.examples(table, has_targets=False)
    assert examples[0].words == ("Anna", "Bert", "'s", "gates", ".")
    features = task.features(examples, Encoding(wordpiece, 40, has_types=True))
    assert "tags" not in features.targets
    outputs = []
    for item, example in enumerate(features.example.tolist()):
        words = features.targets["word"][item]
        scores = np.zeros((len(words), 3), dtype=np.float32)
        for word, tag in {0: 1, 1: 2}.items():
            scores[words == word, tag] = 3.0 if example == 0 else 0.0
        outputs.append(scores)
    answers = task.answers(examples, features, outputs)
    (entity,) = answers[0]["entities"]
    assert (entity["type"], entity["begin"], entity["end"], entity["text"]) == ("PER", 2, 12, "Anna  Bert")
    assert answers[2]["answer"] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  \n", []),
        ("Hello, world!", ["Hello", ",", "world", "!"]),
        ("(U.S. all-rounder)", ["(", "U.S.", "all-rounder", ")"]),
        ("Simmons' 1,000 at 12:30...", ["Simmons", "'", "1,000", "at", "12:30", "..."]),
        ("they’ve", ["they", "’ve"]),
        ("O'Brien's", ["O'Brien", "'s"]),
        ("na\u0131\u0308ve हिन्दी", ["na\u0131\u0308ve", "हिन्दी"]),
        ("a\u00a0b", ["a", "b"]),
        ("$5%", ["$", "5", "%"]),
    ],
)
def test_words_of_running_text(text: str, words: list[str]) -> None:
    positions = split_words(text)
    assert [text[begin:end] for begin, end in positions] == words


@pytest.mark.parametrize("scheme", ["iob1", "iob2", "bioes", "plain"])
def test_a_run_learns_each_scheme(scheme: str) -> None:
    rows = []
    for row in _rows(60, seed=5):
        marks = {"iob1": "I-", "iob2": "B-", "bioes": "S-", "plain": ""}
        # one word a chunk: in IOB1 those of one type side by side are one chunk
        rows.append({"tokens": row["tokens"], "tags": [tag.replace("B-", marks[scheme]) for tag in row["ner"]]})
    if scheme == "bioes":
        rows[0] = {"tokens": ["Anna", "Bert"], "tags": ["B-PER", "E-PER"]}
    result = bertsmith.finetune(
        "bert-tiny", train=rows, dev=rows[:20], device="cpu", set=[*SETTINGS, "run.epochs=8", 'run.choose="last"']
    )
    assert result["metric"] == ("accuracy" if scheme == "plain" else "f1")
    assert result["accuracy"] > 90
    assert result["score"] > 80
    (answer,) = result.predictor.details(["the gates near Rome, Anna."])
    assert answer["words"] == ["the", "gates", "near", "Rome", ",", "Anna", "."]
    if scheme != "plain":
        assert {("LOC", 15, 19, "Rome"), ("PER", 21, 25, "Anna")} == {
            (found["type"], found["begin"], found["end"], found["text"]) for found in answer["entities"]
        }


def test_a_run_with_the_context_of_documents() -> None:
    rows = _rows(40, seed=6)
    settings = [*SETTINGS, "run.epochs=2", 'task.kind="tagging"', 'task.context="document"']
    result = bertsmith.finetune("bert-tiny", train=rows, dev=rows[:8], device="cpu", set=settings)
    assert result.predictor.task.context == "document"
    together = result.predictor.details(["Anna forges gates", "near Rome"])
    assert together == [*result.predictor.details(["Anna forges gates"]), *result.predictor.details(["near Rome"])]
