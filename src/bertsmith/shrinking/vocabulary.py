"""A model with a smaller vocabulary: the pieces that its texts use, and a table of them as a product of two."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.files import NewFolder, tensors_of
from bertsmith.checkpoint.store import load, write_model
from bertsmith.engines.artefact import read_artefact
from bertsmith.errors import InputError
from bertsmith.models.convert import factorise
from bertsmith.models.model import Model
from bertsmith.models.vocabulary import keep_tokens
from bertsmith.settings import Record
from bertsmith.shrinking.embedding_repair import Surroundings, embedding_error, repair
from bertsmith.shrinking.settings import ShrinkSettings
from bertsmith.tasks.predictor import TASK_FILE, read_task_record, write_task_record
from bertsmith.text.cut import changed_tokens, cut_tokenizer, piece_counts, used_pieces

Figures = dict[str, Any]


class VocabularyConfig(Record):
    """What becomes of a vocabulary and of its table."""

    pieces: int | None = Field(default=None, gt=0)
    """The most pieces that stay, those that it takes to spell any text counted in; None for all that are used."""
    at_least: int = Field(default=1, gt=0)
    """How often a piece must occur in the texts to stay."""
    rank: int | None = Field(default=None, gt=0)
    """Keep the token table as a product of two, (pieces, rank) · (rank, width); None leaves it as it is."""
    repair_steps: int = Field(default=100, ge=0)
    """With a rank: the most steps that fit the two tables, so that the embedding gives what it gave before."""


class CutSettings(ShrinkSettings):
    """All that a cut of a fine-tuned model's vocabulary depends on."""

    method: Literal["vocabulary"] = "vocabulary"
    vocabulary: VocabularyConfig = VocabularyConfig()


def cut_vocabulary(model: Model, texts: Iterable[str], config: VocabularyConfig) -> tuple[Model, Figures]:
    """A copy of a model with the pieces that texts use, its table factorised where asked for, and what that changed.

    Of texts whose pieces stay it says the same as before, unless the table is factorised: then the embedding is off by
    `embedding_error` of what it gave, the root mean square over the running tokens of the texts.
    """
    base, listed = model.require_tokenizer(), list(texts)
    if not listed:
        raise InputError("texts is empty; a vocabulary is cut to what texts use, so give at least one")
    kept = used_pieces(base, piece_counts(base, listed), at_least=config.at_least, pieces=config.pieces)
    cut = cut_tokenizer(base, kept)
    small = keep_tokens(model, cut.ids, cut.tokenizer)
    changed, total = changed_tokens(base, cut, listed)
    figures = {
        "pieces_before": model.config.encoder.vocabulary,
        "pieces_after": len(cut.ids),
        "tokens": total,
        "tokens_changed": changed,
        "tokens_changed_percent": 100 * changed / max(1, total),
    }
    if config.rank is not None:
        small, errors = _factorised(small, listed, config.rank, config.repair_steps)
        figures |= {"rank": config.rank, **errors}
    for when, one in (("before", model), ("after", small)):
        figures[f"parameters_{when}"] = sum(parameter.numel() for parameter in one.parameters())
        figures[f"megabytes_{when}"] = sum(tensor.nbytes for tensor in tensors_of(one).values()) / 1e6
    return small, figures


def cut_vocabulary_folder(folder: str | Path, texts: Iterable[str], config: VocabularyConfig, out: Path) -> Figures:
    """The figures of a cut; the model in a folder, with the task beside it if it has one, is written to `out`."""
    folder = model_folder(folder)
    artefact = read_artefact(folder)
    if artefact.precision != "float32" or artefact.engine == "onnxruntime":
        raise InputError(
            f"{str(folder)!r} holds an artefact in {artefact.precision} for {artefact.engine}; a vocabulary is cut "
            "before that: give the model it was made from"
        )
    model = load(folder)
    kept = read_task_record(folder) if (folder / TASK_FILE).is_file() else None
    small, figures = cut_vocabulary(model, texts, config)
    with NewFolder(out.resolve()) as new:
        write_model(small, new)
        if kept is not None:
            write_task_record(kept, new)
    return figures


def _factorised(model: Model, texts: list[str], rank: int, steps: int) -> tuple[Model, Figures]:
    pieces, width = model.token_table.shape
    most = (pieces * width - 1) // (pieces + width)
    if rank > most:
        raise InputError(f"rank is {rank}; allowed: 1 to {most}, as more would take no less than {pieces} × {width}")
    surroundings = Surroundings(model, texts)
    small = factorise(model, rank, surroundings.weights)
    error = embedding_error(small, model, surroundings)
    repair(small, model, surroundings, steps)
    return small, {
        "embedding_error_before_repair": error,
        "embedding_error": embedding_error(small, model, surroundings),
    }
