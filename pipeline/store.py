"""The run folder: the one module that writes files of it, by what `files` offers.

    RUN/run.json                       what the run is; written once
    RUN/manifests/000007.v1.json       the commit point of step 7, written last
    RUN/rollouts/000007.v1.parquet     one row per log row: facts, verdict, text where it is copied
    RUN/groups/000007.v1.parquet       one row per group
    RUN/bad_records/000007.v1.parquet  only where there were any

Tables are built in RUN/.staging and get their names by a hard link, which fails if the name is
taken; then the manifest. What has no manifest does not exist and is swept by the next writer.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec
import polars as pl
import pyarrow.parquet as pq

from rollsift.schemas.errors import RESTORE, CheckError, RollsiftError, UsageError
from rollsift.schemas.manifest import (
    FORMAT,
    UNDECODABLE,
    Encoded,
    Manifest,
    Tables,
    as_file,
    decode,
    other_format,
)

from .files import link, naming, put, sha256_of, sync, write_table
from .info import RunInfo, must_be_same

TABLES = ("rollouts", "groups", "bad_records")
OURS = {"run.json", "manifests", ".lock", ".staging", *TABLES}
_NAME = re.compile(r"(\d{6,18})\.v(\d+)\.(json|parquet)")


@dataclass(frozen=True, slots=True)
class Step:
    """A published step."""

    step: int
    version: int
    id: str
    manifest: Manifest
    tables: Tables

    def log(self, root: Path) -> Path:
        """Where its log lies; raises CheckError where that is not under the log root."""
        file = self.manifest.sources[0].file
        if not inside(file):
            raise CheckError(f"step {self.step}: its log {file!r} is outside {root}; {RESTORE}")
        return root / file


class Run:
    """A run folder, to read or, inside `writing`, to add steps to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._heads: dict[tuple[int, int], Step] = {}

    @property
    def info(self) -> RunInfo:
        """run.json; raises UsageError where the folder is no run."""
        file = self.path / "run.json"
        try:
            info = msgspec.json.decode(file.read_bytes(), type=RunInfo)
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"{self.path}: no run here; make one with rollsift filter") from None
        except UNDECODABLE as error:
            told = f"{file}: not the run.json of this version ({error}); {RESTORE}"
            raise CheckError(told) from None
        if info.format != FORMAT:
            raise CheckError(f"{file}: {other_format(info.format)}")
        return info

    def published(self) -> list[tuple[int, int]]:
        """(step, version) of all manifests, in order."""
        return _numbered(self.path / "manifests", "json")

    def versions(self) -> dict[int, int]:
        """Step -> its newest version, in step order."""
        newest: dict[int, int] = {}
        for step, version in self.published():
            newest[step] = max(version, newest.get(step, 0))
        return dict(sorted(newest.items()))

    def steps(self, rows: bool = True) -> dict[int, Step]:
        """All published steps in order; raises CheckError for a manifest that is not whole.

        Without `rows` the manifests have no lists of rows, which over a long run would fill the
        memory; they are then read once, for a published manifest never changes.
        """
        if rows:
            return {step: self.step(step, version) for step, version in self.versions().items()}
        newest = self.versions().items()
        for step, version in newest:
            if (step, version) not in self._heads:
                self._heads[step, version] = self.step(step, version, rows=False)
        return {step: self._heads[step, version] for step, version in newest}

    def step(self, step: int, version: int, rows: bool = True) -> Step:
        """One published step; without `rows` its manifest has no lists of rows."""
        file = self.table("manifests", step, version)
        return Step(step, version, *decode(file.read_bytes(), str(file), rows))

    def table(self, kind: str, step: int, version: int) -> Path:
        """Where a step's table or manifest lies."""
        ending = "json" if kind == "manifests" else "parquet"
        return self.path / kind / f"{step:06d}.v{version}.{ending}"

    def note(self, step: Step) -> dict[str, str]:
        """What was noted in a published step's groups table."""
        metadata = pq.read_metadata(self.table("groups", step.step, step.version)).metadata or {}
        return {key.decode(): value.decode() for key, value in metadata.items()}

    def difficulties(self, step: Step) -> pl.Series:
        """The difficulty of each group of a published step, in order."""
        path = self.table("groups", step.step, step.version)
        return pl.read_parquet(path, columns=["difficulty"])["difficulty"]

    def _check_ours(self) -> None:
        """Raise UsageError where the path is no folder, somebody else's, or leads elsewhere."""
        for path in (self.path, *self.path.parents):
            if path.exists() and not path.is_dir():
                raise UsageError(f"{self.path}: {path} is a file, no folder; choose another -o")
        names = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        if strange := [name for name in names if name not in OURS]:
            held = ", ".join(strange[:3])
            raise UsageError(f"{self.path}: no run folder, it holds {held}; choose another -o")
        for name in names:
            if (self.path / name).is_symlink():
                raise UsageError(
                    f"{self.path / name}: a symbolic link, and a run folder holds none; put what "
                    "it points to there, or choose another -o"
                )

    @contextmanager
    def writing(self, info: RunInfo) -> Iterator[Writer]:
        """Hold the folder for writing: made if need be, leftovers swept, one writer at a time.

        Raises UsageError naming the first key of the recipe that differs from the run's own.
        """
        fresh = not self.path.exists()
        self._check_ours()
        folders = [self.path / name for name in ("manifests", *TABLES)]
        above = {path.parent for path in (self.path, *self.path.parents) if not path.exists()}
        with naming(self.path):
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            (self.path / ".lock").touch()
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                    raise BlockingIOError  # a writer that failed took its new folder away
            except OSError:
                raise RollsiftError(f"{self.path}: another rollsift is writing into it") from None
            if (self.path / "run.json").exists():
                must_be_same(self.info, info, self.path)
            writer = Writer(self, info)
            try:
                with naming(self.path):
                    # The folders' own names, and what a killed writer had named, shall last, too.
                    for folder in (*folders, self.path):
                        sync(folder)
                    for folder in {self.path.parent} | above:
                        with suppress(PermissionError):  # it may be one that only others can list
                            sync(folder)
                    writer.sweep()
                yield writer
            finally:
                shutil.rmtree(writer.staging, ignore_errors=True)
                if fresh and not (self.path / "run.json").exists():
                    shutil.rmtree(self.path, ignore_errors=True)


class Writer:
    """Builds steps in the staging folder and publishes them."""

    def __init__(self, run: Run, info: RunInfo) -> None:
        self.run, self.info = run, info
        self.staging = run.path / ".staging"

    def sweep(self) -> None:
        """Remove what a killed writer left: the staging folder, tables and empty manifests that no
        whole manifest speaks for."""
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir()
        for step, version in _numbered(self.run.path / "manifests", "json"):
            file = self.run.table("manifests", step, version)
            if not file.read_bytes().strip(b"\0"):
                file.unlink()
        published = set(_numbered(self.run.path / "manifests", "json"))
        for kind in TABLES:
            for step, version in _numbered(self.run.path / kind, "parquet"):
                if (step, version) not in published:
                    self.run.table(kind, step, version).unlink()

    def stage(
        self,
        step: int,
        version: int,
        manifest: Encoded,
        tables: Mapping[str, Iterable[pl.DataFrame]],
        note: Mapping[str, str],
    ) -> None:
        """Write a step into the staging folder, with its manifest as `encode` gives it; `note` goes
        into the groups' footer."""
        digests = {}
        for kind, parts in tables.items():
            staged = self._staged(kind, step, version)
            write_table(staged, parts, note if kind == "groups" else {})
            digests[kind] = sha256_of(staged)
        file = as_file(manifest, Tables(**digests))
        put(self._staged("manifests", step, version), file)

    def _staged(self, kind: str, step: int, version: int) -> Path:
        return self.staging / f"{kind}-{self.run.table(kind, step, version).name}"

    def publish(self, steps: Sequence[tuple[int, int]]) -> Iterator[int]:
        """Give staged steps, in their order, their names, which must not exist yet; -> each step
        that is published. The manifests' names come last: a step is whole or absent, durable."""
        info = self.run.path / "run.json"
        if steps and not info.exists():
            value = msgspec.json.format(msgspec.json.encode(self.info), indent=1) + b"\n"
            put(self.staging / "run.json", value)
            link({self.staging / "run.json": info})
        for kind in TABLES:
            names = {self._staged(kind, *step): self.run.table(kind, *step) for step in steps}
            link({staged: name for staged, name in names.items() if staged.exists()})
        for step in steps:
            link({self._staged("manifests", *step): self.run.table("manifests", *step)})
            yield step[0]


class Spool:
    """Text columns of a step on their way to its table: in memory, past `LIMIT` bytes on disk."""

    LIMIT = 256 << 20

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[pl.DataFrame | Path] = []
        self.held = 0

    def add(self, part: pl.DataFrame) -> None:
        """Take one chunk; chunks come back in their order."""
        self.held += int(part.estimated_size())
        if self.held <= self.LIMIT:
            self.parts.append(part)
            return
        handle, path = tempfile.mkstemp(".arrow", "spool-", self.folder)
        os.close(handle)
        with naming(Path(path)):
            part.write_ipc(path, compression="lz4")
        self.parts.append(Path(path))

    def __iter__(self) -> Iterator[pl.DataFrame]:
        for part in self.parts:
            yield part if isinstance(part, pl.DataFrame) else pl.read_ipc(part)

    def close(self) -> None:
        """Let go of everything, also on disk."""
        for part in self.parts:
            if isinstance(part, Path):
                part.unlink()
        self.parts, self.held = [], 0


def _numbered(folder: Path, ending: str) -> list[tuple[int, int]]:
    """(step, version) of the files in a folder that have such names; others are not ours."""
    if not folder.is_dir():
        return []
    found = [_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted((int(m[1]), int(m[2])) for m in found if m and m[3] == ending)


def inside(file: str) -> bool:
    """Whether a source's name stays under the log root."""
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in file
