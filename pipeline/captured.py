"""Captured files: what their footer says, and the digests that pin their tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.captured import FORMAT, KEY, Captured


def captured(metadata: pq.FileMetaData) -> Captured | None:
    """What capture noted in a Parquet file's footer; None where capture did not write it.

    Raises ValueError where that cannot be read, or is of another format.
    """
    noted = (metadata.metadata or {}).get(KEY)
    if noted is None:
        return None
    try:
        found = msgspec.json.decode(noted, type=Captured)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"its note of capture cannot be read ({error})") from None
    if found.format != FORMAT:
        raise ValueError(
            f"captured in format {found.format}; this rollsift reads format {FORMAT}. Read it with "
            "the version that wrote it"
        )
    return found


class Digest:
    """SHA-256 of a column of lists, taken part by part: that of all lengths (int64, -1 for null)
    and that of all values, both as little-endian bytes, hashed together."""

    def __init__(self) -> None:
        self._lengths, self._values = hashlib.sha256(), hashlib.sha256()

    def add(self, lists: Any) -> None:
        """Take an Arrow array of lists of numbers."""
        lengths = lists.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
        self._lengths.update(lengths.astype("<i8").data)
        values = lists.flatten().to_numpy(zero_copy_only=False)
        self._values.update(np.ascontiguousarray(values).data)

    def hexdigest(self) -> str:
        """The digest of what was added."""
        return hashlib.sha256(self._lengths.digest() + self._values.digest()).hexdigest()


def digest(lists: Any) -> str:
    """The digest of a whole Arrow array or chunked array of lists of numbers."""
    whole = Digest()
    for chunk in lists.chunks if isinstance(lists, pa.ChunkedArray) else [lists]:
        whole.add(chunk)
    return whole.hexdigest()
