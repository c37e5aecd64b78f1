"""Summary: what a filter did, and what the run now holds, for a person."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from rollsift.schemas.errors import CheckError
from rollsift.schemas.reasons import NOT_COUNTED, REASONS

from .batch import Outcome
from .readers.parquet import UNREADABLE, first_line
from .store import Run

# What is shown of the rows that count, and of those that were kept.
_COUNTED, _KEPT = ~pl.col("reason").is_in(NOT_COUNTED).fill_null(False), pl.col("reason").is_null()
_SHOWN = [
    expression.alias(f"{at} {which}")
    for which in ("counted", "kept")
    for rows in [pl.col(which)]
    for at, expression in enumerate(
        (
            rows.sum(),
            pl.col("response_length").filter(rows).sum(),
            pl.col("response_length").filter(rows).mean(),
            pl.col("truncated").filter(rows).mean(),
            pl.col("reward").filter(rows).mean(),
        )
    )
]


def _all(run: Run, kind: str, *columns: str) -> pl.LazyFrame:
    """Columns of a kind of table, of all steps."""
    paths = [run.table(kind, step.step, step.version) for step in run.steps(rows=False).values()]
    return pl.concat([pl.scan_parquet(path, glob=False).select(columns) for path in paths])


def summary(out: Path, outcome: Outcome) -> str:
    """Totals before and after, what was dropped and why, and what was written where."""
    run = Run(out)
    manifests = [step.manifest for step in run.steps(rows=False).values()]
    unit = next((m.length_unit for m in manifests if m.length_unit), "tokens")
    dropped = {
        reason: count
        for reason in REASONS
        if (count := sum(m.counts.dropped.get(reason, 0) for m in manifests))
    }
    size = pl.col("group_size")
    sizes = _all(run, "groups", "group_size").select(size.sum(), groups=(size > 0).sum())
    rows = _all(run, "rollouts", "reason", "response_length", "truncated", "reward")
    counted = rows.with_columns(counted=_COUNTED, kept=_KEPT).select(_SHOWN)
    try:
        sized, shown = (values.collect(engine="streaming").row(0) for values in (sizes, counted))
    except UNREADABLE as error:
        raise CheckError(
            f"{out}: {first_line(error)}; `rollsift verify {out}` tells more"
        ) from None
    forms = {
        "rows that count": ",.0f", f"{unit} in responses": ",.0f", f"mean length ({unit})": ".1f",
        "clip ratio": ".3f", "mean reward": ".3f",
    }  # fmt: skip
    lines = [
        f"{'':22}{'before':>14}{'after':>14}{'change':>10}",
        *map(_line, forms, shown[:5], shown[5:], forms.values()),
    ]
    counts = [manifest.counts for manifest in manifests]
    head = (
        f"{run.info.recipe['name']}: kept {sum(c.kept for c in counts):,} of "
        f"{sum(c.rows for c in counts):,} rows ({sized[0]:,} rollouts in {sized[1]:,} groups of "
        f"{len(counts):,} steps)"
    )
    why = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
    return "\n".join(
        [
            head,
            "",
            *lines,
            "",
            f"dropped   {why}",
            f"bad       {sum(c.bad_records for c in counts):,} records",
            _written(out, outcome),
        ]
    )


def _line(name: str, before: float | None, after: float | None, form: str) -> str:
    shown = ["-" if value is None else format(value, form) for value in (before, after)]
    change = f"{(after - before) / before:+.1%}" if before and after is not None else ""
    return f"{name:22}{shown[0]:>14}{shown[1]:>14}{change:>10}".rstrip()


def _written(out: Path, outcome: Outcome) -> str:
    parts = [
        f"{len(steps):,} {word} ({_range(steps)})"
        for word, steps in (
            ("new", outcome.published),
            ("new versions", outcome.replaced),
            ("unchanged", outcome.unchanged),
        )
        if steps
    ]
    return f"written   {out}: steps {', '.join(parts)}"


def _range(steps: list[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
