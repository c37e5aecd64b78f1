"""Files: written so that they last, with equal bytes for equal content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.errors import RollsiftError

ROW_GROUP = 1 << 19
# Columns that count up or have many values, and those of small numbers: what is written fastest.
ENCODINGS = dict.fromkeys(("group", "source_row", "response_length"), "DELTA_BINARY_PACKED")
ENCODINGS |= dict.fromkeys(("sample", "rank"), "BYTE_STREAM_SPLIT")
DISTINCT = ("group_id",)  # whose values are as good as all different
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


def link(targets: Mapping[Path, Path]) -> None:
    """Give staged files their names in one folder, which must not exist yet, for good."""
    for staged, target in targets.items():
        with naming(target):
            os.link(staged, target)
    for folder in {target.parent for target in targets.values()}:
        with naming(folder):
            sync(folder)


def write_table(path: Path, parts: Iterable[pl.DataFrame], note: Mapping[str, str]) -> None:
    """Write a Parquet file: one row group or more per part, equal bytes for equal parts."""
    with naming(path), ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for part in parts:
            table = part.to_arrow(compat_level=pl.CompatLevel.oldest())
            if writer is None:
                options = _options(part, table, isinstance(parts, list))
                writer = pq.ParquetWriter(path, **options)
                stack.callback(writer.close)
                writer.add_key_value_metadata(dict(note))
            writer.write_table(table.cast(options["schema"]), row_group_size=ROW_GROUP)
        stack.close()
        sync(path)


def _options(part: pl.DataFrame, table: pa.Table, whole: bool) -> dict[str, Any]:
    """How to write a table like this first part, or like this `whole` one: nulls take time where
    there could be any."""
    fields = [f.with_nullable(not whole or table[f.name].null_count > 0) for f in table.schema]
    encodings = {name: ENCODINGS[name] for name in part.columns if name in ENCODINGS}
    return {
        "schema": pa.schema(fields),
        "compression": {n: "zstd" if t == pl.String else "lz4" for n, t in part.schema.items()},
        "column_encoding": encodings,
        "use_dictionary": [n for n in part.columns if n not in (*encodings, *DISTINCT)],
        "write_statistics": [name for name in PRUNED if name in part.columns],
        "store_schema": False,
        "write_page_checksum": True,
    }


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
