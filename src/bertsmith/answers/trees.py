"""Constituency trees: reading, normalisation, writing, constituents, and sequences of symbols with their repair."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NamedTuple

TOP = "TOP"
"""Label above a tree without a root of its own; never scored."""
NO_TAG = "XX"
"""Tag of a word whose part of speech is unknown."""
LeafSymbols = Literal["XX", "tags", "words"]

_EMPTY_TAG = "-NONE-"
_MAX_DEPTH = 200
_SEPARATOR = "::"
_SAME_LABELS = {"PRT|ADVP": "PRT", "ADVP|PRT": "PRT"}
_TOKEN = re.compile(r"[()]|[^\s()]+")
_ESCAPES = {"-LRB-": "(", "-RRB-": ")", "-LCB-": "{", "-RCB-": "}", "-LSB-": "[", "-RSB-": "]"}
_BRACKETS = str.maketrans({"(": "-LRB-", ")": "-RRB-"})


class TreeError(ValueError):
    """A text that is not a tree; the message is the predicate of a sentence."""


@dataclass(frozen=True)
class Leaf:
    """A word and its part of speech."""

    tag: str
    word: str


@dataclass(frozen=True)
class Tree:
    """A constituent."""

    label: str
    children: tuple["Tree | Leaf", ...]


class Constituent(NamedTuple):
    """A labelled span of words: from word `begin` to before word `end`."""

    label: str
    begin: int
    end: int


def read_tree(text: str) -> Tree:
    """Read one bracketed tree and normalise it; raise TreeError if it is malformed.

    Empty elements (tag -NONE-) and constituents without other words are dropped, function tags and indices are cut from
    labels ("NP-SBJ-1" becomes "NP"). A tree in brackets without a label is unwrapped.
    """
    tree = _normalised(_parsed(text))
    if tree is None:
        raise TreeError("has no words")
    return _unwrapped(tree)


def _parsed(text: str) -> Tree | Leaf:
    """Parse brackets without recursion."""
    stack: list[list[str | Tree | Leaf]] = []
    for position in (tokens := _TOKEN.finditer(text)):
        token = position.group()
        if token == "(":
            stack.append([])
            if len(stack) > _MAX_DEPTH:
                raise TreeError(f"is nested more than {_MAX_DEPTH} deep")
        elif not stack:
            raise TreeError(f"has {token!r} outside the brackets")
        elif token != ")":
            stack[-1].append(token)
        else:
            node = _node(stack.pop())
            if stack:
                stack[-1].append(node)
                continue
            rest = next(tokens, None)
            if rest is not None:
                raise TreeError(f"has {rest.group()!r} after the last bracket")
            return node
    raise TreeError("has a bracket that is not closed" if stack else "has no brackets")


def _node(parts: list[str | Tree | Leaf]) -> Tree | Leaf:
    label = parts[0] if parts and isinstance(parts[0], str) else ""
    rest = parts[1:] if label else parts
    if len(rest) == 1 and isinstance(rest[0], str) and label:
        return Leaf(label, rest[0])
    children = tuple(part for part in rest if not isinstance(part, str))
    if len(children) < len(rest) or not children:
        raise TreeError(
            f"has ({' '.join(str(part) for part in parts if isinstance(part, str))}), which is no tagged word"
        )
    return Tree(label, children)


def _normalised(node: Tree | Leaf) -> Tree | Leaf | None:
    if isinstance(node, Leaf):
        return None if node.tag == _EMPTY_TAG else node
    children = tuple(child for child in map(_normalised, node.children) if child is not None)
    return Tree(plain_label(node.label), children) if children else None


def plain_label(label: str) -> str:
    """Cut function tags and indices from a label.

    >>> plain_label("NP-SBJ-1"), plain_label("PP=2"), plain_label("-LRB-")
    ('NP', 'PP', '-LRB-')
    """
    label = label if label.startswith("-") else re.split("[-=]", label, maxsplit=1)[0]
    return _SAME_LABELS.get(label, label) or TOP


def _unwrapped(node: Tree | Leaf) -> Tree:
    """Remove TOP above a single constituent; put it above a single word."""
    while isinstance(node, Tree) and node.label == TOP and len(node.children) == 1:
        node = node.children[0]
    return Tree(TOP, (node,)) if isinstance(node, Leaf) else node


def write_tree(tree: Tree | Leaf) -> str:
    """Write a tree in brackets on one line; `read_tree` reads it back."""
    if isinstance(tree, Leaf):
        return f"({tree.tag} {tree.word})"
    return f"({tree.label} {' '.join(map(write_tree, tree.children))})"


def leaves(tree: Tree | Leaf) -> Iterator[Leaf]:
    """Yield the words of a tree in order."""
    if isinstance(tree, Leaf):
        yield tree
        return
    for child in tree.children:
        yield from leaves(child)


def constituents(tree: Tree) -> list[Constituent]:
    """Return all labelled spans, a constituent before its parts; words alone are not constituents."""
    found: list[Constituent] = []

    def visit(node: Tree | Leaf, begin: int) -> int:
        if isinstance(node, Leaf):
            return begin + 1
        index, end = len(found), begin
        found.append(Constituent(node.label, begin, begin))
        for child in node.children:
            end = visit(child, end)
        found[index] = Constituent(node.label, begin, end)
        return end

    visit(tree, 0)
    return found


def joined(tree: Tree) -> list[Constituent]:
    """Return the constituents with the labels of a unary chain joined: S over VP over the same words is "S::VP"."""
    spans: dict[tuple[int, int], str] = {}
    for label, begin, end in constituents(tree):
        above = spans.get((begin, end))
        spans[begin, end] = label if above is None else f"{above}{_SEPARATOR}{label}"
    return [Constituent(label, begin, end) for (begin, end), label in spans.items()]


def split_joined(spans: Iterable[Constituent]) -> list[Constituent]:
    """Split joined labels into a unary chain, the upper label first."""
    return [Constituent(label, begin, end) for chain, begin, end in spans for label in chain.split(_SEPARATOR)]


def plain_labels(labels: Iterable[str]) -> list[str]:
    """Return the sorted labels that joined labels consist of."""
    return sorted({part for label in labels for part in label.split(_SEPARATOR)})


def build_tree(spans: Iterable[Constituent], words: Sequence[Leaf]) -> Tree:
    """Return the tree of nested constituents; the first of several over the same words is the upper one."""
    children: list[list[Tree | Leaf]] = [[]]
    open_spans: list[Constituent] = []

    def close() -> None:
        node = Tree(open_spans.pop().label, tuple(children.pop()))
        children[-1].append(node)

    # stable: keeps the order of a unary chain; the next span is the last of the list
    waiting = sorted(spans, key=lambda span: (span.begin, -span.end))[::-1]
    for index, word in enumerate(words):
        while open_spans and open_spans[-1].end <= index:
            close()
        while waiting and waiting[-1].begin == index:
            open_spans.append(waiting.pop())
            children.append([])
        children[-1].append(word)
    while open_spans:
        close()
    return _unwrapped(Tree(TOP, tuple(children[0])))


def surface(word: str) -> str:
    """Return the text of a word of a treebank, for a tokenizer.

    >>> [surface(word) for word in ("-LRB-", "``", "and\\\\/or", "it")]
    ['(', '"', 'and/or', 'it']
    """
    if word in ("``", "''"):
        return '"'
    return _ESCAPES.get(word, word).replace("\\/", "/").replace("\\*", "*")


def escape(word: str) -> str:
    """Return a word of a text as a tree can hold it: without brackets and white space."""
    return "_".join(word.split()).translate(_BRACKETS) or "_"


def linearise(tree: Tree, leaf_symbols: Iterable[str] | None = None) -> list[str]:
    """Return a tree as symbols, depth first (Vinyals et al. 2015): "(S", "(NP", "XX", ")NP", …, ")S".

    `leaf_symbols` are the symbols of the words, by default "XX".
    """
    symbols: list[str] = []
    words = repeat(NO_TAG) if leaf_symbols is None else iter(leaf_symbols)

    def visit(node: Tree | Leaf) -> None:
        if isinstance(node, Leaf):
            symbols.append(next(words))
            return
        symbols.append(f"({node.label}")
        for child in node.children:
            visit(child)
        symbols.append(f"){node.label}")

    visit(tree)
    return symbols


class Repaired(NamedTuple):
    """A tree built from symbols, and whether these were not a tree of the words."""

    tree: Tree
    is_changed: bool


def repair(symbols: Sequence[str], words: Sequence[Leaf], leaf_symbols: LeafSymbols = "XX") -> Repaired:
    """Return the tree that symbols describe, with all the words in order.

    A closing symbol closes the innermost constituent, whatever its label. Surplus words and closing symbols are
    ignored, missing words are appended to the root, open constituents are closed, empty ones are dropped. Without any
    constituent the tree is a flat S.
    """
    root: list[Tree | Leaf] = []
    stack: list[tuple[str, list[Tree | Leaf]]] = []
    used, is_changed = 0, False

    def close() -> bool:
        label, children = stack.pop()
        if children:
            (stack[-1][1] if stack else root).append(Tree(label, tuple(children)))
        return bool(children)

    for symbol in symbols:
        if symbol.startswith("(") and len(stack) < _MAX_DEPTH:
            stack.append((symbol[1:], []))
        elif symbol.startswith(")") and stack:
            is_changed |= stack[-1][0] != symbol[1:]
            is_changed |= not close()
        elif not symbol.startswith(("(", ")")) and used < len(words):
            word = Leaf(symbol, words[used].word) if leaf_symbols == "tags" else words[used]
            (stack[-1][1] if stack else root).append(word)
            used += 1
        else:
            is_changed = True
    is_changed |= bool(stack)
    rest = words[used:]
    is_changed |= bool(rest)
    while len(stack) > 1:
        close()
    if stack:
        stack[0][1].extend(rest)
        rest = ()
        close()
    if rest and len(root) == 1 and isinstance(root[0], Tree):
        root = [Tree(root[0].label, (*root[0].children, *rest))]
    else:
        root += rest
    is_changed |= len(root) != 1
    if all(isinstance(node, Leaf) for node in root):
        return Repaired(Tree("S", tuple(root)), True)
    return Repaired(_unwrapped(Tree(TOP, tuple(root))), is_changed)
