"""Tokens: lists of the kept rows out of Parquet. Only their row groups are read, without a Python
object for a token, and what pins captured tokens is checked on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.pipeline.captured import Digest, captured
from rollsift.pipeline.readers import footer
from rollsift.pipeline.readers.parquet import UNREADABLE
from rollsift.schemas.errors import CheckError, InputError

IDS = ("prompt_ids", "response_ids")
PER_TOKEN = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages")
RESTORE = "bring back what it was"
BATCH = 1 << 10  # rows decoded at a time


class Lists(NamedTuple):
    """Rows of numbers: `values` [total], and `offsets` [rows + 1] int64 that cut them."""

    values: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[rows] how many numbers each row has."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> list[np.ndarray[Any, Any]]:
        """Each row's numbers, as a view."""
        cuts = self.offsets.tolist()
        return [self.values[low:high] for low, high in pairwise(cuts)]


def read(
    path: Path, rows: np.ndarray[Any, np.dtype[np.int64]], names: Sequence[str]
) -> dict[str, Lists]:
    """Lists of the named columns, for `rows` in the order in which they stand there.

    `response_mask` is all ones where it is not logged. Ids and masks are int64, all else float32.
    Raises InputError for a column that is not there or whose lists do not fit the responses',
    CheckError where captured tokens are not those that their digest says.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            logged = [name for name in names if name in file.schema_arrow.names]
            missing = [n for n in names if n not in logged and n != "response_mask"]
            if missing:
                raise InputError(f"{path}: no column {' and '.join(missing)}")
            table = _take(file, path, rows, logged)
    except UNREADABLE as error:
        raise CheckError(f"{path}: cannot be read as Parquet: {error}") from None
    found = {name: _lists(table[name], path, rows, name) for name in logged}
    if "response_mask" in names and "response_mask" not in found:
        offsets = found["response_ids"].offsets
        found["response_mask"] = Lists(np.ones(offsets[-1], np.int64), offsets)
    _check(found, path, rows)
    return found


def light(
    path: Path, rows: np.ndarray[Any, np.dtype[np.int64]], name: str
) -> pa.ChunkedArray[Any] | None:
    """A column of one value a row, for `rows`; None where there is no such column. Raises
    CheckError where it cannot be read."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            footer.check(file.metadata)
            if name not in file.schema_arrow.names:
                return None
            return file.read(columns=[name]).column(name).take(pa.array(rows))
    except (*UNREADABLE, IndexError) as error:
        raise CheckError(f"{path}: cannot be read as Parquet: {error}") from None


def _take(
    file: pq.ParquetFile, path: Path, rows: np.ndarray[Any, np.dtype[np.int64]], names: list[str]
) -> pa.Table:
    """The rows, in their order; row group by row group, of which only these rows are held."""
    metadata = file.metadata
    footer.check(metadata)
    digests = _noted(metadata, path, names)
    counts = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    starts = np.concatenate([[0], np.cumsum(counts)])
    order = np.argsort(rows, kind="stable")
    wanted = rows[order]
    if len(wanted) and wanted[-1] >= starts[-1]:
        raise CheckError(f"{path}: row {wanted[-1]} is kept, but it holds {starts[-1]} rows")
    groups = np.unique(np.searchsorted(starts, wanted, "right") - 1).tolist()
    found = {group: {name: Digest() for name in digests} for group in groups}
    parts = []
    with ThreadPoolExecutor(1) as beside:  # hashes one batch while the next is decoded
        for group in groups:
            at = int(starts[group])
            for batch in file.iter_batches(BATCH, row_groups=[group], columns=names):
                for name, digest in found[group].items():
                    beside.submit(digest.add, batch.column(name))
                low, high = np.searchsorted(wanted, [at, at + len(batch)])
                if high - low == len(batch):
                    parts.append(batch)
                elif high > low:
                    parts.append(batch.take(wanted[low:high] - at))
                at += len(batch)
    for group, of_column in found.items():
        for name, digest in of_column.items():
            if digest.hexdigest() != digests[name][group]:
                raise CheckError(
                    f"{path}: {name} of row group {group} is not what was captured: SHA-256 "
                    f"{digest.hexdigest()}, its footer says {digests[name][group]}; {RESTORE}"
                )
    if not parts:
        return file.schema_arrow.empty_table().select(names)
    table = pa.Table.from_batches(parts)
    if (order == np.arange(len(order))).all():
        return table
    return table.combine_chunks().take(np.argsort(order, kind="stable"))


def _noted(metadata: pq.FileMetaData, path: Path, names: list[str]) -> dict[str, list[str]]:
    """The digests of each column's row groups by the footer's note, empty where there is none."""
    note = captured(metadata)
    if note is None:
        return {}
    for name in names:
        if len(note.tokens.get(name, [])) != metadata.num_row_groups:
            raise CheckError(
                f"{path}: its footer has {len(note.tokens.get(name, []))} digests of {name} for "
                f"{metadata.num_row_groups} row groups, so it was written anew; {RESTORE}"
            )
    return {name: note.tokens[name] for name in names}


def _lists(
    column: pa.ChunkedArray[Any], path: Path, rows: np.ndarray[Any, Any], name: str
) -> Lists:
    array: Any = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # where there are no chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_map(array.type) or not hasattr(array, "value_lengths"):
        raise InputError(f"{path}: {name} holds {array.type}, expected lists of numbers")
    if array.null_count:
        row = rows[array.is_null().to_numpy(zero_copy_only=False).argmax()]
        raise InputError(f"{path}, row {row}: {name} is null, expected a list: not logged for it")
    flat = array.flatten()
    if flat.null_count:
        raise InputError(f"{path}: {name} holds a null among its numbers")
    dtype = np.float32 if name in PER_TOKEN else np.int64
    values = flat.to_numpy(zero_copy_only=False)
    whole = values.dtype.kind in "iub"
    if not (whole or (dtype is np.float32 and values.dtype.kind == "f")):
        raise InputError(f"{path}: {name} holds {flat.type}, expected {np.dtype(dtype).name}")
    lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return Lists(values.astype(dtype), np.concatenate([[0], np.cumsum(lengths)]))


def _check(found: Mapping[str, Lists], path: Path, rows: np.ndarray[Any, Any]) -> None:
    responses = found.get("response_ids")
    for name, lists in found.items():
        if name != "prompt_ids" and responses is not None:
            unfit = lists.lengths != responses.lengths
            if unfit.any():
                at = int(unfit.argmax())
                raise InputError(
                    f"{path}, row {rows[at]}: {name} has {lists.lengths[at]} values for "
                    f"{responses.lengths[at]} of response_ids"
                )
        if lists.values.dtype == np.float32 and not np.isfinite(lists.values).all():
            at = int(np.searchsorted(lists.offsets, (~np.isfinite(lists.values)).argmax(), "right"))
            raise InputError(f"{path}, row {rows[at - 1]}: {name} holds NaN or infinity")
    if "response_mask" in found and (found["response_mask"].values & ~1).any():
        raise InputError(f"{path}: response_mask holds other values than 0 and 1")
    for name in IDS:
        if name in found and (found[name].lengths == 0).any():
            at = int((found[name].lengths == 0).argmax())
            raise InputError(f"{path}, row {rows[at]}: {name} is empty; verl cannot train on it")
