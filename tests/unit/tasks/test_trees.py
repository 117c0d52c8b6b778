"""Trees: reading, normalisation, writing, joined labels, symbols and their repair."""

from random import Random

import pytest

from bertsmith.answers.tree_symbols import WORD_CLASSES, TreeState, word_symbol
from bertsmith.answers.trees import (
    TOP,
    Leaf,
    Tree,
    TreeError,
    build_tree,
    constituents,
    escape,
    joined,
    leaves,
    linearise,
    read_tree,
    repair,
    split_joined,
    surface,
    write_tree,
)

LABELS = ("S", "NP", "VP", "PP", "TOP")


def random_tree(draw: Random, words: int) -> Tree:
    """Return a tree with unary chains, some of them of equal labels."""

    def node(begin: int, end: int, depth: int) -> Tree | Leaf:
        if end - begin == 1 and (depth or draw.random() < 0.5):
            leaf: Tree | Leaf = Leaf("NN", f"w{begin}")
            return leaf if draw.random() < 0.6 and depth else Tree(draw.choice(LABELS[:4]), (leaf,))
        edges = sorted(draw.sample(range(begin + 1, end), draw.randint(0, min(3, end - begin - 1))))
        parts = [node(left, right, depth + 1) for left, right in zip([begin, *edges], [*edges, end], strict=True)]
        return Tree(draw.choice(LABELS[:4]), tuple(parts))

    tree = node(0, words, 0)
    return tree if isinstance(tree, Tree) else Tree("S", (tree,))


TREES = [random_tree(Random(seed), 1 + seed % 9) for seed in range(120)]


def test_empty_elements_function_tags_and_the_outer_bracket_are_removed() -> None:
    text = "( (S-1 (NP-SBJ=2 (-NONE- *T*-1) ) (VP (VBZ is) (PRT|ADVP (RP up)) "
    text += "(SBAR (-NONE- 0) (S (-NONE- *)))) (-LRB- -LRB-)))"
    assert write_tree(read_tree(text)) == "(S (VP (VBZ is) (PRT (RP up))) (-LRB- -LRB-))"


def test_unary_chain_of_one_label_is_kept() -> None:
    assert [label for label, _, _ in constituents(read_tree("(NP (NP (NP (NN iron)) (NN gate)))"))] == ["NP"] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(S (NP", "not closed"),
        ("iron", "outside the brackets"),
        ("", "no brackets"),
        ("(S (NN a)) (S (NN b))", "after the last bracket"),
        ("(S a b)", "no tagged word"),
        ("(S)", "no tagged word"),
        ("()", "no tagged word"),
        ("(S (NP a b) c)", "no tagged word"),
        ("(S (-NONE- *))", "no words"),
        ("(S " * 201 + "(NN a)" + ")" * 201, "nested"),
    ],
)
def test_malformed_trees_raise(text: str, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        read_tree(text)


def test_tree_of_one_tagged_word_gets_a_top() -> None:
    assert read_tree("(NN iron)") == Tree(TOP, (Leaf("NN", "iron"),))


def test_trees_round_trip() -> None:
    for tree in TREES:
        words = list(leaves(tree))
        assert read_tree(write_tree(tree)) == tree
        assert build_tree(split_joined(joined(tree)), words) == tree
        assert len({(begin, end) for _, begin, end in joined(tree)}) == len(joined(tree))
        assert repair(linearise(tree), words) == (tree, False)
        assert repair(linearise(tree, [leaf.tag for leaf in words]), words, "tags") == (tree, False)


WORDS = (Leaf("XX", "a"), Leaf("XX", "b"), Leaf("XX", "c"))


@pytest.mark.parametrize(
    ("symbols", "expected"),
    [
        ("", "(S (XX a) (XX b) (XX c))"),
        ("XX", "(S (XX a) (XX b) (XX c))"),
        ("(S (NP XX )NP", "(S (NP (XX a)) (XX b) (XX c))"),
        ("(S (NP XX )VP XX XX XX )S )S", "(S (NP (XX a)) (XX b) (XX c))"),
        ("(S (NP )NP XX XX XX )S", "(S (XX a) (XX b) (XX c))"),
        ("(S XX )S (NP XX )NP", "(TOP (S (XX a)) (NP (XX b)) (XX c))"),
        ("(S XX )S", "(S (XX a) (XX b) (XX c))"),
        ("XX (NP XX XX )NP", "(TOP (XX a) (NP (XX b) (XX c)))"),
    ],
)
def test_broken_symbols_are_repaired(symbols: str, expected: str) -> None:
    tree, is_changed = repair(symbols.split(), WORDS)
    assert write_tree(tree) == expected
    assert is_changed


def test_repair_of_any_symbols_keeps_all_words_in_order() -> None:
    draw = Random(0)
    alphabet = ["XX", *(f"{mark}{label}" for mark in "()" for label in LABELS)]
    for _ in range(400):
        words = [Leaf("XX", f"w{index}") for index in range(draw.randint(1, 8))]
        symbols = draw.choices(alphabet, weights=[4] + [1] * 10, k=draw.randint(0, 30))
        tree = repair(symbols, words).tree
        assert list(leaves(tree)) == words
        assert read_tree(write_tree(tree)) == tree


def test_grammar_admits_trees_and_what_it_admits_needs_no_repair() -> None:
    for tree in TREES:
        state = TreeState(len(list(leaves(tree))))
        for symbol in linearise(tree):
            assert state.allows(symbol), (symbol, tree)
            assert not state.is_complete
            state = state.after(symbol)
        assert state.is_complete
    draw, alphabet = Random(1), ["XX", *(f"{mark}{label}" for mark in "()" for label in LABELS[:3])]
    for count in [1, 2, 3, 5, 9] * 20:
        words, state, written = [Leaf("XX", f"w{index}") for index in range(count)], TreeState(count), []
        while not state.is_complete:
            symbol = draw.choice([one for one in alphabet if state.allows(one)])
            written.append(symbol)
            state = state.after(symbol)
        assert not repair(written, words).is_changed


def test_grammar_admits_the_symbol_of_the_next_word_only() -> None:
    for tree in TREES:
        own = [word_symbol(leaf.word, {"iron"}) for leaf in leaves(tree)]
        state = TreeState(len(own), word_symbols=tuple(own))
        for symbol in linearise(tree, own):
            assert state.allows(symbol)
            others = [one for one in (*WORD_CLASSES, "=iron") if one != symbol]
            assert symbol.startswith(("(", ")")) or not any(map(state.allows, others))
            state = state.after(symbol)
        assert state.is_complete
        assert state.next_word is None


def test_symbols_of_words_do_not_depend_on_the_style_of_the_treebank() -> None:
    frequent = {"-LRB-", '"', "and/or"}
    assert [word_symbol(word, frequent) for word in ("(", "-LRB-", "``", "''", "and\\/or")] == [
        "=-LRB-",
        "=-LRB-",
        '="',
        '="',
        "=and/or",
    ]


def test_words_are_escaped_and_restored() -> None:
    assert [surface(escape(word)) for word in ("(", ")", "a/b")] == ["(", ")", "a/b"]
    assert surface("and\\/or") == "and/or"
    assert escape(" ") == "_"
