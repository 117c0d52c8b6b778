"""`bertsmith import` and `bertsmith export`: convert models from and to Hugging Face and ONNX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.files import find_weights
from bertsmith.checkpoint.hf.writing import NativeChoice, plan_hf
from bertsmith.checkpoint.store import load, write_model
from bertsmith.engines.artefact import ARTEFACT_FILE, read_artefact, write_artefact
from bertsmith.engines.base import Artefact, Inputs, Precision
from bertsmith.engines.int8 import ACTIVATIONS, calibrate, float_inputs
from bertsmith.engines.onnx_graph import HeadChoice
from bertsmith.engines.onnx_session import GRAPH_FILE, METADATA_FILE
from bertsmith.errors import InputError
from bertsmith.exporting import check_options, exactness, read_result, write_card, write_onnx
from bertsmith.files import read_json
from bertsmith.layers.quantised import RangeKind
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.models.generator import part_of
from bertsmith.models.model import Model
from bertsmith.runs.flags import DataFlag, ForceFlag, OutFlag, flag_group
from bertsmith.runs.output import check_out, replace_folder, write_result
from bertsmith.runs.result import OneShotResult, print_plain, spread
from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE, read_elastic_metadata
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.predictor import has_task_record, read_task_record, sample_inputs, write_task_record

QUANTISED, HUGGING_FACE = flag_group("With --to onnx and --to torch"), flag_group("With --to hf")
PART = flag_group("Export a part")


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """Size and heads of a model."""

    family: str
    parameters: int
    layers: int
    width: int
    vocabulary: int
    heads: list[str]
    has_tokenizer: bool

    @classmethod
    def of(cls, model: Model) -> "ModelSummary":
        encoder = model.config.encoder
        return cls(
            family=model.config.family,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layers=len(encoder.layers),
            width=encoder.width,
            vocabulary=encoder.vocabulary,
            heads=list(model.heads),
            has_tokenizer=model.tokenizer is not None,
        )


class GraphSummary(TypedDict):
    """Precision of an ONNX graph and its numerical difference from the model, as in onnx.json."""

    precision: str
    opset: int
    head: str | None
    largest_difference: float
    largest_absolute_difference: float
    compared_on: str


@dataclass(frozen=True, kw_only=True)
class ImportResult(OneShotResult):
    """Result of `bertsmith import`."""

    model: ModelSummary = spread()


@dataclass(frozen=True, kw_only=True)
class HfExportResult(ImportResult):
    """Result of `bertsmith export --to hf`."""

    form: Literal["native", "bertsmith"]
    """"native" loads with transformers alone, "bertsmith" with `trust_remote_code=True` or `import bertsmith.hf`."""
    architecture: str
    remark: str


@dataclass(frozen=True, kw_only=True)
class OnnxExportResult(ImportResult):
    """Result of `bertsmith export --to onnx`."""

    graph: GraphSummary = spread()
    bytes: int


@dataclass(frozen=True, kw_only=True)
class TorchExportResult(ImportResult):
    """Result of `bertsmith export --to torch`."""

    precision: str
    bytes: int
    """Size of the weights."""
    float_inputs: list[str]
    """Layers whose inputs stay in floating point, because their values are too sparse for 8 bits."""


def import_model(
    model: str | Path,
    *,
    out: OutFlag[Path],
    ignore: list[str] | None = None,
    force: ForceFlag = False,
) -> ImportResult:
    """Convert a Hugging Face model folder to Bertsmith's format.

    Every tensor is mapped exactly; an unknown tensor is an error unless --ignore matches its name.

    Parameters
    ----------
    model
        Hugging Face folder with config.json, model.safetensors and optionally a tokenizer; or a bundled model (small).
    out
        Output folder.
    ignore
        Skip tensors whose names start with this prefix, for example classifier; repeatable.
    force
        Replace the contents of --out.
    """
    model, out = model_folder(model), Path(out)
    loaded = load(model, ignore=tuple(ignore or ()))
    result = ImportResult(model=ModelSummary.of(loaded))
    with replace_folder(out, force, model) as new:
        write_model(loaded, new)
        if has_task_record(model):
            write_task_record(read_task_record(model), new)
        write_result(new, result.to_json(), seals=True)
    _print_summary(result.model, out)
    return result


def export_model(
    model: str | Path,
    *,
    out: OutFlag[Path],
    to: Literal["hf", "onnx", "torch"] = "hf",
    precision: Annotated[Literal["float32", "float16", "int8", "int8_static", "int8_weights"], QUANTISED] = "float32",
    calibration: Annotated[Literal["mean_max", "kl"], QUANTISED] = "mean_max",
    width: Annotated[float, PART] = 1.0,
    depth: Annotated[float, PART] = 1.0,
    head: Annotated[Literal["auto", "masked_tokens"], QUANTISED] = "auto",
    data: Annotated[DataFlag[str | None], QUANTISED] = None,
    part: Annotated[Literal["encoder", "generator"], PART] = "encoder",
    native: Annotated[Literal["auto", "always", "never"], HUGGING_FACE] = "auto",
    force: ForceFlag = False,
) -> HfExportResult | OnnxExportResult | TorchExportResult:
    """Export a model to Hugging Face transformers, to ONNX Runtime or as an 8-bit PyTorch model.

    A Hugging Face folder loads with transformers alone if transformers has an equivalent class, otherwise with
    trust_remote_code=True or after `import bertsmith.hf`. An ONNX folder runs with bertsmith.runtime and, if the model
    was fine-tuned, with evaluate and predict. Both contain a model card, README.md. --to torch writes int8 weights,
    also of translation models, for evaluate and predict.

    Parameters
    ----------
    model
        A bundled model (small) or a model folder.
    out
        Output folder.
    to
        Target format.
    precision
        ONNX and PyTorch: int8, dynamic quantisation; int8_static, static quantisation calibrated on --data. ONNX:
        float32; float16, half the size but slower than float32 on a CPU. PyTorch: int8_weights, 8-bit weights
        multiplied in float32.
    calibration
        PyTorch, int8_static: activation ranges as the mean of the largest values of batches, or the thresholds of
        least KL divergence.
    width
        Fraction of the heads and neurons to keep in every layer, for example 0.5.
    depth
        Fraction of the layers to keep, for example 0.5.
    head
        ONNX: output of the graph. "auto" is the task head, or the hidden states without one; "masked_tokens" is the
        logits of the masked-LM head.
    data
        ONNX and PyTorch: task data, as for fine-tuning. Some training rows are used to calibrate int8_static, which
        requires them, and to compare the ONNX graph with the model.
    part
        For a model with a generator (ELECTRA): export the encoder with its heads, or the generator.
    native
        Hugging Face: use a class of transformers if it computes the same (auto), always, or never.
    force
        Replace the contents of --out.
    """
    model, out = model_folder(model), Path(out)
    if to == "torch":
        _check_torch_options(precision, calibration, head)
    else:
        check_options(to, precision, head)
        if calibration != "mean_max":
            raise InputError(f"--calibration is {calibration!r} with --to {to}; allowed with --to torch")
    if precision == "int8_static" and data is None and to == "onnx":
        raise InputError("--precision int8_static needs --data to calibrate the ranges of activations")
    if to == "hf" and data is not None:
        raise InputError(f"--data is {data!r}, but --to hf uses no data; allowed with --to onnx")
    _check_source(model)
    # an elastic model was trained with its own rule for which layers to drop
    rule = {"depth_rule": read_elastic_metadata(model).depth_rule} if (model / ELASTIC_FILE).is_file() else {}
    subnet = Subnet.parse({"width": width, "depth": depth, **rule}, source="the sub-network")
    check_out(out, force, model)
    loaded = part_of(load(model), part)
    cut = None if (width, depth) == (1.0, 1.0) else {"width": width, "depth": depth}
    if cut is not None:
        loaded = extract(loaded, subnet)
    if to == "hf":
        return _export_hf(loaded, model, out, cut, native, force)
    if to == "torch":
        return _export_torch(loaded, model, out, precision, calibration, data, force)
    return _export_onnx(loaded, model, out, cut, precision, head, data, force)


def _check_source(model: Path) -> None:
    """Raise InputError if the folder is an artefact without the original weights."""
    if not (model / ARTEFACT_FILE).is_file():
        return
    artefact = read_artefact(model)
    if artefact.engine == "onnxruntime":
        raise InputError(
            f"{str(model)!r} is already an ONNX folder ({artefact.precision}), which bertsmith.runtime.load and "
            "bertsmith predict can run; to export another format, give the model it was made from"
        )
    if artefact.precision.startswith("int8"):
        raise InputError(
            f"{str(model)!r} contains {artefact.precision} weights for PyTorch, which cannot be exported; give the "
            "model it was made from"
        )


def _export_hf(
    loaded: Model, model: Path, out: Path, cut: dict[str, float] | None, native: NativeChoice, force: bool
) -> HfExportResult:
    task = read_task_record(model).plain() if has_task_record(model) else None
    plan = plan_hf(loaded, native=native, task=task)
    summary = ModelSummary.of(loaded)
    result = HfExportResult(model=summary, form=plan.form, architecture=plan.architecture, remark=plan.remark)
    with replace_folder(out, force, model) as new:
        plan.write(new)
        write_card(new, loaded, out.resolve().name, result=read_result(model), subnet=cut, remark=plan.remark)
        write_result(new, result.to_json(), seals=True)
    _print_summary(result.model, out, plan.remark)
    return result


def _check_torch_options(precision: str, calibration: str, head: str) -> None:
    if precision not in ACTIVATIONS:
        raise InputError(
            f"--precision is {precision!r} with --to torch; allowed: {', '.join(ACTIVATIONS)} (the model's folder "
            "itself is PyTorch in float32)"
        )
    if calibration != "mean_max" and precision != "int8_static":
        raise InputError(f"--calibration is {calibration!r} with --precision {precision}; allowed with int8_static")
    if head != "auto":
        raise InputError(f"--head is {head!r} with --to torch, which writes all heads; allowed: auto")


def _export_torch(
    loaded: Model,
    model: Path,
    out: Path,
    precision: Precision,
    calibration: RangeKind,
    data: str | None,
    force: bool,
) -> TorchExportResult:
    record = read_task_record(model) if has_task_record(model) else None
    if precision == "int8_static" and loaded.config.quantisation is None:
        if data is None or record is None:
            raise InputError(
                "--precision int8_static needs --data and a fine-tuned model to calibrate the ranges of activations"
            )
        loaded = calibrate(loaded, sample_inputs(loaded, record, task_splits(data).read("train")), calibration)
    with replace_folder(out, force, model) as new:
        write_artefact(loaded, new, Artefact(engine="torch", precision=precision))
        if record is not None:
            write_task_record(record, new)
        result = TorchExportResult(
            model=ModelSummary.of(loaded),
            precision=precision,
            bytes=find_weights(new).stat().st_size,
            float_inputs=float_inputs(loaded),
        )
        write_result(new, result.to_json(), seals=True)
    kept = f"; inputs left in float32: {', '.join(result.float_inputs)}" if result.float_inputs else ""
    _print_summary(result.model, out, f"{precision}: {result.bytes / 1e6:.1f} MB{kept}")
    return result


def _export_onnx(
    loaded: Model,
    model: Path,
    out: Path,
    cut: dict[str, float] | None,
    precision: Precision,
    head: HeadChoice,
    data: str | None,
    force: bool,
) -> OnnxExportResult:
    found = [] if data is None else sample_inputs(loaded, read_task_record(model), task_splits(data).read("train"))
    samples = [sample for sample in found if isinstance(sample, Inputs)]
    with replace_folder(out, force, model) as new:
        write_onnx(loaded, new, precision, samples, head)
        if has_task_record(model) and head == "auto":
            write_task_record(read_task_record(model), new)
        notes, size = read_json(new / METADATA_FILE), (new / GRAPH_FILE).stat().st_size
        write_card(new, loaded, out.resolve().name, result=read_result(model), subnet=cut)
        graph = GraphSummary(
            precision=notes["precision"],
            opset=notes["opset"],
            head=notes["head"],
            largest_difference=notes["largest_difference"],
            largest_absolute_difference=notes["largest_absolute_difference"],
            compared_on=notes["compared_on"],
        )
        result = OnnxExportResult(model=ModelSummary.of(loaded), graph=graph, bytes=size)
        write_result(new, result.to_json(), seals=True)
    _print_summary(result.model, out, f"model.onnx: {size / 1e6:.1f} MB. {exactness(notes)}")
    return result


def _print_summary(model: ModelSummary, out: Path, remark: str | None = None) -> None:
    print_plain(
        f"{model.family}, {model.layers} layers of width {model.width}, {model.parameters:,} parameters, "
        f"heads: {', '.join(model.heads) or 'none'}; written to {out}"
    )
    if remark is not None:
        print_plain(remark)
