"""verl's generation Parquet: a data set's columns and `responses`, a list of texts, a row a prompt.

Each response becomes a record: `source_row` counts responses over the file, nulls too. `uid` is the
number of the prompt's row, so every row of the file is a group, and equal prompts stay apart.
`ground_truth` is reward_model's. All columns are read, but not those of bytes, such as images;
nested ones become JSON text. A column is `extra_<name>` where its name means something in a log
that it cannot mean here, such as `score`: there is one value a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord

from ..fields import IDS, LOGGED_AS, MASK, PROMPT_IDS, REWARDS
from . import Chunks, jsonl, parquet, records

PROMPTS = 64  # rows read at a time
_ROLES = {name for names in LOGGED_AS.values() for name in names} - {"prompt", "data_source"}
_TAKEN = {*_ROLES, *REWARDS, MASK, IDS, PROMPT_IDS, "response_length"}


def matches(path: Path) -> bool:
    """Whether a Parquet file holds generations: whether `responses` are lists of texts."""
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError):
        return False
    at = schema.get_field_index("responses")
    type_: Any = schema.field(at).type if at >= 0 else pa.null()
    lists = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    return lists and parquet.kind_of(type_.value_type) in ("string", "null")


def columns(schema: pa.Schema) -> list[str]:
    """The columns that are read."""
    return [field.name for field in schema if "binary" not in str(field.type)]


class Reader(jsonl.Reader):
    """One generation file. `digest` and `records` hold, after `chunks` is exhausted, the SHA-256 of
    the footer and of the column chunks read, and the number of responses."""

    def chunks(self, kinds: Mapping[str, str], progress: Any = None) -> Chunks:
        """Read the file; `kinds` fixes what fields of earlier steps hold, as in JSONL."""
        try:
            with pq.ParquetFile(self.path, memory_map=False) as file:
                names = columns(file.schema_arrow)
                if len(set(names)) < len(names):
                    raise ValueError("two columns have the same name; rename one")
                yield from self._batches(file, names, kinds, progress)
                self.digest = parquet.digest(self.path, file.metadata, names)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = f"cannot be read as Parquet: {(str(error).splitlines() or [''])[0]}"
            bad = BadRecord(self.file, None, None, None, reason)
            yield records.chunk(self.file, [], [], [bad], kinds)

    def _batches(
        self, file: pq.ParquetFile, names: list[str], kinds: Mapping[str, str], progress: Any
    ) -> Chunks:
        leaves = [file.schema.column(at) for at in range(len(file.schema.names))]
        texts = [leaf.path for leaf in leaves if leaf.logical_type.type == "STRING"]
        size = self.path.stat().st_size
        rows: list[dict[str, Any]] = []
        places: list[tuple[int, None]] = []
        prompt = held = 0
        with pq.ParquetFile(self.path, memory_map=False, read_dictionary=texts) as reader:
            for batch in reader.iter_batches(PROMPTS, columns=names):
                held += sum(map(parquet.check_text, names, batch.columns))
                for row in batch.to_pylist():
                    responses = row.pop("responses") or []
                    shared = _shared(row) | {"uid": str(prompt)}
                    prompt += 1
                    for response in responses:
                        rows.append(shared | {"response": response})
                        places.append((self.records, None))
                        self.records += 1
                if progress:
                    progress(size * len(batch) // file.metadata.num_rows)
                if held >= jsonl.CHUNK:
                    yield records.chunk(self.file, rows, places, [], kinds)
                    rows, places, held = [], [], 0
        yield records.chunk(self.file, rows, places, [], kinds)


def _shared(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a prompt's responses have in common, under the names of a log."""
    named = {
        f"extra_{name}" if name in _TAKEN else name: records.plain(value)
        for name, value in row.items()
    }
    model = named.get("reward_model")
    return named | {"ground_truth": model.get("ground_truth") if isinstance(model, dict) else None}
