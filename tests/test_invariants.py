"""What must not change when nothing that matters does: order, threads, chunk sizes, formats, and
the number of goes in which a log is filtered."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsift.pipeline.batch import Outcome, filter_logs
from rollsift.pipeline.carried import Carried
from rollsift.pipeline.difficulty import Thresholds
from rollsift.pipeline.judge import judge, measure
from rollsift.pipeline.load import load
from rollsift.pipeline.readers import jsonl, parquet
from rollsift.pipeline.score import rules
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run, Spool
from rollsift.schemas.recipe import resolve

Records = list[dict[str, Any]]
SAME = "ROLLSIFT_EXAMPLES" not in os.environ
EXAMPLES = int(os.environ.get("ROLLSIFT_EXAMPLES", "20"))
BY_BUCKET = {"very_hard": 4, "hard": 3, "medium": 2, "easy": 1}
WORDS = ["a", "bb", "ccc", "dd é", "", "ee\nff", "gggggg"]


def a_step(step: int, seed: int, groups: int = 6, kind: str = "row keys") -> Records:
    """Records of one step, its groups interleaved: ties, empty and unscored answers among them."""
    draw = random.Random(f"{step} {seed}")
    records: Records = []
    for group in range(groups):
        rate = draw.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        for session in range(draw.randint(3, 6)):
            for output in range(draw.choice([1, 1, 1, 2]) if kind == "row keys" else 1):
                right = draw.random() < rate
                record = {
                    "input": f"prompt {group}, turn {output}",
                    "output": draw.choice(WORDS) * draw.randint(1, 3),
                    "gts": str(group),
                    "score": draw.choice([None, 0.1, int(right), right]),
                    "step": step,
                    "policy_version": step - draw.randint(0, 2),
                    "level": draw.choice([1, 2, 2.5]),
                    "place": f"{group} {session} {output}",
                }
                if kind == "row keys":
                    record["uid"] = f"{step}-{group}_{session}_{output}"
                elif kind == "uid":
                    record["uid"] = f"{step}-{group}"
                records.append(record)
    if kind != "row keys":
        draw.shuffle(records)
    return records


def write(folder: Path, steps: Mapping[int, Records]) -> Path:
    """The steps as JSON Lines, a file each."""
    folder.mkdir(exist_ok=True)
    for step, records in steps.items():
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{step}.jsonl").write_text("".join(lines))
    return folder


def sift(logs: Path | Sequence[Path], out: Path, **recipe: Any) -> Outcome:
    """Filter a folder, or files in the given order."""
    named = [logs] if isinstance(logs, Path) else logs
    return filter_logs(discover(named), resolve(recipe), out)


def ids(out: Path) -> dict[int, str]:
    """Step -> the id of its newest manifest."""
    return {step: found.id for step, found in Run(out).steps().items()}


def versions(out: Path) -> dict[int, int]:
    """Step -> its newest version."""
    return Run(out).versions()


def shown(out: Path) -> list[tuple[Any, ...]]:
    """All of the rollouts view."""
    return query(Run(out), "SELECT * FROM rollouts ORDER BY step, source_row").fetchall()


def kept(out: Path, what: str = "place") -> list[Any]:
    """One column of the kept rows, sorted."""
    return sorted(row[0] for row in query(Run(out), f"SELECT {what} FROM kept").fetchall())


ADAPTIVE = {"k": BY_BUCKET, "difficulty": {"of": "reward"}}
STRICT = {
    "k": 2, "metric": "token_efficiency", "max_lag": 1, "min_correct": 1, "zero_variance": "drop",
    "exclude_where": "level = 2.5", "no_signal": "drop",
}  # fmt: skip
BOTH = STRICT | ADAPTIVE


# --- a group is judged alone


@settings(max_examples=EXAMPLES, derandomize=SAME, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["row keys", "uid"]),
    first=st.sets(st.integers(0, 5), min_size=1, max_size=5),
    recipe=st.sampled_from([ADAPTIVE, STRICT]),
)
def test_groups_judged_apart_or_together_get_equal_verdicts(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    kind: str,
    first: set[int],
    recipe: dict[str, Any],
) -> None:
    """Judging the rows of some groups and of the others apart gives what judging all together
    gives, the thresholds being equal."""
    folder = tmp_path_factory.mktemp("apart")
    source = discover([write(folder / "logs", {1: a_step(1, seed, kind=kind)})]).sources[0]
    by = rules(resolve(recipe))
    rows = load(source, by, Carried(), Spool(folder)).rows
    mine = pl.col("group").is_in(sorted(first))
    edges = Thresholds(0.2, 0.4, 0.6, seen=9, earlier=9)

    def judged(part: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        verdict = judge(measure(part, by), by.recipe, edges)
        return verdict.rows, verdict.groups.filter(pl.col("group_size") > 0)

    whole_rows, whole_groups = judged(pl.concat([rows.filter(mine), rows.filter(~mine)]))
    one, other = judged(rows.filter(mine)), judged(rows.filter(~mine))
    assert whole_rows.equals(pl.concat([one[0], other[0]]))
    assert whole_groups.equals(pl.concat([one[1], other[1]]).sort("group"))


@pytest.mark.parametrize("kind", ["row keys", "uid", "prompt"])
def test_rows_of_other_groups_in_between_change_nothing(tmp_path: Path, kind: str) -> None:
    """However the groups of a file are interleaved, the same rows are kept, ties included, as long
    as the rows of each group keep their order."""
    chosen = []
    for seed in range(3):
        steps = {}
        for step in (1, 2):
            records = a_step(step, 5, kind=kind)
            order = [record["gts"] for record in records]
            random.Random(seed).shuffle(order)
            queues = {name: [r for r in records if r["gts"] == name] for name in set(order)}
            steps[step] = [queues[name].pop(0) for name in order]
        logs = write(tmp_path / f"logs{seed}", steps)
        sift(logs, tmp_path / f"run{seed}", **BOTH)
        chosen.append(kept(tmp_path / f"run{seed}", "(step, place)"))
    assert chosen[0]
    assert chosen[0] == chosen[1] == chosen[2]


def test_any_order_of_rows_without_ties_keeps_the_same(tmp_path: Path) -> None:
    """Where no two answers of a group have equal lengths, the order of a file's rows decides
    nothing at all."""
    records = a_step(1, 3, kind="uid")
    for number, record in enumerate(records):
        record["output"] = "x" * (1 + number * 7 % len(records))
    assert len({record["output"] for record in records}) == len(records)
    chosen = []
    for seed in range(3):
        random.Random(seed).shuffle(records)
        sift(write(tmp_path / f"logs{seed}", {1: records}), tmp_path / f"run{seed}", **ADAPTIVE)
        chosen.append(kept(tmp_path / f"run{seed}"))
    assert chosen[0]
    assert chosen[0] == chosen[1] == chosen[2]


def test_equal_difficulty_is_equal_k(tmp_path: Path) -> None:
    """In one step all groups of equal difficulty may keep equally many, by every estimator and rule
    for ties; over the whole run they may where the scope is the whole run."""
    logs = write(tmp_path / "logs", {step: a_step(step, 1, 12, "uid") for step in (1, 2, 3)})
    ways = [
        {"scope": scope, **how}
        for scope in ("running", "global")
        for how in ({"ties": "strict"}, {"ties": "midrank"}, {"quantiles": "tdigest"})
    ]
    for number, way in enumerate(ways):
        out = tmp_path / f"run{number}"
        sift(logs, out, k=BY_BUCKET, difficulty=way)
        shared = "difficulty" if way["scope"] == "global" else "step, difficulty"
        found = query(
            Run(out),
            f"SELECT count(*), count(DISTINCT k) FROM groups WHERE k IS NOT NULL GROUP BY {shared}",
        ).fetchall()
        assert any(groups > 1 for groups, _ in found)
        assert {ks for _, ks in found} == {1}
        assert len(query(Run(out), "SELECT DISTINCT k FROM groups").fetchall()) > 1


# --- how it is run


def _chunk(monkeypatch: pytest.MonkeyPatch, size: int = 1000) -> None:
    monkeypatch.setattr(jsonl, "CHUNK", size)
    monkeypatch.setattr(jsonl, "BLOCK", 8)


def pieces(file: Path) -> int:
    """How many chunks with rows a JSONL file is read in."""
    found = jsonl.Reader(file, file.name).chunks({}, {})
    return sum(len(chunk.places) > 0 for chunk in found)


@pytest.mark.parametrize("kind", ["row keys", "uid", "prompt"])
def test_sizes_of_chunks_and_spool_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A JSONL file read in one piece or in many, its text held in memory or on disk, gives equal
    manifest ids and equal tables."""
    logs = write(tmp_path / "logs", {step: a_step(step, 2, kind=kind) for step in (1, 2)})
    sift(logs, tmp_path / "whole", **BOTH)
    monkeypatch.setattr(Spool, "LIMIT", 0)
    sift(logs, tmp_path / "disk", **BOTH)
    _chunk(monkeypatch)
    assert pieces(logs / "1.jsonl") > 3
    sift(logs, tmp_path / "pieces", **BOTH)
    assert ids(tmp_path / "disk") == ids(tmp_path / "pieces") == ids(tmp_path / "whole")
    assert shown(tmp_path / "disk") == shown(tmp_path / "pieces") == shown(tmp_path / "whole")
    assert any(row["output"] == "" for row in a_step(1, 2, kind=kind))


LINE = {"input": "p", "output": "xx", "score": 1, "step": 1}


@pytest.mark.parametrize(
    ("varied", "recipe"),
    [
        ([{"gts": "4"}, {"gts": 4}], {}),
        ([{"gts": "4"}, {"gts": "4"}, {"gts": "4"}, {"gts": ["4"]}], {}),
        ([{"gts": 4}, {"gts": 4.5}, {"gts": 4}, {"gts": 4}], {}),
        ([{"score": 1}, {"score": "0.5"}, {"score": True}, {"score": float("nan")}], {}),
        ([{"acc": 1}, {"acc": "0"}, {"acc": True}, {"acc": "no"}], {}),
        ([{"acc": 1}, {"acc": "0"}, {"acc": True}], {"reward": "acc"}),
        ([{"level": 1}, {"level": "1"}], {"exclude_where": "level = '1'"}),
        ([{"level": 1}, {"level": 1.5}], {"exclude_where": "level::VARCHAR = '1'"}),
        ([{}, {"level": 2}], {"exclude_where": "level = 2"}),
        ([{"output": None}, {}], {}),
        ([{"seed": 1 << 60}, {"seed": 0.5}], {}),
        ([{"info": {"a": 1}}, {"info": "a"}, {"info": [1]}], {}),
    ],
    ids=json.dumps,
)
def test_a_value_means_the_same_in_any_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, varied: Records, recipe: dict[str, Any]
) -> None:
    """What the values of a field mean, and what groups they make, does not turn on which of them
    were read in one chunk."""
    logs = write(tmp_path / "logs", {1: [LINE | change for change in varied]})
    sift(logs, tmp_path / "whole", k=1, **recipe)
    for size in (1, 110):
        _chunk(monkeypatch, size)
        assert pieces(logs / "1.jsonl") > 1 or size > 1
        sift(logs, tmp_path / f"run{size}", k=1, **recipe)
        assert ids(tmp_path / f"run{size}") == ids(tmp_path / "whole")
        assert shown(tmp_path / f"run{size}") == shown(tmp_path / "whole")


@pytest.mark.parametrize("late", ["score", "output", "response_length"])
def test_a_field_may_first_appear_in_a_late_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The reward, the response or a logged length that the first records of a file lack is found
    where later records have it, in however many chunks the file is read."""
    whole = LINE | {"response_length": 5}
    lacking = {name: value for name, value in whole.items() if name != late}
    logs = write(tmp_path / "logs", {1: [lacking, lacking, whole]})
    sift(logs, tmp_path / "whole")
    _chunk(monkeypatch, 1)
    assert pieces(logs / "1.jsonl") > 1
    sift(logs, tmp_path / "pieces")
    assert ids(tmp_path / "pieces") == ids(tmp_path / "whole")


def test_the_reward_is_one_field_in_all_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some records have `score` and others `reward`, one of them is the reward of the whole
    file, whatever the chunks."""
    bare = {name: value for name, value in LINE.items() if name != "score"}
    logs = write(tmp_path / "logs", {1: [bare | {"reward": 1}, LINE | {"reward": 0}]})
    sift(logs, tmp_path / "whole")
    _chunk(monkeypatch, 1)
    assert pieces(logs / "1.jsonl") > 1
    sift(logs, tmp_path / "pieces")
    assert ids(tmp_path / "pieces") == ids(tmp_path / "whole")


def test_a_repeated_batch_is_seen_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was logged again is a repeat even where its longer step number moves the ends of
    the chunks."""
    lines = [LINE | {"score": score} for score in (1, 0.5, 1, 1)]
    steps = {step: [line | {"step": step} for line in lines] for step in (9, 10)}
    logs = write(tmp_path / "logs", steps)
    # Two lines of step 10 fill a chunk, of step 9 it takes three.
    _chunk(monkeypatch, sum(len(json.dumps(line)) + 1 for line in steps[9][:2]) + 1)
    assert [pieces(logs / f"{step}.jsonl") for step in (9, 10)] == [2, 2]
    sift(logs, tmp_path / "run")
    assert Run(tmp_path / "run").steps()[10].manifest.counts.dropped == {"repeat": len(lines)}


def as_parquet(folder: Path, steps: Mapping[int, Records], tokens: bool = True) -> Path:
    """The steps as Parquet under verl's own names, with text, and token ids of other lengths."""
    folder.mkdir(exist_ok=True)
    for step, records in steps.items():
        columns = {name: [record.get(name) for record in records] for name in records[0]}
        columns["score"] = [None if s is None else float(s) for s in columns["score"]]
        columns["level"] = [float(level) for level in columns["level"]]
        if tokens:
            sizes = [3 + i % 5 for i in range(len(records))]
            columns["response_ids"] = [list(range(size)) for size in sizes]
            columns["response_mask"] = [[1] * (size - 1) + [0] for size in sizes]
        pq.write_table(
            pa.table(columns), folder / f"{step}.parquet", row_group_size=len(records) // 3 + 1
        )
    return folder


@pytest.mark.parametrize("kind", ["row keys", "uid"])
@pytest.mark.parametrize("length", ["auto", "chars"])
def test_sizes_of_batches_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, length: str
) -> None:
    """A Parquet log read in few batches or in many gives equal manifest ids and equal tables."""
    steps = {step: a_step(step, 2, kind=kind) for step in (1, 2)}
    logs = as_parquet(tmp_path / "logs", steps)
    sift(logs, tmp_path / "whole", length=length, **STRICT)
    monkeypatch.setattr(parquet, "LIGHT_ROWS", 3)
    monkeypatch.setattr(parquet, "HEAVY_ROWS", 2)
    sift(logs, tmp_path / "pieces", length=length, **STRICT)
    assert ids(tmp_path / "pieces") == ids(tmp_path / "whole")
    assert shown(tmp_path / "pieces") == shown(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["row keys", "uid", "prompt"])
def test_jsonl_and_token_parquet_of_the_same_rollouts_keep_the_same(
    tmp_path: Path, kind: str
) -> None:
    """Rollouts logged as JSON Lines and as token-level Parquet with their text give equal verdicts
    by characters, and by tokens not all the same ones."""
    steps = {step: a_step(step, 4, kind=kind) for step in (1, 2)}
    write(tmp_path / "jsonl", steps)
    as_parquet(tmp_path / "parquet", steps)
    verdicts = {}
    for name, length in (("jsonl", "chars"), ("parquet", "chars"), ("parquet", "tokens")):
        out = tmp_path / f"{name}-{length}"
        sift(tmp_path / name, out, length=length, **BOTH)
        rows = query(
            Run(out),
            """SELECT step, source_row, group_source, kept, reason, metric, rank, k, bucket,
                difficulty, group_size, reward, correct, response, prompt, uid, place
            FROM rollouts ORDER BY step, source_row""",
        ).fetchall()
        verdicts[name, length] = rows
    assert verdicts["jsonl", "chars"] == verdicts["parquet", "chars"]
    assert verdicts["parquet", "tokens"] != verdicts["parquet", "chars"]


THREADED = """
import json
import sys
from pathlib import Path
import polars
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve
recipe, folder, *logs = sys.argv[1:]
print(polars.thread_pool_size())
for number, source in enumerate(logs):
    out = Path(folder, str(number))
    filter_logs(discover([source]), resolve(json.loads(recipe)), out)
    print(*[step.id for step in Run(out).steps().values()])
"""


def test_the_number_of_threads_changes_nothing(tmp_path: Path) -> None:
    """1, 2 and 8 threads of the engine give the same manifest ids, from JSONL and from Parquet."""
    steps = {step: a_step(step, 6, groups=120) for step in (1, 2)}
    logs = [write(tmp_path / "jsonl", steps), as_parquet(tmp_path / "parquet", steps)]
    found = {}
    for threads in (1, 2, 8):
        answer = subprocess.run(
            [sys.executable, "-c", THREADED, json.dumps(BOTH), tmp_path / f"{threads}", *logs],
            env={**os.environ, "POLARS_MAX_THREADS": str(threads)},
            capture_output=True,
            text=True,
            check=True,
        )
        used, *found[threads] = answer.stdout.splitlines()
        assert int(used) == threads
    assert [len(line.split()) for line in found[1]] == [len(steps), len(steps)]
    assert found[1] == found[2] == found[8]


def test_the_order_of_named_files_changes_nothing(tmp_path: Path) -> None:
    """Files named in any order are the same log: steps go by their numbers."""
    logs = write(tmp_path / "logs", {step: a_step(step, 7) for step in (2, 9, 10)})
    files = sorted(logs.iterdir())
    found = []
    for number, order in enumerate([files, files[::-1], files[1:] + files[:1]]):
        sift(list(order), tmp_path / f"run{number}", **ADAPTIVE)
        found.append(ids(tmp_path / f"run{number}"))
    assert list(found[0]) == [2, 9, 10]
    assert all(other == found[0] for other in found)


# --- in how many goes it is run

GLOBAL = {"k": BY_BUCKET, "difficulty": {"scope": "global"}}
TDIGEST = {"k": BY_BUCKET, "difficulty": {"quantiles": "tdigest"}}
RUNNING = [
    pytest.param(ADAPTIVE, id="by bucket"),
    pytest.param(ADAPTIVE | {"difficulty": {"ties": "midrank", "warmup": 9}}, id="warmup"),
    pytest.param(TDIGEST, id="tdigest"),
]


def five(seed: int = 1) -> dict[int, Records]:
    """Five steps without ties of content, one of them empty."""
    return {step: [] if step == 3 else a_step(step, seed, 8) for step in (1, 2, 3, 4, 5)}


@pytest.mark.parametrize("recipe", RUNNING)
def test_a_log_filtered_as_it_grows_equals_one_filtered_at_once(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    """First some steps and then all of them give the ids of all at once, and what was published
    first is left as it was."""
    steps = five()
    sift(write(tmp_path / "all", steps), tmp_path / "once", **recipe)
    growing, out = tmp_path / "logs", tmp_path / "run"
    before: dict[int, str] = {}
    for last in (2, 3, 5):
        write(growing, {step: steps[step] for step in range(1, last + 1)})
        outcome = sift(growing, out, **recipe)
        assert outcome.unchanged == list(before)
        assert {step: ids(out)[step] for step in before} == before
        before = ids(out)
    assert before == ids(tmp_path / "once")
    assert set(versions(out).values()) == {1}
    assert shown(out) == shown(tmp_path / "once")


@pytest.mark.parametrize("recipe", RUNNING)
def test_a_changed_step_renews_itself_and_all_later_ones(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    """A step whose log changed, and every later one, get a second version, equal to a first one
    made of the new logs; earlier ones stay."""
    steps = five()
    logs, out = write(tmp_path / "logs", steps), tmp_path / "run"
    sift(logs, out, **recipe)
    before = ids(out)
    changed = steps | {4: a_step(4, 99, 8)}
    outcome = sift(write(logs, changed), out, **recipe)
    assert (outcome.unchanged, outcome.replaced, outcome.published) == ([1, 2, 3], [4, 5], [])
    assert versions(out) == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    after = ids(out)
    assert [step for step in before if before[step] == after[step]] == [1, 2, 3]
    sift(write(tmp_path / "fresh", changed), tmp_path / "once", **recipe)
    assert after == ids(tmp_path / "once")
    assert shown(out) == shown(tmp_path / "once")


def test_a_step_put_in_between_renews_the_later_ones(tmp_path: Path) -> None:
    """A step that arrives late is new; the steps after it, which it comes before in the running
    difficulty, get a second version; those before it stay."""
    steps = five()
    logs, out = tmp_path / "logs", tmp_path / "run"
    sift(write(logs, {step: steps[step] for step in (1, 2, 5)}), out, **ADAPTIVE)
    outcome = sift(write(logs, steps), out, **ADAPTIVE)
    assert (outcome.unchanged, outcome.published, outcome.replaced) == ([1, 2], [3, 4], [5])
    assert versions(out) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2}
    sift(write(tmp_path / "fresh", steps), tmp_path / "once", **ADAPTIVE)
    assert ids(out) == ids(tmp_path / "once")


def test_a_log_of_the_same_size_and_time_is_seen_as_changed(tmp_path: Path) -> None:
    """A log rewritten with as many bytes, and as old by the clock, makes a new version."""
    steps = five()
    logs, out = write(tmp_path / "logs", steps), tmp_path / "run"
    sift(logs, out, k=2)
    file = logs / "5.jsonl"
    text = file.read_text()
    times = file.stat()
    file.write_text(text.replace('"level": 1,', '"level": 2,', 1))
    assert len(file.read_text()) == len(text) != 0
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert sift(logs, out, k=2).replaced == [5]


@pytest.mark.parametrize(
    ("recipe", "form"),
    [(ADAPTIVE, "jsonl"), (ADAPTIVE, "parquet"), (TDIGEST, "jsonl"), (GLOBAL, "jsonl")],
    ids=["jsonl", "parquet", "tdigest", "global"],
)
def test_filtering_again_publishes_nothing(
    tmp_path: Path, recipe: dict[str, Any], form: str
) -> None:
    """Where nothing changed, a second go leaves every file of the run as it is."""
    steps = {step: records for step, records in five().items() if records}
    logs = (write if form == "jsonl" else as_parquet)(tmp_path / "logs", steps)
    out = tmp_path / "run"
    sift(logs, out, **recipe)

    def files() -> Iterable[tuple[str, int, int]]:
        found = [path for path in sorted(out.rglob("*")) if path.is_file() and path.suffix]
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_ino) for path in found]

    before = files()
    outcome = sift(logs, out, **recipe)
    assert (outcome.unchanged, outcome.published, outcome.replaced) == ([1, 2, 4, 5], [], [])
    assert files() == before


def test_a_new_step_renews_all_where_difficulty_is_global(tmp_path: Path) -> None:
    """With difficulty over the whole run a new step gives every step a new version, and the run is
    what filtering all at once gives."""
    steps = five()
    logs, out = tmp_path / "logs", tmp_path / "run"
    sift(write(logs, {step: steps[step] for step in (1, 2, 3, 4)}), out, **GLOBAL)
    before = ids(out)
    outcome = sift(write(logs, steps), out, **GLOBAL)
    assert (outcome.replaced, outcome.published, outcome.unchanged) == ([1, 2, 3, 4], [5], [])
    assert versions(out) == {1: 2, 2: 2, 3: 2, 4: 2, 5: 1}
    assert all(ids(out)[step] != before[step] for step in before)
    edges = {step.manifest.thresholds for step in Run(out).steps().values()}
    assert len(edges) == 1
    sift(write(tmp_path / "fresh", steps), tmp_path / "once", **GLOBAL)
    assert ids(out) == ids(tmp_path / "once")


def test_a_repeat_is_seen_across_goes(tmp_path: Path) -> None:
    """A batch logged again under a later step is a repeat also where the first one was filtered in
    an earlier go."""
    records = a_step(1, 8, kind="prompt")
    logs, out = tmp_path / "logs", tmp_path / "run"
    sift(write(logs, {1: records}), out, k=2)
    sift(write(logs, {2: [{**record, "step": 2} for record in records]}), out, k=2)
    assert Run(out).steps()[2].manifest.counts.dropped == {"repeat": len(records)}
