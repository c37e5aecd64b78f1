"""Stats: what was recognised in a log, or what a run holds, by verl's metric names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from rollsift.schemas.errors import InputError
from rollsift.schemas.reasons import NOT_COUNTED
from rollsift.schemas.recipe import Recipe

from .aids import NOTHING, Aids
from .carried import Carried
from .fields import could_be_reward
from .load import Loaded, load
from .score import rollouts, rules
from .sources import Logs
from .sql import query
from .store import Run, Spool

METRICS = (
    "critic/score/mean", "critic/score/max", "critic/score/min", "response_length/mean",
    "response_length/max", "response_length/min", "response_length/clip_ratio",
)  # fmt: skip


@dataclass(slots=True)
class Stats:
    """Facts in the order in which they are shown; `metrics` by verl's names, null if unknown."""

    facts: dict[str, Any]
    metrics: dict[str, float | None]
    bad: list[str] = field(default_factory=list)


def stats_of_logs(
    logs: Logs, progress: Callable[[int], None] = lambda _: None, aids: Aids = NOTHING
) -> Stats:
    """Read logs as a filter would. Raises InputError where nothing of them can be read."""
    by = rules(Recipe(), aids)
    carried = Carried()
    loaded: list[Loaded] = []
    parts: list[pl.DataFrame] = []
    bad: list[str] = []
    with TemporaryDirectory() as folder:
        for source in logs.sources:
            step = load(source, by, carried, Spool(Path(folder)), progress, need_reward=False)
            step.close()
            bad += map(str, step.bad)
            carried = step.carried
            usable = rollouts(step.rows).filter(~pl.col("padding") & ~pl.col("repeat"))
            parts.append(usable.select("step", "group", "reward", "response_length", "truncated"))
            loaded.append(step)
    rows = pl.concat(parts)
    if not len(rows) and bad:
        raise InputError("no record can be read:\n" + "\n".join(bad[:20]))
    facts = {
        "format": _formats(loaded),
        "steps": _span([source.step for source in logs.sources]),
        "rows": sum(step.records for step in loaded),
        "rollouts": len(rows),
        "groups": rows.select("step", "group").n_unique() if len(rows) else 0,
        "G": _sizes(rows),
        "groups by": _words(step.group_source for step in loaded if len(step.rows)),
        "reward field": carried.reward or _no_reward(carried.kinds),
        "length unit": carried.unit,
        "padding rows": sum(int(step.rows["padding"].sum()) for step in loaded),
        "bad records": len(bad),
        "fields": ", ".join(carried.kinds),
    }
    return Stats(facts, _metrics(rows), bad)


def _no_reward(kinds: Mapping[str, str]) -> str:
    return f"none of score, reward; numeric are {', '.join(could_be_reward(kinds)) or 'none'}"


def stats_of_run(run: Run) -> Stats:
    """Read a run's own views; metrics over all rollouts that count."""
    steps = run.steps(rows=False)
    manifests = [step.manifest for step in steps.values()]
    total = (
        query(
            run,
            "SELECT sum(rows), sum(rollouts), sum(groups), sum(kept), sum(bad_records) FROM steps",
        ).fetchone()
        or (None,) * 5
    )
    facts = {
        "recipe": run.info.recipe["name"],
        "steps": _span(list(steps)),
        "rows": total[0],
        "rollouts": total[1],
        "groups": total[2],
        "kept": total[3],
        "reward field": next((m.reward_field for m in manifests if m.reward_field), None),
        "length unit": next((m.length_unit for m in manifests if m.length_unit), None),
        "bad records": total[4],
    }
    values = query(
        run,
        f"""SELECT avg(reward), max(reward), min(reward), avg(response_length),
            max(response_length), min(response_length), avg(truncated::INT)
        FROM rollouts WHERE coalesce(reason, '') NOT IN {NOT_COUNTED}""",
    ).fetchone()
    return Stats(facts, dict(zip(METRICS, values or (), strict=False)))


def _metrics(rows: pl.DataFrame) -> dict[str, float | None]:
    reward, length, clipped = rows["reward"], rows["response_length"], rows["truncated"]
    values = (
        reward.mean(), reward.max(), reward.min(), length.mean(), length.max(), length.min(),
        clipped.mean(),
    )  # fmt: skip
    found: dict[str, Any] = dict(zip(METRICS, values, strict=True))
    return found


def _formats(loaded: list[Loaded]) -> str:
    return _words(step.format for step in loaded if step.format)


def _words(words: Any) -> str:
    return ", ".join(dict.fromkeys(words)) or "none"


def _span(steps: list[int]) -> str:
    return f"{len(steps)} ({steps[0]} to {steps[-1]})" if steps else "0"


def _sizes(rows: pl.DataFrame) -> str:
    sizes = rows.group_by("step", "group").len()["len"]
    if not len(sizes):
        return "none"
    low, *_, high = sizes.sort().to_list()[:1] + sizes.sort().to_list()[-1:]
    return str(low) if low == high else f"{low} to {high}"
