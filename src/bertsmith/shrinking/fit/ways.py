"""The ways a sub-network can be run here: engine, precision, vocabulary."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from bertsmith.engines.artefact import ENGINES
from bertsmith.engines.base import Artefact, Precision
from bertsmith.errors import InputError, nearest
from bertsmith.models.model import Model
from bertsmith.shrinking.fit.settings import SearchConfig
from bertsmith.shrinking.vocabulary import VocabularyConfig, cut_vocabulary
from bertsmith.tasks.predictor import KeptTask
from bertsmith.text.rows import Table

LENGTHS_TO_COMPILE = 4  # each is compiled for by itself, in every process anew


class Way(NamedTuple):
    """How a sub-network is run."""

    engine: str
    precision: Precision
    vocabulary: Literal["whole", "cut"] = "whole"

    @property
    def artefact(self) -> Artefact:
        return Artefact.parse({"engine": self.engine, "precision": self.precision})

    @property
    def words(self) -> str:
        cut = "" if self.vocabulary == "whole" else ", vocabulary cut"
        return f"{self.engine} {self.precision}{cut}"


def ways(search: SearchConfig, lengths: Sequence[int]) -> tuple[list[Way], list[str]]:
    """The ways that are asked for and that this machine has, and what is to be said of those that are left out."""
    for name in search.engines:
        if name not in ENGINES:
            raise InputError(f"--engine is {name!r}; {nearest(name, ENGINES)} (all: {', '.join(ENGINES)})")
    found, notices = list[Way](), list[str]()
    for name in search.engines or tuple(ENGINES):
        engine = ENGINES[name]
        missing = engine.missing()
        if missing is not None:
            notices.append(f"the engine {name} is left out: it {missing}")
            continue
        if name == "compiled" and not search.engines and len(set(lengths)) > LENGTHS_TO_COMPILE:
            notices.append(
                "the engine compiled is left out, since it compiles for each length by itself: give --length, or "
                "--engine compiled"
            )
            continue
        found += [
            Way(name, precision)
            for precision in engine.precisions
            if not search.precisions or precision in search.precisions
        ]
    if not found:
        why = "; ".join(notices) or f"none of the engines has {', '.join(search.precisions)}"
        raise InputError(f"no engine can run the model as asked: {why}")
    return found, notices


def slow_precisions(latencies: dict[Way, float]) -> list[str]:
    """A sentence for each engine in which a narrower precision does not pay, given the latency of one network."""
    said = []
    for way, latency in latencies.items():
        plain = latencies.get(way._replace(precision="float32"))
        if plain is not None and way.precision != "float32" and latency > 0.97 * plain:
            than = "slower" if latency > 1.03 * plain else "no faster"
            said.append(
                f"{way.precision} is {than} than float32 here in {way.engine}: {latency:.2f} ms against {plain:.2f} ms "
                "for the whole network"
            )
    return said


def cut_model(model: Model, kept: KeptTask, train: Table | None, dev: Table) -> tuple[Model, str]:
    """The model with the pieces that the training texts use, and a sentence on what that changed.

    Where there is no training part, the texts it is scored on stand in for it.
    """
    task = kept.task
    texts = list(task.texts(task.examples(dev if train is None else train, has_targets=False)))
    small, _ = cut_vocabulary(model, texts, VocabularyConfig())
    before, after = model.config.encoder.vocabulary, small.config.encoder.vocabulary
    if before == after:
        return small, f"the vocabulary stays as it is: the texts use all of its {before:,} pieces"
    return small, f"the vocabulary is cut from {before:,} to {after:,} pieces, those that the texts use"
