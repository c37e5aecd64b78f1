"""verl's generation Parquet: a data set's columns and `responses`, a list of texts, a row a prompt.

Each response becomes a record: `source_row` counts responses over the file, nulls too. `uid` is the
number of the prompt's row, so every row of the file is a group, and equal prompts stay apart.
`ground_truth` is reward_model's. All columns are read, but not those of bytes, such as images;
nested ones become JSON text. A column is `extra_<name>` where its name means something in a log
that it cannot mean here, such as `score`: there is one value a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord

from ..fields import IDS, LOGGED_AS, MASK, PROMPT_IDS, REWARDS
from . import Chunk, Chunks, arrow_types, jsonl, parquet, records

PROMPTS = 1 << 10  # rows whose responses make a chunk
_ROLES = {name for names in LOGGED_AS.values() for name in names} - {"prompt", "data_source"}
_TAKEN = {*_ROLES, *REWARDS, MASK, IDS, PROMPT_IDS, "response_length"}


def matches(path: Path) -> bool:
    """Whether a Parquet file holds generations: whether `responses` are lists of texts."""
    try:
        schema = pq.read_schema(path)
    except parquet.UNREADABLE:
        return False
    at = schema.get_field_index("responses")
    type_: Any = schema.field(at).type if at >= 0 else pa.null()
    lists = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    return lists and arrow_types.kind_of(type_.value_type) in ("string", "null")


def columns(schema: pa.Schema) -> list[str]:
    """The columns that are read."""
    return [field.name for field in schema if "binary" not in str(field.type)]


class Reader(jsonl.Reader):
    """One generation file. `digest` and `records` hold, after `chunks` is exhausted, the SHA-256 of
    the footer and of the column chunks read, and the number of responses."""

    def chunks(
        self, fixed: Mapping[str, str], known: Mapping[str, str], progress: Any = None
    ) -> Chunks:
        """Read the file; `fixed` and `known` say what fields hold, as in JSONL."""
        prompts = parquet.Reader(self.path, self.file)
        bad: list[BadRecord] = []
        number = 0
        try:
            names = columns(pq.read_schema(self.path))
            for chunk in prompts.chunks({}, lambda _: names, progress):
                bad += chunk.bad
                for rows in chunk.rows.iter_slices(PROMPTS):
                    yield self._responses(rows, number, fixed, known)
                    number += len(rows)
        except parquet.UNREADABLE as error:
            bad.append(BadRecord(self.file, None, None, None, f"cannot be read: {error}"))
        # Of a prompt that cannot be read, the responses cannot be counted.
        bad = [replace(record, source_row=None) for record in bad]
        yield records.chunk(self.file, [], [], bad, fixed, known)
        self.digest = prompts.digest

    def _responses(
        self,
        prompts: pl.DataFrame,
        first: int,
        fixed: Mapping[str, str],
        known: Mapping[str, str],
    ) -> Chunk:
        rows = [
            shared | {"response": response}
            for number, prompt in enumerate(prompts.iter_rows(named=True), first)
            for responses in [prompt.pop("responses") or []]
            for shared in [_shared(prompt) | {"uid": str(number)}]
            for response in responses
        ]
        places = [(self.records + index, None) for index in range(len(rows))]
        self.records += len(rows)
        return records.chunk(self.file, rows, places, [], fixed, known)


def _shared(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a prompt's responses have in common, under the names of a log."""
    named = {
        f"extra_{name}" if name in _TAKEN else name: records.plain(value)
        for name, value in row.items()
    }
    model = named.get("reward_model")
    return named | {"ground_truth": model.get("ground_truth") if isinstance(model, dict) else None}
