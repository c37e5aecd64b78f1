"""Preflight: all that is replayed is looked at before the first update, each rank a part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollsift.pipeline.captured import captured
from rollsift.pipeline.readers.parquet import UNREADABLE
from rollsift.schemas.errors import CheckError, InputError

from .dataset import Replay
from .plan import Ints, Plan
from .tokens import light

# Columns that say that a row needs more than its tokens, here and in other logs.
MORE_THAN_TOKENS = ("multimodal", "multi_modal_inputs", "multi_modal_data", "images", "videos")
ROUTED = ("router_replay", "routed_experts")


def check(
    data: Replay,
    *,
    recomputed: bool,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Make every `part`-th item (index, of how many) and let it go again.

    Raises what an item raises, and InputError or CheckError for a log that is not the one that was
    filtered, and rows that cannot be replayed: with images, or with experts logged where log-probs
    are not `recomputed`.
    """
    for index in range(part[0], len(data), part[1]):
        update = data.plan.update(index)
        _check_source(data.plan, index, update.path)
        rows = update.rows
        if data.rules.rejected:
            rows = np.concatenate([rows, data.plan.rejected(index, update)])
        _refuse(update.path, rows, MORE_THAN_TOKENS, "has inputs other than tokens, whose "
                "positions verl counts in another way: not replayed")  # fmt: skip
        if not recomputed:
            _refuse(update.path, rows, ROUTED, "was sampled for router replay, so its logged "
                    "log-probs are not this model's: use --old-log-probs recompute")  # fmt: skip
        data[index]
        progress(min(index + part[1], len(data)))


def _check_source(plan: Plan, index: int, path: Path) -> None:
    """Raise CheckError where a log is not the one that its manifest pins."""
    from rollsift.pipeline.aids import NOTHING
    from rollsift.pipeline.carried import Carried
    from rollsift.pipeline.load import digest_of
    from rollsift.pipeline.score import rules
    from rollsift.pipeline.sources import source_at
    from rollsift.schemas.recipe import resolve

    manifest = plan.head(index).manifest
    pinned = manifest.sources[0]
    try:
        captured(pq.read_metadata(path))
        by = rules(resolve(manifest.recipe), NOTHING)
        found = digest_of(source_at(path, plan.root), by, Carried.of(manifest))
    except UNREADABLE as error:
        raise CheckError(f"{path}: cannot be read as Parquet: {error}") from None
    if found != pinned.digest:
        raise CheckError(
            f"{path}: not the log that was filtered: its digest is {found}, the manifest of step "
            f"{manifest.step} says {pinned.digest}; bring back what it was, or filter again"
        )


def _refuse(path: Path, rows: Ints, names: tuple[str, ...], why: str) -> None:
    for name in names:
        column = light(path, rows, name)
        if column is None:
            continue
        has: Any = column
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            has = pc.greater(pc.list_value_length(column), pa.scalar(0))
        elif not pa.types.is_boolean(column.type):
            has = pc.is_valid(column)
        flags = has.fill_null(False).to_numpy()
        if flags.any():
            raise InputError(f"{path}, row {rows[flags.argmax()]}: {name}: {why}")
