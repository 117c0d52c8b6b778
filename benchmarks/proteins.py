"""Proteins: the empirical baseline, a harder test split, and what attention learned of amino acids.

    python benchmarks/proteins.py PROTEINS
    python benchmarks/proteins.py PROTEINS --hard-test runs/hard
    python benchmarks/proteins.py PROTEINS --model runs/proteins --out runs/similarity --sequences 800

PROTEINS is a folder with train, valid and test files (.jsonl, also .xz), one protein per line in the field `sequence`.
The baseline predicts every residue by its frequency in train (add-one), and always guesses the most frequent one.
--hard-test writes the test proteins that share at most half of their 8-mers with train. --model compares the attention
of a model with BLOSUM62: for every head, the share of its attention that each amino acid gets; the similarity of two
amino acids is the correlation of their shares over all heads (Vig et al. 2020). --out gets similarity.json and
similarity.png, which takes matplotlib (bertsmith[report]).
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import bertsmith
from bertsmith.data.batch import packed
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.text.readers import split_documents

AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"
ALPHABET = "ACDEFGHIKLMNPQRSTVWYBOUXZ"
GROUPS = ("AVLIMFWC", "DE", "KRH", "STNQY", "G", "P", "FWYH")
"""Hydrophobic, negative, positive, polar, glycine, proline, aromatic."""
CLOSE_PAIRS = ("DE", "FY", "IV", "KR")
MIN_ARCS = 100
THRESHOLD = 0.3
KMER = 8

# BLOSUM62 in half bits, the lower triangle row by row in the order of AMINO_ACIDS
_BLOSUM62 = """
4
-1 5
-2 0 6
-2 -2 1 6
0 -3 -3 -3 9
-1 1 0 0 -3 5
-1 0 0 2 -4 2 5
0 -2 0 -1 -3 -2 -2 6
-2 0 1 -1 -3 0 0 -2 8
-1 -3 -3 -3 -1 -3 -3 -4 -3 4
-1 -2 -3 -4 -1 -2 -3 -4 -3 2 4
-1 2 0 -1 -3 1 1 -2 -1 -3 -2 5
-1 -1 -2 -3 -1 0 -2 -3 -2 1 2 -1 5
-2 -3 -3 -3 -2 -3 -3 -3 -1 0 0 -3 0 6
-1 -2 -2 -1 -3 -1 -1 -2 -2 -3 -3 -1 -2 -4 7
1 -1 1 0 -1 0 0 0 -1 -2 -2 0 -1 -2 -1 4
0 -1 0 -1 -1 -1 -1 -2 -2 -1 -1 -1 -1 -2 -1 1 5
-3 -3 -4 -4 -2 -2 -3 -2 -2 -3 -2 -3 -1 1 -4 -3 -2 11
-2 -2 -2 -3 -2 -1 -2 -3 2 -1 -1 -2 -1 3 -3 -2 -2 2 7
0 -3 -3 -3 -1 -2 -2 -3 -3 3 1 -2 1 -1 -2 -2 0 -3 -1 4
"""


def blosum62() -> np.ndarray:
    """Return the substitution matrix, (20, 20), in the order of AMINO_ACIDS."""
    matrix = np.zeros((20, 20), dtype=np.int64)
    for row, line in enumerate(_BLOSUM62.split("\n")[1:-1]):
        values = [int(value) for value in line.split()]
        matrix[row, : len(values)] = matrix[: len(values), row] = values
    return matrix


@dataclass(frozen=True)
class Baseline:
    """Prediction by frequency alone."""

    perplexity: float
    accuracy: float
    guess: str
    residues: int


def empirical_baseline(train: Iterable[str], test: Iterable[str], alphabet: str = ALPHABET) -> Baseline:
    """Return perplexity and accuracy of add-one frequencies of train on test; special tokens do not take part."""
    seen, wanted = (_counts(proteins, alphabet) for proteins in (train, test))
    shares = (seen + 1) / (seen + 1).sum()
    nats = -(wanted * np.log(shares)).sum() / wanted.sum()
    best = int(seen.argmax())
    return Baseline(math.exp(nats), float(wanted[best] / wanted.sum()), alphabet[best], int(wanted.sum()))


def _counts(proteins: Iterable[str], alphabet: str) -> np.ndarray:
    letters: Counter[str] = Counter()
    for protein in proteins:
        letters.update(protein)
    unknown = sorted({*letters} - {*alphabet})
    if unknown:
        raise InputError(f"the proteins have the letters {', '.join(unknown)}; allowed: {alphabet}")
    return np.array([letters[letter] for letter in alphabet], dtype=np.int64)


def hard_proteins(train: Iterable[str], test: Sequence[str], *, most: float = 0.5) -> list[int]:
    """Return the indices of the test proteins that share at most `most` of their 8-mers with train."""
    kmers = [{protein[place : place + KMER] for place in range(len(protein) - KMER + 1)} for protein in test]
    asked = set().union(*kmers) if kmers else set()
    found: set[str] = set()
    for protein in train:
        found |= asked & {protein[place : place + KMER] for place in range(len(protein) - KMER + 1)}
    return [index for index, own in enumerate(kmers) if len(own & found) <= most * len(own)]


Measure = Literal["arcs", "weights"]


class AttentionShares:
    """Adds up the attention that each amino acid gets from every head.

    "arcs" counts the pairs with a weight of at least 0.3; "weights" adds up the weights themselves, rows normalised
    after special tokens are left out. Linear attention hardly reaches the threshold: use "weights".
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.sums: np.ndarray | None = None

    def add(self, maps: np.ndarray, letters: str) -> None:
        """Add the maps of one protein.

        Shape: maps (heads, length, length), rows are queries; letters has one amino acid per position.
        """
        if self.measure == "arcs":
            received = (maps >= THRESHOLD).sum(1).astype(np.float64)  # (heads, length)
        else:
            totals = maps.sum(2, keepdims=True)
            received = np.divide(maps, totals, out=np.zeros_like(maps), where=totals > 0).sum(1)
        is_letter = np.array([list(letters)]) == np.array(list(AMINO_ACIDS))[:, None]  # (20, length)
        sums = received @ is_letter.T.astype(np.float64)  # (heads, 20)
        self.sums = sums if self.sums is None else self.sums + sums

    def shares(self) -> np.ndarray:
        """Return the share of each amino acid in the attention of each head that has enough of it, (heads, 20)."""
        if self.sums is None:
            raise InputError("no protein was added")
        totals = self.sums.sum(1)
        is_kept = totals >= (MIN_ARCS if self.measure == "arcs" else 1e-9)
        if is_kept.sum() < 3:
            raise InputError(
                f"{int(is_kept.sum())} heads have {MIN_ARCS} weights of {THRESHOLD} or more; give more proteins, or "
                "--measure weights"
            )
        return self.sums[is_kept] / totals[is_kept, None]


def similarity_of(shares: np.ndarray) -> np.ndarray:
    """Return the correlation of every two amino acids over heads: (heads, 20) -> (20, 20)."""
    constant = [AMINO_ACIDS[index] for index in np.flatnonzero(shares.std(0) == 0)]
    if constant:
        raise InputError(f"all heads attend equally to {', '.join(constant)}; give more proteins")
    return np.corrcoef(shares.T)


@dataclass(frozen=True)
class Agreement:
    """Agreement of learned similarities with BLOSUM62."""

    correlation: float
    """Pearson correlation over the 190 pairs of different amino acids."""
    p_value: float
    """Share of random permutations of the amino acids with at least this correlation."""
    within_minus_between: float
    """Mean similarity inside chemical groups, minus that between groups."""
    ranks: dict[str, int]
    """Rank of known close pairs among the 190, from 1."""


def agreement_with_blosum(similarity: np.ndarray, *, shuffles: int = 1000, seed: int = 0) -> Agreement:
    """Compare similarities with BLOSUM62.

    Shape: similarity (20, 20), in the order of AMINO_ACIDS.
    """
    above = np.triu_indices(20, 1)
    expected = blosum62()[above]
    correlation = _pearson(similarity[above], expected)
    draw = np.random.default_rng(seed)
    random = []
    for _ in range(shuffles):
        order = draw.permutation(20)
        random.append(_pearson(similarity[np.ix_(order, order)][above], expected))
    groups = [{AMINO_ACIDS.index(letter) for letter in group} for group in GROUPS]
    is_within = np.array([any({a, b} <= group for group in groups) for a, b in zip(*above, strict=True)])
    ordered = (-similarity[above]).argsort(kind="stable").argsort(kind="stable") + 1
    names = ["".join(sorted((AMINO_ACIDS[a], AMINO_ACIDS[b]))) for a, b in zip(*above, strict=True)]
    return Agreement(
        correlation,
        (1 + sum(value >= correlation for value in random)) / (1 + shuffles),
        float(similarity[above][is_within].mean() - similarity[above][~is_within].mean()),
        {pair: int(ordered[names.index(pair)]) for pair in CLOSE_PAIRS},
    )


def _pearson(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])


@torch.inference_mode()
def attention_shares(model: Model, proteins: Sequence[str], measure: Measure, *, length: int = 512) -> np.ndarray:
    """Return the shares of all heads of a model over proteins, each cropped to `length` tokens."""
    tokenizer, found = model.require_tokenizer(), AttentionShares(measure)
    with model.evaluating():
        for protein in proteins:
            text = protein[: length - 2]
            row = np.array([tokenizer.start, *tokenizer.encode_plain([text])[0], tokenizer.separator])
            tokens, layout = packed([row], 0)
            inputs = EncoderInputs(tokens.to(model.device), layout.to(model.device))
            maps = model.run(inputs, Want(maps=True)).maps
            # (1, heads, tokens, tokens) of every block -> (all heads, residues, residues)
            heads = torch.cat([values[0] for block in maps for values in block.values()])[:, 1:-1, 1:-1]
            found.add(heads.double().cpu().numpy(), text)
    return found.shares()


def draw(similarity: np.ndarray, agreement: Agreement, path: Path) -> None:
    """Draw learned similarities beside BLOSUM62."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise InputError("the picture needs matplotlib: pip install 'bertsmith[report]'") from missing
    figure = Figure(figsize=(11, 5), dpi=110, facecolor="white", layout="constrained")
    panels = zip(
        figure.subplots(1, 2),
        (similarity, blosum62().astype(float)),
        (f"attention: correlation {agreement.correlation:.2f}, p = {agreement.p_value:.3f}", "BLOSUM62"),
        strict=True,
    )
    for axes, matrix, title in panels:
        values = matrix.copy()
        np.fill_diagonal(values, np.nan)
        image = axes.imshow(values, cmap="RdBu_r")
        axes.set_xticks(range(20), list(AMINO_ACIDS), fontsize=8)
        axes.set_yticks(range(20), list(AMINO_ACIDS), fontsize=8)
        axes.set_title(title, fontsize=11)
        figure.colorbar(image, ax=axes, shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    options = _options()
    train = split_documents(options.data, "train", options.field)
    print("split  perplexity  accuracy  guess  residues")
    for split in ("valid", "test"):
        found = empirical_baseline(train, split_documents(options.data, split, options.field))
        print(f"{split:<7}{found.perplexity:>10.2f}{found.accuracy:>10.2%}{found.guess:>7}{found.residues:>10,}")
    test = split_documents(options.data, "test", options.field)
    if options.hard_test is not None:
        hard = hard_proteins(train, test)
        options.hard_test.mkdir(parents=True, exist_ok=True)
        with (options.hard_test / "test.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({options.field: test[index]}) + "\n" for index in hard)
        base = empirical_baseline(train, [test[index] for index in hard])
        print(f"hard test: {len(hard):,} of {len(test):,} proteins, {base.perplexity:.2f}, {base.accuracy:.2%}")
    if options.model is not None:
        model = bertsmith.load(options.model, device=options.device)
        shares = attention_shares(model, test[: options.sequences], options.measure, length=options.length)
        similarity = similarity_of(shares)
        agreement = agreement_with_blosum(similarity)
        print(json.dumps({"heads": len(shares), **asdict(agreement)}))
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"amino_acids": AMINO_ACIDS, "similarity": similarity.tolist(), **asdict(agreement)}
        (options.out / "similarity.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        draw(similarity, agreement, options.out / "similarity.png")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--field", default="sequence")
    parser.add_argument("--hard-test", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/similarity"))
    parser.add_argument("--measure", choices=["weights", "arcs"], default="weights")
    parser.add_argument("--sequences", default=800, type=int)
    parser.add_argument("--length", default=512, type=int)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
