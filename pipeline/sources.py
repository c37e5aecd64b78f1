"""Which files are the log: step files found, foreign ones left out, versions resolved."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollsift.schemas.errors import InputError, UsageError, one_line

from .readers import generation, jsonl, parquet

STEP_FILE = re.compile(
    r"(?:completions_)?(?P<step>\d{1,18})(?:\.v(?P<version>\d{1,9}))?"
    r"\.(?P<kind>jsonl|parquet)(?:\.(?P<compression>gz|zst))?"
)
EXPECTED = "<step>.jsonl or <step>.parquet, also .jsonl.gz and .jsonl.zst"


@dataclass(frozen=True, slots=True)
class Source:
    """A log file of one step. `file` is its name relative to the log root, with `/`."""

    path: Path
    file: str
    step: int
    version: int
    kind: Literal["jsonl", "parquet"]


@dataclass(frozen=True, slots=True)
class Logs:
    """The sources of one training run in step order, the folder they lie under, and remarks."""

    root: Path
    sources: tuple[Source, ...]
    notes: tuple[str, ...] = ()


def discover(logs: Sequence[str | os.PathLike[str]]) -> Logs:
    """Find the step files that `logs` names: files, folders (not their subfolders) and globs. The
    name of a file in a folder must tell its step, that of others may leave it to the content.

    Raises UsageError for a path that is not there, InputError where nothing is left, where two
    files hold the same step, and for a named file that tells no step.
    """
    files: dict[Path, Path] = {}
    notes: list[str] = []
    for item in logs:
        for path in _expand(os.fspath(item)):
            if path.is_dir():
                found, foreign = _folder(path)
                if foreign:
                    notes.append(f"{path}: left out {listed(foreign)}: no step files ({EXPECTED})")
            elif path.is_file():
                found = [path]
            else:
                raise UsageError(one_line(f"{path}: neither a file nor a folder"))
            files.update({file.resolve(): file for file in found})
    if not files:
        where = ", ".join(os.fspath(item) for item in logs)
        told = [f"{where}: no step files; expected names like {EXPECTED}", *notes]
        raise InputError("\n".join(map(one_line, told)))
    root = Path(os.path.commonpath([file.absolute().parent for file in files.values()]))
    sources = [source_at(file.absolute(), root) for file in files.values()]
    return Logs(root, *_one_per_step(sources, notes))


def _expand(item: str) -> list[Path]:
    if os.path.exists(item):
        return [Path(item)]
    if found := sorted(glob.glob(item)):
        return [Path(path) for path in found]
    raise UsageError(one_line(f"{item}: no such file or folder, and no glob that matches any"))


def _folder(folder: Path) -> tuple[list[Path], list[str]]:
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.is_dir())
    except OSError as error:
        raise InputError(one_line(f"{folder}: cannot be listed ({error.strerror})")) from None
    named = {entry for entry in entries if STEP_FILE.fullmatch(entry.name)}
    # A pipe or a dangling link is no log, whatever its name.
    found = [entry for entry in entries if entry in named and entry.is_file()]
    left = [entry for entry in entries if entry not in set(found)]
    return found, [f"{e.name} (a broken link or a pipe)" if e in named else e.name for e in left]


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names, and how many there are more."""
    names = [name if name.isprintable() else repr(name) for name in names]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def source_at(path: Path, root: Path) -> Source:
    """The step file at `path`; raises InputError where neither name nor content tells a step."""
    match = STEP_FILE.fullmatch(path.name)
    if not match:
        return _nameless(path, root)
    if match["kind"] == "parquet" and match["compression"]:
        told = f"{path}: a compressed Parquet file cannot be read in place; unpack it"
        raise InputError(one_line(told))
    return Source(
        path=path,
        file=path.relative_to(root).as_posix(),
        step=int(match["step"]),
        version=int(match["version"] or 1),
        kind="parquet" if match["kind"] == "parquet" else "jsonl",
    )


def _nameless(path: Path, root: Path) -> Source:
    """A file whose step stands in its first record. verl's generation comes before any step: 0."""
    kind: Literal["jsonl", "parquet"] = "parquet" if parquet.matches(path) else "jsonl"
    if kind == "jsonl":
        step = jsonl.first(path).get("step")
    else:
        step = 0 if generation.matches(path) else parquet.first(path, "step")
    whole = re.fullmatch(r"(\d{1,18})(\.0)?", str(step))
    if not whole:
        told = f"{path}: the name tells no step, and no first record with a `step` does"
        raise InputError(one_line(f"{told}; rename it to the step it holds, like {EXPECTED}"))
    return Source(path, path.relative_to(root).as_posix(), int(whole[1]), 1, kind)


def _one_per_step(
    sources: list[Source], notes: list[str]
) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    by_step: dict[int, Source] = {}
    for source in sorted(sources, key=lambda source: (source.step, source.version, source.file)):
        other = by_step.get(source.step)
        if other and (other.version == source.version or other.path.parent != source.path.parent):
            told = f"{other.path} and {source.path}: both hold step {source.step}; one run has one "
            told += "file a step. Name only the one that counts, or filter the two runs apart"
            raise InputError(one_line(told))
        if other:
            notes.append(f"{source.file} supersedes {other.file}")
        by_step[source.step] = source
    return tuple(by_step[step] for step in sorted(by_step)), tuple(notes)
