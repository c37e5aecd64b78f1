"""Sweep: every point keeps what a filter of its settings keeps, from one reading of the logs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollsift.jobs.main import main
from rollsift.pipeline import sweep as module
from rollsift.pipeline.aids import NOTHING, Aids
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.points import Point, grid
from rollsift.pipeline.recipes import load
from rollsift.pipeline.sources import Logs, discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.pipeline.sweep import sweep
from rollsift.schemas.errors import InputError, RecipeError, RollsiftError
from rollsift.schemas.reasons import NOT_COUNTED

# What a run says by SQL of its rollouts: rows of one session are one, its reward the last output's.
_BY_SQL = f"""
    WITH all_ AS (
        SELECT step, group_id, sample, bool_or(kept) AS kept, sum(response_length) AS length,
            arg_max(reward, source_row) AS reward, arg_max(correct, source_row) AS correct
        FROM rollouts WHERE coalesce(reason, '') NOT IN {NOT_COUNTED} GROUP BY ALL
    ), flat AS (
        SELECT 1 FROM all_ WHERE kept GROUP BY step, group_id
        HAVING max(reward) - min(reward) <= 1e-6
    )
    SELECT count(*) FILTER (kept) AS kept, coalesce(sum(length) FILTER (kept), 0) AS kept_tokens,
        coalesce(sum(length) FILTER (kept), 0) / sum(length) AS tokens_ratio,
        avg(length) FILTER (kept) AS mean_length,
        avg(length) FILTER (kept) / avg(length) - 1 AS length_change,
        avg(reward) FILTER (kept) AS mean_reward, avg(reward) AS mean_reward_all,
        avg(correct::INT) FILTER (kept) AS correct_share, avg(correct::INT) AS correct_share_all,
        (SELECT count(*) FROM flat) AS groups_no_signal
    FROM all_"""


def _session(rng: random.Random, step: int, group: str, session: int) -> list[dict[str, Any]]:
    """One rollout, at times of two outputs, an empty response or without a reward."""
    score: Any = rng.choice([0.0, 0.0, 0.25, 1.0, 1.0, -1.0])
    if rng.random() < 0.05:
        score = rng.choice([None, math.nan])
    outputs = 2 if rng.random() < 0.1 else 1
    return [
        {
            "input": f"prompt {group}", "output": "x" * rng.choice([0, *range(1, 60)]),
            "score": score, "acc": rng.random() < 0.5, "step": step,
            "uid": f"{group}_{session}_{output}",
        }
        for output in range(outputs)
    ]  # fmt: skip


def _logs(folder: Path, seed: int = 0, steps: int = 3) -> Path:
    """Steps of ragged groups with verl's row keys, some all right or all wrong, and padding."""
    rng = random.Random(seed)
    folder.mkdir()
    for step in range(1, steps + 1):
        rows = []
        for number in range(6):
            sessions = [
                _session(rng, step, f"g{step}{number}", session)
                for session in range(rng.choice([1, 4, 8, 8, 8]))
            ]
            if rng.random() < 0.3:
                score = rng.choice([0.0, 1.0])
                sessions = [[row | {"score": score} for row in rows_] for rows_ in sessions]
            rows += [row for rows_ in sessions for row in rows_]
        padding = {"input": "", "output": "", "score": 0, "step": step, "acc": False}
        rows.append(padding | {"uid": f"pad{'0' * 32}_0_0"})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{step}.jsonl").write_text(lines)
    return folder


def _points(recipe: Path, grids: list[str], sets: list[str]) -> list[Point]:
    return [
        Point(
            keys, load(str(recipe), [*sets, *(f"{k}={v}" for k, v in keys.items())], recipe.parent)
        )
        for keys in grid(grids)
    ]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs made here to compare with need not outlive a power cut."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with k by bucket."""
    path = tmp_path / "shipped" / "recipe.yaml"
    path.parent.mkdir()
    path.write_text("k: {very_hard: 6, hard: 4, medium: 3, easy: 2}\n")
    return path


CASES = {
    "k and metric": ["k=1,2,4,100", "metric=response_length,token_efficiency"],
    "k by bucket": ["k.easy=1,4", "k.very_hard=2,8"],
    "scope": ["difficulty.scope=running,global", "difficulty.warmup=0,10", "k.easy=1,5"],
    "ties and signal": ["difficulty.ties=strict,midrank", "difficulty.of=reward,acc"],
    "whole groups": ["zero_variance=keep,drop", "zero_variance_of=reward,acc", "max_mean=0.5,1"],
    "guards": ["min_correct=0,1", "min_incorrect=0,1", "no_signal=keep,drop"],
    "expressions": [
        "metric=greatest(response_length, 20);response_length / (1 + reward * reward)",
        "exclude_where=acc;response_length > 40",
        "correct=auto;reward > 0.5",
    ],
    "how logs are read": ["length=chars,bytes", "reward=score,acc", "k=2,4"],
    "nothing kept": ["min_mean=null,2", "k=2,4"],
}


def _equal_filters(tmp_path: Path, logs: Logs, points: list[Point], aids: Aids = NOTHING) -> None:
    for number, point in enumerate(points):
        run = tmp_path / f"run{number}"
        filter_logs(logs, point.recipe, run, aids=aids)
        found = query(Run(run), _BY_SQL)
        names = [column[0] for column in found.description or ()]
        values = [v if v is None else pytest.approx(v, rel=1e-12) for v in found.fetchone() or ()]
        expected = point.keys | dict(zip(names, values, strict=True))
        assert point.row() | point.keys == expected, point.label


@pytest.mark.parametrize("case", CASES)
def test_every_point_keeps_what_a_filter_of_it_keeps(
    tmp_path: Path, recipe: Path, case: str
) -> None:
    """Counts, tokens, means and groups without signal equal those that SQL finds in a run which
    filter made by the same settings."""
    logs = discover([_logs(tmp_path / "logs", seed=len(case))])
    points = _points(recipe, CASES[case], [])
    sweep(logs, points)
    _equal_filters(tmp_path, logs, points)


def test_points_are_read_by_the_aids_that_are_named(tmp_path: Path, recipe: Path) -> None:
    """With a reward function every point is scored anew, as filter does it, and other rollouts are
    kept than by the logged score."""
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(solution_str) % 3\n"
    )
    aids = Aids.named(None, f"{tmp_path / 'mine.py'}:score")
    logs = discover([_logs(tmp_path / "logs")])
    logged, anew = (_points(recipe, ["k=1,3"], ["metric=token_efficiency"]) for _ in range(2))
    sweep(logs, logged)
    sweep(logs, anew, aids=aids)
    assert [point.kept.tokens for point in anew] != [point.kept.tokens for point in logged]
    _equal_filters(tmp_path, logs, anew, aids)


def test_the_points_of_a_case_differ(tmp_path: Path, recipe: Path) -> None:
    """The logs tell the settings apart: running and global quartiles, warm-up and k by bucket
    each change what is kept."""
    points = _points(recipe, CASES["scope"], [])
    sweep(discover([_logs(tmp_path / "logs", seed=len("scope"))]), points)
    kept = [point.kept.tokens for point in points]
    assert all(one != other for one, other in pairwise(kept))
    assert len(set(kept)) >= 5


def test_points_that_read_alike_share_one_reading(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is read once for all points; once more where quartiles are over the whole run, and
    for points that need other fields of it."""
    logs = discover([_logs(tmp_path / "logs", steps=3)])
    read: list[int] = []
    real: Callable[..., Any] = module.load

    def counting(source: Any, *rest: Any) -> Any:
        read.append(source.step)
        return real(source, *rest)

    monkeypatch.setattr(module, "load", counting)
    sweep(logs, _points(recipe, ["k=1,2,4", *CASES["k and metric"][1:], "min_mean=null,0"], []))
    assert read == [1, 2, 3]
    read.clear()
    sweep(logs, _points(recipe, ["difficulty.scope=running,global"], []))
    assert read == [1, 2, 3, 1, 2, 3]
    read.clear()
    sweep(logs, _points(recipe, ["zero_variance_of=reward,acc"], []))
    assert read == [1, 1, 2, 2, 3, 3]


def test_nothing_is_written(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sweep the logs and the working folder hold what they held before."""
    folder = _logs(tmp_path / "logs")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    sweep(discover([folder]), _points(recipe, ["k=1,2"], []))
    assert sorted(tmp_path.rglob("*")) == before


def test_remarks_are_said_once_and_of_whom_they_hold(tmp_path: Path, recipe: Path) -> None:
    """What holds of all points is said plainly, what holds of some names them."""
    notes: list[str] = []
    folder = _logs(tmp_path / "logs", steps=1)
    points = _points(recipe, ["k=2,8", "metric=response_length,token_efficiency"], [])
    sweep(discover([folder]), points, notify=notes.append)
    assert notes.count("no tokens: lengths are in characters") == 1
    efficient = "k=2, metric=token_efficiency; k=8, metric=token_efficiency: token_efficiency with"
    assert any(note.startswith(efficient) for note in notes)
    whole = "k=8, metric=response_length; k=8, metric=token_efficiency: k keeps every group whole"
    assert any(note.startswith(whole) for note in notes)


def _same_error(tmp_path: Path, folder: Path, points: list[Point]) -> RollsiftError:
    """The error of a sweep, after a look that the first point's filter gives the same one."""
    with pytest.raises(RollsiftError) as one:
        filter_logs(discover([folder]), points[0].recipe, tmp_path / "run")
    with pytest.raises(type(one.value)) as other:
        sweep(discover([folder]), points)
    assert other.value.text() == one.value.text()
    return other.value


@pytest.mark.parametrize("grids", [["k=1,2"], ["difficulty.scope=global"], ["length=chars,bytes"]])
def test_bad_records_are_refused_as_filter_refuses_them(
    tmp_path: Path, recipe: Path, grids: list[str]
) -> None:
    """All bad files are named, each record once however many points there are, and --skip-bad goes
    on without them."""
    folder = _logs(tmp_path / "logs")
    for step in (2, 3):
        path = folder / f"{step}.jsonl"
        path.write_text(path.read_text() + "{broken\n")
    points = _points(recipe, grids, [])
    error = _same_error(tmp_path, folder, points)
    assert isinstance(error, InputError)
    assert [record.source_file for record in error.bad] == ["2.jsonl", "3.jsonl"]
    points = _points(recipe, grids, [])
    sweep(discover([folder]), points, skip_bad=True)
    assert all(point.kept.rollouts for point in points)


def test_incomplete_groups_are_refused_where_the_recipe_says_so(
    tmp_path: Path, recipe: Path
) -> None:
    """incomplete=error stops a sweep with the message that filter gives."""
    folder = _logs(tmp_path / "logs", steps=1)
    points = _points(recipe, ["k=1,2"], ["group_size=8", "incomplete=error"])
    assert "rollouts" in str(_same_error(tmp_path, folder, points))


def test_a_name_that_no_step_has_is_refused(tmp_path: Path, recipe: Path) -> None:
    """The key that reads it is named, and the nearest name."""
    folder = _logs(tmp_path / "logs", steps=1)
    error = _same_error(tmp_path, folder, _points(recipe, ["metric=response_lenght * 2"], []))
    assert isinstance(error, RecipeError)
    assert "metric: no field 'response_lenght' in the logs; did you mean response_length?" in str(
        error
    )


def _run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["sweep", *args])
    printed = capsys.readouterr()
    return left.value.code, printed.out, printed.err


@pytest.mark.parametrize(
    ("grid_", "said"),
    [
        ("kk=2,4", "kk: no such recipe key"),
        ("k=2,two", "k: "),
        ("k.easy=2,4", "k: by bucket it needs all four; not set: very_hard, hard, medium"),
        ("difficulty.scope=running,local", "difficulty.scope: "),
        ("metric=sum(reward),reward", "metric: sum() is an aggregate"),
        ("k", "--grid k: expected key=value,value"),
    ],
)
def test_a_wrong_grid_is_exit_2_and_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], grid_: str, said: str
) -> None:
    """Every value of the grid is checked before anything is read."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "1.jsonl").write_text("not looked at\n")
    code, out, err = _run(capsys, str(folder), "-r", "gfpo-shortest", "--grid", grid_)
    assert code == 2
    assert out == ""
    assert said in err


def test_the_command_prints_every_point_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """json is one object a point, the table one line a point, --plot one file."""
    folder = str(_logs(tmp_path / "logs"))
    asked = [folder, "-r", "gfpo-shortest", "-s", "min_correct=1", "--grid", "k=1,4"]
    code, out, err = _run(capsys, *asked, "-f", "json", "--plot", str(tmp_path / "it.html"))
    assert code == 0
    points = json.loads(out)
    assert [point["k"] for point in points] == [1, 4]
    assert points[0]["kept"] < points[1]["kept"]
    assert "k=4" in (tmp_path / "it.html").read_text()
    assert "note: no tokens" in err
    code, out, _ = _run(capsys, *asked)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:2] == ["k", "kept"]
    assert [line[:2] for line in lines[2:]] == [[str(p["k"]), str(p["kept"])] for p in points]
