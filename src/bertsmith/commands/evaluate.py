"""`bertsmith evaluate`: how good a model is at a task. For now the task is pairs of texts: translation."""

from pathlib import Path
from typing import Any, Literal


def evaluate(
    model: Path,
    *,
    data: Path,
    out: Path,
    part: str = "dev",
    source: str | None = None,
    target: str | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    extra_length: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    force: bool = False,
) -> dict[str, Any]:
    """Translate one part of a task and compare: BLEU by sacrebleu, exact match, perplexity.

    Parameters
    ----------
    model
        The folder of a model that translates.
    data
        A folder with the part as .jsonl (also .gz, .xz, .zst), one pair a line.
    out
        The folder to write: translations.jsonl and result.json.
    part
        The part to translate: dev, test …
    source
        The column to translate from; by default as the model was trained, else found out from the data.
    target
        The column to translate to.
    beam
        Hypotheses that are followed side by side; 1 takes the likeliest token each time. The search is that of the
        model's recipe where nothing is given.
    length_penalty
        α of log P / ((5 + length) / 6)^α; 0 for none.
    extra_length
        Tokens a translation may have more than its source.
    device
        Where to compute; "auto" takes a GPU if there is one.
    force
        Replace what --out holds.
    """
    from bertsmith.batches.pairs import PairConfig
    from bertsmith.commands.output import check_out, claim, write_result
    from bertsmith.commands.translating import (
        evaluated,
        load_translator,
        print_evaluation,
        recorded,
        search_with,
        write_translations,
    )
    from bertsmith.text.task_folder import pair_columns, read_pairs

    model, data, out = Path(model), Path(data), Path(out)
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
        **evaluation.figures,
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
