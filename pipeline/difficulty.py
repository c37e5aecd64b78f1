"""Difficulty: the mean signal of a whole group, and the buckets that quartiles over prompts make.

The mean is the correctly rounded sum over the count, so that equal groups get equal buckets in
whatever order their rows come. Source of the buckets: GFPO, arXiv 2508.09726, adaptive difficulty.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import polars as pl

from rollsift.schemas.errors import UsageError
from rollsift.schemas.recipe import Difficulty

QUARTILES = (0.25, 0.5, 0.75)
_SCALE = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Edges of the buckets; null before any group had a difficulty. `seen` groups stand behind
    them, `earlier` of those in steps before this one."""

    q25: float | None = None
    q50: float | None = None
    q75: float | None = None
    seen: int = 0
    earlier: int = 0


def group_means(values: pl.Series, groups: pl.Series, count: int) -> pl.Series:
    """Correctly rounded sum / count of the finite values of each of `count` groups, else null.

    Values that are multiples of 2**-20, as most rewards are, are summed as exact integers.
    """
    x = values.cast(pl.Float64).to_numpy()  # where null is NaN
    known = np.isfinite(x) & groups.is_not_null().to_numpy()
    codes = groups.fill_null(0).to_numpy().astype(np.int64)
    if not known.all():
        x, codes = x[known], codes[known]
    counts = np.bincount(codes, minlength=count)
    largest = max(float(x.max(initial=0.0)), -float(x.min(initial=0.0))) * int(
        counts.max(initial=0)
    )
    if largest < (1 << 53) / _SCALE and bool(((scaled := x * _SCALE) == np.rint(scaled)).all()):
        sums = np.bincount(codes, weights=scaled, minlength=count) / _SCALE
        means = np.divide(sums, counts, out=np.full(count, np.nan), where=counts > 0)
    else:
        order = np.argsort(codes, kind="stable")
        parts = np.split(x[order], np.cumsum(counts)[:-1]) if count else []
        means = np.array([_mean(part.tolist()) for part in parts])
    return pl.Series(means + 0.0, dtype=pl.Float64).fill_nan(None)


def _mean(values: list[float]) -> float:
    if not values:
        return math.nan
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return float(sum(map(Fraction, values)) / len(values))


Edges = tuple[float, float, float] | tuple[None, None, None]


class Estimator(Protocol):
    """Quartiles over the difficulties of all groups added so far."""

    @property
    def seen(self) -> int:
        """Groups added so far."""

    def add(self, difficulties: pl.Series) -> None:
        """Add a step's groups, in their order; nulls are left out."""

    def edges(self) -> Edges:
        """The three edges: below the first is very_hard, below the second hard, and so on."""


def estimator(how: Difficulty) -> Estimator:
    """The estimator that a recipe names; raises UsageError where its library is missing."""
    return TDigest(how.ties) if how.quantiles == "tdigest" else Exact(how.ties)


class Exact:
    """value -> count. A quartile is the smallest value v with F(v) >= q; merges in any order."""

    def __init__(self, ties: str) -> None:
        self.ties = ties
        self.values = np.empty(0)
        self.counts = np.empty(0, dtype=np.int64)

    @property
    def seen(self) -> int:
        """Groups added so far."""
        return int(self.counts.sum())

    def add(self, difficulties: pl.Series) -> None:
        """Count a step's groups; nulls are left out."""
        new, counts = np.unique(
            difficulties.filter(difficulties.is_finite()).to_numpy(), return_counts=True
        )
        both = np.concatenate([self.values, new])
        self.values, place = np.unique(both, return_inverse=True)
        weights = np.concatenate([self.counts, counts])
        self.counts = np.zeros(len(self.values), dtype=np.int64)
        np.add.at(self.counts, place, weights)

    def edges(self) -> Edges:
        """The quartiles, or the values at which mid-ranks reach the quarters."""
        if not len(self.values):
            return None, None, None
        below = np.cumsum(self.counts)
        if self.ties == "midrank":
            return _midrank_edges(self.values, 2 * below - self.counts, 2 * int(below[-1]))
        # Quarters in integers: F(v) >= i/4 is 4 * below >= i * n.
        q25, q50, q75 = (
            float(self.values[np.argmax(4 * below >= i * below[-1])]) for i in (1, 2, 3)
        )
        return q25, q50, q75


def _midrank_edges(values: Any, doubled_rank: Any, total: int) -> tuple[float, float, float]:
    """The smallest value whose mid-rank reaches each quarter; infinite where none does."""
    edges = []
    for i in (1, 2, 3):
        reached = 4 * doubled_rank >= i * total
        edges.append(float(values[np.argmax(reached)]) if reached.any() else math.inf)
    return edges[0], edges[1], edges[2]


class TDigest:
    """The paper's estimator, by the `tdigest` library (Dunning and Ertl's t-digest).

    The library draws from the global random generators; its own stream is swapped in for each
    call, so that the same difficulties in the same order give the same digest. Its percentiles can
    leave the data's range: they are clamped.
    """

    def __init__(self, ties: str) -> None:
        if ties != "strict":
            raise UsageError("difficulty.ties: midrank needs difficulty.quantiles=exact")
        try:
            from tdigest import TDigest as Digest
        except ImportError:
            raise UsageError(
                "difficulty.quantiles: tdigest needs the library: pip install 'rollsift[tdigest]'"
            ) from None
        self.digest = Digest()
        self.streams = random.Random(0).getstate(), np.random.RandomState(0).get_state()
        self.seen = 0
        self.least, self.most = math.inf, -math.inf

    def add(self, difficulties: pl.Series) -> None:
        """Feed a step's groups in their order; nulls are left out."""
        # One NaN makes the library count for ever.
        values = difficulties.filter(difficulties.is_finite()).to_list()
        self._own(lambda: self.digest.batch_update(values) if values else None)
        self.seen += len(values)
        self.least, self.most = min([self.least, *values]), max([self.most, *values])

    def edges(self) -> Edges:
        """The quartiles, within the data's range."""
        if not self.seen:
            return None, None, None
        q25, q50, q75 = (
            min(max(float(self.digest.percentile(100 * q)), self.least), self.most)
            for q in QUARTILES
        )
        return q25, q50, q75

    def _own(self, call: Any) -> None:
        theirs = random.getstate(), np.random.get_state()
        random.setstate(self.streams[0])
        np.random.set_state(self.streams[1])
        try:
            call()
        finally:
            self.streams = random.getstate(), np.random.get_state()
            random.setstate(theirs[0])
            np.random.set_state(theirs[1])


def thresholds(estimator: Estimator, earlier: int) -> Thresholds:
    """What the estimator says now; `earlier` groups with a difficulty stand in earlier steps."""
    q25, q50, q75 = estimator.edges()
    return Thresholds(q25, q50, q75, estimator.seen, earlier)


def buckets(difficulties: pl.Series, edges: Thresholds, warmup: int) -> pl.Series:
    """very_hard below q25, hard below q50, medium below q75, else easy; null without difficulty."""
    d = pl.col("d")
    if edges.earlier < warmup or edges.q25 is None:
        named: Any = pl.when(d.is_not_null()).then(pl.lit("warmup"))
    else:
        named = (
            pl.when(d.is_null()).then(None)
            .when(d < edges.q25).then(pl.lit("very_hard"))
            .when(d < edges.q50).then(pl.lit("hard"))
            .when(d < edges.q75).then(pl.lit("medium"))
            .otherwise(pl.lit("easy"))
        )  # fmt: skip
    frame = difficulties.rename("d").to_frame()
    return frame.select(bucket=named.cast(pl.String))["bucket"]
