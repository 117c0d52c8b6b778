"""`bertsmith encode` and `bertsmith fill-mask`: vectors of texts, and the words that a model expects at masks."""

import json
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import torch
from cyclopts import Parameter
from torch import Tensor
from torch.nn.functional import normalize as normalised

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.store import load
from bertsmith.data.devices import Device, device_type
from bertsmith.data.executor import RayWorkers
from bertsmith.data.inference import InferencePrecision
from bertsmith.data.inference import windows as split_windows
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.runs.flags import DataFlag, ForceFlag, OutFlag, RayFlag, TextFlag
from bertsmith.runs.output import check_out, claim, write_result
from bertsmith.runs.predict import format_answer
from bertsmith.runs.result import OneShotResult, count_of, print_plain
from bertsmith.text.readers import find_files, read_documents

ARRAY, ROWS, TABLE = "vectors.npy", "vectors.jsonl", "vectors.parquet"


@dataclass(frozen=True, kw_only=True)
class EncodeResult(OneShotResult):
    """Number and width of the vectors; `vectors` is set for --text only, the file always has them."""

    texts: int
    width: int
    seconds: float
    model: str
    vectors: list[list[float]] | None


@dataclass(frozen=True, kw_only=True)
class FillMaskResult(OneShotResult):
    """The most probable tokens of every mask, by text."""

    masks: list[list[list[tuple[str, float]]]]


def encode(
    model: str | Path,
    *,
    text: TextFlag = None,
    data: DataFlag[list[Path] | None] = None,
    out: OutFlag[Path | None] = None,
    field: str = "text",
    normalize: bool = False,
    format: Literal["npy", "jsonl", "parquet"] = "npy",
    device: Device = "auto",
    precision: InferencePrecision = "auto",
    ray: RayFlag = None,
    force: ForceFlag = False,
) -> EncodeResult:
    """Encode texts as vectors: the output of the model's embedder head, or the mean of its hidden states.

    Parameters
    ----------
    model
        A bundled model (small), or a Bertsmith or Hugging Face model folder.
    text
        Text to encode; repeatable. Without --out, the vectors are printed.
    data
        Files or folders with texts: .txt with documents between blank lines, .jsonl (also .gz, .xz, .zst) or .parquet;
        repeatable. Files of any size are read and written some thousand texts at a time.
    out
        Output folder: the vectors and result.json. Optional with --text.
    field
        Field or column with the text in .jsonl and .parquet files.
    normalize
        Scale every vector to length 1.
    format
        "npy": vectors.npy, a float32 array with one row per text. "jsonl" and "parquet": a table vectors.jsonl or
        vectors.parquet with the columns text and vector, from which another model can learn the vectors (bertsmith
        finetune). Its vectors are float16, in .jsonl encoded as base64; .parquet is smaller and needs pyarrow.
    device
        Device to run on; "auto" uses a GPU if one is available.
    precision
        Precision of matrix products; "auto" is bfloat16 on a GPU and float32 on a CPU.
    ray
        Encode on a Ray cluster: its address, "auto", or "local" to start one on this machine. Every worker loads the
        model from its folder, which all machines must share.
    force
        Replace the contents of --out.
    """
    folder, out = model_folder(model), None if out is None else Path(out)
    texts = [text] if isinstance(text, str) else text or []
    if (data is None) == (not texts):
        raise InputError("give either --data with files or --text with a text, not both")
    if data is not None and out is None:
        raise InputError("--out is not given; give the folder to write the vectors to")
    files = [] if data is None else find_files([data] if isinstance(data, str | Path) else data)
    if format == "parquet":
        _import_pyarrow()  # raises before anything is computed
    if out is not None:
        check_out(out, force, folder, *files)
    documents = iter(texts) if data is None else read_documents(files, field)
    first = next(documents, None)
    if first is None:
        raise InputError(f"--data {str(files[0])!r} has no text; give files with texts")
    loaded = load(folder, device=device_type(device))
    start = time.perf_counter()
    read: deque[str] = deque()  # texts whose vectors are not written yet
    recorded = _recorded(chain([first], documents), read)
    windows = _vectors(recorded, loaded, folder, device, precision, ray)
    windows = (normalised(window, dim=-1) if normalize else window for window in windows)
    vectors = torch.cat(list(windows)) if data is None else None
    if out is None:
        assert vectors is not None
        count, width = vectors.shape
    else:
        claim(out, force, folder, *files)
        windows = windows if vectors is None else iter([vectors])
        if format == "parquet":
            count, width = write_table(out / TABLE, windows, read)
        elif format == "jsonl":
            count, width = write_rows(out / ROWS, windows, read)
        else:
            count, width = write_array(out / ARRAY, windows)
    result = EncodeResult(
        texts=count,
        width=width,
        seconds=round(time.perf_counter() - start, 3),
        model=str(folder),
        vectors=None if vectors is None else vectors.tolist(),
    )
    for vector in result.vectors or ():
        print_plain(format_answer(vector))
    if out is not None:
        write_result(out, result.to_json())
        print_plain(f"{count_of(count, 'vector')} of {width} numbers in {result.seconds:.1f} s; written to {out}")
    return result


def _vectors(
    texts: Iterable[str], model: Model, folder: Path, device: str, precision: InferencePrecision, ray: str | None
) -> Iterator[Tensor]:
    """Yield the vectors of windows of texts, computed by the model here or by copies of it on a cluster."""
    if ray is None:
        yield from model.encode_stream(texts, precision=precision)
        return
    threads = torch.get_num_threads()  # the same number everywhere, so that all workers round alike
    make = partial(load_on_worker, folder.resolve(), device, precision, threads)
    with RayWorkers(make, ray, cores=threads, gpus=int(model.device.type == "cuda")) as executor:
        for _, vectors in executor.results(split_windows(texts)):
            yield torch.from_numpy(vectors)


def load_on_worker(
    folder: Path, device: str, precision: InferencePrecision, threads: int
) -> Callable[[Sequence[str]], np.ndarray]:
    """Load the model of a worker; return its function from a window of texts to vectors."""
    torch.set_num_threads(threads)
    model = load(folder, device=device_type(device))
    return lambda texts: model.encode_window(texts, precision=precision).cpu().numpy()


def fill_mask(
    model: str | Path,
    *,
    text: Annotated[list[str], Parameter(alias="-t")],
    top: int = 5,
    device: Device = "auto",
) -> FillMaskResult:
    """Print the most probable words at the masks of a text.

    Parameters
    ----------
    model
        A bundled model (small), or a Bertsmith or Hugging Face model folder with a masked-LM head.
    text
        Text with one or more [MASK]; repeatable.
    top
        Number of words per mask.
    device
        Device to run on; "auto" uses a GPU if one is available.
    """
    if top < 1:
        raise InputError(f"--top is {top}; allowed: 1 or more")
    loaded = load(model_folder(model), device=device_type(device))
    masks = loaded.fill_mask([text] if isinstance(text, str) else text, top_k=top)
    for filled in (mask for of_text in masks for mask in of_text):
        print_plain(", ".join(f"{token}  {100 * probability:.1f} %" for token, probability in filled))
    return FillMaskResult(masks=masks)


def write_array(path: Path, windows: Iterator[Tensor]) -> tuple[int, int]:
    """Write windows of vectors to a .npy file as they come; return the number of vectors and their width."""
    count, width = 0, 0
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        for window in windows:
            if not count:
                width = window.shape[1]
                _write_header(file, 0, width)
            file.write(np.ascontiguousarray(window.cpu().numpy(), dtype="<f4").tobytes())
            count += len(window)
        file.seek(0)
        _write_header(file, count, width)  # as long as the first one: the format leaves room for the number of rows
    unfinished.replace(path)
    return count, width


def _write_header(file: BinaryIO, count: int, width: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(file, header)


def write_rows(path: Path, windows: Iterator[Tensor], texts: deque[str]) -> tuple[int, int]:
    """Write texts and windows of their vectors to a .jsonl file as they come; return the number of rows and width.

    A vector is the base64 of float16 numbers. `texts` holds at least the texts of a window when the window comes.
    """
    count, width = 0, 0
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("w", encoding="utf-8") as file:
        for window in windows:
            width = window.shape[1]
            for vector in window.cpu().numpy().astype("<f2"):
                row = {"text": texts.popleft(), "vector": b64encode(vector.tobytes()).decode("ascii")}
                file.write(json.dumps(row) + "\n")
            count += len(window)
    unfinished.replace(path)
    return count, width


def write_table(path: Path, windows: Iterator[Tensor], texts: deque[str]) -> tuple[int, int]:
    """Write texts and windows of their vectors to a .parquet file as they come; return the number of rows and width.

    `texts` holds at least the texts of a window when the window comes.
    """
    pyarrow, parquet = _import_pyarrow()
    count, width = 0, 0
    unfinished = path.with_name(f".{path.name}")
    writer: Any = None
    try:
        for window in windows:
            width = window.shape[1]
            numbers = pyarrow.array(window.cpu().numpy().astype("<f2").ravel())
            rows = [texts.popleft() for _ in range(len(window))]
            vectors = pyarrow.FixedSizeListArray.from_arrays(numbers, width)
            table = pyarrow.table({"text": rows, "vector": vectors})
            writer = writer or parquet.ParquetWriter(unfinished, table.schema, compression="zstd")
            writer.write_table(table)
            count += len(window)
    finally:
        if writer is not None:
            writer.close()
    unfinished.replace(path)
    return count, width


def _recorded(texts: Iterable[str], read: deque[str]) -> Iterator[str]:
    """Yield texts and append each to `read`."""
    for text in texts:
        read.append(text)
        yield text


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            "--format is 'parquet', which needs pyarrow: pip install 'bertsmith[parquet]'; or use 'npy'"
        ) from None
    return pyarrow, pyarrow.parquet
