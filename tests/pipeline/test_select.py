"""Select and remarks: verdicts worked out by hand, and what a person is told of a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.remarks import MANY
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve

BY_BUCKET = {"very_hard": 2, "hard": 2, "medium": 2, "easy": 2}


def sift(folder: Path, groups: list[list[Any]], **keys: Any) -> tuple[list[Any], list[str]]:
    """Filter one step, a row for each reward, each response longer than the one before in its
    group; -> the reasons in order, and what was said."""
    (folder / "logs").mkdir()
    rows = [
        {"uid": f"g{at}", "output": "x" * (1 + place), "score": reward, "c": reward}
        for at, rewards in enumerate(groups)
        for place, reward in enumerate(rewards)
    ]
    text = "".join(json.dumps(row | {"input": "p", "step": 1}) + "\n" for row in rows)
    (folder / "logs/1.jsonl").write_text(text)
    said: list[str] = []
    recipe = resolve({"k": 2, **keys})
    filter_logs(discover([folder / "logs"]), recipe, folder / "run", notify=said.append)
    found = query(Run(folder / "run"), "SELECT reason FROM rollouts ORDER BY source_row")
    return [row[0] for row in found.fetchall()], said


OUT, SWAPPED, UNKNOWN = "outranked", "displaced", "nullif(c, 0.5) = 1"


@pytest.mark.parametrize(
    ("rewards", "keys", "reasons"),
    [
        # The last-ranked kept one gives way to the best-ranked one of the wanted kind.
        ([0, 0, 0, 1, 1], {"min_correct": 1}, [None, SWAPPED, OUT, None, OUT]),
        ([0, 0, 0, 1, 1], {"min_correct": 2}, [SWAPPED, SWAPPED, OUT, None, None]),
        ([1, 1, 0], {"min_incorrect": 1}, [None, SWAPPED, None]),
        # There is none to swap in, or enough is kept already.
        ([0, 0, 0], {"min_correct": 1}, [None, None, OUT]),
        ([0, 1, 1], {"min_correct": 1}, [None, None, OUT]),
        # One that is neither gives way, though it ranks first: the other guard is never broken.
        ([0.5, 0, 1], {"min_correct": 1, "min_incorrect": 1}, [SWAPPED, None, None]),
        # Nothing can give way: the one kept incorrect rollout is what the other guard asks for.
        ([0, 1], {"k": 1, "min_incorrect": 1}, [None, OUT]),
    ],
)
def test_guards_swap_by_rank(tmp_path: Path, rewards: Any, keys: Any, reasons: Any) -> None:
    """min_correct and min_incorrect bring in the best-ranked of their kind for the last-ranked kept
    other one, and neither breaks what the other has."""
    assert sift(tmp_path, [rewards], correct=UNKNOWN, **keys)[0] == reasons


@pytest.mark.parametrize(
    ("rewards", "reasons"),
    [
        ([1, 1 + 1e-6, 0.5], ["no_signal", "no_signal", OUT]),
        ([1, 1.1, 1], [None, None, OUT]),
        ([1], ["no_signal"]),
    ],
)
def test_groups_without_signal_are_dropped_on_demand(
    tmp_path: Path, rewards: Any, reasons: Any
) -> None:
    """With no_signal=drop a group whose kept rewards are all equal, to 1e-6, keeps nothing; what
    was outranked before stays so."""
    assert sift(tmp_path, [rewards], no_signal="drop")[0] == reasons


@pytest.mark.parametrize(
    ("constant", "k", "told"), [(0, BY_BUCKET, True), (1, BY_BUCKET, False), (0, 2, False)]
)
def test_a_log_without_constant_groups_is_told(
    tmp_path: Path, constant: int, k: Any, told: bool
) -> None:
    """With k per bucket a log of many groups none of which has equal rewards looks filtered by the
    trainer, and its quartiles are the survivors': that is said, but not with one k for all, nor
    where one group has equal rewards."""
    groups = [[0, 1, 1]] * (MANY - constant) + [[1, 1, 1]] * constant
    assert any("the survivors'" in text for text in sift(tmp_path, groups, k=k)[1]) == told


def test_few_groups_tell_nothing_of_filtering(tmp_path: Path) -> None:
    """A log of few groups may lack constant ones by chance: nothing is said of it."""
    said = sift(tmp_path, [[0, 1, 1]] * (MANY - 1), k=BY_BUCKET)[1]
    assert not any("survivors" in text for text in said)


def test_a_metric_that_nothing_has_is_told(tmp_path: Path) -> None:
    """Where no rollout has a number to be ranked by, nothing is kept, and that is said."""
    reasons, said = sift(tmp_path, [[0, 1]], metric="'abc'")
    assert reasons == ["no_metric", "no_metric"]
    assert any("no rollout has a metric" in text for text in said)


def test_what_a_cut_file_takes_along_is_told(tmp_path: Path) -> None:
    """A file that is cut half-way is out whole, and how many records go with it is said."""
    whole = json.dumps({"uid": "g", "input": "p", "output": "x", "score": 1, "step": 1}) + "\n"
    (tmp_path / "1.jsonl").write_text(3 * whole + whole[:20])
    said: list[str] = []
    logs = discover([tmp_path / "1.jsonl"])
    filter_logs(logs, resolve({"k": 1}), tmp_path / "run", skip_bad=True, notify=said.append)
    assert "1.jsonl: cut, so its 3 other records are left out, too" in said
