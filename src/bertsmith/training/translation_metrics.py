"""How well a model translates: perplexity by teacher forcing, BLEU and exact match of what it writes by itself."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bertsmith.data.loader import SpecialTokens
from bertsmith.data.pairs import PairConfig, PairPlan, PairReader, Pairs
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq
from bertsmith.objectives.translation import TranslationConfig
from bertsmith.text.tables import TextPairs

NO_BLEU = "no BLEU: that needs sacrebleu (pip install 'bertsmith[translate]')"


@torch.no_grad()
def forced_figures(model: Seq2Seq, texts: TextPairs, config: PairConfig) -> dict[str, Any]:
    """Loss, perplexity and accuracy of the next token of true targets, without smoothing; over-long pairs are cut."""
    tokenizer = model.require_tokenizer()
    pairs = Pairs.tokenised(texts.sources, texts.targets, tokenizer, config.model_copy(update={"too_long": "cut"}))
    reader = PairReader(pairs, config, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator))
    objective = TranslationConfig(smoothing=0.0).build()
    loss, correct, count = 0.0, 0, 0
    with model.evaluating():
        for plan in PairPlan(pairs, config, 0).one_epoch():
            prepared = objective.prepare(reader[plan].batch.to(model.device), 0)  # type: ignore[arg-type]
            sums = objective(model, prepared)["next_token"]
            loss, count = loss + float(sums.loss), count + int(prepared.count)
            correct += int(sums.figures["accuracy"].part)
    mean = loss / count
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "accuracy": correct / count, "target_tokens": count}


def translations(
    model: Seq2Seq, texts: Sequence[str], config: GenerationConfig, *, batch_size: int = 64, show: bool = True
) -> list[str]:
    """One text for each text, with a progress bar."""
    columns = (TextColumn("translating"), BarColumn(bar_width=12), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task("", total=len(texts))
        return model.translate(texts, config, batch_size=batch_size, progress=lambda done: bar.advance(task, done))


def written_figures(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Exact match in percent and, with sacrebleu, BLEU and its signature; `metric` names the main one."""
    hits = sum(a.strip() == b.strip() for a, b in zip(hypotheses, references, strict=True))
    figures: dict[str, Any] = {"exact_match": 100 * hits / len(references)}
    scored = bleu(hypotheses, references)
    if scored is None:
        return {"metric": "exact_match", "score": figures["exact_match"], **figures}
    figures |= {"bleu": scored[0], "signature": scored[1]}
    return {"metric": "bleu", "score": scored[0], **figures}


def has_bleu() -> bool:
    """Whether sacrebleu is installed."""
    return find_spec("sacrebleu") is not None


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str] | None:
    """Corpus BLEU by sacrebleu's defaults (13a, mixed case) and its signature; None where it is not installed."""
    if not has_bleu():
        return None
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    score = float(metric.corpus_score(list(hypotheses), [list(references)]).score)
    return score, str(metric.get_signature())
