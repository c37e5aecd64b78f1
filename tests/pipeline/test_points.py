"""The grid as it is written, and the sums over what a point keeps."""

from __future__ import annotations

import polars as pl
import pytest

from rollsift.pipeline.points import COLUMNS, Point, Totals, grid
from rollsift.schemas.errors import RecipeError
from rollsift.schemas.recipe import Recipe


def test_a_grid_is_every_value_with_every_other() -> None:
    """The points are the product of the keys' values, the last key running fastest."""
    assert grid(["k=2,4", "no_signal=keep,drop"]) == [
        {"k": "2", "no_signal": "keep"},
        {"k": "2", "no_signal": "drop"},
        {"k": "4", "no_signal": "keep"},
        {"k": "4", "no_signal": "drop"},
    ]


def test_a_semicolon_separates_where_values_hold_commas() -> None:
    """With a `;` in it a value keeps its commas; a last one alone makes one value of them."""
    metric = "greatest(response_length, 50)"
    assert grid([f"metric={metric};reward"]) == [{"metric": metric}, {"metric": "reward"}]
    assert grid([f"metric={metric};"]) == [{"metric": metric}]
    assert grid(["correct=reward = 1, reward = 2"]) == [
        {"correct": "reward = 1"},
        {"correct": "reward = 2"},
    ]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (["k"], "--grid k: expected key=value,value"),
        (["k="], "--grid k=: expected key=value,value"),
        (["k=2,,4"], "--grid k=2,,4: expected key=value,value"),
        (["k=;"], "--grid k=;: expected key=value,value"),
        (["k=2,4,2"], "k: --grid names the same value twice"),
        (["k=2", "k=4"], "k: --grid sets the same twice"),
        (["k=2", "k.easy=4"], "k and k.easy: --grid sets the same twice"),
        (["k.easy=2", "k=4"], "k.easy and k: --grid sets the same twice"),
    ],
)
def test_a_grid_that_says_nothing_clear_is_refused(items: list[str], said: str) -> None:
    """The item or key is named, and what was expected."""
    with pytest.raises(RecipeError) as caught:
        grid(items)
    assert said in str(caught.value)


def test_keys_that_merely_begin_alike_are_two_keys() -> None:
    """Only a key and its own part exclude each other."""
    assert len(grid(["min_correct=0,1", "min_incorrect=0,1", "k.easy=2", "k.hard=4"])) == 4


def _frame(rows: list[tuple[int, int | None, float, bool | None]]) -> pl.DataFrame:
    schema = {
        "group": pl.UInt32, "response_length": pl.Int64, "reward": pl.Float64,
        "correct": pl.Boolean,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def test_means_are_over_what_is_known() -> None:
    """A rollout without a length or a verdict on correctness counts, but in no mean of these."""
    totals = Totals()
    totals.add(_frame([(0, 10, 1.0, True), (0, None, 0.0, None)]))
    totals.add(_frame([(0, 20, 0.5, False)]))
    assert totals.rollouts == 3
    assert totals.tokens == 30
    assert totals.mean("response_length") == 15
    assert totals.mean("reward") == 0.5
    assert totals.mean("correct") == 0.5


def test_a_row_compares_what_is_kept_with_all() -> None:
    """Tokens as a ratio, length as a change, reward and correctness beside those of all; a kept
    group whose rewards differ by no more than 1e-6 has no signal."""
    one, two = _frame([(0, 10, 1.0, True), (0, 10, 0.0, False)]), _frame([(1, 40, 1.0, True)])
    point = Point({"k": "2", "difficulty.scope": "global"}, Recipe(k=2))
    for part in (one, two):
        point.all.add(part)
    point.add(
        two.vstack(_frame([(1, 20, 1.0 + 1e-7, True)])).filter(pl.col("response_length") < 40)
    )
    row = point.row()
    assert list(row) == ["k", "difficulty.scope", *COLUMNS]
    assert (row["k"], row["difficulty.scope"]) == (2, "running")
    assert (row["kept"], row["kept_tokens"], row["tokens_ratio"]) == (1, 20, 20 / 60)
    assert (row["mean_length"], row["length_change"]) == (20, 0)
    assert (row["mean_reward_all"], row["correct_share_all"]) == (2 / 3, 2 / 3)
    assert (row["correct_share"], row["groups_no_signal"]) == (1, 1)
    point.add(one)
    assert point.row()["groups_no_signal"] == 1


def test_nothing_kept_is_null_not_zero() -> None:
    """A point that keeps nothing has no means, and a log without rollouts no ratio."""
    row = Point({"k": "1"}, Recipe(k=1)).row()
    assert (row["kept"], row["kept_tokens"], row["groups_no_signal"]) == (0, 0, 0)
    names = ("tokens_ratio", "mean_length", "length_change", "mean_reward", "correct_share")
    assert {row[name] for name in names} == {None}
