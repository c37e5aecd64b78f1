"""Points: a grid of recipes, and what each of them keeps, in sums over rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec
import polars as pl

from rollsift.schemas.errors import RecipeError
from rollsift.schemas.recipe import Recipe

from .select import TOLERANCE

COLUMNS = (
    "kept", "kept_tokens", "tokens_ratio", "mean_length", "length_change", "mean_reward",
    "mean_reward_all", "correct_share", "correct_share_all", "groups_no_signal",
)  # fmt: skip


def grid(items: Iterable[str]) -> list[dict[str, str]]:
    """The points of a grid, key -> value: every value with all of the other keys', the last key
    fastest.

    An item is `key=value,value`; where it holds a `;`, that separates. Raises RecipeError.
    """
    axes: dict[str, list[str]] = {}
    for item in items:
        key, values = _axis(item)
        for other in axes:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                both = key if key == other else f"{other} and {key}"
                raise RecipeError(f"{both}: --grid sets the same twice; name one of them, once")
        axes[key] = values
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _axis(item: str) -> tuple[str, list[str]]:
    key, found, text = item.partition("=")
    values = [value.strip() for value in text.split(";" if ";" in text else ",")]
    if len(values) > 1 and ";" in text and not values[-1]:
        values.pop()  # `f(x, y);` is one value
    if not found or not all(values):
        raise RecipeError(f"--grid {item}: expected key=value,value or key=value;value")
    if len(set(values)) < len(values):
        raise RecipeError(f"{key.strip()}: --grid names the same value twice")
    return key.strip(), values


@dataclass(slots=True)
class Totals:
    """Sums over rollouts; of each column those that are known, and how many these are."""

    rollouts: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)

    def add(self, rollouts: pl.DataFrame) -> None:
        """Count a step's rollouts."""
        self.rollouts += len(rollouts)
        for name in ("response_length", "reward", "correct"):
            column = rollouts[name]
            self.sums[name] = self.sums.get(name, 0.0) + float(column.sum())
            self.known[name] = self.known.get(name, 0) + len(column) - column.null_count()

    def mean(self, name: str) -> float | None:
        """Mean of the known values; None where there are none."""
        return self.sums[name] / self.known[name] if self.known.get(name) else None

    @property
    def tokens(self) -> int:
        """Total length, in the log's unit."""
        return int(self.sums.get("response_length", 0))


@dataclass(slots=True)
class Point:
    """One setting of the grid, and what it keeps of `all`, the rollouts that count."""

    keys: Mapping[str, str]
    recipe: Recipe
    kept: Totals = field(default_factory=Totals)
    all: Totals = field(default_factory=Totals)
    groups_no_signal: int = 0

    @property
    def label(self) -> str:
        """The setting in words."""
        return ", ".join(f"{key}={value}" for key, value in self.keys.items())

    def add(self, kept: pl.DataFrame) -> None:
        """Count a step's kept rollouts."""
        self.kept.add(kept)
        spread = pl.col("reward").max() - pl.col("reward").min()
        flat = kept.group_by("group").agg(flat=spread <= TOLERANCE)["flat"]
        self.groups_no_signal += int(flat.sum())

    def row(self) -> dict[str, Any]:
        """The grid's keys, then COLUMNS; null where nothing is kept or nothing known."""
        kept, whole = self.kept, self.all
        length, length_all = kept.mean("response_length"), whole.mean("response_length")
        values = (
            kept.rollouts,
            kept.tokens,
            kept.tokens / whole.tokens if whole.tokens else None,
            length,
            length / length_all - 1 if length is not None and length_all else None,
            kept.mean("reward"),
            whole.mean("reward"),
            kept.mean("correct"),
            whole.mean("correct"),
            self.groups_no_signal,
        )
        keys = {key: _value(self.recipe, key) for key in self.keys}
        return keys | dict(zip(COLUMNS, values, strict=True))


def _value(recipe: Recipe, key: str) -> Any:
    found = msgspec.to_builtins(recipe)
    for part in key.split("."):
        found = found[part]
    return found
