"""Sentence splitting of abbreviations, numbers, quotes and several scripts."""

import random

import pytest

from bertsmith.text.sentences import split_sentences

CASES = [
    "One here.|Two here!|Three here?|Four…|Five.",
    "Dr. Smith met Mrs. Jones at St. Mary's.|They left.",
    "J. R. R. Tolkien wrote it.|It sold well.",
    "The U.S. Army came at 5 p.m. Eastern time.|It stayed.",
    "It costs 3.14 euros, or 1,000.50.|Really.",
    "See Fig. 3 and pp. 12 of vol. 2.|Then No. 5.",
    "It ended in 1999.|The next began.",
    '"Stop!" he said.|(It was late.)|"Why?"|She left.',
    "Smith et al. Proved it e.g. Here.",
    "visit example.com for more.|Thanks.",
    "これは文です。|次の文！|「はい。」|終わり",
    "नमस्ते।|यह दूसरा है।",
    "Tokenised text is split too .|Like this .",
    "He won! and left.",
    "¿Qué?|¡Nada!|Él rió.",
    "Wait...|What?!|Yes.",
]


@pytest.mark.parametrize("case", CASES)
def test_sentences_end_at_the_marked_positions(case):
    sentences = case.split("|")
    separator = "" if any("\u3040" <= letter <= "\u9fff" for letter in case) else " "
    assert split_sentences(separator.join(sentences)) == sentences


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n \n", "\u2028"])
def test_line_ends_always_end_a_sentence(end):
    assert split_sentences(f"no stop here{end}nor here") == ["no stop here", "nor here"]


def test_list_numbers_stay_with_their_item():
    assert split_sentences("1. First entry\n2. Second entry") == ["1. First entry", "2. Second entry"]


def test_empty_document_has_no_sentences():
    assert split_sentences(" \n\t ") == []


def test_no_visible_character_is_lost():
    generator = random.Random(5)
    alphabet = "aBc. .!?…\"')(\n\r\t 1,。！？」「é東\u00a0\u2028-"
    for _ in range(500):
        document = "".join(generator.choices(alphabet, k=60))
        sentences = split_sentences(document)
        assert "".join("".join(sentences).split()) == "".join(document.split())
        assert all(sentence == sentence.strip() != "" for sentence in sentences)
        assert not any("\n" in sentence for sentence in sentences)
