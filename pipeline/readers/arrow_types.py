"""Arrow's types to those that Polars knows, and values that Python and UTF-8 do not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

MAX_BATCH = 2 << 30  # bytes of text that a batch may expand to
TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
# What Python's datetime can hold, in days from 1970, and DuckDB's interval; the seconds of a day.
YEARS, DAYS, DAY = (-719_162, 2_932_896), 106_751_990, 86_400


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
    if any(test(type_) for test in TEXT):
        return "string"
    if pa.types.is_null(type_):
        return "null"
    if pa.types.is_nested(type_):
        return "nested"
    return str(type_)


def in_known_types(
    batch: pa.RecordBatch, names: Sequence[str], texts: Sequence[str]
) -> pa.RecordBatch:
    """The columns as Polars knows them, but text as it was read."""
    arrays: list[Any] = []
    for name in names:
        array: Any = batch.column(name)
        if name not in texts:
            validate(name, array)  # Polars would panic at bad text in it
            array = _known(array)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, list(names))


def validate(name: str, array: Any) -> None:
    """Raise ValueError naming the column where values are none of its type, such as bad UTF-8."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {name}: {error}") from None


def series(name: str, array: Any, expanded: bool = True) -> pl.Series:
    """A column for Polars, dictionaries expanded or as Categorical."""
    if pa.types.is_dictionary(array.type) and expanded:
        values = pl.Series(name, pl.from_arrow(array.dictionary))
        return values.gather(pl.Series(pl.from_arrow(array.indices)))
    return pl.Series(name, pl.from_arrow(array))


def check_text(name: str, array: Any) -> int:
    """Bytes that the text of a column read as dictionaries expands to, in nested columns too."""
    size = _expanded(array)
    if size > MAX_BATCH:
        raise ValueError(f"column {name}: its text expands to more than {MAX_BATCH >> 30} GiB")
    return size


def _expanded(array: Any) -> int:
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary)
        if (most := (pc.max(lengths).as_py() or 0) * len(array)) <= MAX_BATCH >> 3:
            return most
        return pc.sum(pc.cast(lengths.take(array.indices), pa.int64())).as_py() or 0
    if not pa.types.is_nested(array.type):
        return 0
    inner = array.flatten() if pa.types.is_struct(array.type) else [array.values]
    return sum(map(_expanded, inner))


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


def why_no_time(array: Any) -> dict[int, str]:
    """Why values hold a date or duration that Python cannot show, by their place."""
    type_ = array.type
    if pa.types.is_struct(type_):
        inner = [why_no_time(field) for field in array.flatten()]
        return {at: reason for found in inner for at, reason in found.items()}
    if pa.types.is_nested(type_):
        found = why_no_time(array.flatten())
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
