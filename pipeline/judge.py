"""Judge: the whole of the filter as one pure function over one step's rows."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rollsift.schemas.recipe import BUCKETS, KPerBucket, Recipe

from .difficulty import Thresholds, buckets, group_means
from .score import Rules, rollouts, score
from .select import select


@dataclass(slots=True)
class Scored:
    """A step after scoring: its rows, its rollouts with their scores, and its groups by `group`:
    `group_size`, `mean_reward`, `difficulty` and the spread that zero variance is judged by."""

    rows: pl.DataFrame
    rollouts: pl.DataFrame
    groups: pl.DataFrame


@dataclass(slots=True)
class Judged:
    """`rows` with the verdict columns; `groups` with `bucket`, `k` and `kept_count` added."""

    rows: pl.DataFrame
    groups: pl.DataFrame


def measure(rows: pl.DataFrame, by: Rules) -> Scored:
    """Score every rollout and sum up every group: all that needs no other step."""
    scored = score(rollouts(rows), by)
    return Scored(rows, scored, _groups(scored))


def judge(scored: Scored, recipe: Recipe, edges: Thresholds) -> Judged:
    """Give every row its verdict. Adds columns, looks only within a group, touches no file."""
    bucket = buckets(scored.groups["difficulty"], edges, recipe.difficulty.warmup)
    groups = scored.groups.with_columns(bucket=bucket, k=_k(bucket, recipe))
    chosen = select(scored.rollouts, groups, recipe)
    verdict = chosen.select(
        "rollout", "correct", "metric", "rank", "reason", kept=pl.col("reason").is_null()
    )
    rows = scored.rows.join(verdict, on="rollout", how="left", maintain_order="left")
    kept = chosen.filter(pl.col("reason").is_null()).group_by("group").len("kept_count")
    groups = groups.join(kept, on="group", how="left", maintain_order="left").with_columns(
        pl.col("kept_count").fill_null(0).cast(pl.Int32)
    )
    return Judged(rows, groups)


def _k(bucket: pl.Series, recipe: Recipe) -> pl.Series:
    """K of each group; null where k differs by bucket and the group has none."""
    if not isinstance(recipe.k, KPerBucket):
        return pl.repeat(recipe.k, len(bucket), dtype=pl.Int32, eager=True)
    return bucket.replace_strict(
        {name: recipe.k_of(name) for name in (*BUCKETS, "warmup")}, return_dtype=pl.Int32
    )


def _groups(rollouts: pl.DataFrame) -> pl.DataFrame:
    known = rollouts.filter(pl.col("group").is_not_null())
    count = int(known["group"].max()) + 1 if len(known) else 0  # type: ignore[arg-type]  # UInt32
    counted = known.filter(pl.col("invalid").is_null())
    spread = pl.col("spread").filter(pl.col("spread").is_finite())
    sums = counted.group_by("group").agg(
        group_size=pl.len().cast(pl.Int32),
        spread_min=spread.min(),
        spread_max=spread.max(),
        spread_count=spread.len(),
        reward_span=pl.col("reward").max() - pl.col("reward").min(),
    )
    groups = pl.DataFrame({"group": pl.int_range(count, dtype=pl.UInt32, eager=True)})
    return groups.join(sums, on="group", how="left", maintain_order="left").with_columns(
        pl.col("group_size").fill_null(0),
        mean_reward=group_means(counted["reward"], counted["group"], count),
        difficulty=group_means(counted["signal"], counted["group"], count),
    )
