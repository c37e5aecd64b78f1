"""Preflight: all that is replayed is looked at before the first update, each rank a part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from rollsift.pipeline.captured import captured
from rollsift.pipeline.readers.parquet import UNREADABLE
from rollsift.schemas.errors import CheckError, InputError

from .plan import Plan
from .tokens import IDS, read

# Columns that say that a row needs more than its tokens, here and in other logs.
MORE_THAN_TOKENS = ("multimodal", "multi_modal_inputs", "multi_modal_data", "images", "videos")
ROUTED = ("router_replay", "routed_experts")


def check(
    plan: Plan,
    names: tuple[str, ...],
    vocabulary: int,
    *,
    recomputed: bool,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Read the columns `names` of every kept row in every `part`-th update (index, of how many).

    Raises InputError or CheckError for a log that is gone, torn or not the one that was filtered,
    captured tokens whose digest is another, ids beyond the `vocabulary`, and rows that cannot be
    replayed: with images, or with experts logged where log-probs are not `recomputed`.
    """
    for index in range(part[0], len(plan), part[1]):
        update = plan.update(index)
        _check_source(plan, index, update.path)
        rows = pl.Series(update.rows)
        _refuse(update.path, rows, MORE_THAN_TOKENS, "has inputs other than tokens, whose "
                "positions verl counts in another way: not replayed")  # fmt: skip
        if not recomputed:
            _refuse(update.path, rows, ROUTED, "was sampled for router replay, so its logged "
                    "log-probs are not this model's: use --old-log-probs recompute")  # fmt: skip
        lists = read(update.path, update.rows, names)
        for name in IDS:
            values = lists[name].values
            if (values < 0).any() or (values >= vocabulary).any():
                worst = values.min() if values.min() < 0 else values.max()
                raise InputError(
                    f"{update.path}: {name} holds id {worst}, the model's vocabulary has "
                    f"{vocabulary}; is it the model that these rollouts were sampled for?"
                )
        progress(min(index + part[1], len(plan)))


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


def _refuse(path: Path, rows: pl.Series, names: tuple[str, ...], why: str) -> None:
    schema = pl.read_parquet_schema(path)
    for name in (name for name in names if name in schema):
        column = pl.read_parquet(path, columns=[name], glob=False).to_series().gather(rows)
        found = column if column.dtype == pl.Boolean else column.is_not_null()
        if column.dtype.is_nested() and column.dtype != pl.Struct:
            found = column.list.len() > 0
        if found.fill_null(False).any():
            row = rows.filter(found.fill_null(False))[0]
            raise InputError(f"{path}, row {row}: {name}: {why}")
