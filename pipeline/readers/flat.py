"""Flat records, the fast path of `jsonl`: lines that all look as verl's own writer makes them.

Taken where every line has the first one's keys, in its order, once each, spaced as `json.dumps`
does it, and under each key only text, or only numbers, true, false and null. `read` gives what the
line reader would give, or None: it never guesses, and never words what is wrong.

The proof is by position. Lines hold no control character, so each line feed ends a record. A quote
that no backslash escapes begins or ends a text. What stands between texts must be the expected
bytes; numbers and words among them are matched one by one, and so is every text's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from . import constant
from .records import DTYPES, EXACT, joint, whole_kind

BLOCK = 1 << 18  # bytes looked at together: they stay in the cache
MAX_BACKSLASHES = 64  # before a quote
_LINE_FEED, _QUOTE, _BACKSLASH = b'\n"\\'
_INTEGER = r"^-?(?:0|[1-9][0-9]*)$"
_NUMBER = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$"
# The words of `fixed` that a kind agrees with.
_AGREE = {
    "null": {"bool", "number", "string", "text", "nested", "any"},
    "bool": {"bool", "any"},
    "int": {"number", "any"},
    "long": {"number", "any"},
    "float": {"number", "any"},
    "string": {"string", "text", "any"},
}


def read(
    data: bytes, fixed: Mapping[str, str], known: Mapping[str, str]
) -> tuple[pl.DataFrame, dict[str, str]] | None:
    """Rows and kinds of lines that each end in a line feed, or None.

    `fixed` and `known` say what fields hold, as in `jsonl.Reader.chunks`.
    """
    fields = _fields(data) if data.endswith(b"\n") else None
    if not fields:
        return None
    bounds = _bounds(np.frombuffer(data, np.uint8), fields)
    if bounds is None:
        return None
    # Values and what stands between them as one array of texts over the bytes as they are.
    edges: Any = np.concatenate([[0], bounds.ravel(), [len(data)]])
    pieces = pa.LargeStringArray.from_buffers(
        len(edges) - 1, pa.py_buffer(edges), pa.py_buffer(data)
    )
    try:
        pieces.validate(full=True)  # UTF-8, too
        every = pl.Series(pl.from_arrow(pieces))
        count = len(bounds)
        columns = {name: constant(None, count, DTYPES[kind]) for name, kind in known.items()}
        kinds = dict(known)
        for index, (name, is_text) in enumerate(fields.items()):
            values = every.gather_every(2 * len(fields), 2 * index + 1).alias(name)
            kind, column = _texts(values) if is_text else _scalars(values)
            if fixed.get(name, "any") not in _AGREE[kind]:
                return None
            kinds[name] = joint(known.get(name), kind)
            if kinds[name] == "mixed" or known.get(name) == "nested":
                return None
            columns[name] = column.cast(DTYPES[kinds[name]])
    except (pa.ArrowInvalid, pl.exceptions.ComputeError, _NotFlat):
        return None
    return pl.DataFrame(columns), kinds


class _NotFlat(Exception):
    """A value that the line reader has to see."""


def _fields(data: bytes) -> dict[str, bool] | None:
    """The first record's keys, each with whether text stands under it."""
    try:
        pairs: Any = json.loads(data[: data.find(b"\n")], object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, tuple) or any(isinstance(value, list | tuple) for _, value in pairs):
        return None
    plain = all(json.dumps(key, ensure_ascii=False) == f'"{key}"' for key, _ in pairs)
    fields = {key: isinstance(value, str) for key, value in pairs}
    return fields if plain and len(fields) == len(pairs) else None


def _bounds(buffer: Any, fields: Mapping[str, bool]) -> Any:
    """Begin and end of every value (a text's quotes are part of it), a row per record; None where
    a byte that belongs to no value is not the expected one."""
    ends, quotes = _marks(buffer)
    width = 2 * (len(fields) + sum(fields.values()))
    if not len(ends) or len(quotes) != width * len(ends):
        return None
    quotes = quotes.reshape(len(ends), width)
    bounds = np.empty((len(ends), 2 * len(fields)), np.int64)
    at, lead = 0, b"{"
    before: Any = np.append(0, ends[:-1] + 1)
    for index, (key, is_text) in enumerate(fields.items()):
        expected = lead + f'"{key}": '.encode()
        begin = quotes[:, at] - len(lead)
        if before is None:  # a number or word ends where the next key begins
            bounds[:, 2 * index - 1] = begin
        elif (begin != before).any():
            return None
        if not _are(buffer, begin, expected):
            return None
        bounds[:, 2 * index] = begin + len(expected)
        at, lead, before = at + 2, b", ", None
        if is_text:
            if (quotes[:, at] != bounds[:, 2 * index]).any():
                return None
            bounds[:, 2 * index + 1] = before = quotes[:, at + 1] + 1
            at += 2
    if before is None:
        bounds[:, -1] = ends - 1
    elif (ends - 1 != before).any():
        return None
    return bounds if _are(buffer, ends - 1, b"}") and (np.diff(bounds) > 0).all() else None


def _marks(buffer: Any) -> tuple[Any, Any]:
    """Where line feeds stand, and the quotes that no backslash escapes; none where there are other
    control characters."""
    found = []
    for start in range(0, len(buffer), BLOCK):
        block = buffer[start : start + BLOCK]
        found.append(np.flatnonzero((block < ord(" ")) | (block == _QUOTE)) + start)
    at = np.concatenate(found)
    ends, quotes = at[buffer[at] == _LINE_FEED], at[buffer[at] == _QUOTE]
    # Of backslashes in a row before a quote, an odd number escapes it.
    escaped = np.zeros(len(quotes), bool)
    left, back = np.arange(len(quotes)), 1
    while len(left := left[buffer[quotes[left] - back] == _BACKSLASH]):
        escaped[left] ^= True
        back += 1
        if back > MAX_BACKSLASHES:
            return at[:0], at[:0]
    return (ends, quotes[~escaped]) if len(ends) + len(quotes) == len(at) else (at[:0], at[:0])


def _are(buffer: Any, begin: Any, expected: bytes) -> bool:
    there = buffer.take(begin[:, None] + np.arange(len(expected)), mode="clip")
    return bool((there == np.frombuffer(expected, np.uint8)).all())


def _texts(values: pl.Series) -> tuple[str, pl.Series]:
    # Half of a surrogate pair would become NUL without a word.
    if values.str.contains("\\u", literal=True).any() and values.str.contains(r"\\u[dD]").any():
        raise _NotFlat
    return "string", values.str.json_decode(pl.String)


def _scalars(values: pl.Series) -> tuple[str, pl.Series]:
    """Numbers, or true and false, some of them null."""
    values = values.set(values == "null", None)
    known = values.drop_nulls()
    if not len(known):
        return "null", values.cast(pl.Null)
    if known.is_in(["true", "false"]).all():
        return "bool", values == "true"
    if not known.str.contains(_NUMBER).all():
        raise _NotFlat
    whole = known.filter(known.str.contains(_INTEGER))
    kind = "int" if len(whole) == len(known) else "float"
    read = values.cast(DTYPES[kind], strict=False)
    fits = read.null_count() == values.null_count()
    if kind == "int" and fits:
        kind = whole_kind(int(read.min()), int(read.max()))  # type: ignore[arg-type]  # none is null
    if kind == "float":  # integers among them must be exact, and -0 is no -0.0
        small = (whole.cast(pl.Float64).abs() < EXACT) & (whole != "-0")
        fits &= bool(small.all() and read.drop_nulls().is_finite().all())
    if not fits:
        raise _NotFlat
    return kind, read
