"""WikiText's articles and running text."""

import doctest

from bertsmith.text import wikitext
from bertsmith.text.wikitext import join_articles, running_text

LINES = ["= First =", "A line .", "= = Part = =", "More .", "= Second article =", "= 5 = is no heading", "End ."]


def test_examples_of_the_documentation_hold() -> None:
    assert doctest.testmod(wikitext).failed == 0


def test_articles_begin_at_level_one_headings() -> None:
    articles = join_articles(LINES)
    assert articles == ["\n".join(LINES[:4]), "\n".join(LINES[4:])]
    assert join_articles(["no heading", *LINES])[0] == "no heading"
    assert join_articles([]) == []


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
