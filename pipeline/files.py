"""Files: written so that they last, with equal bytes for equal content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.errors import RollsiftError

ROW_GROUP = 1 << 17
# Columns that count up, and those whose values are as good as all different.
DELTAS, DISTINCT = ("source_row",), ("source_row", "group_id")
PRUNED = ("step", "group", "source_row")  # columns by which queries skip row groups


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file that is written inside where that fails."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RollsiftError(f"{path}: cannot be written: {error}") from None


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put(path: Path, data: bytes) -> None:
    """Write a small file that lasts."""
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link(staged: Path, target: Path) -> None:
    """Give a staged file its name, which must not exist yet, for good."""
    with naming(target):
        os.link(staged, target)
        sync(target.parent)
        staged.unlink()


def write_table(path: Path, parts: Iterable[pl.DataFrame], note: Mapping[str, str]) -> None:
    """Write a Parquet file: one row group or more per part, equal bytes for equal parts."""
    with naming(path), ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for part in parts:
            table = part.to_arrow(compat_level=pl.CompatLevel.oldest())
            if writer is None:
                writer = pq.ParquetWriter(
                    path,
                    table.schema,
                    compression="zstd",
                    column_encoding=dict.fromkeys(
                        {*DELTAS} & {*part.columns}, "DELTA_BINARY_PACKED"
                    ),
                    use_dictionary=[name for name in part.columns if name not in DISTINCT],  # type: ignore[arg-type]  # names, too
                    write_statistics=[name for name in PRUNED if name in part.columns],
                    store_schema=False,
                    write_page_checksum=True,
                )
                stack.callback(writer.close)
                writer.add_key_value_metadata(dict(note))
            writer.write_table(table, row_group_size=ROW_GROUP)
        stack.close()
        sync(path)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
