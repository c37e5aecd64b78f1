"""Random logs through the whole filter, against the slow program in `oracle.py`.

ROLLSIFT_EXAMPLES sets how many logs are tried (default 40).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve

EXAMPLES = int(os.environ.get("ROLLSIFT_EXAMPLES", "40"))
PHASES = [phase for phase in Phase if phase is not Phase.shrink or "ROLLSIFT_SHRINK" in os.environ]


def _load_oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oracle", Path(__file__).with_name("oracle.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


oracle = _load_oracle()

MISSING = object()
TEXTS = ["a", "b", "ab", "", "ba", "aab", "é", "éa", "bbbb", "a\nb"]
REWARDS = [0, 1, 1.0, 0.5, -1, 0.1, 0.2, 0.7, 5e-7, 1.5e-6, True, False, -0.0, 1e308, "1.0", "True"]
NO_REWARDS = [None, MISSING, math.nan, math.inf, -math.inf, "NaN", "-Infinity"]
ACCS = [0, 1, True, False, 0.5, 0.1, "1.0", "False", "0", None, MISSING, math.nan]
UIDS = ["a", "a", "b", "b", "a_1", "c_0_1", "é_1_1", ""]
BARE = ["reward", "acc", "response_length"]
CONDITIONS = [
    "truncated",
    "contains(output, 'b')",
    "reward < 0 OR response_length = 2",
    "step = 2",
    "response_length > 3",
]
METRICS = [
    "response_length",
    "token_efficiency",
    "reward",
    "acc",
    "abs(response_length - 2)",
    "-reward",
    "reward * response_length",
    "CASE WHEN reward > 0 THEN response_length END",
    "CASE WHEN response_length < 2 THEN 'NaN'::DOUBLE ELSE reward END",
]


def _mostly(common: st.SearchStrategy[Any], rare: st.SearchStrategy[Any], of: int = 5) -> Any:
    return st.integers(0, of - 1).flatmap(lambda n: rare if n == of - 1 else common)


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe in which each key is often left out."""
    values: dict[str, Any] = {}

    def maybe(key: str, found: st.SearchStrategy[Any], of: int = 3) -> None:
        if draw(st.integers(0, of - 1)) == 0:
            values[key] = draw(found)

    maybe("length", st.sampled_from(["chars", "bytes"]), 5)
    maybe("correct", st.sampled_from(["reward > 0.5", "acc", "response_length > 3"]))
    maybe("max_lag", st.integers(0, 2), 5)
    maybe("exclude_where", st.sampled_from(CONDITIONS), 4)
    maybe("min_length", st.integers(0, 3), 2)
    maybe("zero_variance", st.just("drop"), 4)
    maybe("zero_variance_of", st.sampled_from(BARE))
    maybe("metric", st.sampled_from(METRICS), 2)
    maybe("no_signal", st.just("drop"), 4)
    ends = st.sampled_from([-1.0, 0.0, 0.1, 0.5, 2 / 3, 1.0])
    low, high = sorted([draw(ends), draw(ends)])
    maybe("min_mean", st.just(low), 6)
    maybe("max_mean", st.just(high), 6)
    if draw(st.booleans()):
        values["group_size"] = draw(st.integers(1, 4))
        values["incomplete"] = draw(st.sampled_from(["keep", "keep", "drop"]))
    values["k"] = draw(
        st.one_of(
            st.integers(1, 3), st.fixed_dictionaries({b: st.integers(1, 4) for b in oracle.BUCKETS})
        )
    )
    least = min(values["k"].values()) if isinstance(values["k"], dict) else values["k"]
    if draw(st.booleans()):
        values["min_correct"] = draw(st.integers(0, least))
        values["min_incorrect"] = draw(st.integers(0, least - values["min_correct"]))
    values["difficulty"] = {
        "of": draw(_mostly(st.just("reward"), st.sampled_from(BARE), 2)),
        "scope": draw(st.sampled_from(["running", "global"])),
        "ties": draw(st.sampled_from(["strict", "midrank"])),
        "warmup": draw(_mostly(st.just(0), st.integers(1, 4), 3)),
    }
    return values


@st.composite
def logs(draw: st.DrawFn, recipe: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Steps of records; few values, so that ties, twins and gaps are frequent."""
    how = {
        "groups": draw(st.sampled_from(["uid", "row keys", "prompt"])),
        "acc": draw(st.booleans()) or "acc" in json.dumps(recipe),
        "versions": draw(st.booleans()) or "max_lag" in recipe,
        "logged": draw(st.booleans()) and "length" not in recipe,
        "truths": draw(st.sampled_from([["4", "5", "", None, MISSING], [4, 5], [["4"], ["4", 5]]])),
        "whole": draw(st.booleans()),  # every row has all it needs
        "bad": draw(_mostly(st.just(False), st.just(True), 3)),
    }
    steps = sorted(draw(st.sets(st.sampled_from([1, 2, 3, 9, 10]), min_size=1, max_size=3)))
    log: dict[int, list[dict[str, Any]]] = {}
    for step in steps:
        if how["groups"] == "prompt" and log and draw(st.integers(0, 4)) == 4:
            again = log[draw(st.sampled_from(sorted(log)))]
            log[step] = [{**record, "step": step} for record in again]
            continue
        log[step] = _records(draw, step, how)
    every = [record for records in log.values() for record in records]
    if how["acc"] and all(record.get("acc") is None for record in every):
        for record in every:
            record["acc"] = 1
    return log


def _records(draw: st.DrawFn, step: int, how: dict[str, Any]) -> list[dict[str, Any]]:
    good = st.sampled_from(REWARDS)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "input": st.sampled_from(["p", "p", "q", "p\0q"]),
        "output": st.sampled_from(TEXTS),
        "gts": st.sampled_from(how["truths"]),
        "score": good if how["whole"] else _mostly(good, st.sampled_from(NO_REWARDS)),
        "truncated": st.sampled_from([True, False, False, None, MISSING]),
    }
    if not how["whole"]:
        fields["output"] = _mostly(fields["output"], st.sampled_from([None, MISSING]), 8)
    if how["acc"]:
        fields["acc"] = st.sampled_from(ACCS)
    if how["versions"]:
        fields["policy_version"] = st.integers(step - 3, step)
    if how["logged"]:
        fields["response_length"] = st.sampled_from([0, 1, 1, 2, 2, 3, 4, "2", None])
    if how["groups"] == "uid":
        names = st.sampled_from(UIDS)
        fields["uid"] = _mostly(names, st.sampled_from([None, MISSING]), 8) if how["bad"] else names
    records = draw(st.lists(st.fixed_dictionaries(fields), max_size=14))
    if how["groups"] == "row keys":
        _name_by_row_keys(draw, records)
    if how["groups"] != "prompt" and records and draw(st.integers(0, 3)) == 0:
        padding = {**records[0], "input": "", "output": "", "score": 0}
        for i in range(draw(st.integers(1, 2))):
            records.append({**padding, "uid": f"pad{i:032x}_{i}_0"})
    records = [{k: v for k, v in r.items() if v is not MISSING} for r in records]
    for record in records:
        record |= {"step": step, "request": f"of step {step}"}
    for name, value in {"score": None, "output": None, "response_length": 2}.items():
        wanted = name != "response_length" or how["logged"]
        if records and wanted and all(r.get(name) is None for r in records):
            records[0][name] = value
    return records


def _name_by_row_keys(draw: st.DrawFn, records: list[dict[str, Any]]) -> None:
    keys = st.tuples(
        st.sampled_from(["g", "h", "g_0"]), st.integers(0, 2), st.sampled_from([0, 0, 1, 2, 10])
    )
    named = draw(st.lists(keys, min_size=len(records), max_size=len(records), unique=True))
    odd = draw(st.integers(0, 4)) == 0
    for record, (name, session, index) in zip(records, named, strict=True):
        record["uid"] = f"{name}_{session}_{index}"
        if not odd:
            later = index and any((name, session, i) in named for i in range(index))
            record["input"] = f"{name}, turn {index if later else 0}"


ROWS = """
    SELECT step, source_row, group_id, group_source, reward, correct, response_length, kept, reason,
        metric, rank, k, bucket, difficulty, group_size
    FROM rollouts ORDER BY step, source_row"""
GROUPS = """
    SELECT step, group_id, group_size, kept_count, mean_reward, difficulty, bucket, k
    FROM groups"""


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=PHASES,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_every_verdict_and_manifest_is_the_slow_programs(data: st.DataObject) -> None:
    """For any log and recipe each row's verdict, each group and each manifest are what the rules
    say, worked out by a program that shares nothing with rollsift."""
    recipe = data.draw(recipes(), "recipe")
    log = data.draw(logs(recipe), "log")
    differences = compare(log, recipe)
    assert not differences, "\n".join(differences)


def compare(log: dict[int, list[dict[str, Any]]], recipe: dict[str, Any]) -> list[str]:
    """Where the filter and the slow program differ."""
    with TemporaryDirectory() as folder:
        source, out = Path(folder, "logs"), Path(folder, "run")
        source.mkdir()
        for step, records in log.items():
            lines = [json.dumps(record) + "\n" for record in records]
            (source / f"{step}.jsonl").write_text("".join(lines))
        filter_logs(discover([source]), resolve(recipe), out, skip_bad=True)
        run = Run(out)
        rows = query(run, ROWS).fetchall()
        groups = query(run, GROUPS).fetchall()
        manifests = {step: found.manifest for step, found in run.steps().items()}
    answers = oracle.judge(log, recipe)
    names = {(row[0], row[1]): row[2] for row in rows}
    expected = [row for answer in answers for row in _rows(answer, log[answer.step], names)]
    expected_groups = [group for answer in answers for group in _groups(answer, names)]
    return [
        *_differing(rows, expected),
        *_differing(sorted(groups, key=repr), sorted(expected_groups, key=repr)),
        *_differing(
            [_manifest(manifests[step]) for step in sorted(log)],
            [_expected_manifest(answer) for answer in answers],
        ),
    ]


def _differing(found: list[Any], expected: list[Any]) -> list[str]:
    """The pairs that differ, as text: -0.0 is not 0.0."""
    pairs = itertools.zip_longest(found, expected)
    return [f"found {one}\nright {other}" for one, other in pairs if repr(one) != repr(other)]


def _name(step: int, group: Any, names: dict[tuple[int, int], str]) -> str:
    """A logged group's own name; else the name of its first row, one no other group has."""
    if isinstance(group.name, str):
        return group.name
    return names[step, group.rollouts[0].rows[0]]


def _rows(answer: Any, records: list[dict[str, Any]], names: Any) -> list[tuple[Any, ...]]:
    taken = [_name(answer.step, group, names) for group in answer.groups]
    assert len(set(taken)) == len(taken)
    found = []
    for row, (rollout, group) in sorted(answer.verdicts.items()):
        shown = [None, None, None, None, None]
        if group is not None:
            name = _name(answer.step, group, names)
            shown = [name, group.k, group.bucket, group.difficulty, len(group.counted)]
        found.append(
            (
                answer.step, row, shown[0], group and answer.source,
                oracle.finite(records[row].get("score")), rollout.correct, answer.lengths[row],
                rollout.reason is None, rollout.reason, rollout.metric, rollout.rank, *shown[1:],
            )
        )  # fmt: skip
    return found


def _groups(answer: Any, names: Any) -> list[tuple[Any, ...]]:
    return [
        (
            answer.step, _name(answer.step, group, names), len(group.counted),
            sum(r.reason is None for r in group.rollouts), group.mean_reward, group.difficulty,
            group.bucket, group.k,
        )
        for group in answer.groups
    ]  # fmt: skip


def _manifest(found: Any) -> dict[str, Any]:
    edges = found.thresholds
    return {
        "row": found.row,
        "source": found.source,
        "offsets": found.offsets,
        "group_rows": found.group_rows,
        "group_tokens": found.group_tokens,
        "rows": (found.counts.rows, [source.rows for source in found.sources]),
        "kept": found.counts.kept,
        "dropped": sorted(found.counts.dropped.items()),
        "bad": found.counts.bad_records,
        "thresholds": (edges.q25, edges.q50, edges.q75, edges.seen),
    }


def _expected_manifest(answer: Any) -> dict[str, Any]:
    row, offsets, group_rows, group_tokens = answer.training()
    kept, dropped = answer.counts()
    edges = [None if edge is None else repr(edge) for edge in answer.edges]
    return {
        "row": row,
        "source": [0] * len(row),
        "offsets": offsets,
        "group_rows": group_rows,
        "group_tokens": group_tokens,
        "rows": (answer.rows, [answer.rows]),
        "kept": kept,
        "dropped": sorted(dropped.items()),
        "bad": len(answer.bad),
        "thresholds": (*edges, answer.seen),
    }
