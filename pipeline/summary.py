"""Summary: what a filter did, and what the run now holds, for a person."""

from __future__ import annotations

from pathlib import Path

from rollsift.schemas.reasons import NOT_COUNTED, REASONS

from .batch import Outcome
from .sql import query
from .store import Run

_TOTALS = """
    SELECT count(*) AS steps, sum(rows) AS rows, sum(groups) AS groups, sum(kept) AS kept,
        sum(rollouts) AS rollouts, sum(bad_records) AS bad_records,
        sum(tokens_before) AS tokens_before, sum(tokens_after) AS tokens_after
    FROM steps"""
_MEANS = """
    SELECT count(*) AS n, avg(response_length) AS length, avg(truncated::INT) AS clip,
        avg(reward) AS reward
    FROM rollouts
    WHERE {which}"""


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
    totals = query(run, _TOTALS).fetchone()
    assert totals is not None  # an aggregate gives a row
    steps, rows, groups, kept, rollouts, bad, tokens, kept_tokens = (int(x or 0) for x in totals)
    uncounted = ", ".join(f"'{reason}'" for reason in NOT_COUNTED)
    counted = f"coalesce(reason, '') NOT IN ({uncounted})"
    before = query(run, _MEANS.format(which=counted)).fetchone()
    after = query(run, _MEANS.format(which="kept")).fetchone()
    assert before is not None
    assert after is not None
    lines = [
        f"{'':22}{'before':>14}{'after':>14}{'change':>10}",
        _line("rows that count", float(before[0]), float(after[0])),
        _line(f"{unit} in responses", float(tokens), float(kept_tokens)),
        _line(f"mean length ({unit})", before[1], after[1], ".1f"),
        _line("clip ratio", before[2], after[2], ".3f"),
        _line("mean reward", before[3], after[3], ".3f"),
    ]
    head = (
        f"{run.info.recipe['name']}: kept {kept:,} of {rows:,} rows "
        f"({rollouts:,} rollouts in {groups:,} groups of {steps:,} steps)"
    )
    why = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
    return "\n".join(
        [
            head,
            "",
            *lines,
            "",
            f"dropped   {why}",
            f"bad       {bad:,} records",
            _written(out, outcome),
        ]
    )


def _line(name: str, before: float | None, after: float | None, form: str = ",.0f") -> str:
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
