"""`bertsmith import` and `bertsmith export`: models to and from other programs."""

from pathlib import Path
from typing import Any, Literal


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
    return _finish(loaded, out, write_result)


def export_model(
    model: Path,
    *,
    out: Path,
    to: Literal["hf"] = "hf",
    part: Literal["encoder", "generator"] = "encoder",
    force: bool = False,
) -> dict[str, Any]:
    """Write a model for another program: "hf" is a folder that transformers loads without Bertsmith.

    Parameters
    ----------
    model
        A model folder.
    out
        The folder to write.
    to
        The form to write.
    part
        Of a model that was trained against a generator: the encoder with its heads, or the generator.
    force
        Replace what --out holds.
    """
    from bertsmith.checkpoint.hf import check_exportable, save_hf
    from bertsmith.checkpoint.store import load
    from bertsmith.commands.output import claim, write_result
    from bertsmith.models.generator import part_of

    model, out = Path(model), Path(out)
    loaded = part_of(load(model), part)
    # before claiming: a model that cannot be exported must not cost the folder that is there
    twin, _ = check_exportable(loaded)
    save_hf(loaded, claim(out, force, model))
    return _finish(loaded, out, write_result, twin.remark(loaded.config))


def _finish(model: Any, out: Path, write_result: Any, remark: str | None = None) -> dict[str, Any]:
    from rich.console import Console

    encoder = model.config.encoder
    figures = {
        "family": model.config.family,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": len(encoder.layers),
        "width": encoder.width,
        "vocabulary": encoder.vocabulary,
        "heads": list(model.heads),
        "has_tokenizer": model.tokenizer is not None,
    }
    write_result(out, figures)
    Console().print(
        f"{figures['family']}, {figures['layers']} layers of width {figures['width']}, "
        f"{figures['parameters']:,} parameters, heads: {', '.join(model.heads) or 'none'}; written to {out}",
        highlight=False,
        markup=False,
    )
    if remark is not None:
        Console().print(remark, highlight=False, markup=False)
    return figures
