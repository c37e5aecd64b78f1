"""Lists: verl's fields of tokens as Arrow arrays, without a Python object for a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tensordict import NonTensorData


def ragged(data: Any, field: str) -> Any:
    """A field of V1's queue as lists, one a row; None where there is none.

    It is a jagged tensor, a dense one where all rows have one length, or one tensor a row.
    """
    values = data.get(field, None)
    if values is None:
        return None
    if not isinstance(values, torch.Tensor):
        values = torch.nested.as_nested_tensor(objects(data, field, 0), layout=torch.jagged)
    values = values.detach().cpu()
    if values.is_nested:
        return array(values.values(), values.offsets().numpy())
    return array(values.reshape(-1), np.arange(len(values) + 1) * values.shape[1])


def unpadded(values: torch.Tensor, there: torch.Tensor) -> Any:
    """The values [rows, width] that are `there` as lists, one a row."""
    lengths = there.sum(1).cpu().numpy()
    return array(values[there].detach().cpu(), np.concatenate([[0], np.cumsum(lengths)]))


def array(flat: torch.Tensor, offsets: Any) -> Any:
    """Values [total] and the offsets [rows + 1] that cut them as lists; floats as float32."""
    flat = flat.float() if flat.is_floating_point() else flat
    values: Any = pa.array(flat.contiguous().numpy())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def objects(data: Any, field: str, count: int) -> list[Any]:
    """A field of Python objects, one a row; `count` Nones where there is none."""
    values = data.get(field, None)
    if values is None:
        return [None] * count
    found = values.tolist() if hasattr(values, "tolist") else list(values)
    return [value.data if isinstance(value, NonTensorData) else value for value in found]


def lengths(lists: Any) -> np.ndarray[Any, Any]:
    """[rows] how many values each list has."""
    found: np.ndarray[Any, Any] = lists.value_lengths().to_numpy(zero_copy_only=False)
    return found


def values(lists: Any) -> np.ndarray[Any, Any]:
    """[total] the values of all lists."""
    found: np.ndarray[Any, Any] = lists.flatten().to_numpy(zero_copy_only=False)
    return found


def sums(lists: Any) -> np.ndarray[Any, Any]:
    """[rows] float64: the sum of each list."""
    rows = np.repeat(np.arange(len(lists)), lengths(lists))
    return np.bincount(rows, weights=values(lists).astype(np.float64), minlength=len(lists))


def any_of(lists: Any, wanted: frozenset[int]) -> np.ndarray[Any, Any]:
    """[rows] bool: whether each list has one of the wanted values."""
    hits = np.isin(values(lists), sorted(wanted))
    rows = np.repeat(np.arange(len(lists)), lengths(lists))
    return np.bincount(rows[hits], minlength=len(lists)) > 0
