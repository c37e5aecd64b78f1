"""Readers: bytes of one log file to rows under the names they were logged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from rollsift.schemas.errors import BadRecord


@dataclass(slots=True)
class Chunk:
    """Some consecutive records of a file.

    `places` has `source_row` (Int64, from 0 in the file) and `line` (Int64, physical line from 1,
    null in Parquet); `rows` has a column per logged field, beside it row by row. `kinds` says what
    each field holds in the file up to here: null, bool, int, long (integers beyond 2**53), float,
    string, nested (lists, objects) or mixed, the last two as JSON text in JSONL; in Parquet also
    other types by their Arrow names. Records that cannot be used are in `bad` and nowhere else.
    """

    places: pl.DataFrame
    rows: pl.DataFrame
    kinds: Mapping[str, str]
    bad: list[BadRecord] = field(default_factory=list)


Chunks = Iterator[Chunk]


def constant(value: Any, count: int, dtype: Any) -> pl.Series:
    """One value in every row, made without Polars' engine, which for few rows takes long."""
    return pl.Series([value], dtype=dtype).new_from_index(0, count)
