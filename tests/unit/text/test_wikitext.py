"""WikiText's articles and running text."""

import doctest
from pathlib import Path

import pytest

from bertsmith.text import wikitext
from bertsmith.text.readers import split_documents
from bertsmith.text.wikitext import begins_article, join_articles, published_articles, running_text

LINES = ["= First =", "A line .", "= = Part = =", "More .", "= Second article =", "= 5 = is no heading", "End ."]


def test_examples_of_the_documentation_hold() -> None:
    assert doctest.testmod(wikitext).failed == 0


def test_articles_begin_at_level_one_headings() -> None:
    articles = join_articles(LINES)
    assert articles == ["\n".join(LINES[:4]), "\n".join(LINES[4:])]
    assert join_articles(["no heading", *LINES])[0] == "no heading"
    assert join_articles([]) == []


FIRST = "The first gate was made by a smith , who forged it of iron in a cold winter long ago ."
RAW = """
= Gates =

{first}
A second paragraph .

= = Use = =

= = = At home = = =

Key : Pld
= Played , W =
Wins , L = Losses


= don 't =

{other}
"""


def test_empty_lines_are_restored() -> None:
    """`RAW` is laid out as the published files are; headings without text have two empty lines between them."""
    raw = RAW.format(first=FIRST, other=f"don 't is a verb . {FIRST}").replace("= = Use = =\n\n", "= = Use = =\n\n\n")
    lines = [line for line in raw.split("\n") if line]
    articles = published_articles(lines)
    assert len(articles) == 2
    assert "".join(articles) == raw
    assert all(article.endswith("\n") for article in articles)
    assert published_articles([]) == []


def test_titles_are_told_from_fragments() -> None:
    assert begins_article("= Gates =", FIRST)
    assert begins_article("= Gates =", f'" {FIRST} "')
    for title, following in {
        "= Played , W =": "Wins , L",
        "= 1 henry and capacitance C =": f"1 farad . {FIRST}",
        "= ( J =": f"0 in {FIRST}",
        "= and =": f"− . in {FIRST}",
        "= End =": "",
    }.items():
        assert not begins_article(title, following)


@pytest.mark.parametrize(("split", "articles", "total"), [("valid", 60, 217_646), ("test", 60, 245_569)])
def test_counts_of_wikitext_are_the_published_ones(split: str, articles: int, total: int) -> None:
    data = Path(__file__).parents[4] / "shared" / "data" / "corpus" / "wikitext-2-raw"
    if not data.is_dir():
        pytest.skip("WikiText-2 is not here")
    found = published_articles(split_documents(data, split))
    assert len(found) == articles
    assert sum(len(article.split()) + article.count("\n") for article in found) == total


def test_rules_of_running_text() -> None:
    cases = {
        "the boys ' hats": "the boys' hats",
        "1 @,@ 000 and 3 @.@ 5 of a well @-@ known one": "1,000 and 3.5 of a well-known one",
        "so : one ; two , three ! four ? five .": "so: one; two, three! four? five.",
        "( a ) [ b ] { c }": "(a) [b] {c}",
        'he said " no more " twice': 'he said "no more" twice',
        "= = = = Deep = = = =": "==== Deep ====",
        "= = Part = =\nText .": "== Part ==\nText.",
        "at 5 ° north": "at 5°north",
        "about N people": "about 1 people",
        "Whishaw 's play": "Whishaw's play",
    }
    for text, expected in cases.items():
        assert running_text(text) == expected
        assert running_text(expected) == expected


def test_quotes_pair_across_lines() -> None:
    assert running_text('a " b\nc " d') == 'a "b\nc" d'
