"""Rejudge: a run judged again from its logs, and compared value by value."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
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


def rejudge(
    run: Run, logs: Logs, by: Rules, progress: Callable[[int], None]
) -> Iterator[tuple[Path, str, str]]:
    """Filter `logs` anew into a temporary folder; -> what differs in the newest versions of `run`,
    as (file, expected, found): of each manifest the first field, of each table the first value."""
    with tempfile.TemporaryDirectory(prefix="rollsift-") as folder:
        again = Run(Path(folder) / "run")
        try:
            filter_logs(logs, by.recipe, again.path, aids=by.aids, skip_bad=True, progress=progress)
        except (InputError, RecipeError) as error:
            yield run.path / "run.json", "logs that can be filtered by it", error.text()
            return
        for step, version in run.versions().items():
            mine, theirs = run.step(step, version), again.step(step, 1)
            found, expected = to_builtins(mine.manifest), to_builtins(theirs.manifest)
            expected["previous"] = found["previous"]  # which an earlier step's difference changes
            if difference := told("manifest", expected, found):
                yield run.table("manifests", step, version), *difference
            digests = to_builtins(theirs.tables)
            for kind, digest in to_builtins(mine.tables).items():
                if digests.get(kind, digest) != digest:
                    path = run.table(kind, step, version)
                    checks = starmap(told, _checks(path, again.table(kind, step, 1)))
                    if difference := next(filter(None, checks), None):
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


def _checks(mine: Path, theirs: Path) -> Iterator[tuple[str, Any, Any]]:
    """Damage, columns, notes, number of rows, then the values that differ, some rows at a time.
    Bytes may differ by the library that wrote them alone."""
    yield "damage", None, damage(mine) or None
    expected, found = (pq.read_metadata(path) for path in (theirs, mine))
    schemas = (footer.schema.to_arrow_schema() for footer in (expected, found))
    columns = [[f"{field.name}: {field.type}" for field in schema] for schema in schemas]
    yield "columns", columns[0], columns[1]
    yield "notes", expected.metadata or {}, found.metadata or {}
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
