"""Cut the vocabulary of a model to the tokens that texts use, and factorise its token table."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.files import tensors_of
from bertsmith.checkpoint.store import load, write_model
from bertsmith.engines.artefact import read_artefact
from bertsmith.errors import InputError
from bertsmith.files import NewFolder
from bertsmith.models.convert import factorise
from bertsmith.models.masks import refuse_masks
from bertsmith.models.model import Model
from bertsmith.models.vocabulary import keep_tokens
from bertsmith.settings import Record
from bertsmith.shrinking.context import ShrinkSettings, TaskTables
from bertsmith.shrinking.embedding_repair import TokenStatistics, embedding_error, repair
from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.predictor import Predictor, has_task_record, read_task_record, write_task_record
from bertsmith.text.cut import changed_tokens, cut_tokenizer, token_counts, used_tokens


class VocabularyConfig(Record):
    """Size of the cut vocabulary and rank of its token table."""

    tokens: int | None = Field(default=None, gt=0)
    """Maximum size of the vocabulary, including the tokens needed to spell any text; None for all used tokens."""
    at_least: int = Field(default=1, gt=0)
    """Minimum number of occurrences of a token in the texts."""
    rank: int | None = Field(default=None, gt=0)
    """Factorise the token table into (tokens, rank) · (rank, width); None for no factorisation."""
    repair_steps: int = Field(default=100, ge=0)
    """With a rank: maximum number of L-BFGS steps that fit the factors to the embeddings of the full table."""


class VocabularySettings(ShrinkSettings):
    """All settings of vocabulary cutting."""

    method: Literal["vocabulary"] = "vocabulary"
    vocabulary: VocabularyConfig = VocabularyConfig()


@dataclass(frozen=True)
class VocabularyCut:
    """Effects of a cut on tokens and sizes; errors are root mean squares over the tokens of the texts."""

    tokens_before: int
    tokens_after: int
    tokens: int
    """Tokens of the texts with the whole vocabulary."""
    tokens_changed: int
    tokens_changed_percent: float
    rank: int | None
    """Rank of the factorised token table; None if it is not factorised."""
    embedding_error_before_repair: float | None
    embedding_error: float | None
    """Relative RMS error of the embeddings; None if the table is not factorised."""
    parameters_before: int
    megabytes_before: float
    parameters_after: int
    megabytes_after: float


@dataclass(frozen=True)
class CutModel:
    """A model with a smaller vocabulary, and the scores on dev before and after."""

    model: Model
    cut: VocabularyCut
    evaluation: Evaluation
    evaluation_before: Evaluation


def shrink_vocabulary(settings: VocabularySettings, tables: TaskTables, device: str) -> CutModel:
    """Cut the vocabulary to the training texts and evaluate on dev before and after."""
    task, model = settings.task, settings.model.load()
    refuse_masks(model, "--method vocabulary")
    small, cut = cut_vocabulary(model, task.texts(task.examples(tables.train)), settings.vocabulary)
    before, after = (
        Predictor(one.to(device).eval(), settings.task_record).evaluate(tables.dev)[0] for one in (model, small)
    )
    return CutModel(small, cut, after, before)


def cut_vocabulary(model: Model, texts: Iterable[str], config: VocabularyConfig) -> tuple[Model, VocabularyCut]:
    """Return a copy of a model with a vocabulary cut to the texts, and the effects of the cut.

    Outputs for texts whose tokens are all kept do not change, unless the table is factorised.
    """
    base, listed = model.require_tokenizer(), list(texts)
    if not listed:
        raise InputError("texts is empty; give at least one text to cut the vocabulary to")
    keep_ids = used_tokens(base, token_counts(base, listed), at_least=config.at_least, tokens=config.tokens)
    cut = cut_tokenizer(base, keep_ids)
    small = keep_tokens(model, cut.ids, cut.tokenizer)
    changed, total = changed_tokens(base, cut, listed)
    error_before_repair = error = None
    if config.rank is not None:
        small, error_before_repair, error = _factorise(small, listed, config.rank, config.repair_steps)
    return small, VocabularyCut(
        tokens_before=model.config.encoder.vocabulary,
        tokens_after=len(cut.ids),
        tokens=total,
        tokens_changed=changed,
        tokens_changed_percent=100 * changed / max(1, total),
        rank=config.rank,
        embedding_error_before_repair=error_before_repair,
        embedding_error=error,
        parameters_before=_parameters(model),
        megabytes_before=_megabytes(model),
        parameters_after=_parameters(small),
        megabytes_after=_megabytes(small),
    )


def cut_vocabulary_folder(
    folder: str | Path, texts: Iterable[str], config: VocabularyConfig, out: Path
) -> VocabularyCut:
    """Cut the vocabulary of the model in a folder; write the model, and its task if it has one, to `out`."""
    folder = model_folder(folder)
    artefact = read_artefact(folder)
    if artefact.precision != "float32" or artefact.engine == "onnxruntime":
        raise InputError(
            f"{str(folder)!r} is an artefact in {artefact.precision} for {artefact.engine}, whose vocabulary cannot be "
            "cut; give the model it was made from"
        )
    model = load(folder)
    task_record = read_task_record(folder) if has_task_record(folder) else None
    small, cut = cut_vocabulary(model, texts, config)
    with NewFolder(out.resolve()) as new:
        write_model(small, new)
        if task_record is not None:
            write_task_record(task_record, new)
    return cut


def _factorise(model: Model, texts: list[str], rank: int, steps: int) -> tuple[Model, float, float]:
    """Return the model with a factorised table, and its error before and after the repair."""
    tokens, width = model.token_table.shape
    max_rank = (tokens * width - 1) // (tokens + width)
    if rank > max_rank:
        raise InputError(
            f"rank is {rank}; allowed: 1 to {max_rank}, since a higher rank is no smaller than the full table "
            f"({tokens} × {width})"
        )
    statistics = TokenStatistics(model, texts)
    small = factorise(model, rank, statistics.weights)
    before = embedding_error(small, model, statistics)
    repair(small, model, statistics, steps)
    return small, before, embedding_error(small, model, statistics)


def _parameters(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _megabytes(model: Model) -> float:
    return sum(tensor.nbytes for tensor in tensors_of(model).values()) / 1e6
