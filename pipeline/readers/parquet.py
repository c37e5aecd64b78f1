"""Parquet rollout logs: only the columns asked for are read, batch by batch.

Text is read as dictionaries and its expanded size is checked first: a file of a few MB can hold
tens of GB of repeated text that its footer does not tell of.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord

from . import Chunk, Chunks

LIGHT_ROWS, HEAVY_ROWS = 1 << 17, 1 << 13  # rows a batch without and with lists or long text
BATCH = 256 << 20  # bytes that a batch should hold, by the footer
MAX_BATCH = 2 << 30  # bytes of text that a batch may expand to
MAX_LIST = 1 << 24  # values in the lists of a row, on average over a row group
# Tokens take 1 to 4 bytes each and bombs none. Masks take none either, so below this many values
# in a row group nothing is asked.
MAX_RATIO, RATIO_FROM = 500, 1 << 26
VALUE = 8  # bytes of a list's value
BLOCK = 4 << 20  # bytes hashed at a time


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
            for batch in file.iter_batches(LIGHT_ROWS, columns=[column]):
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
                for name in heavy:
                    batch.column(name).validate(full=True)  # Polars would panic at bad text
                bad = self._not_text(batch, texts, start)
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
                rows = pl.DataFrame({name: _series(name, batch.column(name)) for name in columns})
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
    if metadata.num_rows and metadata.num_columns:
        pages: Any = _NoPages()
        groups = list(range(metadata.num_row_groups))
        file = pq.ParquetFile(pages, metadata=metadata, buffer_size=1 << 12, pre_buffer=True)
        with file, contextlib.suppress(_Reached):
            next(file.iter_batches(1, row_groups=groups))


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


def _series(name: str, array: Any) -> pl.Series:
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    elif (known := _known(array.type)) != array.type:
        array = array.cast(known)
    return pl.Series(name, pl.from_arrow(array))


def _known(type_: Any) -> Any:
    """The type that Polars knows for one that it does not: other lists, half floats, decimals of
    256 bits, maps."""
    if pa.types.is_float16(type_):
        return pa.float32()
    if pa.types.is_decimal256(type_):
        return pa.float64()
    if isinstance(type_, pa.MapType):
        pair = [("key", _known(type_.key_type)), ("value", _known(type_.item_type))]
        return pa.list_(pa.struct(pair))
    if isinstance(type_, pa.LargeListType | pa.LargeListViewType):
        return pa.large_list(_known(type_.value_type))
    if isinstance(type_, pa.ListType | pa.ListViewType | pa.FixedSizeListType):
        return pa.list_(_known(type_.value_type))
    if isinstance(type_, pa.StructType):
        return pa.struct([field.with_type(_known(field.type)) for field in type_])
    return type_


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
