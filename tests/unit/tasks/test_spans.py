"""Extractive question answering: rows and their errors, windows and targets, the loss in every layout, a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

import bertsmith
from bertsmith.answers.sequences import IGNORED
from bertsmith.answers.spans import SpanExample, most_context, window_starts
from bertsmith.data.examples import ExampleConfig, ExampleReader
from bertsmith.data.plan import Cursor, MicroBatchPlan
from bertsmith.errors import InputError
from bertsmith.objectives.supervised import Spans
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.spans import SpanAnswers
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.rows import table_of
from bertsmith.text.table_files import json_table

STORY = "Anna the smith forged an iron gate in spring. Berta, her sister, mended seven lanterns near the harbour."
QUESTIONS = [
    ("Who forged a gate?", "Anna the smith"),
    ("What did Anna forge?", "an iron gate"),
    ("When was the gate forged?", "spring"),
    ("Who mended lanterns?", "Berta"),
    ("Who is Berta?", "her sister"),
    ("How many lanterns were mended?", "seven"),
    ("What did Berta mend?", "seven lanterns"),
    ("Where did Berta mend them?", "near the harbour"),
    ("Who sold the gate?", None),
    ("When were the lanterns sold?", None),
]


def _rows(*, has_unanswerable: bool = True) -> list[dict]:
    rows = []
    for index, (question, answer) in enumerate(QUESTIONS):
        if answer is None and not has_unanswerable:
            continue
        answers = (
            {"text": [answer], "answer_start": [STORY.index(answer)]} if answer else {"text": [], "answer_start": []}
        )
        row = {"id": f"q{index}", "context": STORY, "question": question, "answers": answers}
        rows.append({**row, "is_impossible": answer is None} if has_unanswerable else row)
    return rows


def _row(**changes) -> dict:
    row = {
        "context": "an iron gate, an oak gate",
        "question": "what?",
        "answers": {"text": ["oak"], "answer_start": [17]},
    }
    return {**row, **changes}


@pytest.fixture(scope="module", params=["wordpiece", "bytes", "unigram"])
def tokenizer(request):
    return learn_tokenizer([STORY, *(question for question, _ in QUESTIONS)] * 3, request.param, 330, progress=False)


def test_rows_are_recognised_with_and_without_unanswerable_questions() -> None:
    table = table_of(_rows(), "train")
    assert recognise(table, None, [], {})["kind"] == "spans"
    assert SpanAnswers().resolve(table).may_be_unanswered is True
    assert SpanAnswers().resolve(table_of(_rows(has_unanswerable=False), "train")).may_be_unanswered is False
    other = [{"frage": row["question"], "context": STORY, "gold": row["answers"]} for row in _rows()]
    found = recognise(table_of(other, "train"), None, ["question=frage", "answer=gold"], {})
    task = SpanAnswers.parse(found)
    assert [example.golds for example in task.examples(table_of(other, "train"))][:2] == [
        ("Anna the smith",),
        ("an iron gate",),
    ]


def test_official_file_gives_equal_examples(tmp_path: Path) -> None:
    qas = [
        {
            "id": row["id"],
            "question": row["question"],
            "is_impossible": row["is_impossible"],
            "answers": [
                {"text": text, "answer_start": start}
                for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
            ],
        }
        for row in _rows()
    ]
    content = {"version": "v2.0", "data": [{"title": "Smiths", "paragraphs": [{"context": STORY, "qas": qas}]}]}
    file = tmp_path / "train-v2.0.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    table = json_table(file)
    assert table.location(1) == f"file {str(file)!r} question 2"
    assert SpanAnswers().examples(table) == SpanAnswers().examples(table_of(_rows(), "train"))
    as_pairs = [{**row, "answers": question["answers"]} for row, question in zip(_rows(), qas, strict=True)]
    assert SpanAnswers().examples(table_of(as_pairs, "train")) == SpanAnswers().examples(table)


@pytest.mark.parametrize("content", ["{", "[]", '{"data": [{}]}', '{"data": [{"paragraphs": [{}]}]}', '{"data": []}'])
def test_malformed_official_file_raises(tmp_path: Path, content: str) -> None:
    file = tmp_path / "train.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"train\.json"):
        json_table(file)


def test_wrong_answer_start_is_repaired_if_the_answer_occurs_once() -> None:
    table = table_of([_row(), _row(answers={"text": ["oak", "gate"], "answer_start": [3, 8]})], "train")
    examples = SpanAnswers().examples(table)
    assert [(one.begin, one.end, one.is_repaired) for one in examples] == [(17, 20, False), (17, 20, True)]
    (notice,) = SpanAnswers().notices(examples)
    assert notice.startswith("1 answers are not at their answer_start")
    assert "'1'" in notice


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": {"text": ["gate"], "answer_start": [0]}}, "'gate' occurs several times .* answer_start 0"),
        ({"answers": {"text": ["gate"]}}, "several times in the passage and there is no answer_start"),
        ({"answers": {"text": ["steel"], "answer_start": [0]}}, "'steel' does not occur"),
        ({"answers": {"text": [" "], "answer_start": [2]}}, "is blank"),
        ({"answers": {"text": ["oak"], "answer_start": ["17"]}}, "integers"),
        ({"answers": {"text": ["oak"], "answer_start": [17, 18]}}, "of equal length"),
        ({"answers": "oak"}, "'answers' must be"),
        (
            {"answers": {"text": [], "answer_start": []}, "is_impossible": False},
            "is empty, but 'is_impossible' is false",
        ),
        ({"is_impossible": "no"}, "'is_impossible' is 'no'"),
        ({"question": None}, "field 'question' is null"),
    ],
)
def test_invalid_rows_raise_with_their_location(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"^train row 1.*{message}"):
        SpanAnswers().examples(table_of([_row(), _row(**changes)], "train"))


def test_windows_cover_the_passage() -> None:
    assert window_starts(0, 10, 4).tolist() == [0]
    assert window_starts(10, 10, 4).tolist() == [0]
    assert window_starts(11, 10, 4).tolist() == [0, 4]
    assert window_starts(30, 10, 128).tolist() == [0, 10, 20]
    assert window_starts(19, 10, 4).tolist() == [0, 4, 8, 12]
    starts, lengths = np.array([0, 4, 8]), np.array([10, 8, 4])
    # tokens 0 … 11; ties go to the first window: token 6 has equal context in both of its windows
    assert most_context(12, starts, lengths).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_longer_windows_get_a_small_bonus() -> None:
    lengths = np.array([200, 90])
    # 39 tokens to the nearest edge plus 2.0 for the length, against 40 plus 0.9
    assert most_context(210, np.array([0, 120]), lengths)[160] == 0
    # 38 plus 2.0 against 40 plus 0.9
    assert most_context(211, np.array([0, 121]), lengths)[161] == 1


def test_targets_decode_to_the_answers_with_any_tokenizer(tokenizer) -> None:
    task = SpanAnswers(stride=5, question_length=6)
    examples = task.examples(table_of(_rows(), "train"))
    features = task.features(examples, Encoding(tokenizer, 28, has_types=True))
    assert len(features) > len(examples)
    decoded = set()
    for item, (start, end) in enumerate(zip(features.targets["start"], features.targets["end"], strict=True)):
        example = examples[features.example[item]]
        assert features.tokens[item][0] == tokenizer.start
        assert len(features.tokens[item]) <= 28
        passage = slice(features.first[item], features.first[item] + features.shown[item])
        assert not features.may_start[item][: passage.start].any()
        assert not features.may_start[item][passage.stop :].any()
        if start:
            assert passage.start <= start <= end < passage.stop
            begin, stop = features.span(item, start, end)
            # a token may cover more than the answer, such as the comma after it
            assert example.golds[0] in STORY[begin:stop]
            assert stop - begin <= len(example.golds[0]) + 12
            decoded.add(example.id)
        else:
            assert end == 0
    assert decoded == {f"q{index}" for index in range(8)}
    # every passage token may start an answer in exactly one window of its question
    shown = sum(features.may_start[item].sum() for item in np.flatnonzero(features.example == 0))
    assert shown == len(tokenizer.encode_plain([STORY])[0])


def test_perfect_scores_give_the_gold_answers(tokenizer) -> None:
    task = SpanAnswers(stride=20, may_be_unanswered=True)
    examples = task.examples(table_of(_rows(), "train"))
    features = task.features(examples, Encoding(tokenizer, 64, has_types=True))
    outputs = []
    for item, length in enumerate(features.tokens.lengths):
        scores = np.zeros((length, 2), np.float32)
        scores[features.targets["start"][item], 0] = scores[features.targets["end"][item], 1] = 9
        # a window without the answer selects its first token, with a lower score than the window with the answer
        outputs.append(scores if features.targets["start"][item] else scores / 3)
    answers = task.answers(examples, features, outputs)
    evaluation = task.evaluate(examples, answers)
    assert evaluation.metrics["f1"] > 90
    assert evaluation.metrics["no_answer_exact"] == 100
    assert [task.error(example, answer) for example, answer in zip(examples, answers, strict=True)][8:] == [0, 0]
    json.dumps(answers, allow_nan=False)
    files = task.files(examples, answers)
    assert set(files) == {"predictions.json", "nbest_predictions.json", "null_odds.json"}
    assert json.loads(files["predictions.json"]) == {
        example.id: answer["answer"] for example, answer in zip(examples, answers, strict=True)
    }
    assert set(json.loads(files["nbest_predictions.json"])["q0"][0]) == {
        "text",
        "probability",
        "start_logit",
        "end_logit",
    }


def test_empty_passage_and_answer_without_tokens(tokenizer) -> None:
    task = SpanAnswers()
    examples = [
        SpanExample("0", "what?", "", ()),
        SpanExample("1", "what?", "iron  gate", ("\t",), 4, 4),
    ]
    features = task.features(examples, Encoding(tokenizer, 32, has_types=False))
    assert features.types is None
    assert features.targets["start"].tolist() == features.targets["end"].tolist() == [0, IGNORED]
    outputs = [np.ones((length, 2), np.float32) for length in features.tokens.lengths]
    empty, _ = task.answers(examples, features, outputs)
    assert (empty["answer"], empty["begin"], empty["score"]) == ("", None, 1.0)


def test_length_without_room_for_the_passage_raises(tokenizer) -> None:
    examples = SpanAnswers().examples(table_of(_rows(), "train"))
    with pytest.raises(InputError, match=r"sequences\.length is 6; at least"):
        SpanAnswers().features(examples, Encoding(tokenizer, 6, has_types=True))


def _batch(features, layout: str, items: list[int]):
    reader = ExampleReader(features, ExampleConfig(layout=layout), 0)
    return reader[MicroBatchPlan(np.array(items), Cursor())].batch


def test_loss_equals_single_windows_in_every_layout(tokenizer) -> None:
    task = SpanAnswers(stride=5)
    features = task.features(task.examples(table_of(_rows(), "train")), Encoding(tokenizer, 48, has_types=True))
    features.targets["start"][2] = features.targets["end"][2] = IGNORED
    items = list(range(9))
    scores = [torch.randn(int(features.tokens.lengths[item]), 2, dtype=torch.float64) for item in items]
    expected = torch.tensor(0.0, dtype=torch.float64)
    for item, own in zip(items, scores, strict=True):
        for side, name in enumerate(("start", "end")):
            if item != 2:
                expected -= log_softmax(own[:, side], 0)[features.targets[name][item]] / 2
    objective = Spans()
    gradients = []
    for layout in ("packed", "padded"):
        batch = _batch(features, layout, items)
        leaves = [own.clone().requires_grad_() for own in scores]
        outputs = torch.cat(leaves)
        if layout == "padded":
            max_length = max(map(len, leaves))
            # outputs at padding must not matter
            fill = [torch.full((max_length - len(own), 2), 50.0, dtype=own.dtype) for own in leaves]
            outputs = torch.stack([torch.cat(pair) for pair in zip(leaves, fill, strict=True)])
        sums = objective.sums(outputs, batch)
        torch.testing.assert_close(sums.loss, expected)
        assert int(objective.count(batch)) == int(sums.metrics["accuracy"].whole) == 8
        probabilities = objective.comparable_logits(outputs.detach(), batch).softmax(-1)
        assert probabilities.shape[:2] == (9, 2)
        torch.testing.assert_close(probabilities[3, 1, : len(scores[3])], scores[3][:, 1].softmax(0))
        sums.loss.backward()
        gradients.append(torch.cat([leaf.grad for leaf in leaves]))
    torch.testing.assert_close(*gradients)
    half = objective.sums(torch.cat(scores).bfloat16(), _batch(features, "packed", items))
    assert half.loss.dtype == torch.float32


@pytest.mark.slow
def test_training_on_ten_questions(tmp_path: Path) -> None:
    settings = ["run.epochs=10", "optimizer.learning_rate=1e-3", "sequences.length=128"]
    settings += ["model.overrides.dropout=0.0", "batch.examples=10", "tokenizer.vocabulary=300"]
    result = bertsmith.finetune(
        "bert-tiny", train=_rows() * 10, dev=_rows(), set=settings, device="cpu", out=tmp_path / "run"
    )
    assert result["metric"] == "f1"
    assert result["score"] > 80
    assert "best_f1_threshold" in result
    (answer,) = result.predict([("Who mended lanterns?", STORY)])
    assert answer == "Berta"
    again = bertsmith.Predictor.load(tmp_path / "run")
    (details,) = again.details([{"question": "Who mended lanterns?", "context": STORY}])
    assert STORY[details["begin"] : details["end"]] == details["answer"] == "Berta"
    assert (tmp_path / "run" / "dev.official" / "null_odds.json").is_file()


def test_describe_returns_one_line() -> None:
    long = SpanExample("0", "Which  gate?", "x" * 200 + " oak " + "y" * 200, ("oak", "oak", "an oak"), 201, 204)
    shown = SpanAnswers().describe(long)
    assert shown.startswith("Which gate? | … x")
    assert " oak y" in shown
    assert shown.endswith("y …")
    assert len(shown) < 160
    assert SpanAnswers().gold(long) == "oak | an oak"
    assert SpanAnswers().describe(SpanExample("0", "q?", "short\ntext", ())) == "q? | short text"
