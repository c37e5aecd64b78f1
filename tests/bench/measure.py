"""Two jobs side by side, round by round: their ratio as one JSON line."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

ROUNDS = 5


def seconds(job: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def compare(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    goal: float | None,
    **more: object,
) -> None:
    """Print ours / theirs; a goal below 0 is the least of theirs / ours, None is no goal."""
    ours(), theirs()  # both warm
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
    at_least = goal is not None and goal < 0
    ratio = statistics.median(b / a if at_least else a / b for a, b in pairs)
    row: dict[str, object] = {"name": name, "ratio": round(ratio, 2), "goal": None, "met": None}
    if goal is not None:
        row |= {"goal": abs(goal), "met": ratio >= -goal if at_least else ratio <= goal}
    best = [round(min(pair[side] for pair in pairs), 3) for side in (0, 1)]
    print(json.dumps(row | {"seconds": best} | more), flush=True)
