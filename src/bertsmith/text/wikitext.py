"""WikiText's raw text: articles from lines, its empty lines, and running text from spaced words and ` @-@ ` marks."""

import re
from collections.abc import Iterable

_TITLE = re.compile(r"= (?!=)[^\n]*(?<!=) =")
_HEADING = re.compile(r"((?:= )+)(?!=).*(?<!=)((?: =)+)")
_MIN_INTRODUCTION = 16
"""Words of the shortest first paragraph of an article; fragments such as `Wins , L` have fewer."""
_PAIRS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
    )
)


def join_articles(lines: Iterable[str]) -> list[str]:
    """Join lines to articles, which begin at level-1 headings such as `= Title =`.

    A few lines of tables look like such headings and begin an article, too.
    """
    articles: list[list[str]] = []
    for line in lines:
        if not articles or _TITLE.fullmatch(line.strip()):
            articles.append([])
        articles[-1].append(line)
    return ["\n".join(article) for article in articles]


def published_articles(lines: Iterable[str]) -> list[str]:
    """Join the non-empty lines of WikiText to articles, with the empty lines of the published files restored.

    Every line ends with a line end. There is an empty line before and after each heading, and another one between two
    articles: this gives the published totals of valid and test of WikiText-2, and 12 lines too many in train.
    """
    given = [line.strip() for line in lines]
    articles: list[list[str]] = []
    for line, following in zip(given, [*given, ""][1:], strict=True):
        looks_like_title = bool(_TITLE.fullmatch(line))
        is_title = looks_like_title and begins_article(line, following)
        if is_title and articles:
            articles[-1].append("")
        if is_title or not articles:
            articles.append([])
        is_heading = is_title or (not looks_like_title and bool(_HEADING.fullmatch(line)))
        articles[-1] += ["", line, ""] if is_heading else [line]
    return ["".join(f"{line}\n" for line in article) for article in articles]


def begins_article(title: str, following: str) -> bool:
    """Return whether a line such as `= Title =` is the title of an article, given the line after it.

    Others are parts of a sentence or a legend that contained two `=`, as `Key : Pld` / `= Played , W =` / `Wins , L`.
    An article has a first paragraph, which begins with a capital letter or the title.
    """
    words = re.findall(r"\w+", following)
    if len(following.split()) < _MIN_INTRODUCTION or not words:
        return False
    first = re.findall(r"\w+", title)[:1]
    return words[0][0].isupper() or (not words[0].isdigit() and words[0].lower() == "".join(first).lower())


def running_text(text: str) -> str:
    """Undo WikiText's tokenisation (detokenise) by the rules of Megatron-LM, in their order.

    Quotes pair across the lines of the text, so apply it to whole articles.

    >>> running_text('He said : " 1 @,@ 500 well @-@ known ( and old ) things . "')
    'He said: "1,500 well-known (and old) things."'
    """
    # the original lines have a space at both ends, which the rules for punctuation need
    text = "".join(f" {line.strip()} \n" for line in text.split("\n"))
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for pattern, replacement in _PAIRS:
        text = pattern.sub(replacement, text)
    for level in (4, 3, 2):
        text = text.replace(" ".join("=" * level), "=" * level)
    text = text.replace(" ° ", "°").replace(" \n", "\n").replace("\n ", "\n")
    return text.replace(" N ", " 1 ").replace(" 's", "'s").strip()
