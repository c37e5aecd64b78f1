"""The run folder: the one module that writes files.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord, CheckError, InputError, RollsiftError, UsageError
from rollsift.schemas.manifest import Manifest, decode, encode

TABLES = ("rollouts", "groups", "bad_records")
ROW_GROUP = 1 << 17
DELTAS, DELTA = ("source_row",), "DELTA_BINARY_PACKED"  # columns that count up
_NAME = re.compile(r"(\d{6,18})\.v(\d+)\.(json|parquet)")


class RunInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """run.json: the recipe, what the readers were told, and the folder the logs lie under."""

    format: int
    recipe: dict[str, Any]
    reader: dict[str, Any]
    log_root: str


@dataclass(frozen=True, slots=True)
class Step:
    """A published step."""

    step: int
    version: int
    id: str
    manifest: Manifest


class Run:
    """A run folder, to read or, inside `writing`, to add steps to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def info(self) -> RunInfo:
        """run.json; raises UsageError where the folder is no run."""
        file = self.path / "run.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=RunInfo)
        except FileNotFoundError:
            raise UsageError(f"{self.path}: no run here; make one with rollsift filter") from None
        except msgspec.DecodeError as error:
            raise CheckError(f"{file}: not the run.json of this version ({error})") from None

    def versions(self) -> dict[int, int]:
        """Step -> its newest version, in step order."""
        newest: dict[int, int] = {}
        for step, version in _numbered(self.path / "manifests", "json"):
            newest[step] = max(version, newest.get(step, 0))
        return dict(sorted(newest.items()))

    def steps(self) -> dict[int, Step]:
        """All published steps in order; raises CheckError for a manifest that is not whole."""
        return {step: self.step(step, version) for step, version in self.versions().items()}

    def step(self, step: int, version: int) -> Step:
        """One published step."""
        file = self.table("manifests", step, version)
        return Step(step, version, *decode(file.read_bytes(), str(file)))

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

    def _strangers(self) -> str:
        """What shows that the folder is somebody else's, empty if nothing does."""
        if not self.path.is_dir():
            return "no folder but a file"
        ours = {"run.json", "manifests", ".lock", ".staging", *TABLES}
        return ", ".join(
            sorted(entry.name for entry in self.path.iterdir() if entry.name not in ours)[:3]
        )

    @contextmanager
    def writing(self, info: RunInfo) -> Iterator[Writer]:
        """Hold the folder for writing: made if need be, leftovers swept, one writer at a time.

        Raises UsageError naming the first key of the recipe that differs from the run's own.
        """
        fresh = not self.path.exists()
        if not fresh and (strange := self._strangers()):
            raise UsageError(f"{self.path}: no run folder, it holds {strange}; choose another -o")
        for folder in ("manifests", *TABLES):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RollsiftError(f"{self.path}: another rollsift is writing into it") from None
            if (self.path / "run.json").exists():
                _same(self.info, info, self.path)
            writer = Writer(self, info)
            try:
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
        rollouts: Iterable[pl.DataFrame],
        groups: pl.DataFrame,
        bad: Sequence[BadRecord],
        note: Mapping[str, str],
    ) -> None:
        """Write a step's tables into the staging folder; `note` goes into the groups' footer."""
        _write(self._staged("rollouts", step, version), rollouts, {})
        _write(self._staged("groups", step, version), [groups], note)
        if bad:
            table = pl.DataFrame([asdict(record) for record in bad], schema=_BAD)
            _write(self._staged("bad_records", step, version), [table], {})

    def _staged(self, kind: str, step: int, version: int) -> Path:
        return self.staging / f"{kind}-{self.run.table(kind, step, version).name}"

    def publish(self, version: int, manifest: Manifest) -> str:
        """Give a staged step its names, the manifest last; -> its id."""
        if not (self.run.path / "run.json").exists():
            value = msgspec.json.format(msgspec.json.encode(self.info), indent=1) + b"\n"
            self.put(self.run.path / "run.json", value)
        for kind in TABLES:
            staged = self._staged(kind, manifest.step, version)
            if staged.exists():
                _link(staged, self.run.table(kind, manifest.step, version))
        id_, data = encode(manifest)
        self.put(self.run.table("manifests", manifest.step, version), data)
        return id_

    def put(self, target: Path, data: bytes) -> None:
        """Publish bytes under a name that must not exist yet: whole or absent, durable."""
        staged = self.staging / f"put-{target.name}"
        with staged.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _link(staged, target)


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
        path = self.folder / f"spool-{len(self.parts)}.arrow"
        part.write_ipc(path, compression="lz4")
        self.parts.append(path)

    def __iter__(self) -> Iterator[pl.DataFrame]:
        for part in self.parts:
            yield part if isinstance(part, pl.DataFrame) else pl.read_ipc(part)

    def close(self) -> None:
        """Let go of everything, also on disk."""
        for part in self.parts:
            if isinstance(part, Path):
                part.unlink()
        self.parts, self.held = [], 0


_BAD = {
    "source_file": pl.String,
    "source_row": pl.Int64,
    "line": pl.Int64,
    "field": pl.String,
    "reason": pl.String,
}


def _numbered(folder: Path, ending: str) -> list[tuple[int, int]]:
    """(step, version) of the files in a folder that have such names; others are not ours."""
    if not folder.is_dir():
        return []
    found = [_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted((int(m[1]), int(m[2])) for m in found if m and m[3] == ending)


def _same(theirs: RunInfo, ours: RunInfo, path: Path) -> None:
    parts = [("recipe", theirs.recipe, ours.recipe), ("reader", theirs.reader, ours.reader)]
    for what, old, new in parts:
        old, new = _flat(old), _flat(new)
        for key in dict.fromkeys([*new, *old]):
            if old.get(key) != new.get(key):
                raise UsageError(
                    f"{path}: made with another {what}: {key} is {_shown(old.get(key))} there, "
                    f"{_shown(new.get(key))} here; use another folder or the same {what}"
                )
    if theirs.log_root != ours.log_root:
        raise InputError(
            f"{path}: made from the logs in {theirs.log_root}, not {ours.log_root}; "
            "use another folder for another training run"
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys as `difficulty.of`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{key}.{name}".rstrip("."): item for name, item in inner.items()}
    return flat


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _write(path: Path, parts: Iterable[pl.DataFrame], note: Mapping[str, str]) -> None:
    """Write a Parquet file: one row group or more per part, equal bytes for equal parts."""
    writer: pq.ParquetWriter | None = None
    try:
        for part in parts:
            table = part.to_arrow(compat_level=pl.CompatLevel.oldest())
            if writer is None:
                writer = pq.ParquetWriter(
                    path,
                    table.schema,
                    compression="zstd",
                    column_encoding={name: DELTA for name in DELTAS if name in part.columns},
                    use_dictionary=[name for name in part.columns if name not in DELTAS],  # type: ignore[arg-type]  # names, too
                    store_schema=False,
                    write_page_checksum=True,
                )
                writer.add_key_value_metadata(dict(note))
            writer.write_table(table, row_group_size=ROW_GROUP)
    except (OSError, pa.ArrowException) as error:
        raise RollsiftError(f"{path}: cannot be written: {error}") from None
    finally:
        if writer is not None:
            writer.close()
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link(staged: Path, target: Path) -> None:
    os.link(staged, target)
    _sync(target.parent)
    staged.unlink()


Progress = Callable[[int], None]
