"""Parquet rollout logs: only the columns asked for are read, batch by batch.

Text is read as dictionaries and its expanded size is checked first: a file of a few MB can hold
tens of GB of repeated text that its footer does not tell of.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord

from . import Chunk, Chunks
from .jsonl import NUL_IN_NAME

LIGHT_ROWS, HEAVY_ROWS = 1 << 17, 1 << 13  # rows a batch without and with lists or long text
FIRST_ROWS = 1 << 10  # rows looked at together for a first value
BATCH = 256 << 20  # bytes that a batch should hold, by the footer
MAX_BATCH = 2 << 30  # bytes of text that a batch may expand to
MAX_LIST = 1 << 24  # values in the lists of a row, on average over a row group
# Tokens take 1 to 4 bytes each and bombs none. Masks take none either, so below this many values
# in a row group nothing is asked.
MAX_RATIO, RATIO_FROM = 500, 1 << 26
VALUE = 8  # bytes of a list's value
BLOCK = 4 << 20  # bytes hashed at a time
# What Python's datetime can hold, in days from 1970, and DuckDB's interval; the seconds of a day.
YEARS, DAYS, DAY = (-719_162, 2_932_896), 106_751_990, 86_400


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
        with pq.ParquetFile(path, read_dictionary=[column]) as file:
            for batch in file.iter_batches(FIRST_ROWS, columns=[column]):
                if len(known := batch.column(0).drop_null()):
                    return known[0].as_py()
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
                self.digest = digest(self.path, file.metadata, columns)
        except UNREADABLE as error:
            reason = f"cannot be read as Parquet: {_first_line(error)}"
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
        _check_footer(file.metadata)
        _check_rows(file.metadata, columns)
        _check_lists(file.metadata, heavy, size)
        texts = [name for name in columns if kinds[name] == "string"]
        most = HEAVY_ROWS if heavy or len(texts) > 1 else LIGHT_ROWS
        with pq.ParquetFile(self.path, memory_map=False, read_dictionary=texts) as reader:
            start = 0
            # An empty file still tells its fields.
            yield Chunk(*_nothing(), kinds)
            at_a_time = _batch_rows(file.metadata, columns, heavy, most)
            for batch in _slices(reader.iter_batches(at_a_time, columns=columns), texts):
                batch = _in_known_types(batch, columns, texts)
                bad = self._not_text(batch, texts, start) | self._odd_times(batch, start)
                places = pl.DataFrame(
                    {
                        "source_row": pl.int_range(start, start + len(batch), eager=True),
                        "line": pl.repeat(None, len(batch), dtype=pl.Int64, eager=True),
                    }
                )
                start += len(batch)
                if progress:
                    progress(size * len(batch) // max(1, file.metadata.num_rows))
                if bad:
                    good = ~places["source_row"].is_in(list(bad))
                    batch, places = batch.filter(good.to_arrow()), places.filter(good)
                rows = pl.DataFrame([_series(name, batch.column(name)) for name in columns])
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
            for index, reason in _why_no_time(array).items()
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


def _why_no_time(array: Any) -> dict[int, str]:
    """Why values hold a date or duration that Python cannot show, by their place."""
    type_ = array.type
    if pa.types.is_struct(type_):
        inner = [_why_no_time(field) for field in array.flatten()]
        return {at: reason for found in inner for at, reason in found.items()}
    if pa.types.is_nested(type_):
        found = _why_no_time(array.flatten())
        rows = pc.list_parent_indices(array) if found else []
        return {rows[at].as_py(): reason for at, reason in found.items()}
    if not pa.types.is_temporal(type_) or pa.types.is_time(type_):  # validated
        return {}
    least, most, expected = _times(type_)
    values = array.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    odd: Any = pc.or_(pc.less(values, least), pc.greater(values, most))  # type: ignore[call-overload]  # numbers, too
    return {
        at: f"found {values[at]} as {type_}, expected {expected}"
        for at in pc.indices_nonzero(odd).to_pylist()
    }


def _times(type_: Any) -> tuple[int, int, str]:
    """The least and the most of such a type that Python has, and what this is in words."""
    ticks = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    day = 1 if pa.types.is_date32(type_) else DAY * ticks[getattr(type_, "unit", "ms")]
    first, last, expected = *YEARS, "a time in the years 1 to 9999"
    if pa.types.is_duration(type_):
        first, last, expected = -DAYS, DAYS, f"at most {DAYS:,} days"
    elif getattr(type_, "tz", None):  # which may be hours from UTC
        first, last = first + 1, last - 1
    return max(first * day, -(1 << 63)), min((last + 1) * day, 1 << 63) - 1, expected


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


def _column_chunks(
    metadata: pq.FileMetaData, names: Sequence[str]
) -> Iterator[tuple[pq.RowGroupMetaData, pq.ColumnChunkMetaData]]:
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


def _check_footer(metadata: pq.FileMetaData) -> None:
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


def _check_rows(metadata: pq.FileMetaData, names: Sequence[str]) -> None:
    """Readers believe the footer, so rows that it leaves out would be lost without a word."""
    rows = sum(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise ValueError(f"its footer says {metadata.num_rows} rows, its row groups say {rows}")
    flat = {
        column.path
        for column in (metadata.schema.column(at) for at in range(metadata.num_columns))
        if not column.max_repetition_level
    }
    for group, column in _column_chunks(metadata, names):
        if column.path_in_schema in flat and column.num_values != group.num_rows:
            raise ValueError(
                f"column {column.path_in_schema}: {column.num_values} values in a row group of "
                f"{group.num_rows} rows"
            )


def _check_lists(metadata: pq.FileMetaData, names: Sequence[str], size: int) -> None:
    for group, column in _column_chunks(metadata, names):
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


def _batch_rows(
    metadata: pq.FileMetaData, columns: Sequence[str], nested: Sequence[str], most: int
) -> int:
    """How many rows to read at a time, so that they fit into memory by what the footer says."""
    widest = 1.0
    for group, column in _column_chunks(metadata, columns):
        bytes_ = column.total_uncompressed_size
        if column.path_in_schema.split(".")[0] in nested:
            bytes_ = max(bytes_, column.num_values * VALUE)
        widest = max(widest, bytes_ / max(1, group.num_rows))
    return max(1, min(most, int(BATCH / widest)))


def _slices(batches: Iterable[pa.RecordBatch], texts: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The batches, cut where their text, read as dictionaries, would expand to more than BATCH."""
    for batch in batches:
        size = sum(check_text(name, batch.column(name)) for name in texts)
        step = -(-len(batch) // (1 + size // BATCH))
        yield from (batch.slice(start, step) for start in range(0, len(batch), max(1, step)))


def _in_known_types(
    batch: pa.RecordBatch, names: Sequence[str], texts: Sequence[str]
) -> pa.RecordBatch:
    """The columns as Polars knows them, but text as it was read."""
    arrays: list[Any] = []
    for name in names:
        array: Any = batch.column(name)
        if name not in texts:
            _validate(name, array)  # Polars would panic at bad text in it
            array = _known(array)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, list(names))


def _validate(name: str, array: Any) -> None:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {name}: {error}") from None


def _series(name: str, array: Any) -> pl.Series:
    if pa.types.is_dictionary(array.type):
        values = pl.Series(name, pl.from_arrow(array.dictionary))
        return values.gather(pl.Series(pl.from_arrow(array.indices)))
    return pl.Series(name, pl.from_arrow(array))


def _known(array: Any) -> Any:
    """An array in types that Polars knows: not half floats, decimals of 256 bits, maps, extensions,
    dictionaries, other lists (which pyarrow's own cast breaks: it leaves out the last offset)."""
    type_ = array.type
    if isinstance(type_, pa.BaseExtensionType):
        return _known(array.storage)
    if pa.types.is_dictionary(type_):
        return _known(array.dictionary_decode())
    if pa.types.is_float16(type_):
        return array.cast(pa.float32())
    if pa.types.is_decimal256(type_):
        return array.cast(pa.float64())
    if not pa.types.is_nested(type_):
        return array
    gone = array.is_null() if array.null_count else None
    if isinstance(type_, pa.MapType):
        pair = pa.struct([("key", type_.key_type), ("value", type_.item_type)])
        return _known(array.cast(pa.list_(pair)))
    if pa.types.is_struct(type_):
        fields = [_known(field) for field in array.flatten()]
        return pa.StructArray.from_arrays(fields, [field.name for field in type_], mask=gone)
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64()))
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    return pa.LargeListArray.from_arrays(offsets, _known(array.flatten()), mask=gone)


def check_text(name: str, array: Any) -> int:
    """Bytes that the text of a column read as dictionaries expands to, in nested columns too."""
    size = _expanded(array)
    if size > MAX_BATCH:
        raise ValueError(f"column {name}: its text expands to more than {MAX_BATCH >> 30} GiB")
    return size


def _expanded(array: Any) -> int:
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        return pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
    if not pa.types.is_nested(array.type):
        return 0
    inner = array.flatten() if pa.types.is_struct(array.type) else [array.values]
    return sum(map(_expanded, inner))


def damage(path: Path, names: Collection[str] | None = None) -> str:
    """Why a file's columns, all or those of `names`, cannot be read; empty where they can."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_footer(file.metadata)
            columns = [name for name in file.schema_arrow.names if names is None or name in names]
            for batch in file.iter_batches(FIRST_ROWS, columns=columns):
                for name, array in zip(columns, batch.columns, strict=True):
                    _validate(name, array)
    except UNREADABLE as error:
        return f"cannot be read as Parquet: {_first_line(error)}"
    return ""


def digest(path: Path, metadata: pq.FileMetaData, columns: Sequence[str]) -> str:
    """SHA-256 of the footer's bytes and of the raw chunks of `columns`, group by group.

    Raises as reading does where the footer cannot be read.
    """
    _check_footer(metadata)
    sha256 = hashlib.sha256()
    with path.open("rb") as raw:  # the footer is followed by its length and the magic word
        raw.seek(-8, 2)
        raw.seek(-8 - int.from_bytes(raw.read(4), "little"), 2)
        sha256.update(raw.read())
        for _, column in _column_chunks(metadata, columns):
            raw.seek(_start(column))
            left = column.total_compressed_size
            while left > 0 and (block := raw.read(min(left, BLOCK))):
                sha256.update(block)
                left -= len(block)
    return sha256.hexdigest()


def _start(column: pq.ColumnChunkMetaData) -> int:
    pages = [column.data_page_offset, column.dictionary_page_offset or column.data_page_offset]
    return int(min(pages))
