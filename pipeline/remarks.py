"""Remarks: what a person should be told about a log or a recipe while it is filtered."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from rollsift.schemas.recipe import BUCKETS, Recipe

from .judge import Judged
from .load import Loaded
from .select import TOLERANCE
from .sources import Source

MANY = 100  # groups without a constant one that make a filtered log likely


class Remarks:
    """Says each thing once; `judged` also refuses incomplete groups where the recipe says so."""

    def __init__(self, recipe: Recipe, notify: Callable[[str], None]) -> None:
        self.recipe, self.notify = recipe, notify
        self.said: set[str] = set()
        self.from_text: dict[str, int] = {}
        self.largest = 0
        self.ranked_out = self.ranked = self.unranked = False
        self.groups = self.constant = 0

    def loaded(self, source: Source, loaded: Loaded) -> None:
        """What reading a step showed."""
        for note in loaded.notes:
            self.notify(note)
        if not len(loaded.rows):
            return
        if loaded.group_source == "prompt":
            self._once("no uid: a group is the rows of equal prompt and ground truth in a step")
        if loaded.length_source == "chars" and self.recipe.length == "auto":
            self._once("no tokens: lengths are in characters")
        for name, count in loaded.from_text.items():
            self.from_text[name] = self.from_text.get(name, 0) + count
        if self.recipe.metric == "token_efficiency" and (loaded.rows["reward"] < 0).any():
            self._once("token_efficiency with negative rewards prefers long wrong answers")

    def judged(self, source: Source, loaded: Loaded, judged: Judged) -> str | None:
        """What judging a step showed; -> why it is refused, if it is."""
        groups = judged.groups.filter(pl.col("group_size") > 0)
        sizes = groups["group_size"]
        if "reward_spread" in groups.columns:
            self.groups += groups["reward_spread"].count()
            self.constant += int((groups["reward_spread"] <= TOLERANCE).sum())
        if not len(sizes):
            return None
        largest = int(sizes.max())  # type: ignore[arg-type]  # Int32
        self.largest = max(self.largest, largest)
        self.ranked |= judged.rows["rank"].count() > 0
        reasons = set(judged.rows["reason"].unique())
        self.unranked |= "no_metric" in reasons
        self.ranked_out |= bool(reasons & {"outranked", "displaced"})
        due = self.recipe.group_size or largest
        odd = groups.filter(pl.col("group_size") != due)
        if not len(odd):
            return None
        first = loaded.ids[int(odd["group"][0])]
        rest = f", and {len(odd) - 1} more groups" if len(odd) > 1 else ""
        found = f"{source.file}: group {first!r} has {odd['group_size'][0]} of {due} rollouts{rest}"
        if self.recipe.incomplete == "error":
            return f"{found}; incomplete=keep or drop goes on without them"
        self.notify(found)
        return None

    def close(self) -> None:
        """What the whole log showed."""
        for name, count in self.from_text.items():
            self.notify(f"{name}: {count} values read as numbers from text")
        if self.groups >= MANY and not self.constant:
            self.notify(
                f"none of {self.groups:,} groups has equal rewards throughout: if the trainer had "
                "filtered them (DAPO), the quartiles of difficulty are the survivors'"
            )
        if self.unranked and not self.ranked:
            self.notify(f"no rollout has a metric, so nothing is kept: {self.recipe.metric!r}")
        smallest_k = min(self.recipe.k_of(bucket) for bucket in BUCKETS)
        if 0 < self.largest <= smallest_k and not self.ranked_out:
            self.notify(f"k keeps every group whole: the largest has {self.largest} rollouts")

    def _once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.notify(text)
