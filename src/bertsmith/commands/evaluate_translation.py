"""How well a model translates one part of a task."""

from pathlib import Path
from typing import Any


def evaluate_translation(
    model: Path,
    data: Path,
    out: Path,
    part: str,
    *,
    source: str | None,
    target: str | None,
    beam: int | None,
    length_penalty: float | None,
    extra_length: int | None,
    device: str,
    force: bool,
) -> dict[str, Any]:
    """Translates one part of a task and compares: BLEU by sacrebleu, exact match, perplexity."""
    from bertsmith.commands.translating import (
        evaluated,
        load_translator,
        print_evaluation,
        recorded,
        search_with,
        write_translations,
    )
    from bertsmith.data.pairs import PairConfig
    from bertsmith.runs.output import check_out, claim, write_result
    from bertsmith.text.tables import pair_columns, read_pairs

    check_out(out, force, model, data)
    translator = load_translator(model, device)
    settings = recorded(model)
    search = search_with(settings, beam, length_penalty, extra_length)
    if settings is None:
        length = min(512, translator.encoder.embedding.longest, translator.decoder.embedding.longest)
        sequences = PairConfig(length=length, micro_tokens=8192)
    else:
        sequences = settings.sequences
        if source is None and target is None:
            source, target = settings.source, settings.target
    columns = pair_columns(data, part, source, target)
    pairs = read_pairs(data, part, *columns)
    evaluation = evaluated(translator, pairs, search, sequences, show=True)
    claim(out, force, model, data)
    write_translations(out / "translations.jsonl", pairs, evaluation.hypotheses)
    figures = {
        **evaluation.metrics,
        "part": part,
        "source": columns[0],
        "target": columns[1],
        "empty": pairs.empty,
        "model": str(model),
        "data": str(data),
    }
    write_result(out, figures)
    print_evaluation(part, pairs, evaluation)
    return figures
