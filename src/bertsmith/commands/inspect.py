"""`bertsmith inspect`: what each head of a model looks at in a text."""

from pathlib import Path
from typing import Any

from bertsmith.errors import InputError

LONGEST = 128  # tokens; a page with more would be too heavy to look at


def inspect(model: Path, *, text: str, out: Path, pair: str | None = None, force: bool = False) -> dict[str, Any]:
    """Show the attention maps of a text, as an interactive page and as a picture.

    Parameters
    ----------
    model
        A model folder, ours or a Hugging Face one.
    text
        The text to look at.
    out
        The folder to write: attention.html, attention.png (if matplotlib is there) and result.json.
    pair
        A second text, read as the second segment.
    force
        Replace what --out holds.
    """
    from importlib.util import find_spec

    from rich.console import Console

    from bertsmith.checkpoint.store import load
    from bertsmith.commands.output import claim, write_result
    from bertsmith.report.attention import attention_page, attention_picture, head_figures

    model, out = Path(model), Path(out)
    loaded = load(model)
    tokens, maps = attention_of(loaded, text, pair)
    folder = claim(out, force, model)
    encoder = loaded.config.encoder
    facts = {
        "model": str(model),
        "network": f"{loaded.config.family}, {len(encoder.layers)} layers of width {encoder.width}",
        "tokens": str(len(tokens)),
    }
    (folder / "attention.html").write_text(attention_page(tokens, maps, title=text, facts=facts), encoding="utf-8")
    files = ["attention.html"]
    if find_spec("matplotlib"):
        attention_picture(tokens, maps, folder / "attention.png", title=text)
        files.append("attention.png")
    heads = [[vars(figure) for figure in layer] for layer in head_figures(tokens, maps)]
    figures = {"tokens": tokens, "layers": maps.shape[0], "heads": maps.shape[1], "files": files, "figures": heads}
    write_result(folder, figures)
    console = Console()
    console.print(
        f"{maps.shape[0]} × {maps.shape[1]} maps of {len(tokens)} tokens: {', '.join(files)} in {out}", markup=False
    )
    if len(files) == 1:
        console.print("no picture: that needs matplotlib (pip install 'bertsmith[report]')", markup=False)
    return figures


def attention_of(model: Any, text: str, pair: str | None = None) -> tuple[list[str], Any]:
    """The pieces of a text and the maps of every head, (layers, heads, length, length)."""
    import torch

    from bertsmith.batches.layout import SequenceLayout

    tokenizer = model.require_tokenizer()
    if not text.strip():
        raise InputError("--text is empty; give some words")
    arrays = tokenizer.encode([text], None if pair is None else [pair])
    ids = torch.from_numpy(arrays["input_ids"])
    longest = min(LONGEST, model.config.encoder.embedding.longest)
    if ids.shape[1] > longest:
        raise InputError(f"--text has {ids.shape[1]} tokens; allowed: up to {longest}")
    types = torch.from_numpy(arrays["token_type_ids"]) if model.config.encoder.embedding.types else None
    with torch.inference_mode():
        by_layer = model.eval().encoder.attention_maps(ids, SequenceLayout.full(*ids.shape), types)
    maps = [next(iter(layer.values())) for layer in by_layer]
    most = max(layer.shape[1] for layer in maps)
    if any(layer.shape[1] != most for layer in maps):
        # layers of a cut model may differ in heads; missing ones show as empty maps
        maps = [torch.nn.functional.pad(layer, (0, 0, 0, 0, 0, most - layer.shape[1])) for layer in maps]
    return tokenizer.pieces(ids[0].tolist()), torch.stack(maps)[:, 0].float().numpy()
