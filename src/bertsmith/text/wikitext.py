"""WikiText's raw text: articles from lines, and running text from its spaced words and ` @-@ ` marks."""

import re
from collections.abc import Iterable

_TITLE = re.compile(r"= (?!=)[^\n]*(?<!=) =")
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
