"""The manifest of a step: the kept rows in training order, and everything they depend on.

A published manifest is one canonical JSON file `{"id": ..., "manifest": {...}}`; the id is the
SHA-256 of the manifest value's canonical bytes: UTF-8, keys sorted, no blanks, floats as the text
that Python's `repr` gives. rollsift's own version stays outside.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Struct

from .errors import CheckError

FORMAT = 1


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
    sources: list[Source]
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


class _Published(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    manifest: msgspec.Raw


def encode(manifest: Manifest) -> tuple[str, bytes]:
    """-> (id, bytes of the published file)."""
    value = msgspec.json.encode(manifest, order="sorted")
    digest = hashlib.sha256(value).hexdigest()
    return digest, b'{"id":"' + digest.encode() + b'","manifest":' + value + b"}\n"


def decode(data: bytes, name: str) -> tuple[str, Manifest]:
    """Read a published file; -> (id, manifest).

    Raises CheckError naming the file where it is not whole, not canonical, of another format, or
    not what its id says.
    """
    try:
        published = msgspec.json.decode(data, type=_Published)
        value = bytes(published.manifest)
        version = msgspec.json.decode(value, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise CheckError(
                f"{name}: manifest format {version!r}; this rollsift reads format {FORMAT}. "
                "Read it with the version that wrote it, or filter into a new folder"
            )
        manifest = msgspec.json.decode(value, type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckError(f"{name}: not a whole manifest ({error})") from None
    found = hashlib.sha256(value).hexdigest()
    if found != published.id or encode(manifest)[1] != data:
        raise CheckError(f"{name}: content has id {found}, the file says {published.id}")
    return published.id, manifest
