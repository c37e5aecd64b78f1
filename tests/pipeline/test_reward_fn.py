"""--reward-fn: the user's function, called as verl calls it."""

from __future__ import annotations

import hashlib
import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollsift.jobs.main import main
from rollsift.pipeline.aids import Aids
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import InputError, RecipeError, UsageError
from rollsift.schemas.recipe import resolve

BOXED = r"""
    import re

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        found = re.findall(r"\\boxed\{([^}]*)\}", solution_str)
        return {"score": 1.0 if found[-1:] == [ground_truth] else -0.5, "boxed": len(found)}
"""
ANSWERS = [r"\boxed{4}", r"\boxed{4} or rather \boxed{5}", "4", r"no: \boxed{3}, \boxed{4}"]
SCORES, BOXES = [1.0, -0.5, -0.5, 1.0], [1, 2, 0, 2]


def _function(folder: Path, source: str, name: str = "rules.py") -> str:
    (folder / name).write_text(textwrap.dedent(source))
    return f"{folder / name}:compute_score"


def _returns(folder: Path, expression: str) -> str:
    """A function of `text`, the response, that gives the value of an expression."""
    source = f"""
        import math, numpy as np
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            text = solution_str
            return {expression}
    """
    return _function(folder, source)


def _rows(outputs: Sequence[str | None], **fields: Any) -> list[dict[str, Any]]:
    """Rows of one group; each further field holds one value a row, or the same for all."""
    return [
        {"uid": "g", "input": "2+2?", "output": output, "gts": "4", "step": 1}
        | {name: v[i] if isinstance(v, list) else v for name, v in fields.items()}
        for i, output in enumerate(outputs)
    ]


def _write(folder: Path, form: str, rows: Sequence[dict[str, Any]], step: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [row | {"step": step} for row in rows]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{step}.parquet")
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{step}.jsonl").write_text(text)
    return folder


def _filtered(logs: Path, out: Path, function: str | None, **options: Any) -> Run:
    skip_bad = options.pop("skip_bad", False)
    aids = Aids.named(None, function)
    filter_logs(discover([logs]), resolve(options), out, aids=aids, skip_bad=skip_bad)
    return Run(out)


def _column(run: Run, *names: str) -> list[Any]:
    text = f"SELECT {', '.join(names)} FROM rollouts ORDER BY step, source_row"
    rows = query(run, text).fetchall()
    return [row[0] for row in rows] if len(names) == 1 else rows


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_it_gives_logs_without_a_score_one(form: str, tmp_path: Path) -> None:
    """Rewards are the function's, its other results are columns, and both decide what is kept."""
    logs = _write(tmp_path / "logs", form, _rows(ANSWERS))
    recipe = {"k": 2, "metric": "-reward * 10 - boxed", "correct": "reward > 0"}
    run = _filtered(logs, tmp_path / "run", _function(tmp_path, BOXED), **recipe)
    assert _column(run, "reward", "boxed") == list(zip(SCORES, BOXES, strict=True))
    # -10 - 1, 5 - 2, 5 - 0, -10 - 2: the last, then the first.
    manifest = run.steps()[1].manifest
    assert manifest.row == [0, 3]
    assert _column(run, "rank") == [2, 3, 4, 1]
    assert manifest.reward_field == "rules.py:compute_score"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_logged_score_stays_visible(form: str, tmp_path: Path) -> None:
    """Scored anew, the old score is a field like any other, and the old `acc` decides nothing."""
    rows = _rows(["4", "5"], score=[0.25, 0.75], acc=[0.0, 1.0])
    logs = _write(tmp_path / "logs", form, rows)
    run = _filtered(logs, tmp_path / "run", _returns(tmp_path, "float(text == '4')"))
    found = _column(run, "reward", "score", "acc", "correct")
    assert found == [(1.0, 0.25, 0.0, True), (0.0, 0.75, 1.0, False)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_new_acc_comes_before_a_logged_one(form: str, tmp_path: Path) -> None:
    """What the function gives has its name, and says what is correct; the log's gives way."""
    logs = _write(tmp_path / "logs", form, _rows(["4", "5"], acc=[0.0, 1.0]))
    function = _returns(tmp_path, "{'score': 1.0, 'acc': text == '4'}")
    run = _filtered(logs, tmp_path / "run", function)
    assert _column(run, "acc", "extra_acc", "correct") == [(True, 0.0, True), (False, 1.0, False)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "truth", ["4", 4, 2.5, ["4", "four"], {"answer": "4", "unit": None}, None], ids=repr
)
def test_arguments_are_what_verl_gives(truth: Any, form: str, tmp_path: Path) -> None:
    """data_source, solution_str, ground_truth and extra_info come by these names, as logged."""
    info = {"index": 7, "tags": ["x"]}
    rows = _rows(["a", "b"], gts=[truth] * 2, data_source="gsm8k", extra_info=info)
    logs = _write(tmp_path / "logs", form, rows)
    function = _function(
        tmp_path,
        """
        def compute_score(**given):
            seen = repr(sorted(given.items()))
            given["extra_info"].clear()
            return {"score": 1.0, "seen": seen}
        """,
    )
    run = _filtered(logs, tmp_path / "run", function)
    given = {"data_source": "gsm8k", "ground_truth": truth, "extra_info": info}
    due = [repr(sorted((given | {"solution_str": text}).items())) for text in "ab"]
    assert _column(run, "seen") == due


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_is_not_logged_is_none_or_empty(form: str, tmp_path: Path) -> None:
    """Without the fields, data_source and ground_truth are None, extra_info a dict of its own."""
    rows = [{"uid": "g", "output": text, "step": 1} for text in "ab"]
    logs = _write(tmp_path / "logs", form, rows)
    function = _function(
        tmp_path,
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            assert data_source is None and ground_truth is None and extra_info == {}
            extra_info["seen"] = True
            return 1.0
        """,
    )
    assert _column(_filtered(logs, tmp_path / "run", function), "reward") == [1.0, 1.0]


def test_values_of_mixed_kinds_come_as_they_were(tmp_path: Path) -> None:
    """A ground truth that is text in one row and a number in the next keeps its type."""
    truths = ["4", 4, [4], None, True]
    logs = _write(tmp_path / "logs", "jsonl", _rows(["x"] * 5, gts=truths))
    source = """
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {"score": 0, "seen": type(ground_truth).__name__}
    """
    run = _filtered(logs, tmp_path / "run", _function(tmp_path, source))
    assert _column(run, "seen") == ["str", "int", "list", "NoneType", "bool"]


@pytest.mark.parametrize(
    ("expression", "reward"),
    [
        ("1", 1.0),
        ("True", 1.0),
        ("np.float32(0.5)", 0.5),
        ("np.float64(0.25)", 0.25),
        ("np.int64(-2)", -2.0),
        ("np.bool_(True)", 1.0),
        ("np.array(0.75)", 0.75),
        ("{'score': np.float32(0.5)}", 0.5),
        ("None", None),
        ("{'score': None}", None),
        ("math.nan", None),
        ("np.float32('nan')", None),
        ("-math.inf", None),
    ],
)
def test_any_number_is_a_score(expression: str, reward: float | None, tmp_path: Path) -> None:
    """Python's and numpy's numbers count; none, NaN and infinity are no reward, told as such."""
    logs = _write(tmp_path / "logs", "jsonl", _rows(["x"]))
    run = _filtered(logs, tmp_path / "run", _returns(tmp_path, expression))
    reason = None if reward is not None else "no_reward"
    assert _column(run, "reward", "reason") == [(reward, reason)]


def test_results_of_any_type_become_columns(tmp_path: Path) -> None:
    """numpy's values are stored as Python's, lists and objects nested, all else as text."""
    logs = _write(tmp_path / "logs", "jsonl", _rows(["x"]))
    results = """{
        "score": 1, "Flag": np.bool_(False), "count": np.int32(3), "share": np.float32(0.5),
        "steps": np.array([1, 2]), "parts": {"a": (1, None)}, "kind": 1 + 2j, "reward": "mine",
        "output": "other",
    }"""
    run = _filtered(logs, tmp_path / "run", _returns(tmp_path, " ".join(results.split())))
    names = ["flag", "count", "share", "steps", "parts", "kind", "extra_reward", "extra_output"]
    *values, steps, parts, kind, reward, output = _column(run, *names)[0]
    assert values == [False, 3, 0.5]
    assert [json.loads(steps), json.loads(parts)] == [[1, 2], {"a": [1, None]}]
    assert [kind, reward, output] == ["(1+2j)", "mine", "other"]
    assert _column(run, "response", "output") == [("x", "x")]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / (text != 'bad')", "raised ZeroDivisionError: division by zero (rules.py, line 5)"),
        ("1 if text != 'bad' else exit('out')", "raised SystemExit: out"),
        ("1 if text != 'bad' else '1.0'", "returned '1.0', expected a number or a dict"),
        ("1 if text != 'bad' else (1, 2)", "returned (1, 2), expected a number or a dict"),
        ("1 if text != 'bad' else {'acc': 1}", "returned {'acc': 1}, expected a number or a"),
        ("1 if text != 'bad' else {'score': 'x'}", "returned {'score': 'x'}, expected a number"),
        ("1 if text != 'bad' else 10 ** 400", "raised OverflowError: int too large"),
        ("{'score': 1, 'x': text if text != 'bad' else '\\ud800'}", "raised UnicodeEncodeError"),
    ],
)
def test_a_row_it_fails_on_is_a_bad_record(
    expression: str, said: str, form: str, tmp_path: Path
) -> None:
    """It names file, row and function and says what came; with skip_bad the other rows stay."""
    logs = _write(tmp_path / "logs", form, _rows(["good", "bad", "good"]))
    function = _returns(tmp_path, expression)
    with pytest.raises(InputError) as caught:
        _filtered(logs, tmp_path / "run", function)
    (record,) = caught.value.bad
    line = 2 if form == "jsonl" else None
    assert (record.source_file, record.source_row, record.line) == (f"1.{form}", 1, line)
    assert record.field == "rules.py:compute_score"
    assert record.reason.startswith(said)
    assert not (tmp_path / "run").exists()
    run = _filtered(logs, tmp_path / "run", function, skip_bad=True)
    assert _column(run, "source_row", "reward") == [(0, 1.0), (2, 1.0)]
    assert run.steps()[1].manifest.counts.bad_records == 1


def test_padding_and_null_responses_are_not_scored(tmp_path: Path) -> None:
    """The function sees neither verl's synthetic rows nor a response that is not there."""
    padding = {"uid": f"pad{'0' * 32}_0_0", "input": "", "output": "", "gts": None}
    rows = [*_rows(["good", None]), _rows([""])[0] | padding]
    rows[0]["uid"], rows[1]["uid"] = "g_0_0", "g_1_0"
    logs = _write(tmp_path / "logs", "jsonl", rows)
    function = _returns(tmp_path, "{'good': 1.0}[text]")
    run = _filtered(logs, tmp_path / "run", function)
    found = _column(run, "reward", "reason")
    assert found == [(1.0, None), (None, "no_response"), (None, "padding")]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_result_keeps_the_kind_of_the_first_step(form: str, tmp_path: Path) -> None:
    """A later value of another kind is a bad record; a name that only steps later have is null."""
    logs = _write(tmp_path / "logs", form, _rows(["a"]))
    _write(logs, form, _rows(["b"]), step=2)
    kinds = "{'score': 1, 'pred': text if text == 'a' else 7}"
    with pytest.raises(InputError) as caught:
        _filtered(logs, tmp_path / "run", _returns(tmp_path, kinds))
    (record,) = caught.value.bad
    assert record.source_file == f"2.{form}"
    assert record.field == "rules.py:compute_score.pred"
    assert record.reason == "found a number, expected text as in earlier steps"
    late = "{'score': 1, 'a': 1} if text == 'a' else {'score': 1, 'b': 'x'}"
    run = _filtered(logs, tmp_path / "run", _returns(tmp_path, late))
    assert _column(run, "a", "b") == [(1, None), (None, "x")]


def test_logs_of_both_forms_show_alike(tmp_path: Path) -> None:
    """Where one step is JSONL and the next Parquet, each column is whole."""
    logs = _write(tmp_path / "logs", "jsonl", _rows(["4"], score=0.5))
    _write(logs, "parquet", _rows(["5"], score=0.25), step=2)
    function = _returns(tmp_path, "{'score': 1.0, 'said': text}")
    run = _filtered(logs, tmp_path / "run", function)
    names = ["response", "output", "ground_truth", "said", "score", "reward", "input"]
    due = [("4", "4", "4", "4", 0.5, 1.0, "2+2?"), ("5", "5", "4", "5", 0.25, 1.0, "2+2?")]
    assert _column(run, *names) == due
    assert _column(run, "response_length") == [1, 1]


def test_rows_come_in_their_order(tmp_path: Path) -> None:
    """Called once a row, in row order, file by file."""
    logs = tmp_path / "logs"
    for step in (2, 10):
        _write(logs, "jsonl", _rows([f"{step}a", f"{step}b"]), step)
    source = """
        calls = []
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            calls.append(solution_str)
            return {"score": 1, "calls": " ".join(calls)}
    """
    run = _filtered(logs, tmp_path / "run", _function(tmp_path, source))
    assert _column(run, "calls") == ["2a", "2a 2b", "2a 2b 10a", "2a 2b 10a 10b"]


def test_a_coroutine_is_awaited(tmp_path: Path) -> None:
    """verl's reward loop also takes async functions."""
    source = """
        import asyncio
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            await asyncio.sleep(0)
            return {"score": float(solution_str)}
    """
    logs = _write(tmp_path / "logs", "jsonl", _rows(["0.5", "2"]))
    assert _column(_filtered(logs, tmp_path / "run", _function(tmp_path, source)), "reward") == [
        0.5,
        2.0,
    ]


def test_text_is_read_of_parquet_and_nothing_copied(tmp_path: Path) -> None:
    """The function's results are stored, the text of a Parquet source stays where it is."""
    logs = _write(tmp_path / "logs", "parquet", _rows(ANSWERS, score=2.0))
    run = _filtered(logs, tmp_path / "run", _function(tmp_path, BOXED))
    stored = pq.read_schema(run.table("rollouts", 1, 1)).names
    assert [name for name in stored if name.startswith("extra.")] == [
        "extra.rules.py:compute_score.boxed"
    ]
    assert not {"prompt", "response", "ground_truth"} & set(stored)
    assert _column(run, "response", "boxed", "score") == [
        (text, boxed, 2.0) for text, boxed in zip(ANSWERS, BOXES, strict=True)
    ]


def test_ids_alone_cannot_be_scored(tmp_path: Path) -> None:
    """A log of token ids has no text to give: said with the fields there are."""
    rows = [{"uid": "g", "response_ids": [1, 2], "step": 1}]
    logs = _write(tmp_path / "logs", "parquet", rows)
    with pytest.raises(InputError, match=r"1\.parquet: rules\.py:compute_score needs the resp"):
        _filtered(logs, tmp_path / "run", _function(tmp_path, BOXED))


def test_the_file_is_pinned(tmp_path: Path) -> None:
    """Manifest and run.json hold its digest and name, no path; a changed file is another run."""
    logs = _write(tmp_path / "logs", "jsonl", _rows(ANSWERS))
    function = _function(tmp_path, BOXED)
    run = _filtered(logs, tmp_path / "run", function)
    digest = hashlib.sha256((tmp_path / "rules.py").read_bytes()).hexdigest()
    _, pinned = run.steps()[1].manifest.sources
    assert (pinned.file, pinned.rows, pinned.digest) == ("rules.py", 0, digest)
    assert run.info.reader == {"reward_fn": {"name": "rules.py:compute_score", "sha256": digest}}
    (tmp_path / "elsewhere").mkdir()
    _filtered(logs, tmp_path / "run", _function(tmp_path / "elsewhere", BOXED))
    assert run.versions() == {1: 1}
    with pytest.raises(UsageError, match=r"made with another reader: reward_fn\.sha256 is"):
        _filtered(logs, tmp_path / "run", _function(tmp_path, BOXED + "    # changed"))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_unchanged_steps_are_not_scored_again(form: str, tmp_path: Path) -> None:
    """A second run calls the function for new steps only, and gives the ids of one run for all."""
    source = """
        from pathlib import Path
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            with (Path(__file__).parent / "calls").open("a") as calls:
                calls.write(solution_str)
            return {"score": len(solution_str), "acc": solution_str}
    """
    function = _function(tmp_path, source)
    logs = _write(tmp_path / "logs", form, _rows(["a", "bb"]))
    _filtered(logs, tmp_path / "run", function)
    _write(logs, form, _rows(["ccc"]), step=2)
    run = _filtered(logs, tmp_path / "run", function)
    assert (tmp_path / "calls").read_text() == "abbccc"
    whole = _filtered(logs, tmp_path / "whole", function)
    assert [step.id for step in whole.steps().values()] == [s.id for s in run.steps().values()]


def test_the_bytes_that_were_hashed_are_run(tmp_path: Path) -> None:
    """Not a compiled copy of an earlier state, equal in size and time; and none is left behind."""
    path = tmp_path / "rules.py"
    logs = _write(tmp_path / "logs", "jsonl", _rows(["x"]))
    for number in (1, 2):
        function = _returns(tmp_path, str(number))
        path.touch()

        os.utime(path, (0, 0))
        assert _column(_filtered(logs, tmp_path / f"{number}", function), "reward") == [number]
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules.py", "expected FILE.py:NAME or package.module:NAME"),
        ("gone.py:f", "no such file"),
        ("{}/rules.py:other", "no function other in it"),
        ("{}/rules.py:NUMBER", "no function NUMBER in it"),
        ("{}/broken.py:f", r"loading it raised SyntaxError: .*broken\.py, line 1"),
        ("{}/fails.py:f", r"loading it raised KeyError: 'x' \(fails\.py, line 2\)"),
        ("no.such.module:f", "loading it raised ModuleNotFoundError: No module named 'no'"),
        ("math:sqrt", "loading it raised ImportError: no Python source"),
    ],
)
def test_what_cannot_be_loaded_is_a_usage_error(text: str, said: str, tmp_path: Path) -> None:
    """The message names the option, what was asked for and what is wrong."""
    (tmp_path / "rules.py").write_text("NUMBER = 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "fails.py").write_text("\n{}['x']\n")
    with pytest.raises(UsageError, match=f"--reward-fn .*: {said}"):
        Aids.named(None, text.format(tmp_path))


def test_a_reward_field_beside_it_is_refused(tmp_path: Path) -> None:
    """Both would say what the reward is."""
    logs = _write(tmp_path / "logs", "jsonl", _rows(["x"], score=1.0))
    with pytest.raises(RecipeError, match="reward: score has no effect beside --reward-fn"):
        _filtered(logs, tmp_path / "run", _function(tmp_path, BOXED), reward="score")


def test_without_it_a_log_without_score_says_so(tmp_path: Path) -> None:
    """The message for a log without a reward names the option, and no code is run."""
    _function(tmp_path, "raise SystemExit")
    logs = _write(tmp_path / "logs", "jsonl", _rows(ANSWERS))
    with pytest.raises(InputError, match=r"no reward field.*--reward-fn FILE\.py:NAME scores"):
        _filtered(logs, tmp_path / "run", None)


def test_the_command_line_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """filter and stats both score by it; what it prints is no part of their output."""
    logs = _write(tmp_path / "logs", "jsonl", _rows(ANSWERS))
    noisy = BOXED.replace("found =", 'print("noise"); found =') + '\n    print("loud")\n'
    options = ["--reward-fn", _function(tmp_path, noisy), str(logs)]
    with pytest.raises(SystemExit, match="0"):
        main(["stats", "-f", "json", *options])
    out, err = capsys.readouterr()
    shown = {fact["name"]: fact["value"] for fact in json.loads(out)}
    assert shown["reward field"] == "rules.py:compute_score"
    assert shown["critic/score/mean"] == 0.25
    assert "noise" in err
    assert "loud" in err
    failing = ["--reward-fn", _returns(tmp_path, "{}[text]"), str(logs)]
    with pytest.raises(SystemExit, match="3"):
        main(["filter", "-r", "gfpo-shortest", "-o", str(tmp_path / "run"), *failing])
    assert "1.jsonl, line 4, field 'rules.py:compute_score': raised KeyError" in (
        capsys.readouterr().err
    )


def test_verl_s_own_function_scores_its_rows(tmp_path: Path) -> None:
    """verl.utils.reward_score:default_compute_score gives what verl's reward manager would."""
    from verl.utils.reward_score import default_compute_score

    name = "verl.utils.reward_score:default_compute_score"
    outputs = ["6 * 7, so #### 42", "#### 41", "42"]
    rows = _rows(outputs, gts="42", data_source="openai/gsm8k")
    logs = _write(tmp_path / "logs", "jsonl", rows)
    run = _filtered(logs, tmp_path / "run", name)
    assert _column(run, "reward") == [1.0, 0.0, 0.0]
    assert [default_compute_score("openai/gsm8k", text, "42") for text in outputs] == [1, 0, 0]
    dapo = _rows(["Answer: 42", "Answer: 7"], gts="42", data_source="math_dapo")
    logs = _write(tmp_path / "dapo", "jsonl", dapo)
    run = _filtered(logs, tmp_path / "run2", name)
    assert _column(run, "reward", "acc", "pred") == [(1.0, True, "42"), (-1.0, False, "7")]
    assert run.steps()[1].manifest.sources[1].file == "verl.utils.reward_score"
