"""`bertsmith import` and `bertsmith export`: models to and from other programs."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.checkpoint.hf import NativeChoice
    from bertsmith.engines.base import Inputs, Precision
    from bertsmith.models.model import Model


def import_model(
    model: Path,
    *,
    out: Path,
    ignore: list[str] | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Turn a Hugging Face folder into one of ours, every weight mapped exactly.

    Parameters
    ----------
    model
        The folder with config.json, model.safetensors and, if there is one, the tokenizer.
    out
        The folder to write.
    ignore
        The start of the names of tensors to leave out, such as "classifier"; may be given several times.
    force
        Replace what --out holds.
    """
    from bertsmith.checkpoint.store import load, write_model
    from bertsmith.commands.output import claim, write_result

    model, out = Path(model), Path(out)
    loaded = load(model, ignore=tuple(ignore or ()))
    write_model(loaded, claim(out, force, model))
    figures = _figures(loaded)
    write_result(out, figures)
    _say(figures, out)
    return figures


def export_model(
    model: Path,
    *,
    out: Path,
    to: Literal["hf", "onnx"] = "hf",
    precision: Literal["float32", "int8", "int8_static"] = "float32",
    width: float = 1.0,
    depth: float = 1.0,
    data: str | None = None,
    part: Literal["encoder", "generator"] = "encoder",
    native: Literal["auto", "always", "never"] = "auto",
    force: bool = False,
) -> dict[str, Any]:
    """Write a model for another program.

    "hf" is a folder that transformers loads, without Bertsmith where it has a class that computes the same and after
    `import bertsmith.hf` elsewhere; "onnx" one that ONNX Runtime runs, and that evaluate and
    predict run as well if the model was fine-tuned.

    Parameters
    ----------
    model
        A model folder.
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
    data
        For int8_static: data of the model's task, as fine-tuning reads it; some of its training rows are run.
    part
        Of a model that was trained against a generator: the encoder with its heads, or the generator.
    native
        Of hf: write a class of transformers' own where one computes the same, always, or never.
    force
        Replace what --out holds.
    """
    from bertsmith.checkpoint.store import load
    from bertsmith.commands.output import check_out
    from bertsmith.engines.exporting import check_form
    from bertsmith.layers.subnet import Subnet
    from bertsmith.models.build import extract
    from bertsmith.models.generator import part_of

    model, out = Path(model), Path(out)
    check_form(to, precision)
    if (precision == "int8_static") != (data is not None):
        given = "no" if data is None else "one"
        raise InputError(f"--precision is {precision!r} and {given} --data is given; int8_static needs it, others none")
    subnet = Subnet.parse({"width": width, "depth": depth, **_depth_rule(model)}, source="the sub-network")
    check_out(out, force, model)
    loaded = part_of(load(model), part)
    if (width, depth) != (1.0, 1.0):
        loaded = extract(loaded, subnet)
    if to == "hf":
        return _export_hf(loaded, model, out, native, force)
    return _export_onnx(loaded, model, out, precision, data)


def _depth_rule(model: Path) -> dict[str, str]:
    """Which layers a depth keeps in an elastic model: those it was trained with."""
    from bertsmith.shrinking.record import ELASTIC_FILE, read_record

    return {"depth_rule": read_record(model).depth_rule} if (model / ELASTIC_FILE).is_file() else {}


def _export_hf(loaded: "Model", model: Path, out: Path, native: "NativeChoice", force: bool) -> dict[str, Any]:
    from bertsmith.checkpoint.hf import plan_hf
    from bertsmith.commands.output import claim, write_result
    from bertsmith.tasks.predictor import TASK_FILE, read_kept

    task = read_kept(model).plain() if (model / TASK_FILE).is_file() else None
    # before claiming: a model that cannot be exported must not cost the folder that is there
    plan = plan_hf(loaded, native=native, task=task)
    plan.write(claim(out, force, model))
    figures = {**_figures(loaded), "form": plan.form, "architecture": plan.architecture, "remark": plan.remark}
    write_result(out, figures)
    _say(figures, out, plan.remark)
    return figures


def _export_onnx(loaded: "Model", model: Path, out: Path, precision: "Precision", data: str | None) -> dict[str, Any]:
    from bertsmith.checkpoint.files import NewFolder, read_json
    from bertsmith.commands.output import MARK, write_result
    from bertsmith.engines.artefact import write_artefact
    from bertsmith.engines.base import Artefact
    from bertsmith.engines.onnx_engine import GRAPH_FILE, NOTES_FILE
    from bertsmith.tasks.predictor import TASK_FILE

    samples = () if data is None else _samples(loaded, model, data)
    with NewFolder(out.resolve()) as new:
        (new / MARK).touch()
        write_artefact(loaded, new, Artefact(engine="onnxruntime", precision=precision), samples)
        if (model / TASK_FILE).is_file():
            shutil.copyfile(model / TASK_FILE, new / TASK_FILE)
        notes, size = read_json(new / NOTES_FILE), (new / GRAPH_FILE).stat().st_size
        difference = notes["largest_difference"]
        figures = {**_figures(loaded), "precision": precision, "opset": notes["opset"]}
        figures |= {"largest_difference": difference, "bytes": size}
        write_result(new, figures)
    remark = (
        f"model.onnx: {size / 1e6:.1f} MB, {precision}, opset {notes['opset']}; its outputs differ from the model's by "
        f"at most {difference:.1e} of the largest"
    )
    _say(figures, out, remark)
    return figures


def _samples(loaded: "Model", model: Path, data: str) -> "list[Inputs]":
    from bertsmith.tasks.parts import task_parts
    from bertsmith.tasks.predictor import read_kept
    from bertsmith.tasks.samples import sample_inputs

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
