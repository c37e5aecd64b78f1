"""Parquet rollout logs: only the columns asked for are read, batch by batch.

Text is read as dictionaries and its expanded size is checked first: a file of a few MB can hold
tens of GB of repeated text that its footer does not tell of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord

from . import Chunk, Chunks

LIGHT_ROWS, HEAVY_ROWS = 1 << 17, 1 << 13  # rows a batch without and with lists or long text
MAX_BATCH = 2 << 30  # bytes of text that a batch may expand to
MAX_LIST = 1 << 24  # values in the lists of a row, on average over a row group


class Reader:
    """One Parquet file. `digest` and `records` hold, after `chunks` is exhausted, the SHA-256 of
    the footer and of the column chunks read, and the number of rows."""

    def __init__(self, path: Path, file: str) -> None:
        self.path, self.file = path, file
        self.records = 0
        self.digest = ""

    def chunks(
        self,
        kinds: Mapping[str, str],
        choose: Callable[[Mapping[str, str]], Sequence[str]],
        progress: Any = None,
    ) -> Chunks:
        """Read the columns that `choose` picks from all fields (name -> kind).

        `kinds` fixes what fields of earlier steps hold. What is wrong stands in the chunks' `bad`:
        a file that cannot be read as a record without a row.
        """
        try:
            with pq.ParquetFile(self.path, memory_map=False) as file:
                found, bad = self._fields(file.schema_arrow, kinds)
                if bad:
                    yield Chunk(*_nothing(), found, bad)
                    return
                columns = list(choose(found))
                yield from self._batches(file, found, columns, progress)
                self.records = file.metadata.num_rows
                self.digest = digest(self.path, file.metadata, columns)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = f"cannot be read as Parquet: {_first_line(error)}"
            yield Chunk(*_nothing(), {}, [BadRecord(self.file, None, None, None, reason)])

    def _fields(
        self, schema: pa.Schema, kinds: Mapping[str, str]
    ) -> tuple[dict[str, str], list[BadRecord]]:
        found: dict[str, str] = {}
        bad = []
        for field in schema:
            kind = kind_of(field.type)
            reason = None
            if field.name in found:
                reason = "two columns have this name; rename one"
            elif kind != "null" and not _agrees(kind, kinds.get(field.name)):
                reason = f"found {kind}, expected {kinds[field.name]} as in earlier steps"
            if reason:
                bad.append(BadRecord(self.file, None, None, field.name, reason))
            found[field.name] = kind
        return found, bad

    def _batches(
        self, file: pq.ParquetFile, kinds: Mapping[str, str], columns: list[str], progress: Any
    ) -> Chunks:
        schema = file.schema_arrow
        heavy = [name for name in columns if pa.types.is_nested(schema.field(name).type)]
        _check_lists(file.metadata, heavy)
        texts = [name for name in columns if _is_text(schema.field(name).type)]
        size = self.path.stat().st_size
        with pq.ParquetFile(self.path, memory_map=False, read_dictionary=texts) as reader:
            start = 0
            # An empty file still tells its fields.
            yield Chunk(*_nothing(), kinds)
            for batch in reader.iter_batches(
                HEAVY_ROWS if heavy or len(texts) > 1 else LIGHT_ROWS, columns=columns
            ):
                rows = pl.DataFrame([_series(name, batch.column(name)) for name in columns])
                places = pl.DataFrame(
                    {
                        "source_row": pl.int_range(start, start + len(batch), eager=True),
                        "line": pl.repeat(None, len(batch), dtype=pl.Int64, eager=True),
                    }
                )
                start += len(batch)
                if progress:
                    progress(size * len(batch) // max(1, file.metadata.num_rows))
                yield Chunk(places, rows, kinds)


def _nothing() -> tuple[pl.DataFrame, pl.DataFrame]:
    return pl.DataFrame(schema={"source_row": pl.Int64, "line": pl.Int64}), pl.DataFrame()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def kind_of(type_: pa.DataType) -> str:
    """What a column of an Arrow type holds, in the words of `Chunk.kinds`."""
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if pa.types.is_boolean(type_):
        return "bool"
    if pa.types.is_integer(type_):
        return "int"
    if pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return "float"
    if _is_text(type_) or pa.types.is_string_view(type_):
        return "string"
    if pa.types.is_null(type_):
        return "null"
    if pa.types.is_nested(type_):
        return "nested"
    return str(type_)


def _agrees(kind: str, fixed: str | None) -> bool:
    number = kind in ("int", "float") and fixed == "number"
    return number or fixed in (None, "any", kind)


def _check_lists(metadata: pq.FileMetaData, names: Sequence[str]) -> None:
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for at in range(group.num_columns):
            column = group.column(at)
            if column.path_in_schema.split(".")[0] in names and column.num_values > MAX_LIST * max(
                1, group.num_rows
            ):
                raise ValueError(
                    f"column {column.path_in_schema}: {column.num_values} values in "
                    f"{group.num_rows} rows; no response is that long"
                )


def _series(name: str, array: Any) -> pl.Series:
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        if (pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0) > MAX_BATCH:
            raise ValueError(f"column {name}: its text expands to more than {MAX_BATCH >> 30} GiB")
        array = array.cast(array.type.value_type)
    elif pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    return pl.Series(name, pl.from_arrow(array))


def digest(path: Path, metadata: pq.FileMetaData, columns: Sequence[str]) -> str:
    """SHA-256 of the footer's bytes and of the raw chunks of `columns`, group by group."""
    sha256 = hashlib.sha256()
    with path.open("rb") as raw:  # the footer is followed by its length and the magic word
        raw.seek(-8, 2)
        raw.seek(-8 - int.from_bytes(raw.read(4), "little"), 2)
        sha256.update(raw.read())
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            for at in range(group.num_columns):
                column = group.column(at)
                if column.path_in_schema.split(".")[0] in columns:
                    raw.seek(_start(column))
                    sha256.update(raw.read(column.total_compressed_size))
    return sha256.hexdigest()


def _start(column: pq.ColumnChunkMetaData) -> int:
    pages = [column.data_page_offset, column.dictionary_page_offset or column.data_page_offset]
    return int(min(pages))
