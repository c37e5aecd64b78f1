"""Tables: a judged step to what is published of it."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from rollsift.schemas.columns import ROLLOUTS
from rollsift.schemas.errors import RollsiftError
from rollsift.schemas.manifest import FORMAT, Counts, Manifest, Thresholds
from rollsift.schemas.manifest import Source as Pinned
from rollsift.schemas.reasons import NOT_COUNTED, REASONS
from rollsift.schemas.recipe import Recipe, plain

from . import difficulty, segments
from .judge import Judged
from .load import Loaded
from .sources import Source
from .texts import joined

# The integer `group` stands for the columns that the groups table holds.
STORED = ["group", *(column.name for column in ROLLOUTS if column.home == "rollouts")]
GROUPS = [
    "step", "group", "group_id", "group_source", "group_size", "kept_count", "mean_reward",
    "difficulty", "bucket", "k",
]  # fmt: skip


def rollouts_table(source: Source, loaded: Loaded, judged: Judged) -> Iterator[pl.DataFrame]:
    """The stored rows, in parts that become row groups."""
    length = loaded.length_source
    facts = judged.rows.with_columns(
        source_file=pl.lit(source.file, pl.Enum([source.file])),
        length_source=pl.lit(length, pl.Enum([length] if length else [])),
    ).select(STORED)
    if loaded.texts is None or not len(facts):
        yield facts
    else:
        yield from joined(loaded.texts, facts)


def groups_table(source: Source, loaded: Loaded, judged: Judged) -> pl.DataFrame:
    """The stored groups, by their number."""
    return judged.groups.with_columns(
        step=pl.lit(source.step, pl.Int64),
        group_id=loaded.ids,
        group_source=pl.lit(loaded.group_source),
    ).select(GROUPS)


def manifest_of(
    source: Source,
    recipe: Recipe,
    loaded: Loaded,
    judged: Judged,
    edges: difficulty.Thresholds,
    previous: str | None,
) -> Manifest:
    """The manifest of a judged step: its kept rows, groups in order of their first row."""
    rows = judged.rows.select("group", "source_row", "response_length", "reason", "kept")
    kept = rows.filter("kept")
    order = segments.by_group(kept["group"])
    kept = kept if order is None else kept[order]
    counted = rows.filter(~pl.col("reason").is_in(NOT_COUNTED).fill_null(False))
    whole = counted.group_by("group").agg(rows=pl.len(), tokens=pl.col("response_length").sum())
    groups = (
        kept.group_by("group", maintain_order=True)
        .agg(kept=pl.len())
        .join(whole, on="group", how="left", maintain_order="left")
    )
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
        counts=_counts(source, loaded, judged),
        source=[0] * len(kept),
        row=kept["source_row"].to_list(),
        offsets=[0, *groups["kept"].cum_sum().to_list()],
        group_rows=groups["rows"].to_list(),
        group_tokens=groups["tokens"].to_list(),
    )


def _text(value: float | None) -> str | None:
    return None if value is None else repr(value)


def _counts(source: Source, loaded: Loaded, judged: Judged) -> Counts:
    found = dict(judged.rows["reason"].drop_nulls().value_counts().iter_rows())
    dropped = {reason: found[reason] for reason in REASONS if reason in found}
    kept = int(judged.rows["kept"].sum())
    rows = kept + sum(dropped.values()) + len(loaded.bad)
    if rows != loaded.records:
        parts = f"kept {kept}, dropped {dropped}, bad {len(loaded.bad)}"
        raise RollsiftError(
            f"{source.file}: {loaded.records} rows are not {parts}: a fault of rollsift; report it"
        )
    return Counts(rows, kept, dropped, len(loaded.bad))
