"""Tables: a judged step to what is published of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import numpy as np
import polars as pl
import pyarrow as pa

from rollsift.schemas.columns import BAD_RECORDS, ROLLOUTS
from rollsift.schemas.errors import RollsiftError
from rollsift.schemas.manifest import FORMAT, Counts, Manifest, Thresholds
from rollsift.schemas.manifest import Source as Pinned
from rollsift.schemas.reasons import NOT_COUNTED, REASONS
from rollsift.schemas.recipe import Recipe, plain

from . import difficulty, segments
from .judge import Judged
from .load import Loaded
from .readers import constant
from .sources import Source
from .texts import joined

# The integer `group` stands for the columns that the groups table holds; what is the same in all of
# a step stands in its manifest, or in `note`.
STORED = ["group", *(c.name for c in ROLLOUTS if c.home == "rollouts")]
GROUPS = [
    "step", "group", "group_id", "group_source", "group_size", "kept_count", "mean_reward",
    "difficulty", "bucket", "k",
]  # fmt: skip


_BAD = {c.name: pl.Int64 if c.type == pa.int64() else pl.String for c in BAD_RECORDS}


def tables_of(source: Source, loaded: Loaded, judged: Judged) -> dict[str, Iterable[pl.DataFrame]]:
    """The step's tables, in parts that become row groups."""
    tables = {"rollouts": _rollouts(loaded, judged), "groups": [_groups(source, loaded, judged)]}
    if loaded.bad:
        tables["bad_records"] = [pl.DataFrame(list(map(asdict, loaded.bad)), schema=_BAD)]
    return tables


def _rollouts(loaded: Loaded, judged: Judged) -> Iterable[pl.DataFrame]:
    """The metric is null where it is the length, as it is for most recipes, and NaN where there is
    none."""
    metric, length = pl.col("metric"), pl.col("response_length").cast(pl.Float64)
    other = pl.when(metric.ne_missing(length)).then(metric.fill_null(math.nan)).alias("metric")
    facts = judged.rows.select(other if name == "metric" else name for name in STORED)
    return joined(loaded.texts, facts) if loaded.texts and len(facts) else [facts]


def note(loaded: Loaded) -> dict[str, str]:
    """What is noted beside the stored groups."""
    return {"fingerprint": loaded.fingerprint, "length_source": loaded.length_source or ""}


def _groups(source: Source, loaded: Loaded, judged: Judged) -> pl.DataFrame:
    count = len(loaded.ids)
    step = constant(source.step, count, pl.Int64)
    by = constant(loaded.group_source, count, pl.String)
    named = pl.DataFrame({"step": step, "group_id": loaded.ids, "group_source": by})
    return judged.groups.hstack(named)[GROUPS]


def manifest_of(
    source: Source,
    recipe: Recipe,
    loaded: Loaded,
    judged: Judged,
    edges: difficulty.Thresholds,
    previous: str | None,
) -> Manifest:
    """The manifest of a judged step: its kept rows, groups in order of their first row."""
    why = judged.rows["reason"].to_physical().fill_null(len(REASONS)).to_numpy()
    kept, counted = why == len(REASONS), why >= len(NOT_COUNTED)
    group = judged.rows["group"].fill_null(0).cast(pl.Int64).to_numpy()  # padding does not count
    length = judged.rows["response_length"].fill_null(0).to_numpy()
    row, of = judged.rows["source_row"].to_numpy()[kept], group[kept]
    if (order := segments.by_group(pl.Series(of))) is not None:
        row = row[order]
    sizes = np.bincount(of, minlength=len(judged.groups))
    there = sizes > 0
    whole = slice(None) if counted.all() else counted  # the first copies nothing
    rows = np.bincount(group[whole], minlength=len(sizes))
    tokens = np.zeros(len(sizes), np.int64)
    np.add.at(tokens, group[whole], length[whole])
    return Manifest(
        format=FORMAT,
        step=source.step,
        previous=previous,
        recipe=plain(recipe),
        sources=[Pinned(source.file, loaded.records, loaded.digest), *loaded.pins],
        length_unit=loaded.carried.unit,
        reward_field=loaded.carried.reward,
        field_types=loaded.carried.kinds,
        thresholds=Thresholds(_text(edges.q25), _text(edges.q50), _text(edges.q75), edges.seen),
        counts=_counts(source, loaded, np.bincount(why, minlength=len(REASONS) + 1).tolist()),
        source=[0] * len(row),
        row=row.tolist(),
        offsets=[0, *np.cumsum(sizes[there]).tolist()],
        group_rows=rows[there].tolist(),
        group_tokens=tokens[there].tolist(),
    )


def _text(value: float | None) -> str | None:
    return None if value is None else repr(value)


def _counts(source: Source, loaded: Loaded, found: Sequence[int]) -> Counts:
    """Rows by their reason, and at last the kept ones."""
    dropped = {reason: n for reason, n in zip(REASONS, found, strict=False) if n}
    rows, kept = sum(found) + len(loaded.bad), found[-1]
    if rows != loaded.records:
        parts = f"kept {kept}, dropped {dropped}, bad {len(loaded.bad)}"
        raise RollsiftError(
            f"{source.file}: {loaded.records} rows are not {parts}: a fault of rollsift; report it"
        )
    return Counts(rows, kept, dropped, len(loaded.bad))
