"""Values: any logged column, or what an expression gives, read as numbers or shown as text."""

from __future__ import annotations

import json
import re

import polars as pl

from .readers import constant
from .readers.records import EXACT

_JSON_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_WORDS = {
    **{"True": 1.0, "true": 1.0, "False": 0.0, "false": 0.0},
    **{"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")},
    # As numpy writes them.
    **{"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")},
}


def numbers(values: pl.Series) -> tuple[pl.Series, int]:
    """Values read as numbers, and how many were text.

    Text is read where it is a number in JSON's syntax, `True` or `False` (in lower case, too),
    `NaN`, `Infinity` or `-Infinity`. What cannot be read is null.
    """
    if values.dtype.is_numeric() or values.dtype in (pl.Boolean, pl.Null):
        return values.cast(pl.Float64), 0
    if values.dtype not in (pl.String, pl.Categorical, pl.Enum):
        return constant(None, len(values), pl.Float64), 0
    text = values.cast(pl.String).to_frame("text")
    number = pl.when(pl.col("text").str.contains(_JSON_NUMBER)).then("text").cast(pl.Float64)
    word = pl.col("text").replace_strict(_WORDS, default=None, return_dtype=pl.Float64)
    read = text.select(number.fill_null(word)).to_series().rename(values.name)
    return read, len(read) - read.null_count()


def as_text(values: pl.Series | None, count: int, kind: str | None = None) -> pl.Series:
    """Any logged values as text, equal for equal values, whatever stands beside them: lists of
    numbers joined by commas, other nested values as JSON, bytes that are no text escaped."""
    if values is None or values.dtype == pl.Null:
        return constant(None, count, pl.String)
    if kind == "mixed" or values.dtype.is_float():
        return pl.Series(values.name, map(_one_text, values), pl.String)
    if isinstance(values.dtype, pl.List) and values.dtype.inner.is_numeric():
        return values.cast(pl.List(pl.String)).list.join(",")
    if values.dtype.is_nested():
        return _nested_text(values)
    if values.dtype == pl.Binary:
        return pl.Series(values.name, map(_bytes_text, values), pl.String)
    if values.dtype in (pl.Duration, pl.Time):  # a cast refuses one and rounds the other
        return values.dt.to_string()
    return values.cast(pl.String)


def _one_text(value: str | float | None) -> str | None:
    """A number, or a mixed field's JSON, as text: strings as they are, 1.0 as 1."""
    if isinstance(value, str):
        if value.startswith('"'):
            return str(json.loads(value))
        if re.fullmatch(r"-?[0-9]+", value) or not re.fullmatch(r"[0-9.eE+-]+", value):
            return value
        return _one_text(float(value))
    if value is not None and value == value // 1 and abs(value) < EXACT:
        return str(int(value))
    return None if value is None else repr(value)


def _bytes_text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return str(value)[2:-1]


def _nested_text(values: pl.Series) -> pl.Series:
    if "Binary" not in str(values.dtype):
        texts = values.to_frame("").select(pl.struct("").struct.json_encode()).to_series()
        texts = texts.str.strip_prefix('{"":').str.strip_suffix("}")
        return texts.set(values.is_null(), None)
    items = [None if v is None else json.dumps(v, default=repr) for v in values.to_list()]
    return pl.Series(values.name, items, pl.String)


def unquoted(values: pl.Series, kind: str | None) -> pl.Series:
    """Mixed values are JSON text, in which strings stand in quotes."""
    return values.str.replace(r'(?s)^"(.*)"$', "$1") if kind == "mixed" else values
