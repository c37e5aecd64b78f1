"""Judge: the whole of the filter as one pure function over one step's rows."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rollsift.schemas.recipe import BUCKETS, KPerBucket, Recipe

from .difficulty import Thresholds, buckets, group_means
from .readers import constant
from .score import Rules, rollouts, score
from .segments import counts
from .select import select


@dataclass(slots=True)
class Scored:
    """A step after scoring: its rows, its rollouts with their scores, and its groups by `group`:
    `group_size`, `mean_reward`, `difficulty`; largest less smallest reward as `reward_spread`
    (where k differs by bucket), of what zero variance is judged by as `spread` (where groups are
    dropped for it), both null where there are not two values."""

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
    return Scored(rows, scored, _groups(scored, by.recipe))


def judge(scored: Scored, recipe: Recipe, edges: Thresholds) -> Judged:
    """Give every row its verdict. Adds columns, looks only within a group, touches no file."""
    bucket = buckets(scored.groups["difficulty"], edges, recipe.difficulty.warmup)
    groups = scored.groups.hstack([bucket, _k(bucket, recipe).alias("k")])
    chosen = select(scored.rollouts, groups, recipe)
    kept = chosen["reason"].is_null()
    verdict = chosen[["correct", "metric", "rank", "reason"]].hstack([kept.alias("kept")])
    if not chosen["rollout"].equals(scored.rows["rollout"]):  # rows of one rollout share a verdict
        at = chosen["rollout"].search_sorted(scored.rows["rollout"])
        verdict = verdict.select(pl.all().gather(at))
    count = counts(chosen["group"].filter(kept), len(groups))
    return Judged(scored.rows.hstack(verdict), groups.hstack([count.alias("kept_count")]))


def _k(bucket: pl.Series, recipe: Recipe) -> pl.Series:
    """K of each group; null where k differs by bucket and the group has none."""
    if not isinstance(recipe.k, KPerBucket):
        return constant(recipe.k, len(bucket), pl.Int32)
    return bucket.replace_strict(
        {name: recipe.k_of(name) for name in (*BUCKETS, "warmup")}, return_dtype=pl.Int32
    )


def _groups(rollouts: pl.DataFrame, recipe: Recipe) -> pl.DataFrame:
    last = rollouts["group"].max()
    count = 0 if last is None else int(last) + 1  # type: ignore[arg-type]  # UInt32
    counted = rollouts[["group", "invalid", "reward", "signal", "spread"]]
    if counted["invalid"].null_count() < len(counted):
        counted = counted.filter(pl.col("invalid").is_null())
    mean = difficulty = group_means(counted["reward"], counted["group"], count)
    if not counted["signal"].equals(counted["reward"]):
        difficulty = group_means(counted["signal"], counted["group"], count)
    groups = pl.DataFrame(
        {
            "group": pl.int_range(count, dtype=pl.UInt32, eager=True),
            "group_size": counts(counted["group"], count),
            "mean_reward": mean,
            "difficulty": difficulty,
        }
    )
    spreads = {}
    if recipe.zero_variance == "drop":
        spreads["spread"] = _spread("spread")
    if isinstance(recipe.k, KPerBucket):
        spreads["reward_spread"] = _spread("reward")
    if not spreads:
        return groups
    found = counted.group_by("group").agg(**spreads)
    return groups.join(found, on="group", how="left", maintain_order="left")


def _spread(column: str) -> pl.Expr:
    known = pl.col(column).filter(pl.col(column).is_finite())
    return pl.when(known.len() > 1).then(known.max() - known.min())
