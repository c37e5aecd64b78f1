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
from .readers import constant
from .store import Spool
from .values import as_text

# Columns of the contract that hold text.
TEXTS = ("uid", "prompt", "response", "ground_truth", "data_source")


def stored_name(field: str) -> str:
    """The stored column of an extra field."""
    return "extra." + "".join(f"%{ord(c):02x}" if c.isupper() or c == "%" else c for c in field)


def text_part(
    rows: pl.DataFrame, source_row: pl.Series, fields: Fields, kinds: Mapping[str, str], copy: bool
) -> pl.DataFrame:
    """A chunk's text and extras under their stored names.

    Without `copy` only what its source does not hold: the results of a reward function.
    """
    columns = {"source_row": source_row}
    for name in TEXTS if copy else ():
        logged = fields.columns.get(name)
        if logged in rows.columns:
            columns[name] = _plain(rows[logged], kinds.get(str(logged), "string"))
        else:
            columns[name] = constant(None, len(rows), pl.String)
    extras = fields.extras if copy else fields.results
    columns |= {stored_name(field): rows[field] for field in extras if field in rows.columns}
    return pl.DataFrame(columns)


def joined(spool: Spool, rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The stored table, part by part: `rows` (by `source_row`) with the text of each beside it."""
    order = rows["source_row"]
    for text in spool:
        if not len(text):
            continue
        low = order.search_sorted(text["source_row"][0], "left")
        high = order.search_sorted(text["source_row"][-1], "right")
        facts = rows.slice(low, high - low)
        if len(facts) != len(text):  # rows that no group could take
            text = text.filter(pl.col("source_row").is_in(facts["source_row"].implode()))
        yield facts.hstack(text.drop("source_row"))


def _plain(values: pl.Series, kind: str) -> pl.Series:
    """Any value as text: strings as they are, others as JSON."""
    if kind != "mixed":
        return values.cast(pl.String)
    texts = [json.loads(text) if text and text.startswith('"') else text for text in values]
    return pl.Series(values.name, texts, pl.String)


class Fingerprint:
    """What a log holds besides its step, whatever the size of its chunks: equal for a batch that
    was logged again under another step."""

    def __init__(self) -> None:
        self.hashes: dict[str, tuple[hashlib._Hash, hashlib._Hash]] = {}

    def add(self, rows: pl.DataFrame, fields: Fields) -> None:
        """Take a chunk's logged columns."""
        for name in rows.columns:
            if name == fields.columns.get("step"):
                continue
            values = rows[name]
            # Polars' own text of numbers is as good, and made faster.
            numeric = values.dtype.is_numeric()
            values = values.cast(pl.String) if numeric else as_text(values, len(values))
            lengths = values.str.len_bytes().cast(pl.Int64).fill_null(-1)
            sizes, texts = self.hashes.setdefault(name, (hashlib.sha256(), hashlib.sha256()))
            sizes.update(lengths.to_numpy().tobytes())
            texts.update("".join(values.drop_nulls()).encode())

    def hexdigest(self) -> str:
        """Empty where nothing was added."""
        if not self.hashes:
            return ""
        parts = [
            f"{name}:{sizes.hexdigest()}:{texts.hexdigest()}"
            for name, (sizes, texts) in sorted(self.hashes.items())
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
