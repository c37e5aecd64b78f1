"""Text of copied logs: what is stored beside the light facts, and under which names.

Views show logged names; the stored column of an extra is `extra.<name>` with capitals as `%xx`, so
that names which differ in case only stay apart in engines that do not see case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import polars as pl

from .fields import Fields
from .readers.records import json_text
from .store import Spool

# Columns of the contract that hold text.
TEXTS = ("uid", "prompt", "response", "ground_truth", "data_source")
_DTYPES = {"bool": pl.Boolean(), "int": pl.Int64(), "float": pl.Float64(), "null": pl.Null()}


def stored_name(field: str) -> str:
    """The stored column of an extra field."""
    return "extra." + "".join(f"%{ord(c):02x}" if c.isupper() or c == "%" else c for c in field)


def joint(one: str | None, other: str) -> str:
    """The kind of a field that holds both kinds."""
    if one in (None, "null", other):
        return other
    if other == "null":
        return str(one)
    return "float" if {one, other} == {"int", "float"} else "mixed"


def text_part(
    rows: pl.DataFrame, source_row: pl.Series, fields: Fields, kinds: Mapping[str, str], copy: bool
) -> tuple[pl.DataFrame, dict[str, str]]:
    """A chunk's text and extras under their stored names; -> (columns, kind of each extra).

    Without `copy` only what its source does not hold: the results of a reward function.
    """
    columns = {"source_row": source_row}
    for name in TEXTS if copy else ():
        logged = fields.columns.get(name)
        if logged in rows.columns:
            columns[name] = _plain(rows[logged], kinds.get(str(logged), "string"))
        else:
            columns[name] = pl.repeat(None, len(rows), dtype=pl.String, eager=True)
    found = {}
    for field in fields.extras if copy else fields.results:
        if field in rows.columns:
            columns[stored_name(field)] = rows[field]
            found[stored_name(field)] = _kind(rows[field], kinds.get(field, "null"))
    return pl.DataFrame(columns), found


def joined(spool: Spool, rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The stored table, part by part: `rows` (by `source_row`) with the text of each beside it."""
    kinds: dict[str, str] = {}
    for part in spool.kinds:
        kinds = kinds | {name: joint(kinds.get(name), kind) for name, kind in part.items()}
    order = rows["source_row"]
    for text, found in zip(spool, spool.kinds, strict=True):
        if not len(text):
            continue
        low = order.search_sorted(text["source_row"][0], "left")
        high = order.search_sorted(text["source_row"][-1], "right")
        facts = rows.slice(low, high - low)
        if len(facts) != len(text):  # rows that no group could take
            text = text.filter(pl.col("source_row").is_in(facts["source_row"].implode()))
        extras = [_typed(text, name, found.get(name), kind) for name, kind in kinds.items()]
        yield facts.hstack([text[name] for name in TEXTS if name in text.columns] + extras)


def _plain(values: pl.Series, kind: str) -> pl.Series:
    """Any value as text: strings as they are, others as JSON."""
    if kind != "mixed":
        return values.cast(pl.String)
    texts = [json.loads(text) if text and text.startswith('"') else text for text in values]
    return pl.Series(values.name, texts, pl.String)


def _kind(values: pl.Series, kind: str) -> str:
    if values.dtype == pl.String:
        return kind if kind in ("nested", "mixed") else "string"
    return next((word for word, dtype in _DTYPES.items() if dtype == values.dtype), "null")


def _typed(text: pl.DataFrame, name: str, found: str | None, kind: str) -> pl.Series:
    dtype = _DTYPES.get(kind, pl.String())
    if found is None:
        return pl.repeat(None, len(text), dtype=dtype, eager=True).alias(name)
    if kind != "mixed" or found == "mixed" or found == "nested":
        return text[name].cast(dtype)
    return json_texts(text[name])


def json_texts(values: pl.Series) -> pl.Series:
    """Each value as JSON text, as a field of mixed kinds holds it."""
    texts = [None if value is None else json_text(value) for value in values]
    return pl.Series(values.name, texts, pl.String)


class Fingerprint:
    """What a log holds besides its step, whatever the size of its chunks: equal for a batch that
    was logged again under another step."""

    def __init__(self) -> None:
        self.hashes: dict[str, hashlib._Hash] = {}

    def add(self, rows: pl.DataFrame, fields: Fields) -> None:
        """Take a chunk's logged columns."""
        for name in rows.columns:
            if name == fields.columns.get("step"):
                continue
            values = rows[name]
            if isinstance(values.dtype, pl.List):
                values = values.cast(pl.List(pl.String)).list.join(",")
            elif values.dtype != pl.String:
                values = values.cast(pl.String)
            lengths = values.str.len_bytes().cast(pl.Int64).fill_null(-1)
            known = self.hashes.setdefault(name, hashlib.sha256())
            known.update(lengths.to_numpy().tobytes())
            known.update("".join(values.drop_nulls()).encode())

    def hexdigest(self) -> str:
        """Empty where nothing was added."""
        if not self.hashes:
            return ""
        parts = [f"{name}:{known.hexdigest()}" for name, known in sorted(self.hashes.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
