"""The filter once more, as a short slow program: steps of records and a recipe to every verdict.

Written from the design's rules alone, with dictionaries, loops and exact fractions; it shares no
code with rollsift and knows nothing of columns, chunks or engines. Row expressions are SQL for
rollsift and the functions of `EXPRESSIONS` here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Record = Mapping[str, Any]
UNCOUNTED = ("padding", "repeat", "no_reward", "no_response", "stale")
BUCKETS = ("very_hard", "hard", "medium", "easy")
QUARTERS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
PADDING = re.compile(r"pad[0-9a-f]{32}_[0-9]+_0")
ROW_KEY = re.compile(r"(.*)_([0-9]+)_([0-9]+)", re.DOTALL)
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"True": 1.0, "False": 0.0, "NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

DEFAULTS: dict[str, Any] = {
    "length": "auto",
    "correct": "auto",
    "max_lag": None,
    "exclude_where": None,
    "min_length": 1,
    "group_size": None,
    "incomplete": "keep",
    "zero_variance": "keep",
    "zero_variance_of": "reward",
    "min_mean": None,
    "max_mean": None,
    "metric": "response_length",
    "k": 8,
    "min_correct": 0,
    "min_incorrect": 0,
    "no_signal": "keep",
    "difficulty": {},
}
DIFFICULTY = {"of": "reward", "scope": "running", "ties": "strict", "warmup": 0}


@dataclass(eq=False)
class Rollout:
    """One sampled answer: its rows, what is known of it, and its verdict."""

    rows: list[int]
    reward: float | None
    length: int | None
    acc: float | None
    output: str | None
    version: int | None
    truncated: bool | None
    step: int
    reason: str | None = None
    correct: bool | None = None
    metric: float | None = None
    signal: float | None = None
    spread: float | None = None
    rank: int | None = None


@dataclass(eq=False)
class Group:
    """The rollouts of one prompt in one step; `name` tells groups of a step apart."""

    name: Any
    rollouts: list[Rollout] = field(default_factory=list)
    difficulty: float | None = None
    mean_reward: float | None = None
    bucket: str | None = None
    k: int | None = None

    @property
    def counted(self) -> list[Rollout]:
        """The rollouts that count in G."""
        return [rollout for rollout in self.rollouts if rollout.reason not in UNCOUNTED]


@dataclass
class Step:
    """A judged step. `verdicts` has the rollout and group of each row that is no bad record; the
    group of a padding row is None. `lengths` are the rows' own."""

    step: int
    rows: int
    bad: list[int]
    source: str
    groups: list[Group]
    verdicts: dict[int, tuple[Rollout, Group | None]]
    lengths: dict[int, int | None]
    edges: tuple[float | None, float | None, float | None] = (None, None, None)
    seen: int = 0

    def counts(self) -> tuple[int, dict[str, int]]:
        """Rows kept, and rows dropped by reason."""
        dropped: dict[str, int] = {}
        for rollout, _ in self.verdicts.values():
            if rollout.reason is not None:
                dropped[rollout.reason] = dropped.get(rollout.reason, 0) + 1
        return len(self.verdicts) - sum(dropped.values()), dropped

    def training(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Kept rows in training order, offsets of their groups, rows and tokens of the whole."""
        order: list[int] = []
        offsets, sizes, tokens = [0], [], []
        for group in self.groups:
            kept = [row for r in group.rollouts if r.reason is None for row in r.rows]
            if kept:
                order += sorted(kept)
                offsets.append(len(order))
                whole = [row for r in group.counted for row in r.rows]
                sizes.append(len(whole))
                tokens.append(sum(self.lengths[row] or 0 for row in whole))
        return order, offsets, sizes, tokens


# --- what a record says


def number(value: Any) -> float | None:
    """A logged value as a number: bools, numbers, and both as text; None where it is null."""
    if isinstance(value, str):
        return float(value) if NUMBER.fullmatch(value) else WORDS[value]
    return None if value is None else float(value)


def finite(value: Any) -> float | None:
    """A number that can be summed, or None."""
    known = number(value)
    return known if known is not None and math.isfinite(known) else None


def length_of(record: Record, how: str) -> int | None:
    """A logged count, or the characters or bytes of the response."""
    if how == "logged":
        known = number(record.get("response_length"))
        return None if known is None else int(known)
    text = record.get("output")
    return None if text is None else len(text.encode() if how == "bytes" else text)


# SQL of a row expression -> what it gives for a rollout; None is null.
EXPRESSIONS: dict[str, Callable[[Rollout], Any]] = {
    "reward": lambda r: r.reward,
    "acc": lambda r: r.acc,
    "response_length": lambda r: r.length,
    "reward > 0.5": lambda r: None if r.reward is None else r.reward > 0.5,
    "response_length > 3": lambda r: None if r.length is None else r.length > 3,
    "truncated": lambda r: r.truncated,
    "contains(output, 'b')": lambda r: None if r.output is None else "b" in r.output,
    "reward < 0 OR response_length = 2": lambda r: _either(
        None if r.reward is None else r.reward < 0, None if r.length is None else r.length == 2
    ),
    "step = 2": lambda r: r.step == 2,
    "abs(response_length - 2)": lambda r: None if r.length is None else abs(r.length - 2),
    "-reward": lambda r: None if r.reward is None else -r.reward,
    "reward * response_length": lambda r: (
        None if None in (r.reward, r.length) else r.reward * r.length
    ),
    "CASE WHEN reward > 0 THEN response_length END": lambda r: (
        r.length if r.reward is not None and r.reward > 0 else None
    ),
    "CASE WHEN response_length < 2 THEN 'NaN'::DOUBLE ELSE reward END": lambda r: (
        math.nan if r.length is not None and r.length < 2 else r.reward
    ),
}


def _either(one: bool | None, other: bool | None) -> bool | None:
    """SQL's OR."""
    if one or other:
        return True
    return None if None in (one, other) else False


# --- records to groups of rollouts


def _grouped(step: int, records: Sequence[Record], recipe: Mapping[str, Any]) -> Step:
    named = any(record.get("uid") is not None for record in records)
    bad = [i for i, r in enumerate(records) if named and r.get("uid") is None]
    good = [i for i in range(len(records)) if i not in bad]
    cut = _row_keys([records[i] for i in good]) if named else False
    logged = any(record.get("response_length") is not None for record in records)
    how = recipe["length"] if recipe["length"] != "auto" else "logged" if logged else "chars"
    sessions: dict[Any, list[tuple[int, int]]] = {}
    homes: dict[Any, Any] = {}
    for i in good:
        record = records[i]
        if named and PADDING.fullmatch(record["uid"]):
            key, home, output = ("padding", i), None, 0
        elif cut:
            name, session, index = ROW_KEY.fullmatch(record["uid"]).groups()
            key, home, output = (name, int(session)), name, int(index)
        elif named:
            key, home, output = i, record["uid"], 0
        else:
            key, home, output = i, (record.get("input"), _text(record.get("gts"))), 0
        sessions.setdefault(key, []).append((output, i))
        homes[key] = home
    groups: dict[Any, Group] = {}
    verdicts: dict[int, tuple[Rollout, Group | None]] = {}
    lengths = {i: length_of(records[i], how) for i in good}
    for key, outputs in sessions.items():
        rollout = _rollout(step, records, outputs, lengths, recipe)
        group = None
        if homes[key] is None:
            rollout.reason = "padding"
        else:
            group = groups.setdefault(homes[key], Group(homes[key]))
            group.rollouts.append(rollout)
        verdicts |= dict.fromkeys(rollout.rows, (rollout, group))
    source = "uid" if named else "prompt"
    return Step(step, len(records), bad, source, list(groups.values()), verdicts, lengths)


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _row_keys(records: Sequence[Record]) -> bool:
    """Whether the uids of a file are verl V1's row keys."""
    uids = [record["uid"] for record in records]
    if len(set(uids)) < len(uids) or not all(ROW_KEY.fullmatch(uid) for uid in uids):
        return False
    first: dict[Any, tuple[int, Any]] = {}
    for record in records:
        if not PADDING.fullmatch(record["uid"]):
            name, session, index = ROW_KEY.fullmatch(record["uid"]).groups()
            known = first.get((name, int(session)))
            if known is None or int(index) < known[0]:
                first[name, int(session)] = int(index), record.get("input")
    prompts: dict[str, set[Any]] = {}
    for (name, _), (_, prompt) in first.items():
        prompts.setdefault(name, set()).add(prompt)
    return all(len(found) == 1 for found in prompts.values())


def _rollout(
    step: int,
    records: Sequence[Record],
    outputs: list[tuple[int, int]],
    lengths: Mapping[int, int | None],
    recipe: Mapping[str, Any],
) -> Rollout:
    """All rows of one session: length their sum, all else of the last output; one that cannot be
    used makes all so."""
    rows = sorted(i for _, i in outputs)
    last = records[max(outputs)[1]]
    all_lengths = [lengths[i] for i in rows]
    versions = [v for i in rows if (v := number(records[i].get("policy_version"))) is not None]
    rollout = Rollout(
        rows=rows,
        reward=finite(last.get("score")),
        length=None if None in all_lengths else sum(all_lengths),
        acc=number(last.get("acc")),
        output=last.get("output"),
        version=int(min(versions)) if versions else None,
        truncated=last.get("truncated"),
        step=step,
    )
    lag = recipe["max_lag"]
    if any(finite(records[i].get("score")) is None for i in rows):
        rollout.reason, rollout.reward = "no_reward", None
    elif any(records[i].get("output") is None for i in rows):
        rollout.reason = "no_response"
    elif lag is not None and step - rollout.version > lag:
        rollout.reason = "stale"
    return rollout


# --- scores and group figures


def _score(step: Step, recipe: Mapping[str, Any]) -> None:
    for rollout in {id(r): r for r, _ in step.verdicts.values()}.values():
        rollout.correct = _correct(rollout, recipe["correct"])
        rollout.metric = _metric(rollout, recipe["metric"])
        rollout.signal = finite(EXPRESSIONS[recipe["difficulty"]["of"]](rollout))
        rollout.spread = finite(EXPRESSIONS[recipe["zero_variance_of"]](rollout))
    for group in step.groups:
        group.mean_reward = mean([r.reward for r in group.counted])
        group.difficulty = mean([r.signal for r in group.counted])


def _correct(rollout: Rollout, rule: str) -> bool | None:
    if rule != "auto":
        value = EXPRESSIONS[rule](rollout)
        return None if value is None else value != 0
    by = rollout.reward if rollout.acc is None or math.isnan(rollout.acc) else rollout.acc
    return None if by is None else by > 0


def _metric(rollout: Rollout, rule: str) -> float | None:
    if rule == "token_efficiency":
        if rollout.reward is None or rollout.length is None:
            return None
        value = -(rollout.reward / max(rollout.length, 1))
    else:
        value = EXPRESSIONS[rule](rollout)
        if value is None or value != value:
            return None
    return float(value) or 0.0


def mean(values: Sequence[float | None]) -> float | None:
    """The correctly rounded sum of what is there, over its count; the exact mean where no float
    holds the sum."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    total = sum(map(Fraction, known), Fraction(0))
    try:
        return (float(total) / len(known)) or 0.0
    except OverflowError:
        return float(total / len(known))


# --- difficulty


def quartiles(difficulties: Sequence[float], ties: str) -> tuple[float | None, ...]:
    """For each quarter the smallest value that reaches it: by F(v), or by the middle rank of v."""
    if not difficulties:
        return None, None, None
    edges = []
    for quarter in QUARTERS:
        reached = [v for v in set(difficulties) if _position(v, difficulties, ties) >= quarter]
        edges.append(min(reached, default=math.inf))
    return tuple(edges)


def _position(value: float, difficulties: Sequence[float], ties: str) -> Fraction:
    below = sum(d < value for d in difficulties)
    equal = sum(d == value for d in difficulties)
    part = Fraction(equal, 2) if ties == "midrank" else equal
    return Fraction(below + part) / len(difficulties)


def bucket_of(value: float, difficulties: Sequence[float], edges: Sequence[Any], ties: str) -> str:
    """The bucket of a difficulty among all that were seen."""
    if ties == "midrank":
        at = _position(value, difficulties, ties)
        return BUCKETS[sum(at >= quarter for quarter in QUARTERS)]
    return BUCKETS[sum(value >= edge for edge in edges)]


# --- verdicts


def _judge(step: Step, recipe: Mapping[str, Any], earlier: int, pool: Sequence[float]) -> None:
    how, k = recipe["difficulty"], recipe["k"]
    for group in step.groups:
        if group.difficulty is not None:
            warm = earlier < how["warmup"]
            bucket = bucket_of(group.difficulty, pool, step.edges, how["ties"])
            group.bucket = "warmup" if warm else bucket
        if isinstance(k, int):
            group.k = k
        elif group.bucket is not None:
            group.k = k["very_hard" if group.bucket == "warmup" else group.bucket]
        _select(group, recipe)


def _select(group: Group, recipe: Mapping[str, Any]) -> None:
    whole = _whole_group(group, recipe)
    excluded = EXPRESSIONS.get(recipe["exclude_where"])
    competing = []
    for rollout in group.counted:
        if excluded and excluded(rollout):
            rollout.reason = "excluded"
        elif rollout.length is not None and rollout.length < recipe["min_length"]:
            rollout.reason = "empty"
        else:
            rollout.reason = whole or (None if rollout.metric is not None else "no_metric")
            if rollout.metric is not None:
                competing.append(rollout)
    competing.sort(key=lambda r: (r.metric, _or_last(r.length), r.rows[0]))
    for place, rollout in enumerate(competing):
        rollout.rank = place + 1
    if whole:
        return
    for rollout in competing[group.k :]:
        rollout.reason = "outranked"
    _guard(competing, True, recipe["min_correct"], recipe["min_incorrect"])
    _guard(competing, False, recipe["min_incorrect"], recipe["min_correct"])
    kept = [r for r in competing if r.reason is None]
    if recipe["no_signal"] == "drop" and kept and _flat([r.reward for r in kept]):
        for rollout in kept:
            rollout.reason = "no_signal"


def _or_last(length: int | None) -> float:
    return math.inf if length is None else length


def _whole_group(group: Group, recipe: Mapping[str, Any]) -> str | None:
    """What the whole group is dropped for."""
    size, low, high = recipe["group_size"], recipe["min_mean"], recipe["max_mean"]
    spread = [r.spread for r in group.counted if r.spread is not None]
    average = group.mean_reward
    if recipe["incomplete"] == "drop" and len(group.counted) != size:
        return "incomplete_group"
    if recipe["zero_variance"] == "drop" and len(spread) > 1 and _flat(spread):
        return "zero_variance"
    if average is not None and (
        (low is not None and average < low) or (high is not None and average > high)
    ):
        return "mean_out_of_range"
    return "no_difficulty" if group.k is None else None


def _flat(values: Sequence[float]) -> bool:
    return Fraction(max(values)) - Fraction(min(values)) <= Fraction(1e-6)


def _guard(ranked: Sequence[Rollout], wanted: bool, least: int, other_least: int) -> None:
    """Swap the best of a kind in for the last kept one, while too few of the kind are kept."""
    while True:
        kept = [r for r in ranked if r.reason is None]
        if sum(r.correct is wanted for r in kept) >= least:
            return
        others = sum(r.correct is (not wanted) for r in kept)
        enters = [r for r in ranked if r.reason is not None and r.correct is wanted]
        leaves = [
            r
            for r in kept
            if r.correct is None or (r.correct is not wanted and others > other_least)
        ]
        if not enters or not leaves:
            return
        enters[0].reason, leaves[-1].reason = None, "displaced"


# --- the whole log


def judge(log: Mapping[int, Sequence[Record]], recipe: Mapping[str, Any]) -> list[Step]:
    """Judge the steps of a log (step -> its records) by a recipe; one answer a step, in order."""
    recipe = {**DEFAULTS, **recipe}
    recipe["difficulty"] = {**DIFFICULTY, **recipe["difficulty"]}
    steps = []
    for number_, records in sorted(log.items()):
        step = _grouped(number_, records, recipe)
        if _repeats(number_, log):
            for rollout, _ in step.verdicts.values():
                rollout.reason = rollout.reason if rollout.reason == "padding" else "repeat"
        _score(step, recipe)
        steps.append(step)
    found = [[g.difficulty for g in s.groups if g.difficulty is not None] for s in steps]
    for i, step in enumerate(steps):
        upto = len(steps) if recipe["difficulty"]["scope"] == "global" else i + 1
        pool = [difficulty for part in found[:upto] for difficulty in part]
        step.edges, step.seen = quartiles(pool, recipe["difficulty"]["ties"]), len(pool)
        _judge(step, recipe, sum(map(len, found[:i])), pool)
    return steps


def _repeats(step: int, log: Mapping[int, Sequence[Record]]) -> bool:
    """Whether an earlier step holds the same rollouts: logs without uid can hold a batch twice."""

    def content(records: Sequence[Record]) -> list[dict[str, Any]]:
        return [{k: v for k, v in record.items() if k != "step"} for record in records]

    mine = repr(content(log[step]))
    return bool(log[step]) and any(
        repr(content(records)) == mine for other, records in log.items() if other < step
    )
