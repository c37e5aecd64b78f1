"""Verify: what is intact passes, and whatever is changed is found and named."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollsift.pipeline.aids import NOTHING, Aids
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.store import Run
from rollsift.pipeline.verify import Verified, verify
from rollsift.schemas.errors import UsageError
from rollsift.schemas.recipe import resolve

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "verl_v1"
BY_BUCKET = {"k": {"very_hard": 3, "hard": 2, "medium": 2, "easy": 1}}


def log(folder: Path, step: int, seed: int = 0) -> None:
    """A step of 4 groups of 4; in step 2 one record is bad."""
    draw = random.Random(f"{step} {seed}")
    lines = [
        json.dumps(
            {
                "input": f"p{row % 4}", "output": "x" * draw.randint(1, 9), "gts": "4",
                "score": float(draw.random() < row % 4 / 3), "step": step, "uid": f"u{row % 4}",
            }
        )
        for row in range(16)
    ]  # fmt: skip
    if step == 2:
        lines[5] = "{"
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def sift(logs: Path, out: Path, aids: Aids = NOTHING) -> None:
    """Filter a folder."""
    filter_logs(discover([logs]), resolve(BY_BUCKET), out, aids=aids, skip_bad=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds `logs` of three steps, and `run`."""
    folder = tmp_path_factory.mktemp("made")
    for step in (1, 2, 3):
        log(folder / "logs", step)
    sift(folder / "logs", folder / "run")
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """The same folder to be tampered with; its run is of its own logs."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    edit_run(tmp_path, lambda info: info.update(log_root=str(tmp_path / "logs")))
    return tmp_path


def edit_run(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change run.json."""
    info = json.loads((place / "run" / "run.json").read_text())
    change(info)
    (place / "run" / "run.json").write_text(json.dumps(info))


def manifest(place: Path, step: int) -> Path:
    """Where a manifest lies."""
    return place / "run" / "manifests" / f"{step:06}.v1.json"


def table(place: Path, step: int, kind: str = "rollouts") -> Path:
    """Where a table lies."""
    return place / "run" / kind / f"{step:06}.v1.parquet"


def seal(
    place: Path, step: int, change: Callable[[dict[str, Any]], object] = lambda _: None
) -> None:
    """Change a manifest and give it the id that it then has, and the digests of its tables."""
    value = json.loads(manifest(place, step).read_text())
    change(value["manifest"])
    text = json.dumps(value["manifest"], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    id_ = hashlib.sha256(text.encode()).hexdigest()
    digests = {
        kind: hashlib.sha256(table(place, step, kind).read_bytes()).hexdigest()
        for kind in value["tables"]
    }
    tables = json.dumps(digests, sort_keys=True, separators=(",", ":"))
    manifest(place, step).write_text(f'{{"id":"{id_}","manifest":{text},"tables":{tables}}}\n')


def edit(
    place: Path, step: int, kind: str, column: str, change: Callable[[list[Any]], Any]
) -> None:
    """Change a column of a table and give the manifest the digest that it then has."""
    path = table(place, step, kind)
    whole = pq.read_table(path)
    values = whole[column].to_pylist()
    change(values)
    number = whole.column_names.index(column)
    whole = whole.set_column(number, column, pa.array(values, whole.schema.field(column).type))
    notes = pq.read_metadata(path).metadata or {}
    with pq.ParquetWriter(path, whole.schema, store_schema=False) as writer:
        writer.add_key_value_metadata({key.decode(): notes[key].decode() for key in notes})
        writer.write_table(whole)
    seal(place, step)


def files(found: Verified) -> set[str]:
    """The files that something is wrong with."""
    return {finding.file for finding in found.findings}


def look(place: Path, **how: Any) -> Verified:
    """Verify the run."""
    return verify(Run(place / "run"), **how)


@pytest.mark.parametrize("deep", [False, True])
def test_a_run_of_the_shipped_logs_is_intact(tmp_path: Path, deep: bool) -> None:
    """What filter wrote holds in every respect: 8 steps, 4,224 records, and of each step a log, a
    manifest and two tables, with run.json 33 files."""
    sift(SHIPPED, tmp_path / "run")
    found = look(tmp_path, deep=deep)
    assert (found.findings, found.notes) == ([], [])
    assert (found.steps, found.rows, found.files) == (8, 4224, 33)


@pytest.mark.parametrize("deep", [False, True])
def test_a_run_with_bad_records_is_intact(place: Path, deep: bool) -> None:
    """Bad records are expected where the run has some: 3 steps of 16 records; one table more."""
    found = look(place, deep=deep)
    assert (found.findings, found.notes) == ([], [])
    assert (found.steps, found.rows, found.files) == (3, 48, 1 + 3 * 4 + 1)


def swap(values: list[Any]) -> None:
    """Exchange the first value and the first that is another."""
    other = next(i for i, value in enumerate(values) if value != values[0])
    values[0], values[other] = values[other], values[0]


def put(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """A change that sets a key."""
    return lambda held: held.update({key: value})


def twice(path: Path) -> None:
    """Write a table with each row twice."""
    pq.write_table(pa.concat_tables([pq.read_table(path)] * 2), path)


def at(index: int, value: Any) -> Callable[[list[Any]], object]:
    """A change that sets one value of a list."""
    return lambda values: values.__setitem__(index, value)


R3, G3, M1, M2, M3 = (
    "rollouts/000003.v1.parquet", "groups/000003.v1.parquet",
    "manifests/000001.v1.json", "manifests/000002.v1.json", "manifests/000003.v1.json",
)  # fmt: skip
# What is done; which files are found; a word of what is expected or found.
TAMPERED: dict[str, tuple[Callable[[Path], object], set[str], str]] = {
    "table removed": (
        lambda p: table(p, 2).unlink(), {"rollouts/000002.v1.parquet"}, "no such file"),
    "bad records removed": (
        lambda p: table(p, 2, "bad_records").unlink(), {"bad_records/000002.v1.parquet"}, "no "),
    "table of another step": (lambda p: shutil.copy(table(p, 1), table(p, 3)), {R3}, "SHA-256"),
    "table of another step, sealed": (
        lambda p: (shutil.copy(table(p, 1), table(p, 3)), seal(p, 3)), {R3}, "step[0]: 3"),
    "count": (
        lambda p: seal(p, 3, lambda m: m["counts"].update(bad_records=1)),
        {M3, R3}, "rows = kept + dropped + bad"),
    "count of an early step": (
        lambda p: seal(p, 1, lambda m: m["counts"].update(rows=17)),
        {M1, M2, "rollouts/000001.v1.parquet"}, "rows of the source"),
    "dropped": (
        lambda p: seal(p, 3, lambda m: m["counts"].update(
            dropped={"empty": m["counts"]["dropped"]["outranked"]})), {R3}, "reason.empty"),
    "no such reason": (
        lambda p: seal(p, 3, lambda m: m["counts"]["dropped"].update(dull=0)), {M3, R3}, "dull"),
    "id": (
        lambda p: manifest(p, 3).write_text(
            manifest(p, 3).read_text().replace('"id":"', '"id":"0')), {M3}, "content has id"),
    "chain": (lambda p: seal(p, 2, put("previous", "0" * 64)), {M2, M3}, "previous"),
    "chain, cut": (lambda p: seal(p, 3, put("previous", None)), {M3}, "previous"),
    "chain, a step gone": (lambda p: manifest(p, 2).unlink(), {M3}, "previous"),
    "order of training": (
        lambda p: seal(p, 3, lambda m: swap(m["row"])), {R3}, "training order"),
    "a row kept twice": (
        lambda p: seal(p, 3, lambda m: at(0, m["row"][1])(m["row"])), {M3, R3}, "twice"),
    "a row less": (lambda p: seal(p, 3, lambda m: m["row"].pop()), {M3, R3}, "kept rows: "),
    "rows of another log": (
        lambda p: seal(p, 3, lambda m: at(0, 1)(m["source"])), {M3}, "sources of kept rows"),
    "a group less": (
        lambda p: seal(p, 3, lambda m: m["group_rows"].pop()), {M3, R3}, "groups[0]"),
    "an empty group": (
        lambda p: seal(p, 3, lambda m: at(1, 0)(m["offsets"])), {M3, R3}, "nothing is kept"),
    "a small group": (
        lambda p: seal(p, 3, lambda m: at(0, 0)(m["group_rows"])), {M3, R3}, "more is kept than"),
    "offsets": (lambda p: seal(p, 3, lambda m: m["offsets"].pop()), {M3, R3}, "ends of offsets"),
    "tokens of a group": (
        lambda p: seal(p, 3, lambda m: at(0, 1)(m["group_tokens"])), {R3}, "group_tokens[0]: 1"),
    "step": (
        lambda p: shutil.copy(manifest(p, 3), manifest(p, 4)),
        {"manifests/000004.v1.json", "rollouts/000004.v1.parquet", "groups/000004.v1.parquet"},
        "step, as its name says"),
    "source elsewhere": (
        lambda p: seal(p, 3, lambda m: m["sources"][0].update(file="../logs/3.jsonl")),
        {M3, R3}, "outside the log root"),
    "source changed": (
        lambda p: (p / "logs" / "2.jsonl").write_text(
            (p / "logs" / "2.jsonl").read_text().replace("p1", "p2", 1)), {"2.jsonl"}, "SHA-256"),
    "source gone": (lambda p: (p / "logs" / "2.jsonl").unlink(), {"2.jsonl"}, "no such file"),
    "kept": (lambda p: edit(p, 3, "rollouts", "kept", swap), {R3, G3}, "a reason though kept"),
    "group": (lambda p: edit(p, 3, "rollouts", "group", swap), {R3, G3}, "their first row"),
    "number of a group": (lambda p: edit(p, 3, "groups", "group", swap), {G3}, "group[0]: 0"),
    "size of a group": (
        lambda p: edit(p, 3, "groups", "group_size", at(0, 5)), {G3}, "group_size[0]: 4"),
    "record in two tables": (
        lambda p: edit(p, 2, "bad_records", "source_row", at(0, 6)),
        {"rollouts/000002.v1.parquet"}, "in no table"),
    "bad record twice": (
        lambda p: (twice(table(p, 2, "bad_records")), seal(p, 2)),
        {"rollouts/000002.v1.parquet", "bad_records/000002.v1.parquet"}, "rows: 1"),
    "bad records unsaid": (
        lambda p: manifest(p, 2).write_text(
            re.sub('"bad_records":"[^"]*",', "", manifest(p, 2).read_text())),
        {M2}, "a bad_records table"),
    "aids": (
        lambda p: edit_run(p, put("reader", {"tokenizer": {"name": "t", "sha256": "0"}})),
        {M1, M2, M3}, "digests of aids"),
    "recipe": (
        lambda p: edit_run(p, lambda info: info["recipe"].update(metric="reward")),
        {M1, M2, M3}, "recipe.metric"),
    "no recipe": (
        lambda p: edit_run(p, lambda info: info["recipe"].update(metric="length(")),
        {"run.json", M1, M2, M3}, "length("),
    "format": (lambda p: edit_run(p, put("format", 2)), {"run.json"}, "format 2"),
    "no run.json": (lambda p: (p / "run" / "run.json").unlink(), {"run.json"}, "no run here"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_tampered_with_is_found_and_named(place: Path, what: str) -> None:
    """Each single change is found; the files named are those that disagree, and none else; what was
    expected and found is said; and that it takes ids and digests that fit makes no difference."""
    change, wrong, word = TAMPERED[what]
    change(place)
    found = look(place)
    assert files(found) == wrong
    assert any(word in f"{finding.expected} {finding.found}" for finding in found.findings)
    assert all(finding.next for finding in found.findings)


def test_all_that_is_wrong_is_told_at_once(place: Path) -> None:
    """Of four unrelated changes each is found, deep or not."""
    changes = ("table removed", "size of a group", "source gone", "offsets")
    for what in changes:
        TAMPERED[what][0](place)
    for deep in (False, True):
        assert files(look(place, deep=deep)) == set().union(
            *(TAMPERED[what][1] for what in changes)
        )


# What agrees with all digests and counts, so that only judging again tells; what it must name.
FORGED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "metric": (lambda p: edit(p, 3, "rollouts", "metric", at(7, 99.5)), R3, "metric of row 7"),
    "text": (lambda p: edit(p, 3, "rollouts", "response", at(3, "so")), R3, "response of row 3"),
    "difficulty": (
        lambda p: edit(p, 3, "groups", "difficulty", at(1, 0.125)), G3, "difficulty of row 1"),
    "bad record": (
        lambda p: edit(p, 2, "bad_records", "reason", at(0, "none")),
        "bad_records/000002.v1.parquet", "reason of row 0"),
    "thresholds": (
        lambda p: seal(p, 3, lambda m: m["thresholds"].update(q25="0.1")), M3, "thresholds.q25"),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_value_is_found_by_judging_again(place: Path, what: str) -> None:
    """A value changed with all digests recomputed is found by --deep alone, which names the file,
    column and row; where the digests are not recomputed, both find it."""
    change, wrong, words = FORGED[what]
    sealed = [manifest(place, step).read_bytes() for step in (1, 2, 3)]
    change(place)
    assert look(place).findings == []
    [finding] = look(place, deep=True).findings
    assert finding.file == wrong
    assert words in finding.expected
    if wrong != M3:
        for step in (1, 2, 3):
            manifest(place, step).write_bytes(sealed[step - 1])
        assert files(look(place)) == {wrong}


def test_strangers_and_leftovers_are_no_fault(place: Path) -> None:
    """A table without a manifest and somebody's file are remarked on, and nothing else is."""
    shutil.copy(table(place, 3), table(place, 4))
    shutil.copy(table(place, 2, "bad_records"), table(place, 3, "bad_records"))
    (place / "run" / "thesis.txt").touch()
    found = look(place, deep=True)
    assert found.findings == []
    [note] = found.notes
    for name in ("rollouts/000004.v1.parquet", "bad_records/000003.v1.parquet", "thesis.txt"):
        assert name in note


def test_older_versions_are_looked_at(place: Path) -> None:
    """A run with replaced versions is intact; damage to a table of an old version is found; so is a
    newest version that does not go on from the newest before it."""
    log(place / "logs", 2, seed=1)
    sift(place / "logs", place / "run")
    assert [file.name for file in sorted((place / "run" / "manifests").iterdir())] == [
        "000001.v1.json", "000002.v1.json", "000002.v2.json", "000003.v1.json", "000003.v2.json",
    ]  # fmt: skip
    assert look(place, deep=True).findings == []
    table(place, 2).write_bytes(table(place, 2).read_bytes() + b"\0")
    assert files(look(place)) == {"rollouts/000002.v1.parquet"}
    seal(place, 3, put("previous", "0" * 64))
    assert files(look(place)) == {"rollouts/000002.v1.parquet", M3}
    (place / "run" / "manifests" / "000003.v2.json").unlink()
    [finding] = [each for each in look(place).findings if each.file == M3]
    assert finding.found == repr("0" * 64)


def test_logs_that_have_moved(place: Path) -> None:
    """Logs elsewhere are missing until it is said where they are; then all is intact."""
    (place / "logs").rename(place / "moved")
    found = look(place)
    assert files(found) == {"1.jsonl", "2.jsonl", "3.jsonl"}
    assert all("--logs" in finding.next for finding in found.findings)
    assert look(place, logs=place / "moved", deep=True).findings == []


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_reward_function_is_needed_again(tmp_path: Path, form: str) -> None:
    """A run filtered with one is judged again with that one only. Without it JSONL is looked at all
    the same; of Parquet, of which it reads more, it is said that it must be named."""
    logs = tmp_path / "logs"
    log(logs, 1)
    if form == "parquet":
        rows = [json.loads(line) for line in (logs / "1.jsonl").read_text().splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), logs / "1.parquet")
        (logs / "1.jsonl").unlink()
    function = tmp_path / "f.py"
    function.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n return 1"
    )
    aids = Aids.named(None, f"{function}:score")
    sift(logs, tmp_path / "run", aids)
    for deep in (False, True):
        assert look(tmp_path, aids=aids, deep=deep).findings == []
    nexts = [finding.next for finding in look(tmp_path).findings]
    assert nexts == ([] if form == "jsonl" else ["add --reward-fn"])
    with pytest.raises(UsageError, match=r"--reward-fn.*f\.py:score.*name it again"):
        look(tmp_path, deep=True)
    function.write_text(function.read_text() + "\n")
    for deep in (False, True):
        with pytest.raises(UsageError, match=r"--reward-fn.*f\.py:score"):
            look(tmp_path, aids=Aids.named(None, f"{function}:score"), deep=deep)
