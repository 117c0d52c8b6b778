"""The rows of .parquet files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, nearest


def parquet_rows(
    file: Path, field: str | None = None, watch: Callable[[int], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows with their numbers from 1, all columns or one; `watch` is told how many bytes were read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"file {str(file)!r} needs pyarrow, which is not installed: pip install 'bertsmith[parquet]'"
        ) from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if field is not None and field not in columns:
                raise InputError(f"file {str(file)!r} has no column {field!r}; {nearest(field, columns)}")
            # whole row groups may be gigabytes; batches of rows are read page by page
            for batch in table.iter_batches(batch_size=256, columns=None if field is None else [field]):
                if watch:
                    watch(batch.nbytes)
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"file {str(file)!r} cannot be read as parquet after row {number}: {reason}") from None
