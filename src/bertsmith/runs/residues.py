"""`bertsmith evaluate --metric residues`: accuracy and perplexity of a protein model."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bertsmith.data.progress import progress_bar
from bertsmith.runs.result import OneShotResult, print_plain
from bertsmith.runs.text_run import TextRun, split_name, window_length
from bertsmith.training.residues import PositionScores, predict_residues

DEFAULT_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class ResidueResult(OneShotResult):
    """Accuracy and perplexity over amino acids; special tokens are not predicted."""

    metric: str = "residue_perplexity"
    residue_accuracy: float
    residue_perplexity: float
    residue_accuracy_without_first: float
    """Without residues after [CLS] or [SEP]: most proteins begin with M."""
    residue_perplexity_without_first: float
    residues: int
    """Predicted residues."""
    direction: Literal["causal", "masked"]
    """Every residue from those before it, or 15 % of them from all others."""
    proteins: int
    unknown_letters: int
    cut: Literal["cropped", "joined"]
    """Every protein up to `length`, or all of them joined and cut into windows of that length."""
    length: int
    by_position: tuple[PositionScores, ...]
    split: str
    model: str
    data: str

    @property
    def score(self) -> float:
        return self.residue_perplexity


def evaluate_residues(
    run: TextRun, *, field: str = "sequence", length: int | None = None, joined: bool = False
) -> ResidueResult:
    """Predict the residues of the proteins of a split, and write result.json."""
    proteins, model = run.read_texts(field), run.load()
    tokenizer = model.require_tokenizer()
    rows = [np.array(row, dtype=np.int64) for row in tokenizer.encode_plain(proteins)]
    length = window_length(model, length, DEFAULT_LENGTH)
    with progress_bar("evaluate") as watch:
        found = predict_residues(model, rows, length=length, joined=joined, watch=watch)
    scores, rest = found.scores, found.scores_without_first
    result = ResidueResult(
        residue_accuracy=scores.accuracy,
        residue_perplexity=scores.perplexity,
        residue_accuracy_without_first=rest.accuracy,
        residue_perplexity_without_first=rest.perplexity,
        residues=scores.residues,
        direction="causal" if model.config.is_causal else "masked",
        proteins=len(proteins),
        unknown_letters=sum(int((row == tokenizer.unknown).sum()) for row in rows),
        cut="joined" if joined else "cropped",
        length=length,
        by_position=found.by_position(length),
        split=split_name(run.data, run.split),
        model=str(run.folder),
        data=run.data,
    )
    run.write(result)
    print_plain(
        f"{result.split}: residue accuracy {result.residue_accuracy:.2%}, perplexity {result.residue_perplexity:.3f} "
        f"over {result.residues:,} residues ({result.direction}; {result.cut} to {length}); without first residues "
        f"{result.residue_accuracy_without_first:.2%}, {result.residue_perplexity_without_first:.3f}; written to "
        f"{run.out}"
    )
    return result
