"""Shares: an update cut into mini-batches of whole groups, and each of these into ranks.

What a rank gets is a pure function of the update's lengths and few integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollsift.schemas.errors import UsageError

from .plan import Update

Odd = Literal["pad", "error", "trim"]
Normalizer = Literal["kept", "all"]


@dataclass(frozen=True, slots=True)
class Split:
    """How updates are cut: `groups` a mini-batch (verl's `ppo_mini_batch_size`), `ranks` that
    share it, `micro` rows that a rank's share must be a multiple of, and what is done where they
    don't divide."""

    groups: int
    ranks: int = 1
    micro: int = 1
    odd: Odd = "pad"
    normalizer: Normalizer = "kept"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a mini-batch: indices of the update's rows, how many padding rows follow
    them, and what the loss is divided by. `ballast` counts the rejected rows' tokens, which stand
    in the first padding row's `loss_mask`; `global_batch_size` counts rows over all ranks."""

    rows: np.ndarray[Any, np.dtype[np.int64]]
    pads: int
    ballast: int
    global_batch_size: int


@dataclass(frozen=True, slots=True)
class Shares:
    """`minis` [mini-batch][rank], and how many groups at the mini-batches' ends were trimmed."""

    minis: list[list[Share]]
    trimmed: int


def shares(
    update: Update, lengths: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any], split: Split
) -> Shares:
    """Cut an update. `lengths` [n] are tokens of prompt and response, by which ranks are balanced;
    `tokens` [n] are those that the policy wrote.

    Raises UsageError where rows don't divide and `odd` is `error`, where trimming would leave
    nothing of a mini-batch, and where rejected tokens should count, but the run counts others.
    """
    if split.normalizer == "all" and update.length_unit != "tokens":
        raise UsageError(
            f"step {update.step}: --normalizer all counts the rejected rows' tokens, but this run "
            f"measures responses by {update.length_unit}; filter with length=tokens, or use "
            "--normalizer kept"
        )
    count = len(update.offsets) - 1
    minis, trimmed = [], 0
    for first in range(0, count, split.groups):
        last = min(first + split.groups, count)
        end = _last(update, first, last, split)
        trimmed += last - end
        minis.append(_mini(update, lengths, tokens, first, end, split))
    return Shares(minis, trimmed)


def _last(update: Update, first: int, last: int, split: Split) -> int:
    """The group before which the mini-batch that begins at `first` ends."""
    multiple = split.ranks * split.micro
    if split.odd == "pad":
        return last
    for end in range(last, first, -1):
        rows = update.offsets[end] - update.offsets[first]
        if rows % multiple == 0:
            return end
        if split.odd == "error":
            raise UsageError(
                f"step {update.step}: a mini-batch of {last - first} groups has {rows} rows, which "
                f"{split.ranks} ranks in micro-batches of {split.micro} rows cannot share; use "
                "--odd pad, --odd trim or another micro-batch size"
            )
    raise UsageError(
        f"step {update.step}: no number of groups from group {first} on has rows that "
        f"{split.ranks} ranks in micro-batches of {split.micro} rows can share; use --odd pad"
    )


def _mini(
    update: Update,
    lengths: np.ndarray[Any, Any],
    tokens: np.ndarray[Any, Any],
    first: int,
    end: int,
    split: Split,
) -> list[Share]:
    low, high = int(update.offsets[first]), int(update.offsets[end])
    rows = high - low
    ballast, size = 0, rows
    if split.normalizer == "all":
        whole = int(update.group_tokens[first:end].sum())
        ballast = whole - int(tokens[low:high].sum())
        size = int(update.group_rows[first:end].sum())
    # With ballast the first rank has one padding row or more, so its place is kept free.
    places = rows + (1 if ballast else 0)
    per_rank = -(-places // (split.ranks * split.micro)) * split.micro
    parts = _balanced(lengths[low:high], split.ranks, per_rank, 1 if ballast else 0)
    return [
        Share(part + low, per_rank - len(part), ballast if rank == 0 else 0, size)
        for rank, part in enumerate(parts)
    ]


def _balanced(
    lengths: np.ndarray[Any, Any], ranks: int, most: int, taken: int
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Rows for each rank, at most `most` (less `taken` for the first), so that their tokens are
    about the same: longest first to the rank with the fewest tokens. In training order inside."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    room = [most - taken, *[most] * (ranks - 1)]
    total = [0] * ranks
    for row in np.argsort(-lengths, kind="stable").tolist():
        rank = min((r for r in range(ranks) if len(parts[r]) < room[r]), key=lambda r: total[r])
        parts[rank].append(row)
        total[rank] += int(lengths[row])
    return [np.array(sorted(part), np.int64) for part in parts]
