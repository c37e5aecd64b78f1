"""Records as Python values to a chunk: what its fields hold, and which records do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from rollsift.schemas.errors import BadRecord

from . import Chunk

_KINDS = {bool: "bool", int: "int", float: "float", str: "string", list: "nested", dict: "nested"}
_EXPECTED = {
    "text": "text",
    "string": "text as in earlier steps",
    "bool": "true or false as in earlier steps",
    "number": "a number as in earlier steps",
    "nested": "a list or an object as in earlier steps",
}
# Other pairs are mixed: a float that a `long` would become is not exact.
_JOINT = {frozenset(("int", "float")): "float", frozenset(("int", "long")): "long"}
EXACT = 1 << 53  # up to here float64 holds every integer
DTYPES = {
    "null": pl.Null(), "bool": pl.Boolean(), "int": pl.Int64(), "float": pl.Float64(),
    "long": pl.Int64(), "string": pl.String(), "nested": pl.String(), "mixed": pl.String(),
}  # fmt: skip


def chunk(
    file: str,
    rows: Sequence[Mapping[str, Any]],
    places: Sequence[tuple[int, int | None]],
    bad: list[BadRecord],
    fixed: Mapping[str, str],
    known: Mapping[str, str],
) -> Chunk:
    """Records of `file`, each with its `source_row` and line, as a chunk.

    `fixed` says what fields of earlier steps hold; a value of another kind makes its record bad.
    `known` says what the fields of this file hold so far: all of them are in the chunk.
    """
    names = dict.fromkeys([*known, *(name for row in rows for name in row)])
    columns = {name: [row.get(name) for row in rows] for name in names}
    wrong: dict[int, BadRecord] = {}
    for name, values in columns.items():
        for index, found in _misfits(values, fixed.get(name)):
            reason = f"found {found}, expected {_EXPECTED[fixed[name]]}"
            record, line = places[index]
            wrong.setdefault(index, BadRecord(file, record, line, name, reason))
    if wrong:
        good = [index for index in range(len(rows)) if index not in wrong]
        columns = {name: [values[i] for i in good] for name, values in columns.items()}
        places = [places[index] for index in good]
        bad = bad + list(wrong.values())
    kinds = {
        name: "mixed" if fixed.get(name) == "mixed" else joint(known.get(name), kind_of(values))
        for name, values in columns.items()
    }
    data = {name: column(name, values, kinds[name]) for name, values in columns.items()}
    numbers = [
        pl.Series("source_row", [row for row, _ in places], pl.Int64),
        pl.Series("line", [line for _, line in places], pl.Int64),
    ]
    return Chunk(pl.DataFrame(numbers), pl.DataFrame(data), kinds, bad)


def kind_of(values: Sequence[Any]) -> str:
    """What a field holds, in the words of `Chunk.kinds`."""
    kinds = {_KINDS[found] for found in set(map(type, values)) if found is not type(None)}
    if "int" in kinds and kinds <= {"int", "float"}:
        whole = [value for value in values if isinstance(value, int)]
        kinds.remove("int")
        kinds.add(whole_kind(min(whole), max(whole)))
    kind = "null"
    for other in kinds:
        kind = joint(kind, other)
    return kind


def whole_kind(least: int, most: int) -> str:
    """What whole numbers are: `long` where a float could not hold all of them, JSON text where a
    column of 64 bits could not."""
    if least >= -EXACT and most <= EXACT:
        return "int"
    return "long" if least >= -(1 << 63) and most < 1 << 63 else "mixed"


def joint(one: str | None, other: str) -> str:
    """The kind of a field that holds both kinds; the order in which fields are joined is free."""
    if one in (None, "null", other):
        return other
    if other == "null":
        return str(one)
    return _JOINT.get(frozenset((str(one), other)), "mixed")


def column(name: str, values: Sequence[Any], kind: str) -> pl.Series:
    """Values of a kind as a Polars column; nested and mixed ones as JSON text."""
    if kind in ("nested", "mixed"):
        values = [None if value is None else json_text(value) for value in values]
    elif kind == "float":
        values = [None if value is None else float(value) for value in values]
    return pl.Series(name, values, DTYPES[kind], strict=True)


def json_text(value: Any) -> str:
    """JSON text of a parsed value, keys in their order; non-finite numbers as strings."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    except ValueError:
        return json_text(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return json.dumps(value) if isinstance(value, float) and value - value != 0 else value


def _misfits(values: Sequence[Any], kind: str | None) -> Iterator[tuple[int, str]]:
    """The values that are not of the kind, by position, each with what it is."""
    allowed: dict[str, tuple[type, ...]] = {
        "bool": (bool,), "number": (int, float), "string": (str,), "text": (str,),
        "nested": (list, dict),
    }  # fmt: skip
    if kind not in allowed:
        return
    types = {type(None), *allowed[kind]}
    if set(map(type, values)) <= types:
        return
    for index, value in enumerate(values):
        if type(value) not in types:
            yield index, word(value)


def word(value: Any) -> str:
    """What a parsed value is, for a message."""
    words = {bool: "a bool", int: "a number", float: "a number", str: "text", list: "a list"}
    return "null" if value is None else words.get(type(value), "an object")


def plain(value: Any) -> Any:
    """A value as JSON would give it: numpy's and torch's as Python's, what JSON lacks as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or type(value) in (bool, int, float):
        return value
    str(value).encode()  # half of a surrogate pair is no text
    return str(value)
