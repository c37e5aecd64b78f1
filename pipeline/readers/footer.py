"""Footers of Parquet files: what they say is checked before it is believed.

A file of a few MB can hold tens of GB of repeated text or lists that its footer does not tell of.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

BATCH = 256 << 20  # bytes that a batch should hold, by the footer
MAX_LIST = 1 << 24  # values in the lists of a row, on average over a row group
# Tokens take 1 to 4 bytes each and bombs none. Masks take none either, so below this many values
# in a row group nothing is asked.
MAX_RATIO, RATIO_FROM = 500, 1 << 26
VALUE = 8  # bytes of a list's value
BLOCK = 4 << 20  # bytes hashed at a time


def column_chunks(
    metadata: pq.FileMetaData, names: Sequence[str]
) -> Iterator[tuple[pq.RowGroupMetaData, pq.ColumnChunkMetaData]]:
    """The chunks of the columns of these names, group by group."""
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for at in range(group.num_columns):
            column = group.column(at)
            if column.path_in_schema.split(".")[0] in names:
                yield group, column


class _Reached(OSError):
    pass


class _NoPages(io.RawIOBase):
    """A file of any size whose pages cannot be read."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def tell(self) -> int:
        return 1 << 62

    def read(self, size: int = -1) -> bytes:
        raise _Reached


def check(metadata: pq.FileMetaData) -> None:
    """Let pyarrow look at every column chunk's metadata by a way on which it raises: asked for one
    that contradicts the schema, it would abort the process."""
    if not (metadata.num_rows and metadata.num_columns):
        return
    pages: Any = _NoPages()
    # With pre_buffer one call would do for all groups, but what it buffers is never freed.
    with pq.ParquetFile(pages, metadata=metadata, buffer_size=1 << 12, pre_buffer=False) as file:
        for group in range(metadata.num_row_groups):
            with contextlib.suppress(_Reached):
                next(file.iter_batches(1, [group], use_threads=False), None)


def check_rows(metadata: pq.FileMetaData, names: Sequence[str]) -> None:
    """Readers believe the footer, so rows that it leaves out would be lost without a word."""
    rows = sum(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise ValueError(f"its footer says {metadata.num_rows} rows, its row groups say {rows}")
    flat = {
        column.path
        for column in (metadata.schema.column(at) for at in range(metadata.num_columns))
        if not column.max_repetition_level
    }
    for group, column in column_chunks(metadata, names):
        if column.path_in_schema in flat and column.num_values != group.num_rows:
            raise ValueError(
                f"column {column.path_in_schema}: {column.num_values} values in a row group of "
                f"{group.num_rows} rows"
            )


def check_lists(metadata: pq.FileMetaData, names: Sequence[str], size: int) -> None:
    """Raise ValueError for lists that take far more memory than the file lets expect."""
    for group, column in column_chunks(metadata, names):
        values, rows = column.num_values, group.num_rows
        if values > MAX_LIST * max(1, rows):
            raise ValueError(
                f"column {column.path_in_schema}: {values} values in {rows} rows; no response is "
                "that long"
            )
        if values > RATIO_FROM and values * VALUE > MAX_RATIO * size:
            raise ValueError(
                f"column {column.path_in_schema}: {values} values in a file of {size} bytes; write "
                "it anew with smaller row groups if you trust it"
            )


def batch_rows(
    metadata: pq.FileMetaData, columns: Sequence[str], nested: Sequence[str], most: int
) -> int:
    """How many rows to read at a time, so that they fit into memory by what the footer says."""
    widest = 1.0
    for group, column in column_chunks(metadata, columns):
        bytes_ = column.total_uncompressed_size
        if column.path_in_schema.split(".")[0] in nested:
            bytes_ = max(bytes_, column.num_values * VALUE)
        widest = max(widest, bytes_ / max(1, group.num_rows))
    return max(1, min(most, int(BATCH / widest)))


def digest(path: Path, metadata: pq.FileMetaData, columns: Sequence[str]) -> str:
    """SHA-256 of the footer's bytes and of the raw chunks of `columns`, group by group; `metadata`
    is checked."""
    sha256 = hashlib.sha256()
    with path.open("rb") as raw:  # the footer is followed by its length and the magic word
        raw.seek(-8, 2)
        raw.seek(-8 - int.from_bytes(raw.read(4), "little"), 2)
        sha256.update(raw.read())
        for _, column in column_chunks(metadata, columns):
            raw.seek(_start(column))
            left = column.total_compressed_size
            while left > 0 and (block := raw.read(min(left, BLOCK))):
                sha256.update(block)
                left -= len(block)
    return sha256.hexdigest()


def _start(column: pq.ColumnChunkMetaData) -> int:
    pages = [column.data_page_offset, column.dictionary_page_offset or column.data_page_offset]
    return int(min(pages))
