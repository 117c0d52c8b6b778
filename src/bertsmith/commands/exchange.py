"""`bertsmith import` and `bertsmith export`: models to and from other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertsmith.bundled import model_folder
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.checkpoint.hf.writing import NativeChoice
    from bertsmith.engines.base import Inputs, Precision
    from bertsmith.engines.onnx_graph import AskedHead
    from bertsmith.models.model import Model


def import_model(
    model: str | Path,
    *,
    out: Path,
    ignore: list[str] | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Turn a Hugging Face folder into one of ours, every weight mapped exactly.

    Parameters
    ----------
    model
        The folder with config.json, model.safetensors and, if there is one, the tokenizer; or a bundled model (small).
    out
        The folder to write.
    ignore
        The start of the names of tensors to leave out, such as "classifier"; may be given several times.
    force
        Replace what --out holds.
    """
    from bertsmith.checkpoint.store import load, write_model
    from bertsmith.runs.output import claim, write_result

    model, out = model_folder(model), Path(out)
    loaded = load(model, ignore=tuple(ignore or ()))
    write_model(loaded, claim(out, force, model))
    figures = _figures(loaded)
    write_result(out, figures)
    _say(figures, out)
    return figures


def export_model(
    model: str | Path,
    *,
    out: Path,
    to: Literal["hf", "onnx"] = "hf",
    precision: Literal["float32", "int8", "int8_static"] = "float32",
    width: float = 1.0,
    depth: float = 1.0,
    head: Literal["auto", "masked_tokens"] = "auto",
    data: str | None = None,
    part: Literal["encoder", "generator"] = "encoder",
    native: Literal["auto", "always", "never"] = "auto",
    force: bool = False,
) -> dict[str, Any]:
    """Write a model for another program.

    "hf" is a folder that transformers loads, without Bertsmith where it has a class that computes the same and after
    `import bertsmith.hf` elsewhere; "onnx" one that ONNX Runtime runs, by bertsmith.runtime or, if the model was
    fine-tuned, by evaluate and predict. README.md in the folder is its model card.

    Parameters
    ----------
    model
        A bundled model (small) or a model folder.
    out
        The folder to write.
    to
        The form to write.
    precision
        Of ONNX: as trained; int8 with ranges measured batch by batch; int8_static with ranges measured on --data.
    width
        Share of the heads and neurons to keep in every layer.
    depth
        Share of the layers to keep.
    head
        Of ONNX, what the graph ends with: the task's head or else the last states; or the scores that fill masks.
    data
        Of ONNX: data of the model's task, as fine-tuning reads it; on some of its training rows the graph is compared
        with the model, and int8_static, which needs it, measures ranges.
    part
        Of a model that was trained against a generator: the encoder with its heads, or the generator.
    native
        Of hf: write a class of transformers' own where one computes the same, always, or never.
    force
        Replace what --out holds.
    """
    from bertsmith.checkpoint.store import load
    from bertsmith.exporting.export import check_form
    from bertsmith.layers.subnet import Subnet
    from bertsmith.models.build import extract
    from bertsmith.models.generator import part_of
    from bertsmith.runs.output import check_out

    model, out = model_folder(model), Path(out)
    check_form(to, precision, head)
    if precision == "int8_static" and data is None:
        raise InputError("--precision is 'int8_static' and no --data is given; it needs data to measure ranges on")
    if to == "hf" and data is not None:
        raise InputError(f"--data is {data!r} with --to hf, which reads none; allowed with --to onnx")
    _check_source(model)
    subnet = Subnet.parse({"width": width, "depth": depth, **_depth_rule(model)}, source="the sub-network")
    check_out(out, force, model)
    loaded = part_of(load(model), part)
    cut = None if (width, depth) == (1.0, 1.0) else {"width": width, "depth": depth}
    if cut is not None:
        loaded = extract(loaded, subnet)
    if to == "hf":
        return _export_hf(loaded, model, out, cut, native, force)
    return _export_onnx(loaded, model, out, cut, precision, head, data)


def _check_source(model: Path) -> None:
    """Raises a sentence if a folder holds what was made from a model, and no longer its weights."""
    from bertsmith.engines.artefact import ARTEFACT_FILE, read_artefact

    if not (model / ARTEFACT_FILE).is_file():
        return
    artefact = read_artefact(model)
    if artefact.engine == "onnxruntime":
        raise InputError(
            f"{str(model)!r} is an ONNX folder already, in {artefact.precision}: bertsmith.runtime.load and bertsmith "
            "predict run it as it is; to export another form, give the model it was made from"
        )
    if artefact.precision.startswith("int8"):
        raise InputError(
            f"{str(model)!r} holds {artefact.precision} codes for PyTorch instead of weights, which cannot be "
            "exported; give the model it was made from"
        )


def _depth_rule(model: Path) -> dict[str, str]:
    """Which layers a depth keeps in an elastic model: those it was trained with."""
    from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE, read_record

    return {"depth_rule": read_record(model).depth_rule} if (model / ELASTIC_FILE).is_file() else {}


def _export_hf(
    loaded: "Model", model: Path, out: Path, cut: dict[str, float] | None, native: "NativeChoice", force: bool
) -> dict[str, Any]:
    from bertsmith.checkpoint.hf.writing import plan_hf
    from bertsmith.exporting.card import write_card
    from bertsmith.exporting.export import read_result
    from bertsmith.runs.output import claim, write_result
    from bertsmith.tasks.predictor import TASK_FILE, read_kept

    task = read_kept(model).plain() if (model / TASK_FILE).is_file() else None
    # before claiming: a model that cannot be exported must not cost the folder that is there
    plan = plan_hf(loaded, native=native, task=task)
    result = read_result(model)  # before claiming, which may be this folder
    plan.write(claim(out, force, model))
    write_card(out, loaded, out.resolve().name, result=result, subnet=cut, remark=plan.remark)
    figures = {**_figures(loaded), "form": plan.form, "architecture": plan.architecture, "remark": plan.remark}
    write_result(out, figures)
    _say(figures, out, plan.remark)
    return figures


def _export_onnx(
    loaded: "Model",
    model: Path,
    out: Path,
    cut: dict[str, float] | None,
    precision: "Precision",
    head: "AskedHead",
    data: str | None,
) -> dict[str, Any]:
    from bertsmith.checkpoint.files import NewFolder, read_json
    from bertsmith.engines.onnx_session import GRAPH_FILE, NOTES_FILE
    from bertsmith.exporting.card import exactness, write_card
    from bertsmith.exporting.export import read_result, write_onnx
    from bertsmith.runs.output import MARK, write_result
    from bertsmith.tasks.predictor import TASK_FILE, read_kept, write_kept

    samples = () if data is None else _samples(loaded, model, data)
    with NewFolder(out.resolve()) as new:
        (new / MARK).touch()
        write_onnx(loaded, new, precision, samples, head)
        if (model / TASK_FILE).is_file() and head == "auto":
            write_kept(read_kept(model), new)
        notes, size = read_json(new / NOTES_FILE), (new / GRAPH_FILE).stat().st_size
        write_card(new, loaded, out.resolve().name, result=read_result(model), subnet=cut)
        kept = ("precision", "opset", "head", "largest_difference", "largest_absolute_difference", "compared_on")
        figures = {**_figures(loaded), **{name: notes[name] for name in kept}, "bytes": size}
        write_result(new, figures)
    _say(figures, out, f"model.onnx: {size / 1e6:.1f} MB. {exactness(notes)}")
    return figures


def _samples(loaded: "Model", model: Path, data: str) -> "list[Inputs]":
    from bertsmith.tasks.data_source import task_parts
    from bertsmith.tasks.predictor import read_kept, sample_inputs

    return sample_inputs(loaded, read_kept(model), task_parts(data).read("train"))


def _figures(model: "Model") -> dict[str, Any]:
    encoder = model.config.encoder
    return {
        "family": model.config.family,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": len(encoder.layers),
        "width": encoder.width,
        "vocabulary": encoder.vocabulary,
        "heads": list(model.heads),
        "has_tokenizer": model.tokenizer is not None,
    }


def _say(figures: dict[str, Any], out: Path, remark: str | None = None) -> None:
    from rich.console import Console

    lines = [
        f"{figures['family']}, {figures['layers']} layers of width {figures['width']}, "
        f"{figures['parameters']:,} parameters, heads: {', '.join(figures['heads']) or 'none'}; written to {out}"
    ]
    for line in lines if remark is None else [*lines, remark]:
        Console().print(line, highlight=False, markup=False)
