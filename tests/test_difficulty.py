"""Difficulty: exact means, quartiles and middle ranks by brute force, and the paper's estimator."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pytest
import tdigest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsift.pipeline.difficulty import (
    Exact,
    TDigest,
    Thresholds,
    buckets,
    estimator,
    group_means,
    thresholds,
)
from rollsift.schemas.errors import UsageError
from rollsift.schemas.recipe import Difficulty

BUCKETS = ["very_hard", "hard", "medium", "easy"]
QUARTERS = [Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)]
FINITE = st.floats(allow_nan=False, allow_infinity=False)
# Few values, as mean rewards are, or any.
DIFFICULTIES = st.one_of(
    st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0]), min_size=1, max_size=30),
    st.lists(FINITE, min_size=1, max_size=12),
)


def fed(how: Difficulty, *steps: Sequence[float | None]) -> Any:
    """An estimator that has seen some steps."""
    found = estimator(how)
    for step in steps:
        found.add(pl.Series(step, dtype=pl.Float64))
    return found


def bucketed(found: Any, values: Sequence[float | None]) -> list[str | None]:
    """The buckets of difficulties by what an estimator has seen."""
    edges = thresholds(found, earlier=found.seen)
    return buckets(pl.Series(values, dtype=pl.Float64), edges, warmup=0).to_list()


def share(values: Sequence[float], upto: float) -> Fraction:
    """F(v): the share of values that are at most v."""
    return Fraction(sum(value <= upto for value in values), len(values))


def middle(values: Sequence[float], of: float) -> Fraction:
    """(below + half of equal) / n."""
    doubled = 2 * sum(value < of for value in values) + sum(value == of for value in values)
    return Fraction(doubled, 2 * len(values))


@settings(deadline=None)
@given(DIFFICULTIES)
def test_exact_quartiles_are_the_smallest_values_that_reach_them(values: list[float]) -> None:
    """q25, q50 and q75 are the smallest value v with F(v) >= q, and a bucket begins at its edge."""
    found = fed(Difficulty(), values)
    expected = [min(v for v in values if share(values, v) >= quarter) for quarter in QUARTERS]
    assert list(found.edges()) == expected
    assert found.seen == len(values)
    names = [BUCKETS[sum(value >= edge for edge in expected)] for value in values]
    assert bucketed(found, values) == names


@settings(deadline=None)
@given(DIFFICULTIES)
def test_midrank_buckets_are_those_of_the_middle_rank(values: list[float]) -> None:
    """With ties by mid-rank a value's bucket is where (below + half of equal) / n stands among the
    quarters."""
    found = fed(Difficulty(ties="midrank"), values)
    names = [BUCKETS[sum(middle(values, value) >= q for q in QUARTERS)] for value in values]
    assert bucketed(found, values) == names


@settings(deadline=None)
@given(DIFFICULTIES, st.sampled_from(["strict", "midrank"]), st.randoms(use_true_random=False))
def test_exact_quartiles_merge_in_any_order(values: list[float], ties: Any, draw: Any) -> None:
    """The same difficulties in any order and in any number of steps have the same edges; nulls are
    left out."""
    whole = fed(Difficulty(ties=ties), values)
    mixed = [*values, None, None]
    draw.shuffle(mixed)
    cut = draw.randint(0, len(mixed))
    parted = fed(Difficulty(ties=ties), mixed[:cut], [], mixed[cut:])
    assert (parted.edges(), parted.seen) == (whole.edges(), whole.seen)


def test_without_any_difficulty_there_are_no_edges_and_no_buckets() -> None:
    """Before any group had a difficulty the edges are null, and so are buckets."""
    for ties in ("strict", "midrank"):
        found = fed(Difficulty(ties=ties), [], [None])
        assert found.edges() == (None, None, None)
        assert bucketed(found, [None, None]) == [None, None]


def test_warmup_lasts_until_enough_groups_stand_in_earlier_steps() -> None:
    """While fewer than `warmup` groups stand in earlier steps every group that has a difficulty is
    in the bucket warmup."""
    values = pl.Series([0.0, 1.0, None])
    edges = {earlier: Thresholds(0.5, 0.5, 0.5, seen=9, earlier=earlier) for earlier in (3, 4)}
    assert buckets(values, edges[3], warmup=4).to_list() == ["warmup", "warmup", None]
    assert buckets(values, edges[4], warmup=4).to_list() == ["very_hard", "easy", None]


# --- means


def rounded_mean(values: Sequence[float]) -> float:
    """The correctly rounded sum over the count; the exact mean where no float holds the sum."""
    total = sum(map(Fraction, values), Fraction(0))
    try:
        return float(total) / len(values)
    except OverflowError:
        return float(total / len(values))


def means(values: Sequence[float | None], codes: Sequence[int | None], count: int) -> list[Any]:
    """group_means of plain lists."""
    groups = pl.Series(codes, dtype=pl.UInt32)
    return group_means(pl.Series(values, dtype=pl.Float64), groups, count).to_list()


def test_a_mean_is_the_same_in_any_order() -> None:
    """All 120 orders of five rewards have one mean, the correctly rounded one, which a plain sum
    misses."""
    rewards = [0.1, 0.2, 0.3, 0.7, 0.6]
    orders = list(itertools.permutations(rewards))
    assert len({sum(order) / 5 for order in orders}) > 1
    values = [value for order in orders for value in order]
    codes = [group for group in range(len(orders)) for _ in rewards]
    assert set(means(values, codes, len(orders))) == {rounded_mean(rewards)}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3) | st.none(),
            st.one_of(
                st.sampled_from([0.0, -0.0, 1.0, 0.5, -1.0, 0.1, 0.7, 1e16, -1e16, 1e308, 5e-324]),
                st.integers(-4, 4).map(lambda n: n / 8),
                FINITE,
                st.sampled_from([None, math.nan, math.inf, -math.inf]),
            ),
        ),
        max_size=24,
    )
)
def test_means_are_correctly_rounded(pairs: list[tuple[int | None, float | None]]) -> None:
    """A group's mean is the correctly rounded sum of its finite values over their count, never
    -0.0; null where it has none."""
    found = means([value for _, value in pairs], [code for code, _ in pairs], 5)
    expected = []
    for group in range(5):
        known = [v for c, v in pairs if c == group and v is not None and math.isfinite(v)]
        expected.append((rounded_mean(known) or 0.0) if known else None)
    assert [repr(mean) for mean in found] == [repr(mean) for mean in expected]


@settings(deadline=None)
@given(st.lists(st.integers(-(2**53), 2**53).map(lambda n: n / 2**20), min_size=1, max_size=40))
def test_means_of_multiples_of_a_small_power_of_two_are_exact(values: list[float]) -> None:
    """Rewards on a binary grid, also where their sum leaves the integers that float64 can hold,
    have the correctly rounded mean."""
    assert means(values, [0] * len(values), 1) == [rounded_mean(values) or 0.0]


# --- the paper's estimator


def spread(count: int) -> list[float]:
    """Mean rewards of groups of 8, mostly low."""
    draw = random.Random(3)
    return [sum(draw.random() < 0.4 for _ in range(8)) / 8 for _ in range(count)]


def digest(*steps: Sequence[float | None]) -> TDigest:
    """The paper's estimator, having seen some steps."""
    return fed(Difficulty(quantiles="tdigest"), *steps)


def bits(edges: Sequence[float | None]) -> bytes:
    """The edges to the last bit."""
    return struct.pack("<3d", *edges)


def test_the_digest_is_repeatable() -> None:
    """The same steps in the same order give the same edges to the last bit, whatever the global
    random state is."""
    steps = [spread(500), spread(300)[::-1], [random.Random(1).random() for _ in range(400)]]
    found = set()
    for seed in (1, 2, 3):
        random.seed(seed)
        np.random.seed(seed)
        found.add(bits(digest(*steps).edges()))
    assert len(found) == 1


def test_the_digest_leaves_global_random_state_alone() -> None:
    """Feeding and asking the digest moves neither Python's nor NumPy's random stream."""
    found = digest()
    before, numpys = random.getstate(), np.random.get_state()
    found.add(pl.Series(spread(300)))
    found.edges()
    assert random.getstate() == before
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpys, strict=True))


@pytest.mark.parametrize(
    "values",
    [[0.0] * 48 + [1.0] * 16, [0.5], [0.0, 1.0], [1.0] * 9 + [-1.0], [0.25] * 5, spread(700)],
    ids=["two", "one", "pair", "rare", "equal", "many"],
)
def test_the_digest_stays_in_the_range_of_the_data(values: list[float]) -> None:
    """No edge lies below the least or above the greatest difficulty seen, and the edges rise."""
    edges = digest(values).edges()
    assert min(values) <= edges[0] <= edges[1] <= edges[2] <= max(values)


def test_the_library_itself_leaves_that_range() -> None:
    """What the clamp is for: of 48 zeros and 16 ones the library's 25th percentile is below 0."""
    raw = tdigest.TDigest()
    raw.batch_update([0.0] * 48 + [1.0] * 16)
    assert raw.percentile(25) < 0.0
    assert digest([0.0] * 48 + [1.0] * 16).edges()[0] == 0.0


def test_the_digest_leaves_out_what_is_no_number() -> None:
    """Null and NaN do not enter the digest and are not counted."""
    values = spread(200)
    holed = [x for value in values for x in (value, None, math.nan)]
    assert bits(digest(holed).edges()) == bits(digest(values).edges())
    assert digest(holed).seen == len(values)


def test_a_group_without_a_number_does_not_reach_the_digest() -> None:
    """A group whose signals are all missing or NaN has no difficulty, so what the estimators are
    fed has no NaN."""
    difficulties = means([0.5, math.nan, None, 1.0], [0, 1, 1, 2], 3)
    assert difficulties == [0.5, None, 1.0]
    assert digest(difficulties).seen == 2


def test_the_digest_is_near_the_exact_quartiles() -> None:
    """The estimator estimates: of evenly spread difficulties its edges are within 3 % of the exact
    ones."""
    values = [i / 2000 for i in range(2000)]
    random.Random(5).shuffle(values)
    exact = fed(Difficulty(), values).edges()
    assert digest(values).edges() == pytest.approx(exact, abs=0.03)


def test_the_published_ports_percentiles_make_every_prompt_easy() -> None:
    """The port asked for percentile(0.25) of a library that takes 0 to 100: every edge is the least
    value or below it, so every prompt is easy. Ours asks for 25 and tells the hard from the easy.
    """
    values = spread(64)
    port = tdigest.TDigest()
    port.batch_update(values)
    wrong = Thresholds(*(port.percentile(q) for q in (0.25, 0.5, 0.75)), seen=64, earlier=64)
    assert set(buckets(pl.Series(values), wrong, warmup=0)) == {"easy"}
    ours = bucketed(digest(values), values)
    assert set(ours) == set(BUCKETS)
    assert ours.count("easy") < len(values) / 2
    by_name = {name: [v for v, of in zip(values, ours, strict=True) if of == name] for name in ours}
    for harder, easier in itertools.pairwise(BUCKETS):
        assert max(by_name[harder]) < min(by_name[easier])


def test_midrank_is_refused_for_the_digest() -> None:
    """A digest has no middle ranks: the recipe is refused, naming the key."""
    with pytest.raises(UsageError, match=r"difficulty\.ties"):
        estimator(Difficulty(quantiles="tdigest", ties="midrank"))


def test_the_recipe_chooses_the_estimator() -> None:
    """`quantiles` names the estimator; exact is what is used where it is not set."""
    assert isinstance(estimator(Difficulty()), Exact)
    assert isinstance(digest(), TDigest)
