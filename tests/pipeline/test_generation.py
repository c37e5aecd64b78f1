"""verl's generation Parquet: one row a prompt, its responses in a list, no score."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollsift.pipeline.aids import Aids
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.readers import generation
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.stats import stats_of_logs
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import InputError
from rollsift.schemas.recipe import resolve

RESPONSES = [["so 4", "5", None], ["it must be 4", "4"], ["", "7"]]


def _prompts(responses: Sequence[Any] = RESPONSES, **columns: Any) -> dict[str, list[Any]]:
    """The columns of verl's data sets; the first two prompts are equal."""
    asked = ["2+2?", "2+2?", "3+4?"]
    return {
        "data_source": ["sums"] * len(responses),
        "prompt": [[{"role": "user", "content": asked[i % 3]}] for i in range(len(responses))],
        "ability": ["math"] * len(responses),
        "reward_model": [
            {"style": "rule", "ground_truth": "447"[i % 3]} for i in range(len(responses))
        ],
        "extra_info": [{"index": i, "split": "train"} for i in range(len(responses))],
        "responses": list(responses),
    } | columns


def _write(path: Path, columns: dict[str, list[Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    table = pa.table(columns)
    at = table.schema.get_field_index("responses")
    if at >= 0:  # a list of nulls alone has no type of its own
        texts = table["responses"].cast(pa.list_(pa.string()))
        table = table.set_column(at, "responses", texts)
    pq.write_table(table, path, row_group_size=2)
    return path


def _rules(folder: Path) -> str:
    """1 for a response that ends in the truth, told by the whole of what verl hands over."""
    (folder / "rules.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    right = float(solution_str.endswith(ground_truth))\n"
        "    return {'score': right, 'given': [data_source, ground_truth, extra_info]}\n"
    )
    return f"{folder / 'rules.py'}:score"


def _filtered(log: Path, out: Path, **recipe: Any) -> Run:
    aids = Aids.named(None, _rules(out.parent))
    filter_logs(discover([log]), resolve(recipe), out, aids=aids)
    return Run(out)


def _column(run: Run, *names: str) -> list[Any]:
    text = f"SELECT {', '.join(names)} FROM rollouts ORDER BY step, source_row"
    return query(run, text).fetchall()


def test_each_response_is_a_rollout_of_its_row(tmp_path: Path) -> None:
    """Rows count responses over the file, nulls too; each row is a group, equal prompts or not."""
    run = _filtered(_write(tmp_path / "logs/3.parquet", _prompts()), tmp_path / "run", k=1)
    found = _column(run, "source_row", "uid", "sample", "response", "response_length", "reward")
    assert found == [
        (0, "0", 0, "so 4", 4, 1.0),
        (1, "0", 1, "5", 1, 0.0),
        (2, "0", 2, None, None, None),
        (3, "1", 0, "it must be 4", 12, 1.0),
        (4, "1", 1, "4", 1, 1.0),
        (5, "2", 0, "", 0, 0.0),
        (6, "2", 1, "7", 1, 1.0),
    ]
    reasons = _column(run, "reason")
    due = ["outranked", None, "no_response", "outranked", None, "empty", None]
    assert [reason for (reason,) in reasons] == due
    manifest = run.steps()[3].manifest
    assert (manifest.row, manifest.offsets) == ([1, 4, 6], [0, 1, 2, 3])
    assert (manifest.counts.rows, manifest.sources[0].rows) == (7, 7)
    groups = query(run, "SELECT group_id, group_size, mean_reward FROM groups ORDER BY ALL")
    assert groups.fetchall() == [("0", 2, 0.5), ("1", 2, 1.0), ("2", 2, 0.5)]


def test_its_columns_are_there_with_every_response(tmp_path: Path) -> None:
    """Truth and data source have their columns, all others are extras, nested ones as JSON."""
    columns = _prompts(
        score=[0.5, 0.25, 0.125], output=["x", "y", "z"], uid=[7, 8, 9], difficulty=[1, 2, None]
    )
    run = _filtered(_write(tmp_path / "logs/1.parquet", columns), tmp_path / "run")
    plain = ["ground_truth", "data_source", "ability", "extra_difficulty"]
    plain += ["extra_score", "extra_output", "extra_uid"]
    assert _column(run, *plain)[3] == ("4", "sums", "math", 2, 0.25, "y", 8)
    nested = ["prompt", "reward_model", "extra_info", "given"]
    assert [json.loads(text) for text in _column(run, *nested)[3]] == [
        [{"role": "user", "content": "2+2?"}],
        {"style": "rule", "ground_truth": "4"},
        {"index": 1, "split": "train"},
        ["sums", "4", {"index": 1, "split": "train"}],
    ]


@pytest.mark.parametrize(
    ("prompt", "truth", "shown"),
    [("2+2?", "4", ("2+2?", "4")), (None, None, (None, None)), ("q", ["4"], ("q", '["4"]'))],
)
def test_prompt_and_truth_may_have_other_forms(
    prompt: Any, truth: Any, shown: tuple[str | None, str | None], tmp_path: Path
) -> None:
    """A prompt of text, a truth that is nested or null: as they are."""
    columns = _prompts(
        [["a"]], prompt=[prompt], reward_model=[{"ground_truth": truth, "style": "x"}]
    )
    (tmp_path / "any.py").write_text("def f(**given):\n    return 1.0\n")
    log = _write(tmp_path / "logs/1.parquet", columns)
    aids = Aids.named(None, f"{tmp_path / 'any.py'}:f")
    filter_logs(discover([log]), resolve({}), tmp_path / "run", aids=aids)
    assert _column(Run(tmp_path / "run"), "prompt", "ground_truth") == [shown]


def test_a_row_without_responses_has_no_rows(tmp_path: Path) -> None:
    """An empty or a null list gives nothing, and the rows after it keep their uid."""
    log = _write(tmp_path / "logs/1.parquet", _prompts([[], None, ["a 7"]]))
    assert _column(_filtered(log, tmp_path / "run"), "source_row", "uid") == [(0, "2")]
    log = _write(tmp_path / "empty/1.parquet", _prompts([[], None]))
    run = _filtered(log, tmp_path / "run2")
    assert run.steps()[1].manifest.counts.rows == 0
    assert _column(run, "response") == []


def test_columns_of_bytes_are_left_out(tmp_path: Path) -> None:
    """Images would be copied with every response: they stay in the file."""
    columns = _prompts(images=[[{"bytes": b"\xff\xd8", "path": "a.jpg"}]] * 3, raw=[b"x"] * 3)
    run = _filtered(_write(tmp_path / "logs/1.parquet", columns), tmp_path / "run")
    assert {"images", "raw"}.isdisjoint(run.steps()[1].manifest.field_types)
    assert len(_column(run, "response")) == 7


def test_without_a_reward_function_it_can_be_looked_at_only(tmp_path: Path) -> None:
    """stats tells what it holds; a filter says which option would score it."""
    log = _write(tmp_path / "logs/1.parquet", _prompts(score=[1.0] * 3))
    facts = stats_of_logs(discover([log])).facts
    names = ["format", "rows", "groups", "G", "groups by", "length unit", "reward field"]
    assert [facts[name] for name in names] == [
        "verl generation Parquet", 7, 3, "2 to 3", "uid", "chars",
        "none of score, reward; numeric are extra_score",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"no reward field.*--reward-fn FILE\.py:NAME"):
        filter_logs(discover([log]), resolve({}), tmp_path / "run")


def test_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a prompt at a time or at once, rows, ids and digest are equal."""
    log = _write(tmp_path / "logs/1.parquet", _prompts(RESPONSES * 30))
    whole = _filtered(log, tmp_path / "whole", k=1)
    monkeypatch.setattr(generation, "PROMPTS", 1)
    parts = _filtered(log, tmp_path / "parts", k=1)
    assert len(list(generation.Reader(log, "1.parquet").chunks({}, {}))) == 91
    assert parts.steps()[1].id == whole.steps()[1].id
    assert _column(parts, "*") == _column(whole, "*")


def test_the_whole_file_is_pinned(tmp_path: Path) -> None:
    """An unchanged file is skipped; one changed response or extra makes a new version."""
    log = _write(tmp_path / "logs/1.parquet", _prompts())
    for _ in range(2):
        run = _filtered(log, tmp_path / "run")
        assert run.versions() == {1: 1}
    _write(log, _prompts([*RESPONSES[:2], ["", "9"]]))
    assert _filtered(log, tmp_path / "run").versions() == {1: 2}
    _write(log, _prompts([*RESPONSES[:2], ["", "9"]], ability=["a", "b", "c"]))
    run = _filtered(log, tmp_path / "run")
    assert run.versions() == {1: 3}
    assert [row[0] for row in _column(run, "ability")] == ["a"] * 3 + ["b"] * 2 + ["c"] * 2


def test_text_is_copied_and_needs_no_log(tmp_path: Path) -> None:
    """A response cannot be joined by its row: the run holds it, whatever becomes of the file."""
    log = _write(tmp_path / "logs/1.parquet", _prompts())
    run = _filtered(log, tmp_path / "run")
    before = _column(run, "*")
    log.unlink()
    assert _column(run, "*") == before


def test_a_later_step_must_hold_the_same_kinds(tmp_path: Path) -> None:
    """A column of another kind than in an earlier step makes its responses bad records."""
    logs = tmp_path / "logs"
    _write(logs / "1.parquet", _prompts())
    _write(logs / "2.parquet", _prompts([["a"], ["b"]], ability=[1, 2]))
    with pytest.raises(InputError) as caught:
        _filtered(logs, tmp_path / "run")
    assert [
        (record.source_file, record.source_row, record.field) for record in caught.value.bad
    ] == [
        ("2.parquet", 0, "ability"),
        ("2.parquet", 1, "ability"),
    ]


@pytest.mark.parametrize("damage", ["cut", "twice", "pages", "text", "response"])
def test_a_broken_file_is_one_bad_record(damage: str, tmp_path: Path) -> None:
    """What cannot be read is said of the whole file, never raised as something else."""
    log = _write(tmp_path / "logs/1.parquet", _prompts(RESPONSES * 50))
    data = log.read_bytes()
    if damage == "cut":
        log.write_bytes(data[: len(data) // 2])
    elif damage in ("text", "response"):
        wrong = pa.array([b"\xff"] * 3, pa.binary()).view(pa.string())
        lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), wrong)
        parts = {"ability": wrong} if damage == "text" else {"responses": lists}
        pq.write_table(pa.table({"responses": [["a"]] * 3} | parts), log)
    elif damage == "pages":
        log.write_bytes(data[:40] + bytes(200) + data[240:])
    else:
        table = pq.read_table(log)
        pq.write_table(table.append_column("ability", table["ability"]), log)
    with pytest.raises(InputError) as caught:
        _filtered(log, tmp_path / "run")
    (record,) = caught.value.bad
    assert (record.source_file, record.source_row) == ("1.parquet", None)
    due = {"twice": "two columns have this name", "text": "byte 0 of the text: 0xff"}
    assert record.reason.startswith(due.get(damage, "cannot be read"))


def test_lists_of_numbers_are_no_generations(tmp_path: Path) -> None:
    """A log with token ids under `responses` is read as the log it is."""
    rows = [{"uid": "g", "step": 1, "score": 1.0, "output": "ab", "responses": [1, 2]}]
    (tmp_path / "logs").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "logs/1.parquet")
    facts = stats_of_logs(discover([tmp_path / "logs"])).facts
    assert (facts["format"], facts["rows"]) == ("Parquet", 1)


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    """A small file whose text would fill the memory is one bad record."""
    text = pa.array(["x" * (2 << 20)], pa.large_string())
    prompt = pa.DictionaryArray.from_arrays(pa.array([0] * 2048, pa.int32()), text)
    (tmp_path / "logs").mkdir()
    table = pa.table({"prompt": prompt, "responses": [["a"]] * 2048})
    pq.write_table(table, tmp_path / "logs/1.parquet")
    assert (tmp_path / "logs/1.parquet").stat().st_size < 1 << 22
    with pytest.raises(InputError) as caught:
        _filtered(tmp_path / "logs", tmp_path / "run")
    assert "its text expands to more than 2 GiB" in caught.value.bad[0].reason


# Files that are named one by one, and whose names tell no step.


def _log(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_named_generation_file_is_step_0(tmp_path: Path) -> None:
    """Its name need not tell a step: it is what the model gave before any."""
    log = _write(tmp_path / "logs/math_gen.parquet", _prompts(step=[5, 6, 7]))
    run = _filtered(log, tmp_path / "run", k=1)
    assert list(run.steps()) == [0]
    assert run.steps()[0].manifest.row == [1, 4, 6]
    assert _column(run, "source_file", "extra_step")[0] == ("math_gen.parquet", 5)
    assert _filtered(log, tmp_path / "run", k=1).versions() == {0: 1}


@pytest.mark.parametrize("name", ["dump.jsonl", "dump", "dump.parquet"])
@pytest.mark.parametrize("step", [12, "12", 12.0])
def test_a_named_log_has_the_step_of_its_first_record(name: str, step: Any, tmp_path: Path) -> None:
    """The record's `step` serves where the name tells none, number or text."""
    row = {"uid": "g", "input": "q", "output": "a", "score": 1.0, "step": step}
    log = _log(tmp_path / name, [row, row])
    (source,) = discover([log]).sources
    assert (source.step, source.file) == (12, name)
    filter_logs(discover([log]), resolve({}), tmp_path / "run")
    assert Run(tmp_path / "run").steps()[12].manifest.row == [0, 1]


@pytest.mark.parametrize("name", ["dump.jsonl", "dump.parquet", "notes.txt"])
@pytest.mark.parametrize("row", [{"a": 1}, {"step": "x"}, {"step": -1}, {"step": True}, None])
def test_a_named_file_without_a_step_is_an_error(name: str, row: Any, tmp_path: Path) -> None:
    """Where neither name nor content tells it, the file is named and how to call it."""
    log = _log(tmp_path / name, [row] if row else [])
    with pytest.raises(InputError, match=f"{name}: the name tells no step.*rename it"):
        discover([log])


def test_a_folder_s_files_need_names_that_tell_it(tmp_path: Path) -> None:
    """In a folder such a file is foreign, and left out with a note."""
    _log(tmp_path / "dump.jsonl", [{"step": 1}])
    _log(tmp_path / "2.jsonl", [{"step": 2}])
    found = discover([tmp_path])
    assert [source.file for source in found.sources] == ["2.jsonl"]
    assert "left out dump.jsonl" in found.notes[0]


def test_two_named_files_of_one_step_are_an_error(tmp_path: Path) -> None:
    """Both are named."""
    logs = [_log(tmp_path / f"{name}.jsonl", [{"step": 4}]) for name in "ab"]
    with pytest.raises(InputError, match=r"a\.jsonl and .*b\.jsonl: both hold step 4"):
        discover(logs)


def test_the_digest_is_of_footer_and_chunks(tmp_path: Path) -> None:
    """What pins the file is the SHA-256 over its footer and every column chunk that is read."""
    log = _write(tmp_path / "logs/1.parquet", _prompts([["a"]]))
    reader = generation.Reader(log, "1.parquet")
    list(reader.chunks({}, {}))
    data = log.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    # One row group: its chunks, from the magic word to the footer, lie side by side.
    due = hashlib.sha256(data[-8 - size :] + data[4 : -8 - size])
    assert reader.digest == due.hexdigest()
