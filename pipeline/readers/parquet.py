"""Parquet rollout logs: only the columns asked for are read, batch by batch.

Text is read as dictionaries, and batches are cut where it would expand to too much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord

from . import Chunk, Chunks, constant, footer
from .arrow_types import check_text, in_known_types, kind_of, series, validate, why_no_time
from .jsonl import NUL_IN_NAME

LIGHT_ROWS, HEAVY_ROWS = 1 << 19, 1 << 13  # rows a batch without and with lists or long text
FIRST_ROWS = 1 << 10  # rows looked at together for a first value
# What pyarrow and Polars raise for broken bytes and for types that they do not know.
UNREADABLE = (
    pa.ArrowException,
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
    OSError,
    OverflowError,
    TypeError,
    ValueError,
)


def matches(path: Path) -> bool:
    """Whether a file is Parquet by its first bytes."""
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def first(path: Path, column: str) -> Any:
    """The column's first value that is not null, None where there is none."""
    try:
        for rows, texts in ((1, []), (FIRST_ROWS, [column])):  # most often it is the first row's
            with pq.ParquetFile(path, read_dictionary=texts) as file:
                for batch in file.iter_batches(rows, columns=[column], use_threads=False):
                    if len(known := batch.column(0).drop_null()):
                        return known[0].as_py()
                    if rows == 1:
                        break
    except (*UNREADABLE, LookupError):  # the last where there is no such column
        pass
    return None


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
                self.digest = footer.digest(self.path, file.metadata, columns)
        except UNREADABLE as error:
            reason = f"cannot be read as Parquet: {first_line(error)}"
            yield Chunk(*_nothing(), {}, [BadRecord(self.file, None, None, None, reason)])

    def _fields(
        self, schema: pa.Schema, kinds: Mapping[str, str]
    ) -> tuple[dict[str, str], list[BadRecord]]:
        found: dict[str, str] = {}
        lower: dict[str, str] = {}
        bad = []
        for field in schema:
            kind = kind_of(field.type)
            reason = None
            if field.name in found:
                reason = "two columns have this name; rename one"
            elif "\0" in field.name:
                reason = NUL_IN_NAME
            elif twin := lower.get(field.name.lower()):
                reason = f"SQL cannot tell it from {twin!r}, for it does not see case; rename one"
            elif kind != "null" and not _agrees(kind, kinds.get(field.name)):
                reason = f"found {kind}, expected {kinds[field.name]} as in earlier steps"
            if reason:
                bad.append(BadRecord(self.file, None, None, field.name, reason))
            found[field.name] = kind
            lower[field.name.lower()] = field.name
        return found, bad

    def _batches(
        self, file: pq.ParquetFile, kinds: Mapping[str, str], columns: list[str], progress: Any
    ) -> Chunks:
        schema = file.schema_arrow
        heavy = [name for name in columns if pa.types.is_nested(schema.field(name).type)]
        size = self.path.stat().st_size
        footer.check(file.metadata)
        footer.check_rows(file.metadata, columns)
        footer.check_lists(file.metadata, heavy, size)
        texts = [name for name in columns if kinds[name] == "string"]
        most = HEAVY_ROWS if heavy or len(texts) > 1 else LIGHT_ROWS
        with pq.ParquetFile(self.path, metadata=file.metadata, read_dictionary=texts) as reader:
            start = 0
            # An empty file still tells its fields.
            yield Chunk(*_nothing(), kinds)
            at_a_time = footer.batch_rows(file.metadata, columns, heavy, most)
            for batch in _slices(reader.iter_batches(at_a_time, columns=columns), texts):
                batch = in_known_types(batch, columns, texts)
                bad = self._not_text(batch, texts, start) | self._odd_times(batch, start)
                places = pl.DataFrame(
                    {
                        "source_row": pl.int_range(start, start + len(batch), eager=True),
                        "line": constant(None, len(batch), pl.Int64),
                    }
                )
                start += len(batch)
                if progress:
                    progress(size * len(batch) // max(1, file.metadata.num_rows))
                if bad:
                    good = ~places["source_row"].is_in(list(bad))
                    batch, places = batch.filter(good.to_arrow()), places.filter(good)
                # Where a uid stands in many rows it is hashed once.
                rows = pl.DataFrame([series(n, batch.column(n), n != "uid") for n in columns])
                yield Chunk(places, rows, kinds, list(bad.values()))
            if start != file.metadata.num_rows:
                raise ValueError(f"its footer says {file.metadata.num_rows} rows, it holds {start}")

    def _not_text(
        self, batch: pa.RecordBatch, names: Sequence[str], start: int
    ) -> dict[int, BadRecord]:
        """Rows whose text is not UTF-8, which neither Arrow nor Polars look at."""
        bad: dict[int, BadRecord] = {}
        for name in names:
            array: Any = batch.column(name)
            try:
                array.validate(full=True)
            except pa.ArrowInvalid:
                for index, value in enumerate(_as_bytes(array)):
                    reason = _why_not_text(value.as_py())
                    if reason:
                        row = start + index
                        bad.setdefault(row, BadRecord(self.file, row, None, name, reason))
        return bad

    def _odd_times(self, batch: pa.RecordBatch, start: int) -> dict[int, BadRecord]:
        """Rows that hold a date or duration beyond those that Python has."""
        return {
            start + index: BadRecord(self.file, start + index, None, name, reason)
            for name, array in zip(batch.schema.names, batch.columns, strict=True)
            for index, reason in why_no_time(array).items()
        }


def _as_bytes(array: Any) -> Any:
    if pa.types.is_dictionary(array.type):
        return array.dictionary.cast(pa.large_binary()).take(array.indices)
    return array.cast(pa.large_binary())


def _why_not_text(value: bytes | None) -> str | None:
    try:
        (value or b"").decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} of the text: 0x{error.object[error.start]:02x} is not UTF-8"
    return None


def _nothing() -> tuple[pl.DataFrame, pl.DataFrame]:
    return pl.DataFrame(schema={"source_row": pl.Int64, "line": pl.Int64}), pl.DataFrame()


def first_line(error: Exception) -> str:
    """What an error says in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _agrees(kind: str, fixed: str | None) -> bool:
    number = kind in ("int", "float") and fixed == "number"
    return number or fixed in (None, "any", kind)


def _slices(batches: Iterable[pa.RecordBatch], texts: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The batches, cut where their text, read as dictionaries, would expand to too much."""
    for batch in batches:
        size = sum(check_text(name, batch.column(name)) for name in texts)
        step = -(-len(batch) // (1 + size // footer.BATCH))
        yield from (batch.slice(start, step) for start in range(0, len(batch), max(1, step)))


def damage(path: Path, names: Collection[str] | None = None) -> str:
    """Why a file's columns, all or those of `names`, cannot be read; empty where they can."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            footer.check(file.metadata)
            columns = [name for name in file.schema_arrow.names if names is None or name in names]
            for batch in file.iter_batches(FIRST_ROWS, columns=columns):
                for name, array in zip(columns, batch.columns, strict=True):
                    validate(name, array)
    except UNREADABLE as error:
        return f"cannot be read as Parquet: {first_line(error)}"
    return ""
