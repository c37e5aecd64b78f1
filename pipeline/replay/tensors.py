"""Tensors: rows of lists as verl takes them, nested (V1), or padded, for people without verl."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from .tokens import Lists


def take(lists: Lists, rows: np.ndarray, pads: int) -> Lists:
    """Some rows, and `pads` rows of one 0 behind them: as a token it is in every vocabulary, and no
    loss is taken on it."""
    if len(rows) and not pads and (np.diff(rows) == 1).all():  # a part as it stands: no copy
        cuts = lists.offsets[rows[0] : rows[-1] + 2]
        return Lists(lists.values[cuts[0] : cuts[-1]], cuts - cuts[0])
    lengths = np.concatenate([lists.lengths[rows], np.ones(pads, np.int64)])
    held = lists.rows
    parts = [held[row] for row in rows.tolist()]
    values = np.concatenate([*parts, np.zeros(pads, lists.values.dtype)])
    return Lists(values, np.concatenate([[0], np.cumsum(lengths)]))


def joined(first: Lists, second: Lists) -> Lists:
    """Each row of one followed by that row of the other."""
    parts = [part for pair in zip(first.rows, second.rows, strict=True) for part in pair]
    return Lists(np.concatenate(parts), first.offsets + second.offsets)


def positions(lists: Lists) -> Lists:
    """0, 1, 2, ... in each row."""
    count = np.arange(len(lists.values), dtype=np.int64)
    return Lists(count - np.repeat(lists.offsets[:-1], lists.lengths), lists.offsets)


def nested(lists: Lists) -> torch.Tensor:
    """A jagged nested tensor on the CPU: Ascend refuses to make one on the device."""
    return torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(lists.values), torch.from_numpy(lists.offsets)
    )


def padded(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A nested mini-batch in the older layout: prompts padded left, responses right, all with 0.

    -> `prompts` [rows, P], `responses` and all that is per response token [rows, R], `input_ids`,
    `attention_mask` and `position_ids` [rows, P + R]; what is not nested as it is.
    """
    found = {key: value for key, value in batch.items() if not value.is_nested}
    for key, value in batch.items():
        if value.is_nested and key not in ("input_ids", "position_ids"):
            found[key] = dense(value, left=key == "prompts")
    masks = [dense(_ones(batch[key]), left=key == "prompts") for key in ("prompts", "responses")]
    mask = torch.cat(masks, dim=1)
    found["input_ids"] = torch.cat([found["prompts"], found["responses"]], dim=1)
    found["attention_mask"] = mask
    found["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return found


def as_nested(rows: torch.Tensor, like: torch.Tensor, pad: float) -> torch.Tensor:
    """Rows of [some, longest] cut to the lengths of `like`, whose further rows get `pad`."""
    offsets = like.offsets()
    lengths = offsets.diff()
    values = torch.full((int(offsets[-1]),), pad, dtype=rows.dtype)
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    within = torch.arange(len(values)) - torch.repeat_interleave(offsets[:-1], lengths)
    real = row < len(rows)
    values[real] = rows[row[real], within[real]]
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _ones(value: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(value.values(), dtype=torch.int64)
    return torch.nested.nested_tensor_from_jagged(ones, value.offsets())


def dense(value: torch.Tensor, left: bool = False) -> torch.Tensor:
    """A nested tensor's rows as [rows, longest], with 0 behind or, to the `left`, before them."""
    values, offsets = value.values(), value.offsets()
    lengths = offsets.diff()
    width = int(lengths.max())
    within = torch.arange(len(values)) - torch.repeat_interleave(offsets[:-1], lengths)
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    column = within + (width - lengths)[row] if left else within
    found = torch.zeros(len(lengths), width, dtype=values.dtype)
    found[row, column] = values
    return found
