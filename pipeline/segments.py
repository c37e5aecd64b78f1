"""Segments: the rows of each group side by side, in whatever order the groups' rows stand.

Groups of one size are a matrix, a row per group, so that NumPy sorts all of them at once: three
times as fast as one sort of all rows by group and value, and ten where the groups are mixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl


def counts(groups: pl.Series, count: int) -> pl.Series:
    """How often each of the numbers 0 to `count` - 1 stands among `groups` (Int32)."""
    return pl.Series(np.bincount(groups.to_numpy(), minlength=count), dtype=pl.Int32)


def places(groups: pl.Series) -> pl.Series:
    """The place of each row in its group, from 0, by the rows' order (Int32)."""
    codes, order = _side_by_side(groups)
    sizes = np.bincount(codes)
    starts = (np.cumsum(sizes) - sizes).astype(np.int32)
    within = np.arange(len(codes), dtype=np.int32) - np.repeat(starts, sizes)
    return pl.Series(_back(within, order))


def ranks(groups: pl.Series, *keys: pl.Series) -> pl.Series:
    """The rank of each row in its group, from 1, by the keys, the first one first (Int32); equal
    rows rank by their order. No key may hold null or NaN; one alone is of integers that,
    times the number of rows, are below 2**62."""
    codes, order = _side_by_side(groups)
    values = [key.to_numpy() if order is None else key.to_numpy()[order] for key in reversed(keys)]
    sizes = np.bincount(codes)
    starts = np.cumsum(sizes) - sizes
    found = np.empty(len(codes), np.int32)
    different = np.unique(sizes[sizes > 0])
    for size in different:
        rows: Any = slice(None)
        if len(different) > 1:
            rows = starts[sizes == size][:, None] + np.arange(size)
        of_size = [value[rows].reshape(-1, size) for value in values]
        by_rank = _order(*of_size) if len(values) == 1 else np.lexsort(of_size, axis=1)
        within = np.empty(by_rank.shape, np.int32)
        np.put_along_axis(within, by_rank, np.arange(1, size + 1, dtype=np.int32)[None, :], axis=1)
        found[rows] = within.ravel() if len(different) == 1 else within
    return pl.Series(_back(found, order))


def _order(values: Any) -> Any:
    """The order of each row of a matrix: values are sorted with their places in their low bits,
    which takes a sixth of the time of a sort of places by value."""
    bits = int(values.shape[1]).bit_length()
    found = values << bits
    found |= np.arange(values.shape[1])
    found.sort(axis=1)
    found &= (1 << bits) - 1
    return found


def _side_by_side(groups: pl.Series) -> tuple[Any, Any]:
    """The groups' numbers in order, and the rows in that order, None where they are in it."""
    order = by_group(groups)
    codes = groups.to_numpy()
    return codes if order is None else codes[order], order


def by_group(groups: pl.Series) -> Any:
    """The rows' places by group and then by their order, None where they stand so."""
    if groups.is_sorted():
        return None
    codes = groups.to_numpy()
    # NumPy sorts 16 bits by their value, five times as fast as it compares more of them.
    order = (codes & 0xFFFF).astype(np.uint16).argsort(kind="stable")
    high = (codes >> 16).astype(np.uint16)
    return order[high[order].argsort(kind="stable")] if high.any() else order


def _back(values: Any, order: Any) -> Any:
    if order is None:
        return values
    found = np.empty_like(values)
    found[order] = values
    return found
