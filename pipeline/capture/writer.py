"""The writer: a step's rows to one Parquet file, whole or absent.

While it is written a file has no name, so that it is gone with the process that is killed; where a
file system has no such files (NFS), it has a hidden one, which the next writer takes away.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.pipeline.captured import digest
from rollsift.pipeline.files import naming, sync
from rollsift.pipeline.sources import STEP_FILE
from rollsift.schemas.captured import KEY, TOKENS, Captured

ROW_GROUP = 1 << 20  # tokens of a row group, about: no prompt group is cut
BUILDING = ".building"
# How a file system says that it has no files without a name.
_UNKNOWN = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
# Bytes of equal weight side by side make ids and log-probs small; masks are runs.
_MASKS = [column.name for column in TOKENS if column.type == pa.list_(pa.int8())]


def write(folder: Path, step: int, table: pa.Table, note: Captured) -> Path:
    """Write a step's rows, those of a prompt group side by side; -> the file, `<step>.parquet`, or
    `<step>.v2.parquet` and so on where the step is there already.

    When it returns the file lasts. Raises RollsiftError naming the file that cannot be written.
    """
    with naming(folder / f"{step}.parquet"), _nameless(folder) as file:
        building = Path(f"/proc/self/fd/{file}")
        write_parquet(building, table, note)
        os.fsync(file)
        target = _link(file, folder, step)
        sync(folder)
    return target


def write_parquet(path: Path, table: pa.Table, note: Captured) -> None:
    """Write captured rows, with the digests of the token columns in the footer's note. Token
    columns that verl had nothing of are left out."""
    lists = [column.name for column in TOKENS if column.name in table.column_names]
    if nothing := [name for name in lists if 0 < table[name].null_count == len(table)]:
        table = table.drop_columns(nothing)
        lists = [name for name in lists if name not in nothing]
    spread = [name for name in lists if name not in _MASKS]
    digests: dict[str, list[str]] = {name: [] for name in lists}
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd",
        use_dictionary=[name for name in table.column_names if name not in spread],  # type: ignore[arg-type]  # names, too
        use_byte_stream_split=[f"{name}.list.element" for name in spread],
        write_statistics=["step"],
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        for part in _row_groups(table):
            writer.write_table(part, row_group_size=len(part))
            for name, found in digests.items():
                found.append(digest(part[name]))
        said = msgspec.json.encode(msgspec.structs.replace(note, tokens=digests))
        writer.add_key_value_metadata({KEY.decode(): said.decode()})


def _row_groups(table: pa.Table) -> Iterator[pa.Table]:
    """The table in parts of about as many tokens, cut between prompt groups."""
    uid = table["uid"].combine_chunks().dictionary_encode().indices.to_numpy()
    tokens = np.cumsum(table["response_length"].to_numpy())
    begins = np.concatenate([[0], np.flatnonzero(np.diff(uid)) + 1, [len(table)]])
    start, due = 0, ROW_GROUP
    for end in begins[1:].tolist():
        if end > start and (end == len(table) or tokens[end - 1] >= due):
            yield table.slice(start, end - start)
            start, due = end, int(tokens[end - 1]) + ROW_GROUP


@contextmanager
def _nameless(folder: Path) -> Iterator[int]:
    """A new file without a name; -> its descriptor."""
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
    except OSError as error:
        if error.errno not in _UNKNOWN or not folder.is_dir():
            raise
        with _hidden(folder) as file:
            yield file
        return
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _hidden(folder: Path) -> Iterator[int]:
    """A new file whose name is hidden, and locked for as long as its writer lives."""
    path = folder / f".{uuid.uuid4().hex}{BUILDING}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def sweep(folder: Path) -> None:
    """Take away what writers that were killed left under hidden names."""
    for path in folder.glob(f".*{BUILDING}"):
        with suppress(OSError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _link(file: int, folder: Path, step: int) -> Path:
    """Give a file the next name of its step; another writer's is never taken."""
    place = os.open(folder, os.O_RDONLY)
    try:
        version = 1 + max(_versions(folder, step), default=0)
        while True:
            name = f"{step}.parquet" if version == 1 else f"{step}.v{version}.parquet"
            try:
                # With a folder's descriptor Python follows the link in /proc, without it doesn't.
                os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=place, follow_symlinks=True)
            except FileExistsError:
                version += 1
            else:
                return folder / name
    finally:
        os.close(place)


def _versions(folder: Path, step: int) -> Iterator[int]:
    for entry in os.scandir(folder):
        match = STEP_FILE.fullmatch(entry.name)
        if match and int(match["step"]) == step:
            yield int(match["version"] or 1)
