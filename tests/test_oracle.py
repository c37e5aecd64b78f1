"""Random logs through the whole filter, against the slow program in `oracle.py`.

The same 40 logs are tried each time; ROLLSIFT_EXAMPLES=3000 tries more, ROLLSIFT_FIRST=1000 others.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import InputError
from rollsift.schemas.reasons import REASONS
from rollsift.schemas.recipe import resolve

EXAMPLES = int(os.environ.get("ROLLSIFT_EXAMPLES", "40"))
FIRST = int(os.environ.get("ROLLSIFT_FIRST", "0"))
Record = dict[str, Any]
Log = dict[int, list[Record]]


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


def a_recipe(draw: random.Random) -> dict[str, Any]:
    """A recipe in which each key is often left out."""
    values: dict[str, Any] = {}

    def maybe(key: str, found: Sequence[Any], of: int = 3) -> None:
        if draw.randrange(of) == 0:
            values[key] = draw.choice(found)

    maybe("length", ["chars", "bytes"], 5)
    maybe("correct", ["reward > 0.5", "acc", "response_length > 3"])
    maybe("max_lag", [0, 1, 2], 5)
    maybe("exclude_where", CONDITIONS, 4)
    maybe("min_length", [0, 1, 2, 3], 2)
    maybe("zero_variance", ["drop"])
    maybe("zero_variance_of", BARE)
    maybe("metric", METRICS, 2)
    maybe("no_signal", ["drop"], 4)
    low, high = sorted(draw.choices([-1.0, 0.0, 0.1, 0.5, 2 / 3, 1.0], k=2))
    maybe("min_mean", [low], 5)
    maybe("max_mean", [high], 5)
    if draw.randrange(3) == 0:
        values["group_size"] = draw.randint(1, 5)
        values["incomplete"] = draw.choice(["keep", "drop"])
    values["k"] = draw.randint(1, 4)
    if draw.random() < 0.5:
        values["k"] = {bucket: draw.randint(1, 5) for bucket in oracle.BUCKETS}
    least = min(values["k"].values()) if isinstance(values["k"], dict) else values["k"]
    if draw.random() < 0.6:
        values["min_correct"] = draw.randint(0, least)
        values["min_incorrect"] = draw.randint(0, least - values["min_correct"])
    values["difficulty"] = {
        "of": draw.choice(["reward", "reward", *BARE]),
        "scope": draw.choice(["running", "global"]),
        "ties": draw.choice(["strict", "midrank"]),
        "warmup": draw.choice([0, 0, 0, 1, 3, 6]),
    }
    return values


def a_log(draw: random.Random, recipe: dict[str, Any]) -> Log:
    """Steps of records; few values, so that ties, twins and gaps are frequent."""
    how = {
        "groups": draw.choice(["uid", "row keys", "prompt"]),
        "acc": draw.random() < 0.5 or "acc" in json.dumps(recipe),
        "versions": draw.random() < 0.3 or "max_lag" in recipe,
        "logged": draw.random() < 0.3 and "length" not in recipe,
        "truths": draw.choice([["4", "5", "", None, MISSING], [4, 5], [["4"], ["4", 5]], ["4"]]),
        "rewards": draw.choice([REWARDS, [0, 1], [0, 1, 0.5], [0, 5e-7, 1.5e-6]]),
        "gaps": draw.random() < 0.5,
        "bad": draw.random() < 0.3,
        "padding": draw.random() < 0.3,
        "odd": draw.random() < 0.2,
        "names": UIDS,
        "prompts": ["p", "p", "q", "p\0q"],
        "sizes": [0, 1, 5, 15, 25, 30],
    }
    if draw.random() < 0.3:  # many small groups, complete but for what a recipe drops
        how |= {"gaps": False, "sizes": [240], "prompts": [f"{n} é" for n in range(60)]}
        how |= {"names": how["prompts"], "rewards": draw.choice([[0, 1], [0, 0, 0, 5e-7, 1.5e-6]])}
    log: Log = {}
    for step in sorted(draw.sample([1, 2, 3, 9, 10], draw.randint(1, 3))):
        if how["groups"] == "prompt" and log and draw.random() < 0.2:
            again = log[draw.choice(sorted(log))]
            log[step] = [{**record, "step": step} for record in again]
        else:
            log[step] = _records(draw, step, how)
    every = [record for records in log.values() for record in records]
    if how["acc"] and all(record.get("acc") is None for record in every):
        for record in every:
            record["acc"] = 1
    return log


def _records(draw: random.Random, step: int, how: dict[str, Any]) -> list[Record]:
    records = [_record(draw, step, how) for _ in range(draw.choice(how["sizes"]))]
    if how["groups"] == "row keys":
        _name_by_row_keys(draw, records, how["odd"])
    if how["groups"] != "prompt" and records and how["padding"]:
        padding = {**records[0], "input": "", "output": "", "score": 0}
        count = draw.randint(1, 2)
        records += [{**padding, "uid": f"pad{i:032x}_{i}_0"} for i in range(count)]
    for record in records:
        record |= {"step": step, "request": f"of step {step}"}
    for name, value in {"score": None, "output": None, "response_length": 2}.items():
        wanted = name != "response_length" or how["logged"]
        if records and wanted and all(r.get(name) is None for r in records):
            records[0][name] = value
    return records


def _record(draw: random.Random, step: int, how: dict[str, Any]) -> dict[str, Any]:
    pick = draw.choice
    record = {
        "input": pick(how["prompts"]),
        "output": pick(TEXTS),
        "gts": pick(how["truths"]),
        "score": pick(how["rewards"]),
        "truncated": pick([True, False, False, None, MISSING]),
    }
    if how["gaps"] and draw.random() < 0.15:
        record["score"] = pick(NO_REWARDS)
    if how["gaps"] and draw.random() < 0.1:
        record["output"] = pick([None, MISSING])
    if how["acc"]:
        record["acc"] = pick(ACCS)
    if how["versions"]:
        record["policy_version"] = step - pick([0, 0, 0, 1, 2, 3])
    if how["logged"]:
        record["response_length"] = pick([0, 1, 1, 2, 2, 3, 4, "2", None])
    if how["groups"] == "uid":
        record["uid"] = pick(how["names"])
        if how["bad"] and draw.random() < 0.1:
            record["uid"] = pick([None, MISSING])
    return {name: value for name, value in record.items() if value is not MISSING}


def _name_by_row_keys(draw: random.Random, records: list[Record], odd: bool) -> None:
    """Name rows as verl V1 does; the prompts of a group's sessions differ where it is `odd`."""
    names = ["g", "h", "g_0", *(f"{n}_é" for n in range(len(records) // 5))]
    keys = [
        (name, session, index) for name in names for session in range(6) for index in (0, 1, 10)
    ]
    named = draw.sample(keys, len(records))
    firsts = {
        (name, session): min(k for k in named if k[:2] == (name, session))
        for name, session, _ in named
    }
    for record, key in zip(records, named, strict=True):
        name, session, index = key
        record["uid"] = f"{name}_{session}_{index}"
        if not odd:
            record["input"] = f"{name}, turn {0 if firsts[name, session] == key else index}"


ROWS = """
    SELECT step, source_row, group_id, group_source, reward, correct, response_length, kept, reason,
        metric, rank, k, bucket, difficulty, group_size
    FROM rollouts ORDER BY step, source_row"""
GROUPS = """
    SELECT step, group_id, group_size, kept_count, mean_reward, difficulty, bucket, k
    FROM groups"""


def test_every_verdict_and_manifest_is_the_slow_programs() -> None:
    """For any log and recipe each row's verdict, each group and each manifest are what the rules
    say, worked out by a program that shares nothing with rollsift."""
    reasons: set[str] = set()
    for seed in range(FIRST, FIRST + EXAMPLES):
        draw = random.Random(seed)
        recipe = a_recipe(draw)
        log = a_log(draw, recipe)
        if compare(log, recipe):
            log = _reduced(log, recipe)
            shown = [f"seed {seed}", repr(recipe), json.dumps(log), *compare(log, recipe)]
            pytest.fail("\n".join(shown))
        for answer in oracle.judge(log, recipe):
            reasons |= set(answer.counts()[1])
    assert reasons == set(REASONS) or EXAMPLES < 40


def _reduced(log: Log, recipe: Record) -> Log:
    """A failing log without many of the rows that it also fails without, found in a minute."""
    end = time.monotonic() + 60
    for step in log:
        size = len(log[step])
        while size and time.monotonic() < end:
            for start in range(0, len(log[step]), size):
                fewer = log | {step: log[step][:start] + log[step][start + size :]}
                with suppress(InputError):  # too little is left to be a log
                    if fewer != log and time.monotonic() < end and compare(fewer, recipe):
                        log = fewer
            size //= 2
    return log


def compare(log: Log, recipe: dict[str, Any]) -> list[str]:
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


def _rows(answer: Any, records: list[Record], names: Any) -> list[tuple[Any, ...]]:
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
