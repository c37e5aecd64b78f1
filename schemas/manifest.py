"""The manifest of a step: the kept rows in training order, and everything they depend on.

A published manifest is one canonical JSON file `{"id": ..., "manifest": {...}, "tables": {...}}`;
the id is the SHA-256 of the manifest value's canonical bytes: UTF-8, keys sorted, no blanks, floats
as the text that Python's `repr` gives. rollsift's own version stays outside, and so do the digests
of the step's tables: Parquet's bytes differ by the library that wrote them, ids must not.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .errors import RESTORE, CheckError

FORMAT = 1
UNDECODABLE = (msgspec.DecodeError, RecursionError)  # the second where it is nested too deeply


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    """A log file: its name relative to the log root, its records, and what pins its content.

    `digest` is the SHA-256 of a JSONL file's bytes; of a Parquet file's footer and of the column
    chunks that were read.
    """

    file: str
    rows: int
    digest: str


class Thresholds(Struct, frozen=True, forbid_unknown_fields=True):
    """Edges of the difficulty buckets, as `repr` texts, null before any group had a difficulty.

    `seen` counts the groups that the edges were taken over.
    """

    q25: str | None
    q50: str | None
    q75: str | None
    seen: int


class Counts(Struct, frozen=True, forbid_unknown_fields=True):
    """rows = kept + the sum of dropped + bad_records."""

    rows: int
    kept: int
    dropped: dict[str, int]
    bad_records: int


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """What one step's filter decided.

    `source` and `row` name each kept row: an index into `sources`, and the record in that file.
    `offsets` (one more than there are groups) cuts them into groups, which stand in the order of
    their first row. `group_rows` and `group_tokens` count the whole group: all rows of it that
    count in G, and their total length in `length_unit`.
    """

    format: int
    step: int
    previous: str | None
    recipe: dict[str, Any]
    sources: Annotated[list[Source], Meta(min_length=1)]
    length_unit: str | None
    reward_field: str | None
    field_types: dict[str, str]
    thresholds: Thresholds
    counts: Counts
    source: list[int]
    row: list[int]
    offsets: list[int]
    group_rows: list[int]
    group_tokens: list[int]


Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Tables(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """SHA-256 of the bytes of each of the step's tables; `bad_records` only where there are any."""

    rollouts: Digest
    groups: Digest
    bad_records: Digest | None = None


ROWS = ("source", "row", "offsets", "group_rows", "group_tokens")  # lists as long as a step


class _Skipped(Struct, array_like=True):
    """A list whose items are not looked at."""


_Head: type[Manifest] = msgspec.defstruct(  # type: ignore[assignment]  # it is one
    "_Head", [(name, _Skipped) for name in ROWS], bases=(Manifest,)
)
Encoded = tuple[str, bytes]  # a manifest's id and its canonical bytes


class _Format(Struct):
    format: Any = None


class _Published(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    manifest: msgspec.Raw
    tables: Tables


def other_format(version: object) -> str:
    """What to do about a file of another format."""
    return (
        f"format {version!r}; this rollsift reads format {FORMAT}. Read it with the version that "
        "wrote it, or filter into a new folder"
    )


def encode(manifest: Manifest) -> Encoded:
    """-> (id, the manifest's canonical bytes)."""
    value = msgspec.json.encode(manifest, order="sorted")
    return hashlib.sha256(value).hexdigest(), value


def as_file(encoded: Encoded, tables: Tables) -> bytes:
    """The bytes of the published file of a manifest as `encode` gives it."""
    file = _Published(encoded[0], msgspec.Raw(encoded[1]), tables)
    return msgspec.json.encode(file, order="sorted") + b"\n"


def decode(data: bytes, name: str, rows: bool = True) -> tuple[str, Manifest, Tables]:
    """Read a published file; -> (id, manifest, digests of its tables). Without `rows` its lists of
    rows, by far the most of it, are not looked at, and no lists.

    Raises CheckError naming the file where it is not whole, not canonical, of another format, or
    not what its id says.
    """
    value = msgspec.json.encode(_Format(FORMAT))
    try:
        file = msgspec.json.decode(data, type=_Published)
        value = bytes(file.manifest)
        manifest: Manifest = msgspec.json.decode(value, type=Manifest if rows else _Head)
        problem = "" if manifest.format == FORMAT else other_format(manifest.format)
    except UNDECODABLE as error:
        problem = f"not a whole manifest ({error}); {RESTORE}"
        with suppress(*UNDECODABLE):  # of another format it need not be like this one's
            version = msgspec.json.decode(value, type=_Format).format
            problem = problem if version == FORMAT else other_format(version)
    if problem:
        raise CheckError(f"{name}: {problem}")
    found = hashlib.sha256(value).hexdigest()
    if found != file.id:
        raise CheckError(f"{name}: content has id {found}, the file says {file.id}; {RESTORE}")
    encoded = encode(manifest) if rows else (found, value)
    if as_file(encoded, file.tables) != data:
        raise CheckError(f"{name}: not in canonical form; {RESTORE}")
    return file.id, manifest, file.tables
