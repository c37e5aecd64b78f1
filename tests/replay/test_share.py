"""Every row of an update gets to one rank, and what the loss is divided by is counted once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsift.pipeline.replay.plan import Update
from rollsift.pipeline.replay.share import Share, Split, shares
from rollsift.schemas.errors import UsageError

Drawn = tuple[Update, list[int], list[int]]


def update(sizes: list[int], rows: list[int], tokens: list[int], unit: str = "tokens") -> Update:
    """An update of groups with so many kept rows, so many rows and tokens in all."""
    count = sum(sizes)
    return Update(
        step=7, manifest="", path=Path(), length_unit=unit, rows=np.arange(count),
        offsets=np.array([0, *np.cumsum(sizes)], np.int64), group_rows=np.array(rows, np.int64),
        group_tokens=np.array(tokens, np.int64), session=np.arange(count),
        final=np.ones(count, np.bool_), reward=np.zeros(count), version=np.zeros(count, np.int64),
    )  # fmt: skip


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """An update, its rows' lengths and the tokens in them that the policy wrote."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=9))
    count = sum(sizes)
    tokens = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    lost = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    rejected = [number * draw(st.integers(0, 50)) for number in lost]
    ends = np.cumsum([0, *sizes])
    kept = [sum(tokens[a:b]) for a, b in pairwise(ends)]
    rows = [a + b for a, b in zip(sizes, lost, strict=True)]
    whole = [a + b for a, b in zip(kept, rejected, strict=True)]
    lengths = [a + b for a, b in zip(tokens, prompts, strict=True)]
    return update(sizes, rows, whole), lengths, tokens


GROUPS, RANKS, MICRO = st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)


def share(case: Drawn, split: Split) -> list[list[Share]]:
    """The shares of all mini-batches and ranks."""
    return shares(case[0], np.array(case[1]), np.array(case[2]), split).minis


@settings(deadline=None)
@given(case=drawn(), groups=GROUPS, ranks=RANKS, micro=MICRO,
       normalizer=st.sampled_from(["kept", "all"]))  # fmt: skip
def test_each_row_gets_to_one_rank(
    case: Drawn, groups: int, ranks: int, micro: int, normalizer: str
) -> None:
    """A mini-batch is the next so many groups; its rows are shared out without rest or repetition,
    in training order inside, to ranks of one size in rows, a multiple of the micro-batch."""
    split = Split(groups, ranks, micro, normalizer=normalizer)  # type: ignore[arg-type]
    found = share(case, split)
    offsets = case[0].offsets
    starts = range(0, len(offsets) - 1, groups)
    assert len(found) == len(starts)
    for first, mini in zip(starts, found, strict=True):
        assert len(mini) == ranks
        end = min(first + groups, len(offsets) - 1)
        together = sorted(row for part in mini for row in part.rows.tolist())
        assert together == list(range(offsets[first], offsets[end]))
        for part in mini:
            assert part.rows.tolist() == sorted(part.rows.tolist())
        assert len({len(part.rows) + part.pads for part in mini}) == 1
        assert (len(mini[0].rows) + mini[0].pads) % micro == 0


@settings(deadline=None)
@given(case=drawn(), groups=GROUPS, ranks=RANKS, micro=MICRO)
def test_padding_is_as_little_as_can_be(case: Drawn, groups: int, ranks: int, micro: int) -> None:
    """Without rejected tokens there are fewer padding rows than one micro-batch on every rank."""
    for mini in share(case, Split(groups, ranks, micro)):
        assert sum(part.pads for part in mini) < ranks * micro


@settings(deadline=None)
@given(case=drawn(), groups=GROUPS, ranks=RANKS, micro=MICRO)
def test_kept_rows_are_divided_by_their_number(
    case: Drawn, groups: int, ranks: int, micro: int
) -> None:
    """With `kept` the loss is divided by the true rows of the mini-batch over all ranks, and no
    token counts that is not there."""
    for mini in share(case, Split(groups, ranks, micro)):
        rows = sum(len(part.rows) for part in mini)
        assert {part.global_batch_size for part in mini} == {rows}
        assert {part.ballast for part in mini} == {0}


@settings(deadline=None)
@given(case=drawn(), groups=GROUPS, ranks=RANKS, micro=MICRO)
def test_all_rows_are_counted_once(case: Drawn, groups: int, ranks: int, micro: int) -> None:
    """With `all` the rows of whole groups divide, and the rejected rows' tokens stand once, in a
    padding row: with the kept rows' tokens they make those of the groups."""
    whole, _, tokens = case
    for number, mini in enumerate(share(case, Split(groups, ranks, micro, normalizer="all"))):
        part = slice(number * groups, (number + 1) * groups)
        assert {each.global_batch_size for each in mini} == {whole.group_rows[part].sum()}
        kept = sum(tokens[row] for each in mini for row in each.rows)
        assert kept + sum(each.ballast for each in mini) == whole.group_tokens[part].sum()
        for each in mini:
            assert each.ballast >= 0
            assert each.pads >= (each.ballast > 0)
        assert sum(each.ballast > 0 for each in mini) <= 1


@settings(deadline=None)
@given(case=drawn(), ranks=RANKS)
def test_ranks_are_balanced_by_tokens(case: Drawn, ranks: int) -> None:
    """Where the number of rows allows, no rank has more tokens than another by more than the
    longest row."""
    lengths = case[1]
    [mini] = share(case, Split(len(lengths), ranks, micro=len(lengths)))
    loads = [sum(lengths[row] for row in part.rows) for part in mini]
    assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize(
    ("lengths", "micro", "wanted"),
    [([9, 9, 1, 1], 2, [[0, 2], [1, 3]]), ([2, 3, 10, 2, 3], 5, [[0, 1, 3, 4], [2]])],
)
def test_long_rows_are_spread(lengths: list[int], micro: int, wanted: list[list[int]]) -> None:
    """It is tokens that are balanced, not rows: one long row weighs as much as four short ones."""
    case = (update([len(lengths)], [len(lengths)], [0]), lengths, [1] * len(lengths))
    [mini] = share(case, Split(1, ranks=2, micro=micro))
    assert sorted(part.rows.tolist() for part in mini) == wanted


@settings(deadline=None)
@given(case=drawn(), groups=GROUPS, ranks=RANKS, micro=MICRO)
def test_odd_rows_may_be_an_error(case: Drawn, groups: int, ranks: int, micro: int) -> None:
    """With `error` an update passes without padding, or is refused with the step and what to do,
    just where the rows of a mini-batch don't divide."""
    offsets = case[0].offsets
    ends = [*offsets[:-1:groups], offsets[-1]]
    divide = all((b - a) % (ranks * micro) == 0 for a, b in pairwise(ends))
    split = Split(groups, ranks, micro, odd="error")
    if divide:
        assert all(part.pads == 0 for mini in share(case, split) for part in mini)
    else:
        with pytest.raises(UsageError, match=r"step 7: .*--odd pad"):
            share(case, split)


@settings(deadline=None)
@given(case=drawn(), groups=GROUPS, ranks=RANKS, micro=st.integers(1, 2))
def test_odd_rows_may_be_trimmed(case: Drawn, groups: int, ranks: int, micro: int) -> None:
    """With `trim` each mini-batch is cut to the most groups whose rows divide, without padding, and
    the groups cut are counted; it is refused where that leaves none."""
    offsets = case[0].offsets.tolist()
    last = len(offsets) - 1
    wanted: list[int | None] = []
    for first in range(0, last, groups):
        fits = [end for end in range(first + 1, min(first + groups, last) + 1)
                if (offsets[end] - offsets[first]) % (ranks * micro) == 0]  # fmt: skip
        wanted.append(max(fits, default=None))
    split = Split(groups, ranks, micro, odd="trim")
    lengths, tokens = np.array(case[1]), np.array(case[2])
    if None in wanted:
        with pytest.raises(UsageError, match=r"step 7: .*use --odd pad"):
            shares(case[0], lengths, tokens, split)
        return
    found = shares(case[0], lengths, tokens, split)
    for first, end, mini in zip(range(0, last, groups), wanted, found.minis, strict=True):
        assert end is not None
        together = sorted(row for part in mini for row in part.rows.tolist())
        assert together == list(range(offsets[first], offsets[end]))
        assert {part.pads for part in mini} == {0}
        assert {part.global_batch_size for part in mini} == {len(together)}
    kept = sum(
        end - first for first, end in zip(range(0, last, groups), wanted, strict=True) if end
    )
    assert found.trimmed == last - kept


@settings(deadline=None)
@given(case=drawn(), groups=GROUPS, ranks=RANKS, micro=MICRO)
def test_shares_are_a_function_of_lengths_and_integers(
    case: Drawn, groups: int, ranks: int, micro: int
) -> None:
    """Every rank computes the shares by itself, so they are the same each time."""
    split = Split(groups, ranks, micro, normalizer="all")
    parts = [
        [(p.rows.tolist(), p.pads, p.ballast) for mini in share(case, split) for p in mini]
        for _ in range(2)
    ]
    assert parts[0] == parts[1]


@pytest.mark.parametrize("micro", [1, 3])
def test_more_ranks_than_rows_leave_some_with_padding(micro: int) -> None:
    """A rank without a row has a micro-batch of padding, so that no rank waits for it."""
    case = (update([2], [4], [9]), [3, 3], [2, 2])
    [mini] = share(case, Split(1, ranks=4, micro=micro, normalizer="all"))
    assert {len(part.rows) + part.pads for part in mini} == {micro}
    assert [part.ballast for part in mini] == [5, 0, 0, 0]


@pytest.mark.parametrize("unit", ["chars", "bytes", "cost"])
def test_other_units_than_tokens_cannot_count_rejected_tokens(unit: str) -> None:
    """Where a run measures responses by something else, `all` is refused, and `kept` is not."""
    case = (update([2], [4], [99], unit), [3, 3], [2, 2])
    with pytest.raises(UsageError, match=f"measures responses by {unit}; filter with length"):
        share(case, Split(1, normalizer="all"))
    assert share(case, Split(1))
