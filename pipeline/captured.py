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


def digest(lists: Any) -> str:
    """SHA-256 of a column of lists: every length (int64, -1 for null), then all values, both as
    little-endian bytes. `lists` is an Arrow array or chunked array of lists of numbers."""
    chunks: list[Any] = lists.chunks if isinstance(lists, pa.ChunkedArray) else [lists]
    sha256 = hashlib.sha256()
    for chunk in chunks:
        lengths = chunk.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
        sha256.update(lengths.astype("<i8").tobytes())
    for chunk in chunks:
        sha256.update(np.ascontiguousarray(chunk.flatten().to_numpy(zero_copy_only=False)).data)
    return sha256.hexdigest()
