"""The shipped recipes: each resolves, and keeps what its comment says; expected by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from rollsift.jobs.list_recipes import SHIPPED
from rollsift.pipeline import recipes
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run

# uid, length of the response in characters, reward
Row = tuple[str, int, float]


def _log(folder: Path, step: int, rows: Iterable[Row]) -> None:
    lines = [
        json.dumps({"input": uid, "output": "x" * n, "score": score, "step": step, "uid": uid})
        for uid, n, score in rows
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n")


def _prompt(uid: str, right: int, of: int = 10) -> list[Row]:
    """A prompt with `right` of `of` rollouts right, these the longest; lengths are 1, 2, 3, ..."""
    return [(uid, n, float(n > of - right)) for n in range(1, of + 1)]


def _kept(tmp_path: Path, name: str) -> dict[tuple[int, str], list[int]]:
    """Lengths of what a recipe keeps, by step and uid, in the order of the log."""
    recipe = recipes.load(name, [], SHIPPED)
    filter_logs(discover([tmp_path / "logs"]), recipe, tmp_path / "run")
    rows = query(
        Run(tmp_path / "run"),
        "SELECT step, group_id, list(response_length ORDER BY source_row) FROM kept GROUP BY ALL",
    ).fetchall()
    return {(step, uid): lengths for step, uid, lengths in rows}


@pytest.mark.parametrize("name", recipes.names(SHIPPED))
def test_every_recipe_resolves_and_begins_with_what_it_is_for(name: str) -> None:
    """The first line is one short sentence, the second names the source; the name is the file's."""
    first, second, *_ = recipes.text_of(name, SHIPPED).splitlines()
    assert first.startswith("# ")
    assert first.endswith(".")
    assert first.count(".") == 1
    assert len(first) <= 90
    assert "arXiv" in second
    assert recipes.load(name, [], SHIPPED).name == name


def test_gfpo_shortest_keeps_the_8_shortest_right_or_wrong(tmp_path: Path) -> None:
    """Of 10 rollouts the two longest go, though they are the right ones; of 3 none goes."""
    _log(tmp_path / "logs", 1, [*reversed(_prompt("a", 2)), *_prompt("b", 1, of=3)])
    assert _kept(tmp_path, "gfpo-shortest") == {
        (1, "a"): [8, 7, 6, 5, 4, 3, 2, 1],
        (1, "b"): [1, 2, 3],
    }


def test_gfpo_token_efficiency_keeps_the_8_with_most_reward_per_token(tmp_path: Path) -> None:
    """Of wrong ones (nothing per token) the shorter stay; below zero the longer ones do."""
    a = [("a", n, 1.0) for n in (90, 80, 70, 60, 50)] + [("a", n, 0.0) for n in (5, 4, 3, 2, 1)]
    b = [("b", n, -1.0) for n in range(1, 11)]
    _log(tmp_path / "logs", 1, a + b)
    assert _kept(tmp_path, "gfpo-token-efficiency") == {
        (1, "a"): [90, 80, 70, 60, 50, 3, 2, 1],
        (1, "b"): [3, 4, 5, 6, 7, 8, 9, 10],
    }


def test_gfpo_adaptive_keeps_more_where_the_prompt_is_hard(tmp_path: Path) -> None:
    """8, 8, 6 or 4 by quartiles over all prompts so far, the step's own included.

    Step 1 has means 0, .2, .5, .9: the quartiles are 0, .2, .5, so no prompt is below the first.
    In step 2 the means are 0, .1, .2, .5 and .9 five times: the quartiles are .2, .9, .9.
    """
    one = _prompt("a", 0) + _prompt("b", 2) + _prompt("c", 5) + _prompt("d", 9)
    two = _prompt("e", 1) + [row for uid in "fghi" for row in _prompt(uid, 9)]
    _log(tmp_path / "logs", 1, one)
    _log(tmp_path / "logs", 2, two)
    kept = _kept(tmp_path, "gfpo-adaptive")
    sizes = {uid: len(lengths) for (_, uid), lengths in kept.items()}
    assert sizes == {"a": 8, "b": 6, "c": 4, "d": 4, "e": 8, "f": 4, "g": 4, "h": 4, "i": 4}
    assert all(lengths == list(range(1, len(lengths) + 1)) for lengths in kept.values())


def test_gfpo_adaptive_paper_keeps_8_until_192_prompts_are_seen(tmp_path: Path) -> None:
    """The warm-up's prompts keep 8 whatever their difficulty, later ones by the t-digest.

    191 prompts with means spread evenly from 0 to 1, and one that is always right; then one in the
    middle of each quarter.
    """
    spread = [(f"w{i}", 1, i / 191) for i in range(191)]
    _log(tmp_path / "logs", 1, spread + _prompt("easiest", 10))
    later = _prompt("a", 1) + _prompt("b", 4) + _prompt("c", 6) + _prompt("d", 9)
    _log(tmp_path / "logs", 2, later)
    kept = _kept(tmp_path, "gfpo-adaptive-paper")
    sizes = {uid: len(lengths) for (_, uid), lengths in kept.items() if uid[0] != "w"}
    assert sizes == {"easiest": 8, "a": 8, "b": 8, "c": 6, "d": 4}


def test_dapo_keeps_whole_groups_whose_rewards_differ(tmp_path: Path) -> None:
    """All right and all wrong go, one right of ten stays whole; a group of one cannot differ."""
    rows = (
        _prompt("wrong", 0) + _prompt("right", 10) + _prompt("mixed", 1) + _prompt("one", 0, of=1)
    )
    _log(tmp_path / "logs", 1, rows)
    assert _kept(tmp_path, "dapo-dynamic-sampling") == {
        (1, "mixed"): list(range(1, 11)),
        (1, "one"): [1],
    }
