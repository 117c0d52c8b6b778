"""`bertsmith evaluate`: score a fine-tuned model on a split of a task, or a language model on text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from bertsmith.bundled import model_folder
from bertsmith.data.devices import Device
from bertsmith.data.inference import InferencePrecision
from bertsmith.data.progress import progress_bar
from bertsmith.errors import InputError
from bertsmith.runs.answer import existing_path, layers_used, name_rows, open_predictor, read_task
from bertsmith.runs.finetuning import Scores, compute_scores, format_score, write_task_page
from bertsmith.runs.flags import TRANSLATION, DataFlag, ForceFlag, OutFlag, flag_group
from bertsmith.runs.mteb_tasks import MtebResult, evaluate_mteb
from bertsmith.runs.output import check_out, claim, write_answers, write_files, write_result
from bertsmith.runs.residues import ResidueResult, evaluate_residues
from bertsmith.runs.result import OneShotResult, print_plain, spread
from bertsmith.runs.text_run import TextRun, split_name
from bertsmith.runs.word_perplexity import WordPerplexityResult, evaluate_word_perplexity
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.glue import name_in_split
from bertsmith.tasks.hf_task import adapt_task
from bertsmith.tasks.translation import Translation


@dataclass(frozen=True, kw_only=True)
class EvaluateResult(OneShotResult):
    """Result of an evaluation."""

    scores: Scores = spread()
    mean_layers: float | None
    """Mean number of layers per input; None without early exits."""
    layers: int | None
    examples: int
    split: str
    model: str
    data: str

    @property
    def score(self) -> float:
        return self.scores.score

    @property
    def metric(self) -> str:
        return self.scores.metric


TEXT = flag_group("Language models on text")
METRIC_FLAGS = {
    "word_perplexity": ("field", "length", "stride", "articles", "detokenise", "count", "allow_lossy"),
    "residues": ("field", "length", "joined"),
}
"""Flags of each value of --metric."""


def evaluate(
    model: str | Path,
    *,
    data: DataFlag[str | None] = None,
    out: OutFlag[Path | None] = None,
    split: str = "dev",
    column: list[str] | None = None,
    mteb: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    source: Annotated[str | None, TRANSLATION] = None,
    target: Annotated[str | None, TRANSLATION] = None,
    beam: Annotated[int | None, TRANSLATION] = None,
    length_penalty: Annotated[float | None, TRANSLATION] = None,
    extra_length: Annotated[int | None, TRANSLATION] = None,
    metric: Annotated[Literal["word_perplexity", "residues"] | None, TEXT] = None,
    field: Annotated[str | None, TEXT] = None,
    length: Annotated[int | None, TEXT] = None,
    stride: Annotated[int | None, TEXT] = None,
    articles: Annotated[bool | None, TEXT] = None,
    detokenise: Annotated[bool | None, TEXT] = None,
    count: Annotated[Literal["words", "published"] | None, TEXT] = None,
    allow_lossy: Annotated[bool | None, TEXT] = None,
    joined: Annotated[bool | None, TEXT] = None,
    device: Device = "auto",
    precision: InferencePrecision = "auto",
    force: ForceFlag = False,
) -> EvaluateResult | WordPerplexityResult | ResidueResult | MtebResult:
    """Score a fine-tuned model on a data set, a language model on text (--metric), or vectors on MTEB (--mteb).

    Writes the metrics of the task, the predictions and report.html; with --metric, result.json only; with --mteb,
    result.json and mteb/ with the results in MTEB's format.

    Parameters
    ----------
    model
        Folder of a fine-tuned model, ours or Hugging Face's; with --metric, of a pre-trained one.
    data
        Folder with one file per split (.jsonl, .csv, .tsv, also .gz, .xz, .zst; or .parquet), a single such file, or
        a data set on the hub, for example glue/mrpc. With --mteb, optional: a folder that contains the data sets of the
        tasks in folders of their hub names, for example mteb/banking77, to read instead of the hub.
    out
        Output folder: predictions.jsonl, report.html, result.json, and official/ with files for the task's official
        scorer. Optional without --metric: the score is printed.
    split
        Split to evaluate, for example dev or test. With --mteb, every task has its own.
    column
        Name of a column if it differs from the training data, for example label=stars; repeatable.
    mteb
        Score the vectors of a model on tasks of MTEB, for example Banking77Classification STSBenchmark, or on one of
        its benchmarks; needs `pip install "bertsmith[mteb]"`.
    source
        Translation: source column; the column of the training data by default.
    target
        Translation: target column; the column of the training data by default.
    beam
        Translation: beam size; 1 is greedy decoding. The model's own setting by default.
    length_penalty
        Translation: α in log P / ((5 + length) / 6)^α; 0 disables the penalty.
    extra_length
        Translation: maximum output tokens beyond the length of the source.
    metric
        word_perplexity: perplexity per word and bits per byte of a causal language model on the text of --data (.txt,
        .jsonl, .parquet). residues: accuracy and perplexity of a protein model. By default, the metrics of the model's
        task.
    field
        With --metric: field or column with the text; text by default, sequence for residues.
    length
        With --metric: tokens of a window; 512 (residues: 1024) or the model's maximum by default.
    stride
        Word perplexity: tokens from one window to the next; half of --length by default. A smaller stride gives every
        token more context and takes more time.
    articles
        Word perplexity: join the lines of WikiText to articles.
    detokenise
        Word perplexity: undo WikiText's tokenisation, for models trained on running text. Words are still those of the
        original text.
    count
        Word perplexity: published also predicts and counts the line ends of WikiText, empty lines included, as
        published figures do; words alone by default.
    allow_lossy
        Word perplexity: measure a model whose tokenizer changes the text, for example to lower case. The result is not
        comparable with others.
    joined
        Residues: join the proteins and cut them into windows of --length tokens; otherwise each is cropped to --length.
    device
        Device to run on; "auto" uses a GPU if one is available.
    precision
        Precision of matrix products; "auto" is bfloat16 on a GPU and float32 on a CPU. Not with
        --metric, which uses float32.
    force
        Replace the contents of --out.
    """
    model, out = model_folder(model), None if out is None else Path(out)
    options: dict[str, Any] = {
        "column": column,
        "source": source,
        "target": target,
        "beam": beam,
        "length_penalty": length_penalty,
        "extra_length": extra_length,
        "field": field,
        "length": length,
        "stride": stride,
        "articles": articles,
        "detokenise": detokenise,
        "count": count,
        "allow_lossy": allow_lossy,
        "joined": joined,
        "precision": None if precision == "auto" else precision,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if mteb:
        if unused := [name for name in given if name != "precision"] + (["metric"] if metric else []):
            raise InputError(f"--{unused[0].replace('_', '-')} is given with --mteb, which does not use it; omit it")
        source_folder = None if data is None else Path(data)
        return evaluate_mteb(model, mteb, data=source_folder, out=out, device=device, precision=precision, force=force)
    if data is None:
        raise InputError("--data is not given; give a data set, or --mteb with tasks of MTEB")
    data = str(data)
    _check_flags(metric, given)
    if metric is not None:
        if out is None:
            raise InputError("--out is not given; give the folder to write the result to")
        run = TextRun(folder=model, data=data, split=split, out=out, device=device, force=force)
        return evaluate_residues(run, **given) if metric == "residues" else evaluate_word_perplexity(run, **given)
    if out is not None:
        check_out(out, force, model, existing_path(data))
    record = read_task(
        model,
        [*(column or []), *(f"{role}={name}" for role, name in (("source", source), ("target", target)) if name)],
        beam=beam,
        length_penalty=length_penalty,
        extra_length=extra_length,
    )
    table = task_splits(data, file_is=split).read(split)
    task = record.task.resolve(table) if isinstance(record.task, Translation) else record.task
    task = adapt_task(model, task, table, column or [], data)
    examples = task.examples(table)  # bad rows raise before the model is loaded
    predictor = open_predictor(model, record.changed(task=task), device, precision)
    with progress_bar("evaluate") as predictor.watch:
        evaluation, answers = predictor.evaluate_examples(examples)
    mean_layers, layers = layers_used(predictor)
    result = EvaluateResult(
        scores=compute_scores(evaluation, len(table)),
        mean_layers=mean_layers,
        layers=layers,
        examples=len(table),
        split=split_name(data, split),
        model=str(model),
        data=data,
    )
    if out is not None:
        claim(out, force, model, existing_path(data))
        write_answers(out / "predictions.jsonl", name_rows(table, answers))
        task = task.changed(name=name_in_split(task.name, split))
        write_files(out / "official", task.files(examples, answers))
        facts = {"Task": task.kind, "Model": str(model), "Data": data, "Split": split, "Examples": f"{len(table):,}"}
        write_task_page(
            task,
            examples,
            answers,
            evaluation,
            out,
            kind="Evaluation",
            split=split,
            interval=result.scores.interval,
            facts=facts,
        )
        write_result(out, result.to_json())
    early = "" if mean_layers is None else f"; {mean_layers:.2f} layers on average"
    written = "" if out is None else f"; written to {out}, see report.html"
    print_plain(f"{format_score(result.split, result.scores)}{early}{written}")
    return result


def _check_flags(metric: str | None, given: dict[str, Any]) -> None:
    """Raise InputError if a flag does not belong to the metric."""
    for name in given:
        flag = name.replace("_", "-")
        owners = [owner for owner, flags in METRIC_FLAGS.items() if name in flags]
        if metric is None and owners:
            raise InputError(f"--{flag} is given without --metric; it needs --metric {' or '.join(owners)}")
        if metric is not None and metric not in owners:
            raise InputError(f"--{flag} is given with --metric {metric}, which does not use it; omit it")
