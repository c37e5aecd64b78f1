"""Rejudge: a run judged again from its logs, and compared value by value."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
from msgspec import to_builtins

from rollsift.schemas.errors import InputError, RecipeError

from .batch import filter_logs
from .readers.parquet import damage
from .score import Rules
from .sources import Logs
from .store import Run

ROWS = 1 << 14  # compared at a time
Difference = tuple[Path, str, str]  # file of the run, expected, found


def rejudge(
    run: Run, logs: Logs, by: Rules, skip_bad: bool, intact: Collection[Path],
    progress: Callable[[int], None],
) -> Iterator[Difference]:  # fmt: skip
    """Filter `logs` anew into a temporary folder; -> what differs in the newest versions of `run`:
    of each manifest the first field, of each `intact` table the first value."""
    with tempfile.TemporaryDirectory(prefix="rollsift-") as folder:
        out = Path(folder) / "run"
        try:
            filter_logs(logs, by.recipe, out, aids=by.aids, skip_bad=skip_bad, progress=progress)
        except (InputError, RecipeError) as error:
            yield run.path / "run.json", "logs that can be filtered by it", error.text()
            return
        yield from _differences(run, Run(out), intact)


def _differences(run: Run, again: Run, intact: Collection[Path]) -> Iterator[Difference]:
    for step, version in run.versions().items():
        mine, theirs = run.step(step, version), again.step(step, 1)
        found, expected = to_builtins(mine.manifest), to_builtins(theirs.manifest)
        # An id that is another is in every later manifest.
        if difference := told("manifest", expected | {"previous": found["previous"]}, found):
            yield run.table("manifests", step, version), *difference
        found, expected = to_builtins(mine.tables), to_builtins(theirs.tables)
        for kind, digest in expected.items():
            path, other = run.table(kind, step, version), again.table(kind, step, 1)
            if path not in intact or found[kind] == digest:
                continue
            if reason := damage(path):
                yield path, "a table", reason
            elif difference := next(filter(None, starmap(told, _of_tables(path, other))), None):
                yield path, *difference


def told(what: str, expected: Any, found: Any) -> tuple[str, str] | None:
    """(expected, found) where these are not equal, lists and maps by their first difference."""
    if expected == found:
        return None
    if isinstance(expected, list) and isinstance(found, list):
        expected, found = dict(enumerate(expected)), dict(enumerate(found))
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in {**expected, **found}:
            if expected.get(key, "nothing") != found.get(key, "nothing"):
                return told(f"{what}.{key}", expected.get(key), found.get(key))
    return f"{what}: {expected!r}", repr(found)


def _of_tables(mine: Path, theirs: Path) -> Iterator[tuple[str, Any, Any]]:
    """Columns, notes, number of rows, then the values that differ, some rows at a time. Bytes may
    differ by the library that wrote them, which also adds notes of its own."""
    expected, found = (pq.read_metadata(path) for path in (theirs, mine))
    yield "columns", _columns(expected), _columns(found)
    notes, ours = expected.metadata or {}, found.metadata or {}
    yield "notes", notes, {key: ours.get(key) for key in notes}
    yield "rows", expected.num_rows, found.num_rows
    for at in range(0, expected.num_rows, ROWS):
        left, right = (
            pl.scan_parquet(path, glob=False, hive_partitioning=False).slice(at, ROWS).collect()
            for path in (theirs, mine)
        )
        for name in left.columns:
            a, b = left[name], right[name]
            for row in a.ne_missing(b).arg_true().head(1):
                yield f"{name} of row {at + row}", *(x.slice(row, 1).to_list()[0] for x in (a, b))


def _columns(footer: pq.FileMetaData) -> list[str]:
    return [f"{column.name}: {column.type}" for column in footer.schema.to_arrow_schema()]
