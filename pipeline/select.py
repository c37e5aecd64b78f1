"""Select: scored rollouts to verdicts. A rule names a reason; the first reason that fits wins.

Rules on a group look at the whole group, before any subset is taken.
"""

from __future__ import annotations

import polars as pl

from rollsift.schemas.recipe import Recipe

from . import segments
from .score import REASON, reason

NO_LENGTH = (1 << 63) - 1  # ranks last
TOLERANCE = 1e-6  # rewards that differ by no more are equal


def select(rollouts: pl.DataFrame, groups: pl.DataFrame, recipe: Recipe) -> pl.DataFrame:
    """Add `reason` (null where kept) and `rank` (1 first, among those that could be kept).

    `rollouts` as scored, one row per rollout; `groups` by their number, with `group_size`,
    `mean_reward`, `spread` (null where there are not two values) and `k`.
    """
    frame = rollouts.select(
        "group", "invalid", "excluded", "metric", "response_length", "reward", "correct",
        early=_row_reasons(recipe),
    )  # fmt: skip
    of = frame["group"]
    frame = frame.hstack(
        groups.select(pl.col("k").gather(of), whole=_group_reasons(recipe).gather(of))
    )
    frame = frame.hstack([_ranks(frame).alias("rank")])
    frame = frame.with_columns(reason=_all_reasons())
    if recipe.min_correct or recipe.min_incorrect:
        frame = _guard(frame, recipe)
    if recipe.no_signal == "drop":
        frame = _drop_without_signal(frame)
    return rollouts.hstack(frame[["reason", "rank"]])


def _row_reasons(recipe: Recipe) -> pl.Expr:
    """What keeps a rollout from competing, whatever its group is like."""
    return (
        pl.when(pl.col("invalid").is_not_null()).then("invalid")
        .when("excluded").then(reason("excluded"))
        .when(pl.col("response_length") < recipe.min_length).then(reason("empty"))
    )  # fmt: skip


def _group_reasons(recipe: Recipe) -> pl.Expr:
    """What keeps all of a group out; looks at the whole group."""
    nothing, mean = pl.lit(False), pl.col("mean_reward")
    incomplete = flat = outside = nothing
    if recipe.group_size is not None and recipe.incomplete == "drop":
        incomplete = pl.col("group_size") != recipe.group_size
    if recipe.zero_variance == "drop":
        flat = pl.col("spread") <= TOLERANCE
    if recipe.min_mean is not None:
        outside = outside | (mean < recipe.min_mean)
    if recipe.max_mean is not None:
        outside = outside | (mean > recipe.max_mean)
    return (
        pl.when(incomplete).then(reason("incomplete_group"))
        .when(flat).then(reason("zero_variance"))
        .when(outside).then(reason("mean_out_of_range"))
        .when(pl.col("k").is_null()).then(reason("no_difficulty"))
    )  # fmt: skip


def _ranks(frame: pl.DataFrame) -> pl.Series:
    """Place in the group by metric, length, source order; null for what cannot compete."""
    competing = frame["early"].is_null() & frame["metric"].is_not_null()
    all_do = competing.all()
    of = frame if all_do else frame.filter(competing)
    keys = [of["metric"], of["response_length"].fill_null(NO_LENGTH)]
    # By length alone it is three times as fast, where its places still fit in beside it.
    most = int(of["response_length"].max() or 0) * len(of)  # type: ignore[arg-type]  # Int64
    alone = most < 1 << 62 and (of["response_length"] == of["metric"]).all(ignore_nulls=False)
    found = segments.ranks(of["group"], *keys[bool(alone) :])
    return found if all_do else found.gather((competing.cum_sum() - 1).set(~competing, None))


def _all_reasons() -> pl.Expr:
    """Every reason but the guards' and no_signal, in order of precedence."""
    return (
        pl.when(pl.col("early").is_not_null()).then("early")
        .when(pl.col("whole").is_not_null()).then("whole")
        .when(pl.col("metric").is_null()).then(reason("no_metric"))
        .when(pl.col("rank") > pl.col("k")).then(reason("outranked"))
    )  # fmt: skip


def _guard(frame: pl.DataFrame, recipe: Recipe) -> pl.DataFrame:
    """Swap the best-ranked correct (incorrect) rollout in for the last-ranked kept other one."""
    reasons = frame["reason"].to_list()
    open_ = frame.with_row_index("at").filter(
        pl.col("reason").is_null() | (pl.col("reason") == "outranked")
    )
    for _, group in open_.sort("group", "rank").group_by("group", maintain_order=True):
        at, right = group["at"].to_list(), group["correct"].to_list()
        kept = [reason is None for reason in group["reason"]]
        least = {True: recipe.min_correct, False: recipe.min_incorrect}
        for wanted in (True, False):
            for leaves, enters in _swaps(kept, right, wanted, least):
                reasons[at[leaves]], reasons[at[enters]] = "displaced", None
    return frame.with_columns(reason=pl.Series(reasons, dtype=REASON))


def _swaps(
    kept: list[bool], right: list[bool | None], wanted: bool, least: dict[bool, int]
) -> list[tuple[int, int]]:
    """Swaps by rank, done in `kept`; the other guard is never broken for this one."""

    def count(value: bool) -> int:
        return sum(keep and value is r for keep, r in zip(kept, right, strict=True))

    swaps = []
    while count(wanted) < least[wanted]:
        spare = count(not wanted) > least[not wanted]
        enters = [i for i, keep in enumerate(kept) if not keep and right[i] is wanted]
        leaves = [
            i for i, keep in enumerate(kept)
            if keep and right[i] is not wanted and (spare or right[i] is None)
        ]  # fmt: skip
        if not enters or not leaves:
            break
        kept[enters[0]], kept[leaves[-1]] = True, False
        swaps.append((leaves[-1], enters[0]))
    return swaps


def _drop_without_signal(frame: pl.DataFrame) -> pl.DataFrame:
    kept = frame.filter(pl.col("reason").is_null())
    spread = pl.col("reward").max() - pl.col("reward").min()
    flat = kept.group_by("group").agg(flat=spread <= TOLERANCE).filter("flat")
    hit = pl.col("reason").is_null() & pl.col("group").is_in(flat["group"].implode())
    return frame.with_columns(
        reason=pl.when(hit).then(reason("no_signal")).otherwise(pl.col("reason"))
    )
