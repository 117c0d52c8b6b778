"""Tagging: tokens of words, windows, schemes, invalid rows, answers."""

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
    """Byte-level BPE like GPT-2's: the first word of a text has no leading space."""
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


def _target_counts(features: Features, examples: list[TaggedWords]) -> list[list[int]]:
    """Count how often each word of each example is a target."""
    counts = [[0] * len(example.words) for example in examples]
    for item, example in enumerate(features.example.tolist()):
        for word in features.targets["word"][item]:
            if word != IGNORED:
                counts[example][word] += 1
    return counts


def test_word_tokens_equal_tokens_of_the_joined_text(tokenizer: Tokenizer) -> None:
    for row in _rows(40, seed=1):
        ((ids, owners),) = word_tokens(tokenizer, [row["tokens"]])
        assert ids.tolist() == tokenizer.encode_plain([" ".join(row["tokens"])])[0]
        for index, word in enumerate(row["tokens"]):
            assert tokenizer.decode(ids[owners == index]).replace(" ", "") == word
        assert (np.diff(owners) >= 0).all()


def test_space_token_belongs_to_the_following_word(tokenizer: Tokenizer) -> None:
    """Before unseen letters, the space mark is a token of its own."""
    words = ["Anna", "Ωmega", "日本", "Rome", "éé"]
    ((ids, owners),) = word_tokens(tokenizer, [words])
    for index, word in enumerate(words[1:], start=1):
        # the leading space only matters to tokenizers that do not add one themselves
        expected = {tuple(tokenizer.encode_plain([text])[0]) for text in (word, f" {word}")}
        assert tuple(ids[owners == index].tolist()) in expected
    starts = tokenizer.starts_word[ids[[np.searchsorted(owners, index) for index in range(1, len(words))]]]
    assert starts.all()


def test_word_without_tokens_is_a_target(tokenizer: Tokenizer) -> None:
    words = ("\x01", "Anna", "", "\u200d", "Rome", "")
    ((_, owners),) = word_tokens(tokenizer, [words])
    assert sorted(set(owners.tolist())) == list(range(len(words)))
    features = Tagging().features([TaggedWords(words)], Encoding(tokenizer, 64, has_types=True))
    assert _target_counts(features, [TaggedWords(words)]) == [[1] * len(words)]


@pytest.mark.parametrize("context", ["sentence", "document"])
@pytest.mark.parametrize("length", [4, 7, 16, 40])
def test_every_word_is_a_target_exactly_once_at_any_length(tokenizer: Tokenizer, length: int, context: str) -> None:
    table = table_of([{**row, "document": index // 5} for index, row in enumerate(_rows(25, 2, 40))], "rows")
    task = Tagging(context=context).resolve(table)  # type: ignore[arg-type]
    examples = task.examples(table)
    features = task.features(examples, Encoding(tokenizer, length, has_types=True))
    assert _target_counts(features, examples) == [[1] * len(example.words) for example in examples]
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


def test_word_longer_than_a_sequence_is_truncated_and_counted(wordpiece: Tokenizer) -> None:
    example = TaggedWords(("Anna", "unbreakable" * 9, "Rome"))
    features = Tagging().features([example], Encoding(wordpiece, 12, has_types=False))
    assert features.cut == 1
    assert features.types is None
    assert _target_counts(features, [example]) == [[1, 1, 1]]


def test_document_context_fills_the_sequence_on_both_sides(wordpiece: Tokenizer) -> None:
    rows = [{"tokens": ["gates"] * 3 + [name], "ner": ["O"] * 3 + ["B-X"], "document": "a"} for name in [*KINDS] * 3]
    rows += [{"tokens": ["smith"] * 4, "ner": ["O"] * 4, "document": "b"}]
    table = table_of(rows, "rows")
    task = Tagging(context="document").resolve(table)
    encoding = Encoding(wordpiece, 30, has_types=True)
    examples = task.examples(table)
    features = task.features(examples, encoding)
    tokens = [len(ids) for ids, _ in word_tokens(wordpiece, [example.words for example in examples])]
    middle = 6
    targets = np.flatnonzero(features.targets["word"][middle] != IGNORED)
    before, after = targets[0] - 1, len(features.tokens[middle]) - 2 - (targets[0] - 1) - tokens[middle]
    assert abs(before - after) <= max(tokens)
    assert before + tokens[middle] + after > 28 - max(tokens)
    # at the start of a document all context is on the right
    assert np.flatnonzero(features.targets["word"][0] != IGNORED)[0] == 1
    assert len(features.tokens[0]) > 30 - max(tokens)
    # other documents are not used as context
    alone = Tagging(context="sentence", labels=task.labels).features(examples[-1:], encoding)
    assert features.tokens[len(features) - 1].tolist() == alone.tokens[0].tolist()


def test_documents_by_column_by_marker_or_a_single_one() -> None:
    def numbers(rows: list[dict[str, Any]]) -> list[int]:
        return [example.document for example in Tagging().examples(table_of(rows, "rows"), has_targets=False)]

    assert numbers([{"tokens": ["a"]}] * 3) == [0, 0, 0]
    assert numbers([{"tokens": ["a"], "document": name} for name in "xxyx"]) == [0, 0, 1, 2]
    assert numbers([{"tokens": [word]} for word in ("a", "-DOCSTART-", "b", "-DOCSTART-")]) == [0, 1, 1, 2]
    assert numbers([Tagging().row("a b"), Tagging().row(["a"])]) == [0, 1]
    table = table_of(_rows(8), "rows")
    task = Tagging(context="document").resolve(table)
    assert any("'document'" in notice for notice in task.notices(task.examples(table)))


def test_recognised_columns() -> None:
    row = {"tokens": ["a"], "pos": ["NN"], "chunk": ["B-NP"], "ner": ["O"]}
    assert Tagging.find_columns(row) == {"words": "tokens", "tags": "ner"}
    assert Tagging.find_columns({"words": ["a"], "tags": ["O"]}) == {"words": "words", "tags": "tags"}
    assert Tagging.find_columns({"text": "a", "tags": ["O"]}) is None
    assert Tagging.find_columns({"tokens": ["a"], "label": "x"}) is None
    found = recognise(table_of([row], "rows"), None, ["tags=pos"], {})
    assert found == {"kind": "tagging", "words": "tokens", "tags": "pos"}


def test_iob1_is_converted_to_iob2_with_a_notice() -> None:
    table = table_of([{"tokens": list("abcd"), "ner": ["I-A", "I-A", "B-A", "O"]}], "rows")
    task = Tagging().resolve(table)
    assert (task.scheme, task.labels) == ("iob", ("O", "B-A", "I-A"))
    examples = task.examples(table)
    assert task.gold(examples[0]) == ["B-A", "I-A", "B-A", "O"]
    assert task.notices(examples) == ["1 of 1 sentences have IOB1 tags, which are converted to IOB2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "ner": ["O"]}, "rows row 1 has 2 words in 'tokens' but 1 tags in 'ner'"),
        ({"tokens": [], "ner": []}, "rows row 1: 'tokens' is empty"),
        ({"tokens": "a b", "ner": ["O"]}, "rows row 1: 'tokens' is 'a b'; it must be a list"),
        ({"tokens": ["a", 7], "ner": ["O", "O"]}, "rows row 1: 'tokens' has 7 as word 2"),
        ({"tokens": ["a"], "ner": [None]}, "rows row 1: 'ner' has None for word 1"),
        ({"tokens": ["a"], "ner": "O"}, "rows row 1: 'ner' is 'O'; it must be a list"),
        ({"tokens": ["a"], "nerr": ["O"]}, "rows row 1 has no field 'ner'; did you mean 'nerr'"),
        (
            {"tokens": ["a", "Po"], "ner": ["O", "B-LOK"]},
            "rows row 1: 'ner' has 'B-LOK' for word 2, 'Po', which is not a tag",
        ),
    ],
)
def test_invalid_rows_raise_with_their_location(row: dict[str, Any], message: str) -> None:
    good = {"tokens": ["a", "b"], "ner": ["B-LOC", "O"]}
    task = Tagging().resolve(table_of([good], "rows"))
    with pytest.raises(InputError) as raised:
        task.examples(table_of([good, row], "rows"))
    assert message in str(raised.value)


def test_single_tag_raises() -> None:
    with pytest.raises(InputError, match="only one tag, 'NN'"):
        Tagging().resolve(table_of([{"tokens": ["a"], "ner": ["NN"]}], "rows"))


def test_unsupported_metric_raises_before_training() -> None:
    plain = table_of([{"tokens": ["a", "b"], "ner": ["NN", "VB"]}], "rows")
    with pytest.raises(InputError, match=r"task\.metric is 'f1'; allowed: accuracy"):
        Tagging(metric="f1").resolve(plain)
    with pytest.raises(InputError, match=r"task\.metric is 'recal'; did you mean 'recall'"):
        Tagging(metric="recal", labels=("O", "B-A", "I-A")).resolve(plain)


def test_tag_prefix_missing_in_training_is_valid_in_dev() -> None:
    task = Tagging().resolve(table_of([{"tokens": ["a", "b"], "ner": ["B-A", "O"]}], "rows"))
    (example,) = task.examples(table_of([{"tokens": ["a", "b"], "ner": ["B-A", "I-A"]}], "rows"))
    assert task.gold(example) == ["B-A", "I-A"]


def test_balanced_weights_count_words() -> None:
    table = table_of([{"tokens": list("abcd"), "ner": ["A", "A", "A", "B"]}], "rows")
    task = Tagging(class_weights="balanced").resolve(table)
    assert task.objective(task.examples(table)).weights == pytest.approx((4 / 6, 2.0))
    weighted = task.changed(class_weights=(1.0, 2.0, 3.0))
    with pytest.raises(InputError, match=r"task\.class_weights has 3 numbers; the task has 2 labels"):
        weighted.objective(task.examples(table))


def _answers_of_head(task: Tagging, table: Table, wrong: dict[int, int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Answers of a head that predicts the gold tags, except for the words `wrong` of the first example."""
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


def test_answers_entities_confusion_and_files(wordpiece: Tokenizer) -> None:
    rows = [{"tokens": ["Anna", "Bert", "gates"] * 12, "ner": ["B-PER", "I-PER", "O"] * 12}, *_rows(3)]
    table = table_of(rows, "rows")
    task = Tagging().resolve(table)
    examples = task.examples(table)
    correct = _answers_of_head(task, table, {}, wordpiece)
    assert [answer["answer"] for answer in correct] == [task.gold(example) for example in examples]
    assert task.evaluate(examples, correct).score == 100.0
    assert [task.error(*pair) for pair in zip(examples, correct, strict=True)] == [0.0] * 4
    answers = _answers_of_head(task, table, {1: task.labels.index("B-LOC")}, wordpiece)
    probability = np.exp(4) / (np.exp(4) + len(task.labels) - 1)
    assert answers[0]["entities"][:2] == [
        {"type": "PER", "begin": 0, "end": 1, "text": "Anna", "score": pytest.approx(probability)},
        {"type": "LOC", "begin": 1, "end": 2, "text": "Bert", "score": pytest.approx(probability)},
    ]
    assert task.error(examples[0], answers[0]) == pytest.approx(probability)
    predicted_labels = task.predicted_labels(examples, answers)
    labels, counts = predicted_labels.labels, predicted_labels.counts
    wrong = next(item for item in predicted_labels.items if item.predicted != item.target)
    assert (wrong.example, wrong.word, wrong.confidence) == (0, 1, pytest.approx(probability))
    before, word, after = task.describe_label(examples[0], wrong)
    assert (before, word, after[:10]) == ("Anna", "Bert", "gates Anna")
    assert counts[labels.index("I-PER"), labels.index("B-LOC")] == 1
    assert counts.sum() == sum(len(example.words) for example in examples)
    assert np.trace(counts) == counts.sum() - 1
    file = task.files(examples, answers)["predictions.conll"]
    assert file.split("\n")[:2] == ["Anna B-PER B-PER", "Bert I-PER B-LOC"]
    assert file.count("\n\n") == 3
    assert task.describe(examples[0]).startswith("Anna Bert gates Anna")


def test_plain_text_is_split_and_entities_have_character_offsets(wordpiece: Tokenizer) -> None:
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
def test_split_words(text: str, words: list[str]) -> None:
    positions = split_words(text)
    assert [text[begin:end] for begin, end in positions] == words


@pytest.mark.parametrize("scheme", ["iob1", "iob2", "bioes", "plain"])
def test_training_with_each_scheme(scheme: str) -> None:
    rows = []
    for row in _rows(60, seed=5):
        marks = {"iob1": "I-", "iob2": "B-", "bioes": "S-", "plain": ""}
        # every chunk is one word; adjacent IOB1 words of one type form one chunk
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
            (entity["type"], entity["begin"], entity["end"], entity["text"]) for entity in answer["entities"]
        }


def test_training_with_document_context() -> None:
    rows = _rows(40, seed=6)
    settings = [*SETTINGS, "run.epochs=2", 'task.kind="tagging"', 'task.context="document"']
    result = bertsmith.finetune("bert-tiny", train=rows, dev=rows[:8], device="cpu", set=settings)
    assert result.predictor.task.context == "document"
    together = result.predictor.details(["Anna forges gates", "near Rome"])
    assert together == [*result.predictor.details(["Anna forges gates"]), *result.predictor.details(["near Rome"])]
