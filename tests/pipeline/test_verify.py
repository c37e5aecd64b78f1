"""Verify: what is intact passes, and whatever is changed is found and named."""

from __future__ import annotations

import hashlib
import json
import random
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
M1, M2, M3 = (f"manifests/00000{step}.v1.json" for step in (1, 2, 3))
R1, R2, R3 = (f"rollouts/00000{step}.v1.parquet" for step in (1, 2, 3))
G3, B2 = "groups/000003.v1.parquet", "bad_records/000002.v1.parquet"
Change = Callable[[Path], object]  # of a run folder


def log(folder: Path, step: int, seed: int = 0) -> None:
    """A step of 4 groups of 4; in step 2 one record is bad."""
    draw = random.Random(f"{step} {seed}")
    lines = [
        json.dumps({"input": f"p{row % 4}", "output": "x" * draw.randint(1, 9), "step": step,
                    "score": float(draw.random() < row % 4 / 3), "gts": "4", "uid": f"u{row % 4}"})
        for row in range(16)
    ]  # fmt: skip
    if step == 2:
        lines[5] = "{"
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def sift(logs: Path, out: Path, aids: Aids = NOTHING) -> None:
    """Filter a folder."""
    filter_logs(discover([logs]), resolve(BY_BUCKET), out, aids=aids, skip_bad=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that holds `logs` of three steps, and `run`."""
    for step in (1, 2, 3):
        log(tmp_path / "logs", step)
    sift(tmp_path / "logs", tmp_path / "run")
    return tmp_path


def look(place: Path, **how: Any) -> Verified:
    """Verify the run."""
    return verify(Run(place / "run"), **how)


def files(found: Verified) -> set[str]:
    """The files that something is wrong with."""
    return {finding.file for finding in found.findings}


def text(name: str, old: str, new: str) -> Change:
    """Another text in a file."""
    return lambda run: (run / name).write_text((run / name).read_text().replace(old, new, 1))


def info(key: str, value: Any) -> Change:
    """Another value in run.json."""

    def change(run: Path) -> None:
        held = json.loads((run / "run.json").read_text())
        held[key] = held[key] | value if isinstance(value, dict) else value
        (run / "run.json").write_text(json.dumps(held))

    return change


def seal(name: str, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Change:
    """Another manifest, with the id that it then has and the digests of its tables."""

    def sealed(run: Path) -> None:
        value = json.loads((run / name).read_text())
        change(value["manifest"])
        form: Any = {"ensure_ascii": False, "sort_keys": True, "separators": (",", ":")}
        value["id"] = hashlib.sha256(json.dumps(value["manifest"], **form).encode()).hexdigest()
        for kind in value["tables"]:
            data = (run / kind / f"{name[10:-5]}.parquet").read_bytes()
            value["tables"][kind] = hashlib.sha256(data).hexdigest()
        (run / name).write_text(json.dumps(value, **form) + "\n")

    return sealed


def table(name: str, change: Callable[[pa.Table], pa.Table]) -> Change:
    """Another table, with a manifest that has its digest."""

    def changed(run: Path) -> None:
        whole = change(pq.read_table(run / name))
        with pq.ParquetWriter(run / name, whole.schema, store_schema=False) as writer:
            writer.add_key_value_metadata(whole.schema.metadata or {})
            writer.write_table(whole)
        seal(f"manifests/{name.split('/')[1][:-8]}.json")(run)

    return changed


def cell(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    """A table with another value."""

    def change(whole: pa.Table) -> pa.Table:
        values, at = whole[column].to_pylist(), whole.column_names.index(column)
        values[row] = value
        return whole.set_column(at, column, pa.array(values, whole.schema.field(at).type))

    return change


def flip(run: Path) -> None:
    """A flipped bit in the last page of a column, whose digest was taken afterwards."""
    column = pq.read_metadata(run / G3).row_group(0).column(0)
    data = bytearray((run / G3).read_bytes())
    data[4 + column.total_compressed_size - 1] ^= 1
    (run / G3).write_bytes(data)
    seal(M3)(run)


# What is done; which files are found; a word of what is expected or found.
TAMPERED: dict[str, tuple[Change, set[str], str]] = {
    "table removed": (lambda run: (run / R2).unlink(), {R2}, "no such file"),
    "bad records removed": (lambda run: (run / B2).unlink(), {B2}, "no such file"),
    "table of another step": (lambda run: shutil.copy(run / R1, run / R3), {R3}, "SHA-256"),
    "bad": (seal(M3, lambda m: m["counts"].update(bad_records=1)), {M3, R3}, "rows = kept + "),
    "rows": (seal(M1, lambda m: m["counts"].update(rows=17)), {M1, M2, R1}, "rows of the source"),
    "a row less": (seal(M3, lambda m: m["row"].pop()), {M3, R3}, "kept rows: "),
    "order": (seal(M3, lambda m: m["row"].reverse()), {R3}, "training order"),
    "kept": (table(R3, lambda t: cell("kept", 0, not t["kept"][0].as_py())(t)), {R3}, "order"),
    "no kept": (table(R3, lambda t: t.drop_columns("kept")), {R3}, "kept"),
    "bad record twice": (table(B2, lambda t: pa.concat_tables([t, t])), {B2}, "rows: 1"),
    "no bad records": (text(M2, '"tables":{"bad_', '"tables":{"'), {M2}, "manifest"),
    "id": (text(M2, '"id":"', '"id":"0'), {M2}, "content has id"),
    "chain": (seal(M2, lambda m: m.update(previous="0" * 64)), {M2, M3}, "previous"),
    "chain, cut": (seal(M3, lambda m: m.update(previous=None)), {M3}, "previous"),
    "chain, a step gone": (lambda run: (run / M2).unlink(), {M3}, "previous"),
    "step": (lambda run: (run / M3).rename(run / M3.replace("3", "4")),
             {x.replace("3", "4") for x in (M3, R3, G3)}, "step, as its name says"),
    "source elsewhere": (seal(M3, lambda m: m["sources"][0].update(file="../logs/3.jsonl")),
                         {M3}, "outside the log root"),
    "source changed": (text("../logs/2.jsonl", "p1", "p2"), {"2.jsonl"}, "SHA-256"),
    "source gone": (lambda run: (run / "../logs/2.jsonl").unlink(), {"2.jsonl"}, "no such file"),
    "aids": (info("reader", {"reward_fn": {"name": "t", "sha256": "0"}}), {M1, M2, M3}, "of aids"),
    "recipe": (info("recipe", {"metric": "reward"}), {M1, M2, M3}, "recipe.metric"),
    "no recipe": (info("recipe", {"metric": "f("}), {"run.json", M1, M2, M3}, "f("),
    "format": (info("format", 2), {"run.json"}, "format 2"),
    "no run.json": (lambda run: (run / "run.json").unlink(), {"run.json"}, "no run here"),
}  # fmt: skip
# What agrees with all ids, digests and counts, so that only judging again tells; what it must name.
FORGED: dict[str, tuple[Change, str, str]] = {
    "metric": (table(R3, cell("metric", 7, 99.5)), R3, "metric of row 7"),
    "text": (table(R3, cell("response", 3, "so")), R3, "response of row 3"),
    "difficulty": (table(G3, cell("difficulty", 1, 0.125)), G3, "difficulty of row 1"),
    "group": (table(G3, cell("group", 1, 0)), G3, "group of row 1"),
    "groups": (table(G3, lambda t: pa.concat_tables([t, t])), G3, "rows: 4"),
    "column": (table(G3, lambda t: t.drop_columns("k")), G3, "columns.9: 'k: int"),
    "note": (table(G3, lambda t: t.replace_schema_metadata({"fingerprint": "0"})), G3, "notes"),
    "bit": (flip, G3, "damage"),
    "thresholds": (seal(M3, lambda m: m["thresholds"].update(q25="0.1")), M3, "thresholds.q25"),
    "dropped": (seal(M3, lambda m: m["counts"].update(dropped={
        "empty": m["counts"]["dropped"]["outranked"]})), M3, "dropped.outranked"),
    "source": (seal(M3, lambda m: m.update(source=[1, *m["source"][1:]])), M3, "source.0: 0"),
    "offsets": (seal(M3, lambda m: m["offsets"].pop()), M3, "offsets.4"),
    "groups' rows": (seal(M3, lambda m: m["group_rows"].pop()), M3, "group_rows.3: 4"),
    "tokens": (seal(M3, lambda m: m["group_tokens"].reverse()), M3, "group_tokens.0"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_tampered_with_is_found_and_named(place: Path, what: str) -> None:
    """Each single change is found; the files named are those that disagree, and none else; what was
    expected and found is said, and what to do; --deep finds no less."""
    change, wrong, word = TAMPERED[what]
    change(place / "run")
    found = look(place)
    assert files(found) == wrong
    assert any(word in f"{finding.expected} {finding.found}" for finding in found.findings)
    assert all(finding.next for finding in found.findings)
    assert what == "aids" or files(look(place, deep=True)) >= wrong  # aids are then needed


def test_all_that_is_wrong_is_told_at_once(place: Path) -> None:
    """Of unrelated changes each is found, deep or not."""
    changes = [TAMPERED[what] for what in ("table removed", "kept", "source gone", "rows")]
    for change, _, _ in changes:
        change(place / "run")
    for deep in (False, True):
        assert files(look(place, deep=deep)) == set().union(*(wrong for _, wrong, _ in changes))


@pytest.mark.parametrize("what", FORGED)
def test_what_was_forged_is_found_by_judging_again(place: Path, what: str) -> None:
    """A change with all ids and digests made to fit is found by --deep alone, which names the file
    and the field, or the column and row; where a table's digest is left, both find it."""
    change, wrong, words = FORGED[what]
    sealed = (place / "run" / M3).read_bytes()
    change(place / "run")
    assert look(place).findings == []
    [finding] = look(place, deep=True).findings
    assert (finding.file, words in finding.expected) == (wrong, True)
    (place / "run" / M3).write_bytes(sealed)
    assert files(look(place)) == {wrong} - {M3}


def test_intact_runs(place: Path) -> None:
    """What filter wrote holds, bad records and strangers' files too, which are remarked on: a log,
    a manifest and two tables a step, one of bad records and run.json."""
    sift(SHIPPED, place / "shipped" / "run")
    leftovers = (R3.replace("3", "4"), B2.replace("2", "3"), "thesis.txt")
    for deep in (False, True):
        found = look(place / "shipped", deep=deep)
        assert (found.findings, found.notes) == ([], [])
        assert (found.steps, found.rows, found.files) == (8, 4224, 1 + 8 * 4)
        for name in leftovers:
            (place / "run" / name).touch()
        found = look(place, deep=deep)
        assert (found.findings, found.steps, found.rows, found.files) == ([], 3, 48, 1 + 3 * 4 + 1)
        assert all(name in found.notes[0] for name in leftovers)


def test_older_versions_are_looked_at(place: Path) -> None:
    """A run with replaced versions is intact; damage to a table of an old version is found; so is a
    newest version that does not go on from the newest before it."""
    log(place / "logs", 2, seed=1)
    sift(place / "logs", place / "run")
    assert Run(place / "run").versions() == {1: 1, 2: 2, 3: 2}
    assert look(place, deep=True).findings == []
    (place / "run" / R2).write_bytes((place / "run" / R2).read_bytes() + b"\0")
    assert files(look(place)) == {R2}
    (place / "run" / "manifests" / "000003.v2.json").unlink()
    assert files(look(place)) == {R2, M3}


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
    logs, function = tmp_path / "logs", tmp_path / "f.py"
    log(logs, 1)
    if form == "parquet":
        rows = [json.loads(line) for line in (logs / "1.jsonl").read_text().splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), logs / "1.parquet")
        (logs / "1.jsonl").unlink()
    function.write_text("def score(data_source, solution_str, ground_truth, extra_info): return 1")
    aids = Aids.named(None, f"{function}:score")
    sift(logs, tmp_path / "run", aids)
    nexts = [finding.next for finding in look(tmp_path).findings]
    assert nexts == ([] if form == "jsonl" else ["add --reward-fn"])
    with pytest.raises(UsageError, match=r"--reward-fn.*f\.py:score.*name it again"):
        look(tmp_path, deep=True)
    for deep in (False, True):
        assert look(tmp_path, aids=aids, deep=deep).findings == []
        function.write_text(function.read_text() + "\n")
        with pytest.raises(UsageError, match=r"--reward-fn.*f\.py:score"):
            look(tmp_path, aids=Aids.named(None, f"{function}:score"), deep=deep)
