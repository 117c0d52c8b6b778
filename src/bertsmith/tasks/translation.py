"""Translation with an encoder-decoder: columns, generation, BLEU, exact match and perplexity."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import ClassVar, Literal, NoReturn

import numpy as np
import torch
from pydantic import Field

from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.texts import TextExample, read_texts
from bertsmith.data.examples import ExampleConfig
from bertsmith.data.loader import SpecialTokens
from bertsmith.data.pairs import PairBatch, PairConfig, PairPlan, PairReader, Pairs
from bertsmith.data.progress import Watch
from bertsmith.engines.base import Runner
from bertsmith.engines.exit_runner import AdaptiveTranslator
from bertsmith.errors import InputError, nearest
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq
from bertsmith.objectives.supervised import Supervised
from bertsmith.objectives.translation import TranslationConfig
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, Example, RowData, Task, is_blank
from bertsmith.tasks.metrics.base import evaluate_metrics
from bertsmith.text.readers import is_visible
from bertsmith.text.rows import Table
from bertsmith.text.tables import ROW_NAMES
from bertsmith.text.tokenizer import Tokenizer

NO_BLEU = "no BLEU: sacrebleu is not installed (pip install 'bertsmith[translate]')"
BATCH_SIZE = 64
"""Number of texts translated at a time."""


class PairTask(Task[Example]):
    """A task that an encoder-decoder learns from pairs of source and target texts."""

    smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Label smoothing: probability distributed evenly over all tokens but the correct one (as in tensor2tensor)."""
    generation: GenerationConfig = GenerationConfig()
    """Settings of beam search."""

    @abstractmethod
    def pair_texts(self, example: Example) -> tuple[str, str]:
        """Return the source and the target text of an example."""

    def complete_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer of fresh weights: the learned one, with further tokens if targets need them."""
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise InputError if the tokenizer of a trained model lacks tokens of the targets."""

    def pairs(self, examples: Sequence[Example], model: Seq2Seq, config: PairConfig) -> Pairs:
        """Tokenise examples; over-long ones are dropped or truncated, as configured."""
        texts = [self.pair_texts(example) for example in examples]
        sources, targets = [source for source, _ in texts], [target for _, target in texts]
        return Pairs.tokenise(sources, targets, model.require_tokenizer(), config)

    @torch.no_grad()
    def model_metrics(self, model: Runner, examples: Sequence[Example], sequences: ExampleConfig) -> dict[str, float]:
        """Return loss, perplexity and next-token accuracy with teacher forcing, without label smoothing; long pairs are
        truncated."""
        translator, config = require_decoder(model), pair_config(sequences)
        tokenizer = translator.require_tokenizer()
        pairs = self.pairs(examples, translator, config.changed(too_long="cut"))
        reader = PairReader(pairs, config, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator))
        objective = TranslationConfig(smoothing=0.0).build()
        loss, correct, count = 0.0, 0, 0
        with translator.evaluating():
            for plan in PairPlan(pairs, config, 0).one_epoch():
                batch = reader[plan].batch
                assert isinstance(batch, PairBatch)
                prepared = objective.prepare(batch.to(translator.device), 0)
                sums = objective(translator, prepared)["next_token"]
                loss, count = loss + float(sums.loss), count + int(prepared.count)
                correct += int(sums.metrics["accuracy"].part)
        mean = loss / count
        return {
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),
            "accuracy": correct / count,
            "target_tokens": count,
        }


class Translation(PairTask[TextExample]):
    """Translate texts of one column into another."""

    kind: Literal["translation"] = "translation"
    source: str | None = None
    """Column to translate from; None for the first if the data has exactly two text columns."""
    target: str | None = None
    """Column to translate to; None for the other text column."""

    roles: ClassVar[tuple[str, ...]] = ("source",)
    target_roles: ClassVar[tuple[str, ...]] = ("target",)

    @property
    def input_columns(self) -> list[str]:
        return [self.source or "text"]

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        return None  # two text columns are ambiguous: translation is selected by a model with a decoder, or by --task

    def resolve(self, train: Table) -> "Translation":
        """Return the task with its two columns: the configured ones, or the only two text columns in their order."""
        row = next(iter(train))
        for flag, name in (("--source", self.source), ("--target", self.target)):
            if name is not None and name not in row:
                raise InputError(f"{flag} is {name!r}, but {train.name} has no such column; {nearest(name, row)}")
        if self.source is not None and self.source == self.target:
            raise InputError(f"--source and --target are both {self.source!r}; name two columns")
        if self.source is not None and self.target is not None:
            return self
        texts = [name for name, value in row.items() if isinstance(value, str) and name not in ROW_NAMES]
        others = [name for name in row if name not in texts and name not in ROW_NAMES]
        if len(texts) != 2 or others:
            raise InputError(
                f"{train.name} has the columns {', '.join(row)}; a MODEL with a decoder supports only translation: "
                "select its two columns with --source and --target"
            )
        first, second = texts
        if self.source == second or self.target == first:
            first, second = second, first
        return self.changed(source=self.source or first, target=self.target or second)

    def is_empty(self, row: RowData) -> bool:
        """Whether one of the two texts is missing."""
        return any(is_blank(row.get(column)) for column in (self.source, self.target) if column is not None)

    def examples(self, table: Table, *, has_targets: bool = True) -> list[TextExample]:
        return read_texts(table, self.input_columns[0], self.target if has_targets else None)

    def texts(self, examples: Sequence[TextExample]) -> Iterator[str]:
        yield from (example.text for example in examples)
        yield from (str(example.pair) for example in examples)

    def predict(
        self, model: Runner, examples: Sequence[TextExample], sequences: ExampleConfig, watch: Watch | None = None
    ) -> Sequence[Answer]:
        translator = model if isinstance(model, AdaptiveTranslator) else require_decoder(model)
        visible = [index for index, example in enumerate(examples) if is_visible(example.text)]
        done = 0

        def count(texts: int) -> None:
            nonlocal done
            done += texts
            if watch is not None:
                watch(done, len(visible))

        texts = [examples[index].text for index in visible]
        outputs = translator.translate(texts, self.generation, batch_size=BATCH_SIZE, progress=count) if texts else []
        translations = dict(zip(visible, outputs, strict=True))
        return [{"answer": translations.get(index, "")} for index in range(len(examples))]

    def evaluate(self, examples: Sequence[TextExample], answers: Sequence[AnswerData]) -> Evaluation:
        hypotheses, references = [answer["answer"] for answer in answers], [self.gold(example) for example in examples]
        hits = [a.strip() == b.strip() for a, b in zip(hypotheses, references, strict=True)]
        metrics: dict[str, Callable[..., float]] = {"exact_match": lambda hits, *_: 100 * float(np.mean(hits))}
        arrays: tuple[np.ndarray, ...] = (np.array(hits),)
        details: dict[str, object] = {}
        if has_bleu():
            counts, details["signature"] = bleu_counts(hypotheses, references)
            metrics = {"bleu": lambda _, counts: corpus_bleu(counts), **metrics}
            arrays = (*arrays, counts)
        details |= {"search": self.generation.plain(), "source": self.source, "target": self.target}
        return replace(evaluate_metrics(metrics, arrays, self.metric), details=details)

    def pair_texts(self, example: TextExample) -> tuple[str, str]:
        return example.text, str(example.pair)

    def gold(self, example: TextExample) -> str:
        return str(example.pair)

    def describe(self, example: TextExample) -> str:
        return " ".join(example.text.split())

    def error(self, example: TextExample, answer: AnswerData) -> float:
        return float(answer["answer"].strip() != self.gold(example).strip())

    def notices(self, examples: Sequence[TextExample]) -> list[str]:
        return [] if has_bleu() else [NO_BLEU]

    def head(self, model: ModelConfig) -> HeadConfig:
        self._refuse()

    def features(self, examples: Sequence[TextExample], encoding: Encoding) -> Features:
        self._refuse()

    def objective(self, examples: Sequence[TextExample]) -> Supervised:
        self._refuse()

    def answers(
        self, examples: Sequence[TextExample], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InputError(
            "the model has a decoder; translation supports finetune, evaluate, predict, inspect, import and export to "
            "Hugging Face"
        )


def require_decoder(model: Runner | Model) -> Seq2Seq:
    """Return the model, or that of a runner, if it has a decoder; raise InputError otherwise."""
    model = model.translator if isinstance(model, AdaptiveTranslator) else model
    if not isinstance(model, Seq2Seq):
        raise InputError("MODEL has no decoder, which translation needs; use one such as the preset transformer-small")
    return model


def pair_config(sequences: ExampleConfig) -> PairConfig:
    """Return the pair settings of a translation model, or defaults if it has none."""
    if isinstance(sequences, PairConfig):
        return sequences
    return PairConfig(length=sequences.length, layout=sequences.layout, micro_tokens=max(8192, sequences.length))


def has_bleu() -> bool:
    """Whether sacrebleu is installed."""
    return find_spec("sacrebleu") is not None


def bleu_counts(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[np.ndarray, str]:
    """Return the sufficient statistics of BLEU by sacrebleu's defaults (13a, mixed case), and its signature.

    Shape: (sentences, 10): matching and all n-grams of orders 1 to 4, lengths of hypothesis and reference.
    """
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    counts = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        one = metric.corpus_score([hypothesis], [[reference]])
        counts.append([*one.counts, *one.totals, one.sys_len, one.ref_len])
    return np.array(counts), str(metric.get_signature())


def corpus_bleu(counts: np.ndarray) -> float:
    """Return BLEU of all sentences whose statistics are given: (sentences, 10)."""
    from sacrebleu.metrics import BLEU

    *ngrams, hypothesis_length, reference_length = counts.sum(0).tolist()
    return float(
        BLEU.compute_bleu(ngrams[:4], ngrams[4:], hypothesis_length, reference_length, smooth_method="exp").score
    )
