"""Pairs of passages: their kinds, dropped lines, and reproducibility by seed."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from killing import Killed, kill_at

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.runs.output import unlock
from bertsmith.runs.pairs import JOURNAL, ROWS, PairJournal
from bertsmith.text.passages import KINDS, Lengths, Passages, pairs_of, parse_kinds
from bertsmith.text.readers import read_documents_with_titles, read_rows

FIRST = [f"The river number {n} flows down to the sea." for n in ("one", "two", "three", "four", "five")]
SECOND = [f"Old houses of the {n} street are made of stone." for n in ("first", "second", "third")]
DOCUMENT = "\n".join(
    [" ".join(FIRST), "Sights and houses.", "Too short. " + " ".join(SECOND), "1 2 3 4 5 6 = 7. 8 9 10 11 12 13 x."]
)


def passages(document: str = DOCUMENT, title: str | None = "Rivers") -> Passages:
    return Passages.of(document, Lengths(), title)


def draw_pairs(kind: str, count: int = 50) -> list[tuple[str, str]]:
    return [pair for _, pair in pairs_of(passages(), {kind: count}, Random(0))]


def test_headings_short_sentences_and_formulas_are_dropped() -> None:
    assert passages().paragraphs == (tuple(FIRST), tuple(SECOND))


def test_document_of_one_sentence_per_line_is_one_paragraph() -> None:
    document = passages("\n".join([*FIRST, "A heading of five words", *SECOND]))
    assert document.paragraphs == ((*FIRST, *SECOND),)


def test_pairs_of_each_kind() -> None:
    neighbours = [*pairwise(FIRST), *pairwise(SECOND)]
    apart = [(a, b) for texts in (FIRST, SECOND) for i, a in enumerate(texts) for b in texts[i + 2 :]]
    assert sorted(draw_pairs("neighbours")) == sorted(neighbours)
    assert sorted(draw_pairs("together")) == sorted(apart)
    assert set(draw_pairs("title")) <= {("Rivers", sentence) for sentence in FIRST}
    assert sorted(draw_pairs("same")) == sorted((text, text) for text in (*FIRST, *SECOND))
    for sentence, crop in draw_pairs("crop"):
        assert crop in sentence
        assert 5 <= len(crop.split()) < len(sentence.split())
    for sentence, changed in draw_pairs("altered"):
        assert changed != sentence
        assert set(changed.split()) <= set(sentence.split())


def test_spans_overlap_or_adjoin() -> None:
    words = [f"word{chr(97 + index // 26)}{chr(97 + index % 26)}" for index in range(60)]
    document = passages(" ".join(words[:30]) + ". " + " ".join(words[30:]).capitalize() + ".")
    positions = {word: index for index, word in enumerate(" ".join(document.sentences).split())}
    pairs = [pair for _, pair in pairs_of(document, {"spans": 200}, Random(0))]
    assert len(pairs) > 150
    for pair in pairs:
        (begin, end), (other, last) = sorted(
            (positions[span.split()[0]], positions[span.split()[-1]] + 1) for span in pair
        )
        assert other <= end
        assert 5 <= end - begin <= 40
        assert 5 <= last - other <= 40


def test_short_documents_give_fewer_pairs() -> None:
    empty = Passages.of("A heading.", Lengths(), None)
    assert list(pairs_of(empty, dict.fromkeys(KINDS, 3), Random(0))) == []


def write(folder: Path) -> Path:
    file = folder / "texts.jsonl"
    row = '{"title": " Rivers ", "text": ' + repr(DOCUMENT).replace("'", '"') + "}\n"
    file.write_text(row + row.replace(" Rivers ", " "), encoding="utf-8")
    return file


def test_titles_are_read_with_documents(tmp_path: Path) -> None:
    text = tmp_path / "plain.txt"
    text.write_text("One.\n\nTwo.\n")
    assert list(read_documents_with_titles([write(tmp_path), text])) == [
        ("Rivers", DOCUMENT),
        (None, DOCUMENT),
        (None, "One."),
        (None, "Two."),
    ]


def test_command_writes_a_fine_tuning_folder(tmp_path: Path) -> None:
    file, contents = write(tmp_path), []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        metrics = bertsmith.pairs([file], out=tmp_path / name, kinds=["same=2", "title", "spans=1"], seed=seed)
        assert metrics["kinds"] == {"same": 4, "title": 1, "spans": 2}
        contents.append((tmp_path / name / ROWS).read_bytes())
    assert contents[0] == contents[1] != contents[2]
    rows = [row for _, row in read_rows(tmp_path / "a" / ROWS)]
    assert [row["kind"] for row in rows] == ["same", "same", "title", "spans", "same", "same", "spans"]
    assert all(row.keys() == {"anchor", "positive", "kind"} for row in rows)
    assert not (tmp_path / "a" / JOURNAL).exists()
    main(["pairs", str(file), "--out", str(tmp_path / "d"), "--kinds", "same=2", "title", "--documents", "1"])
    assert len(list(read_rows(tmp_path / "d" / ROWS))) == 3


def test_interrupted_run_resumes_to_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertsmith.runs.pairs.BLOCK_CHARACTERS", 10)  # a block per document
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"title": f"Part {number}", "text": DOCUMENT}) + "\n" for number in range(9)))
    settings = {"kinds": ["same=2", "spans=2"], "seed": 3}
    bertsmith.pairs([file], out=tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        kill_at(patch, PairJournal, "_count", after=4, before_it=True)
        with pytest.raises(Killed):
            bertsmith.pairs([file], out=tmp_path / "out", **settings)
    unlock(tmp_path / "out")
    with (tmp_path / "out" / ROWS).open("ab") as rows, (tmp_path / "out" / JOURNAL).open("a") as lines:
        rows.write(b"half a block")
        lines.write('{"bytes": 3, "docu')
    with pytest.raises(InputError, match="--resume: seed is 4, but the run was started with 3"):
        bertsmith.pairs([file], out=tmp_path / "out", resume=True, **(settings | {"seed": 4}))
    result = bertsmith.pairs([file], out=tmp_path / "out", resume=True, **settings)
    assert (tmp_path / "out" / ROWS).read_bytes() == (tmp_path / "whole" / ROWS).read_bytes()
    assert result.documents == 9
    with pytest.raises(InputError, match="no interrupted run"):
        bertsmith.pairs([file], out=tmp_path / "out", resume=True, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ["sam"]}, "--kinds names 'sam'; did you mean"),
        ({"kinds": ["same=0"]}, "--kinds is 'same=0'; allowed after =: the number of pairs per document"),
        ({"min_words": 9, "max_words": 8}, "min_words is 9 and max_words is 8"),
        ({"documents": 0}, "--documents is 0; allowed: 1 or more"),
        ({"min_words": 30, "kinds": ["same"]}, "none of the 2 documents has a sentence of 30 to 40 words"),
    ],
)
def test_invalid_settings_of_pairs_raise(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        bertsmith.pairs([write(tmp_path)], out=tmp_path / "out", **settings)


def test_bare_kind_means_the_default_number() -> None:
    assert parse_kinds(["neighbours", "same=9"]) == {"neighbours": 5, "same": 9}
