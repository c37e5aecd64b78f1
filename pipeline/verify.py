"""Verify: whether a run is as it was published, and its logs as they were when they were read.

A manifest's id pins what it says, and the digests beside it pin its tables. What was forged so that
it fits all these is told by judging the logs again, which is done where they are those that were
read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow.parquet as pq
from msgspec import to_builtins

from rollsift.schemas.errors import RESTORE, CheckError, InputError, UsageError
from rollsift.schemas.manifest import FORMAT
from rollsift.schemas.recipe import resolve

from .aids import NOTHING, OPTIONS, Aids
from .carried import Carried
from .files import sha256_of
from .info import RunInfo
from .load import digest_of
from .readers.parquet import UNREADABLE
from .rejudge import rejudge, told
from .score import Rules, rules
from .sources import Logs, Source, listed, source_at
from .store import TABLES, Run, Step, inside

MOVED = "bring it back, or say with --logs where it is"
CHANGED = "bring back what it was, or filter again: it gets a new version"
DAMAGED = (*UNREADABLE, CheckError)  # what reading a damaged file of a run raises
Bars = Callable[[int, str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be, and what to do about it."""

    file: str
    expected: str
    found: str
    next: str


@dataclass(slots=True)
class Verified:
    """How much was looked at, what is wrong with it, and remarks for a person. `steps` and `rows`
    are those of the newest versions; `files` are those of all, with the logs."""

    steps: int = 0
    rows: int = 0
    files: int = 1
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(
    run: Run,
    *,
    deep: bool = False,
    logs: Path | None = None,
    aids: Aids = NOTHING,
    bars: Bars = lambda length, label: nullcontext(SimpleNamespace(update=lambda _: None)),
) -> Verified:
    """Look at every file of a run and at the logs of its newest versions; `deep` judges these logs
    again and compares every value. -> all that is wrong, not only the first.

    `logs` is where the logs lie now, `aids` what the run was filtered with; `bars` makes a bar of
    that length. Raises UsageError where there is no run, or the aids are not the run's.
    """
    check = _Check(run, aids, deep, logs)
    check.steps(bars)
    check.strangers()
    if deep:
        check.again(bars)
    return check.out


class _Check:
    def __init__(self, run: Run, aids: Aids, deep: bool, logs: Path | None) -> None:
        self.run, self.aids, self.out = run, aids, Verified()
        self.info: RunInfo | None = None
        self.by: Rules | None = None
        self.known = {run.path / "run.json", run.path / ".lock"}
        self.sources: list[Source] = []  # those that are as they were read
        try:
            self.info = run.info
            self.by = rules(resolve(self.info.recipe), aids)
        except (UsageError, *DAMAGED) as error:
            if isinstance(error, UsageError) and not (run.path / "manifests").is_dir():
                raise
            self._find(run.path / "run.json", "what the run is", error)
        if self.info:
            aids.must_be(self.info.reader, all_of_them=deep)
        self.root = logs or Path(self.info.log_root if self.info else "")

    def _find(self, file: Path | str, expected: str, found: object, next_: str = RESTORE) -> None:
        """Note what is wrong; files of the run go by their names in it."""
        name = file if isinstance(file, str) else file.relative_to(self.run.path).as_posix()
        words = str(found).removeprefix(f"{file}: ").removesuffix(f"; {RESTORE}")
        self.out.findings.append(Finding(name, expected, words, next_))

    def _same(self, file: Path, what: str, expected: Any, found: Any) -> None:
        """Note what is not the same."""
        if difference := told(what, expected, found):
            self._find(file, *difference)

    def steps(self, bars: Bars) -> None:
        """All versions of all steps, and the logs of the newest, which must follow one another."""
        newest, published = self.run.versions(), self.run.published()
        self.out.steps = len(newest)
        last: str | None = None
        known = True  # whether the last manifest could be read
        with bars(len(published), "verify") as bar:
            for step, version in published:
                bar.update(1)
                found = self._manifest(step, version)
                if version < newest[step]:
                    continue
                if found and known:
                    file = self.run.table("manifests", step, version)
                    self._same(file, "previous", last, found.manifest.previous)
                if found:
                    self._source(found)
                last, known = (found.id, True) if found else (None, False)

    def _manifest(self, step: int, version: int) -> Step | None:
        """A manifest that is what its id says, looked at with its tables."""
        self.out.files += 1
        file = self.run.table("manifests", step, version)
        self.known.add(file)
        try:
            found = self.run.step(step, version)
        except DAMAGED as error:
            self.known |= {self.run.table(kind, step, version) for kind in TABLES}
            self._find(file, f"a manifest of format {FORMAT}", error)
            return None
        tables, manifest, counts = to_builtins(found.tables), found.manifest, found.manifest.counts
        log, *aids = manifest.sources
        parts = counts.kept + sum(counts.dropped.values()) + counts.bad_records
        self._same(file, "step, as its name says", step, manifest.step)
        self._same(file, "rows = kept + dropped + bad", counts.rows, parts)
        self._same(file, "rows of the source", counts.rows, log.rows)
        self._same(file, "kept rows", counts.kept, len(manifest.row))
        self._same(file, "a bad_records table", counts.bad_records > 0, "bad_records" in tables)
        self._same(file, "a source outside the log root", False, not inside(log.file))
        if self.info:
            pins = [aid.get("sha256") for aid in self.info.reader.values()]
            self._same(file, "digests of aids", pins, [aid.digest for aid in aids])
            self._same(file, "recipe", self.info.recipe, manifest.recipe)
        for kind, digest in tables.items():
            self._table(found, kind, digest)
        return found

    def _table(self, step: Step, kind: str, digest: str) -> None:
        self.out.files += 1
        file = self.run.table(kind, step.step, step.version)
        self.known.add(file)
        counts = step.manifest.counts
        rows = {"rollouts": counts.rows - counts.bad_records, "bad_records": counts.bad_records}
        try:
            if not file.is_file():
                raise CheckError("no such file")
            if (found := sha256_of(file)) != digest:
                raise CheckError(f"SHA-256 {found}")
            if kind in rows:
                self._same(file, "rows", rows[kind], pq.read_metadata(file).num_rows)
            if kind == "rollouts":
                read = pl.read_parquet(file, columns=["group", "source_row", "kept"], glob=False)
                kept = read.filter("kept").sort("group", maintain_order=True)["source_row"]
                self._same(file, "kept rows in training order", step.manifest.row, kept.to_list())
        except DAMAGED as error:
            self._find(file, f"a table, SHA-256 {digest}", error)

    def _source(self, step: Step) -> None:
        """Whether a step's log is the one that was read."""
        self.out.files += 1
        self.out.rows += step.manifest.counts.rows
        pinned = step.manifest.sources[0]
        if not (self.info and self.by and inside(pinned.file)):
            return
        path, expected = self.root / pinned.file, f"SHA-256 {pinned.digest}"
        try:
            if not path.is_file():
                raise InputError(f"no such file in {self.root}")
            source = source_at(path, self.root)
            digest = digest_of(source, self.by, Carried.of(step.manifest))
        except (InputError, *UNREADABLE) as error:
            self._find(pinned.file, expected, error, MOVED)
            return
        needed = sorted(self.info.reader.keys() - self.aids.settings.keys())
        if digest == pinned.digest:
            self.sources.append(source)
        elif source.kind == "parquet" and needed:
            options = " and ".join(OPTIONS.get(key, key) for key in needed)
            self._find(pinned.file, expected, f"cannot be told without {options}", f"add {options}")
        else:
            self._find(pinned.file, expected, f"SHA-256 {digest}", CHANGED)

    def strangers(self) -> None:
        """Remark on files that no manifest speaks of."""
        if strange := {p for p in self.run.path.rglob("*") if not p.is_dir()} - self.known:
            names = listed(path.relative_to(self.run.path).as_posix() for path in sorted(strange))
            self.out.notes.append(
                f"no manifest speaks of {names}: left by a filter, or not its own"
            )

    def again(self, bars: Bars) -> None:
        """Judge the logs again, and compare."""
        if not self.by or {source.step for source in self.sources} != {*self.run.versions()}:
            self.out.notes.append("not judged again: not all that the run was made of is as it was")
            return
        logs = Logs(self.root, tuple(self.sources))
        with bars(sum(source.path.stat().st_size for source in logs.sources), "judge again") as bar:
            for file, expected, found in rejudge(self.run, logs, self.by, bar.update):
                self._find(file, expected, found, "filter into another folder")
