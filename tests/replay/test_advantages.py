"""Advantages equal verl's own bit by bit, and the paper's by exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsift.pipeline.replay.advantages import advantages, singletons
from rollsift.pipeline.replay.plan import Update

WORDS = st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.3, 1 / 3, -0.5, 2.0])  # groups of equal rewards
FLOATS = st.floats(-1e3, 1e3, allow_subnormal=False)


@st.composite
def logs(draw: st.DrawFn, outputs: int = 1) -> list[Any]:
    """Kept rows of one step: groups of one rollout and more, sessions of one output and more, and
    within a group the rows in any order."""
    rows = []
    for group in range(draw(st.integers(1, 4))):
        rewards = draw(st.sampled_from([WORDS, FLOATS]))
        written = st.sampled_from([1, 1, 0]) if outputs > 1 else st.just(1)
        held = [
            row_of(f"g{group}", session, output, draw(rewards), draw(written))
            for session in range(draw(st.integers(1, 9)))
            for output in range(draw(st.integers(1, outputs)))
        ]
        rows += draw(st.permutations(held))
    return rows


def row_of(uid: str, session: int, output: int, reward: float, written: int = 1) -> rig.Row:
    """A row of one token, the policy's or not."""
    return rig.Row(1, uid, session, output, reward, [1], [2], [written], [0.0], [0.0], [0.0], 0)


def update(rows: Sequence[Any]) -> Update:
    """What the plan makes of kept rows."""
    uids = [row.uid for row in rows]
    starts = [at for at, uid in enumerate(uids) if at == 0 or uid != uids[at - 1]]
    names = list(dict.fromkeys((row.uid, row.session) for row in rows))
    last = {(row.uid, row.session): 0 for row in rows}
    for row in rows:
        last[row.uid, row.session] = max(row.output, last[row.uid, row.session])
    sizes = np.ones(len(starts), np.int64)
    return Update(
        step=1, manifest="", path=Path(), length_unit="tokens", rows=np.arange(len(rows)),
        offsets=np.array([*starts, len(rows)]), group_rows=sizes, group_tokens=sizes,
        session=np.array([names.index((row.uid, row.session)) for row in rows]),
        final=np.array([row.output == last[row.uid, row.session] for row in rows]),
        reward=np.array([row.reward for row in rows]), version=np.zeros(len(rows), np.int64),
    )  # fmt: skip


def per_row(made: Update, *by: Any, **options: Any) -> torch.Tensor:
    """Of rows that hold tokens of the policy's."""
    return advantages(made, np.ones(len(made), np.int64), *by, **options)


@pytest.mark.parametrize("scale", [True, False])
@settings(deadline=None)
@given(rows=logs(outputs=3))
def test_verls_advantages_are_verls(scale: bool, rows: list[Any]) -> None:
    """`verl` is what verl's V1 trainer computes, to the last bit: for groups of any size, sessions
    of several outputs in any order, some without a token of the policy's, with and without the
    standard deviation."""
    wanted = [float(found[0]) for found in rig.advantages(rows, norm_adv_by_std_in_grpo=scale)]
    written = np.array([row.mask[0] for row in rows])
    found = advantages(update(rows), written, "verl", scale) * torch.from_numpy(written)
    assert found.dtype == torch.float32
    assert [value.hex() for value in found.tolist()] == [value.hex() for value in wanted]


def exact(rewards: Sequence[float], scale: bool) -> list[Fraction]:
    """GFPO's equation 2 over the kept rewards of a group, in fractions, the root to 40 digits."""
    values = [Fraction(reward) for reward in rewards]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    if variance == 0:
        return [Fraction(0)] * len(values)
    digits = 10**40
    sigma = Fraction(isqrt(variance.numerator * variance.denominator * digits**2), digits)
    return [(v - mean) * (variance.denominator / sigma if scale else 1) for v in values]


@pytest.mark.parametrize("scale", [True, False])
@settings(deadline=None)
@given(groups=st.lists(st.lists(st.integers(-99, 99), min_size=1, max_size=16), min_size=1))
def test_the_papers_advantages_are_exact(scale: bool, groups: list[list[int]]) -> None:
    """`paper` divides by the biased standard deviation without epsilon, exact to float32, and is 0
    in groups of equal rewards."""
    rewards = [[number / 8 for number in group] for group in groups]
    rows = [row_of(f"g{at}", n, 0, reward)
            for at, group in enumerate(rewards) for n, reward in enumerate(group)]  # fmt: skip
    wanted = [value for group in rewards for value in exact(group, scale)]
    found = per_row(update(rows), "paper", scale)
    assert found.dtype == torch.float32
    for value, truth in zip(found.tolist(), wanted, strict=True):
        assert abs(Fraction(value) - truth) <= abs(truth) / 2**23


@settings(deadline=None)
@given(reward=st.floats(allow_nan=False, allow_infinity=False), count=st.integers(1, 9))
def test_equal_rewards_have_no_advantage_in_the_paper(reward: float, count: int) -> None:
    """Where the standard deviation is 0 so is the advantage, however the mean rounds."""
    rows = [row_of("g", session, 0, reward) for session in range(count)]
    assert per_row(update(rows), "paper").tolist() == [0.0] * count


@settings(deadline=None)
@given(rows=logs(outputs=3))
def test_the_paper_counts_rollouts_not_outputs(rows: list[Any]) -> None:
    """Outputs of a session share what its last one gets, and the others' rewards have no effect."""
    found = per_row(update(rows), "paper").tolist()
    alone = [row for row, last in zip(rows, update(rows).final, strict=True) if last]
    of_session = dict(zip(((row.uid, row.session) for row in alone),
                          per_row(update(alone), "paper").tolist(), strict=True))  # fmt: skip
    wanted = [of_session[row.uid, row.session] for row in rows]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(rows=logs(outputs=3))
def test_groups_of_one_rollout_are_counted(rows: list[Any]) -> None:
    """A group is a singleton by its rollouts, not by its rows; there verl keeps the raw reward."""
    sessions: dict[str, set[int]] = {}
    for row in rows:
        sessions.setdefault(row.uid, set()).add(row.session)
    assert singletons(update(rows)) == sum(len(held) == 1 for held in sessions.values())


def test_a_lone_rollout_keeps_its_raw_reward() -> None:
    """By verl's rule of mean 0 and deviation 1; in the paper a lone rollout has no advantage."""
    one = update([row_of("g", 0, 0, 3.0)])
    assert per_row(one, "verl", scale=False).tolist() == [3.0]
    assert per_row(one, "verl").tolist() == pytest.approx([3.0], rel=2e-6)
    assert per_row(one, "paper").tolist() == [0.0]
