"""Groups: which rows answer one prompt, which make one rollout, and what is said of odd ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import InputError
from rollsift.schemas.recipe import resolve

Rows = Sequence[Mapping[str, Any]]
Sift = Callable[..., Callable[[str], list[Any]]]
GROUPS = "SELECT group_id, sample FROM rollouts ORDER BY step, source_row"
REASONS = "SELECT reason, group_size FROM rollouts ORDER BY step, source_row"
PAD = "pad0123456789abcdef0123456789abcdef_"


def rows(*uids: str | None, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """A row a uid, each response one character longer than the one before; other columns by row."""
    usual = {"input": "p", "gts": "t", "score": 1.0}
    return [
        {**usual, "output": "x" * at, "uid": uid, **{n: v[at - 1] for n, v in columns.items()}}
        for at, uid in enumerate(uids, 1)
    ]


BOTH = pytest.mark.parametrize("sift", ["jsonl", "parquet"], indirect=True)


@pytest.fixture
def sift(request: pytest.FixtureRequest, tmp_path: Path) -> Sift:
    """Filter steps 1, 2, ... of a log in Parquet or another form; -> what answers a query."""
    form = getattr(request, "param", "parquet")

    def run(*steps: Rows, notes: Any = None, skip_bad: bool = False, **keys: Any) -> Any:
        (tmp_path / "logs").mkdir(exist_ok=True)
        for step, records in enumerate(steps, 1):
            path = tmp_path / "logs" / f"{step}.{form}"
            if form == "parquet":
                pq.write_table(pa.Table.from_pylist([dict(row) for row in records]), path)
            else:
                path.write_text("".join(f"{json.dumps(row)}\n" for row in records))
        found, recipe, say = discover([tmp_path / "logs"]), resolve({"k": 1, **keys}), [].append
        notify = say if notes is None else notes.append
        filter_logs(found, recipe, tmp_path / "run", skip_bad=skip_bad, notify=notify)
        return lambda text: query(Run(tmp_path / "run"), text).fetchall()

    return run


@BOTH
@pytest.mark.parametrize(
    ("uids", "prompts", "groups"),
    [
        (["q_0_0", "r_0_0", "q_1_0"], "pop", [("q", 0), ("r", 0), ("q", 1)]),
        (["a_1_10_0", "a_1_9_0", "a_2_0_0"], "ppo", [("a_1", 10), ("a_1", 9), ("a_2", 0)]),
        (["_0_0", "_1_0", "\n_0_0"], "ppp", [("", 0), ("", 1), ("\n", 0)]),
        ([PAD + "0_0", "q_0_0", "q_1_0"], "opp", [(None, 0), ("q", 0), ("q", 1)]),
        (["q_0_1", "q_0_0", "q_1_0"], "opp", [("q", 0), ("q", 0), ("q", 1)]),
    ],
)
def test_row_keys_are_cut_from_the_right(sift: Sift, uids: Any, prompts: str, groups: Any) -> None:
    """Where every uid but padding's is unique and ends in two numbers, and the first outputs of a
    group's sessions have equal prompts, the group is what stands before, the sample the session."""
    assert sift(rows(*uids, input=prompts))(GROUPS) == groups


@pytest.mark.parametrize(
    ("uids", "prompts", "note"),
    [
        (["q_0_0", "q_0_0", "q_1_0"], "ppp", "'q_0_0' stands twice"),
        (["q_0_0", "q_0_0", "q_0_0"], "ppp", None),
        (["q_0_0", "q_1_0", "plain"], "ppp", "'plain'"),
        (["q_0_0", "q_1_0", "q_02_0"], "ppp", "'q_02_0'"),
        (["q_0_0", "q_1_0", "r_0_0"], "pop", "prompts differ"),
    ],
)
def test_no_uid_is_cut_where_one_is_no_key(sift: Sift, uids: Any, prompts: str, note: Any) -> None:
    """A uid that stands twice, one without two numbers as Python writes them, or unequal prompts in
    a group: every uid is a group as it is, and a note tells what was odd about unique ones."""
    notes: list[str] = []
    assert [row[0] for row in sift(rows(*uids, input=prompts), notes=notes)(GROUPS)] == uids
    said = [text for text in notes if "is cut" in text]
    assert [str(note) in text for text in said] == ([True] if note else [])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0), (2, 0, 3, 1)])
def test_outputs_of_a_session_are_one_rollout(sift: Sift, order: tuple[int, ...]) -> None:
    """Its length is their sum, its reward that of the highest index, by number; it is kept whole,
    in whatever order its rows stand."""
    session = rows("q_0_2", "q_0_9", "q_0_10", "q_1_0", score=[0.0, 0.5, 1.0, 0.25])
    session[3]["output"] = "x" * 7  # against 1 + 2 + 3
    ask = sift([session[at] for at in order])
    kept = ask("SELECT uid FROM kept ORDER BY length(response)")
    assert kept == [("q_0_2",), ("q_0_9",), ("q_0_10",)]
    assert ask("SELECT DISTINCT rank, metric, reason FROM rollouts ORDER BY rank") == [
        (1, 6.0, None), (2, 7.0, "outranked"),
    ]  # fmt: skip
    assert ask("SELECT group_size, kept_count, mean_reward FROM groups") == [(2, 1, 0.625)]


def test_an_unusable_output_takes_its_session_with_it(sift: Sift) -> None:
    """All rows of a session are dropped for what one lacks, and it does not count; with bad records
    left out, the other outputs of their sessions are bad records, too."""
    lacks = rows("q_0_0", "q_0_1", "q_1_0", "r_0_0", "r_0_1", score=["1", None, "1", "1", "1"])
    bad = rows("q_0_0", "q_0_1", "q_1_0", score=["one", "1", "1"])
    lacks[3]["output"] = None
    ask = sift(lacks, bad, skip_bad=True)
    unscored, silent, whole = ("no_reward", 1), ("no_response", 0), (None, 1)
    assert ask(REASONS) == [unscored, unscored, whole, silent, silent, whole]
    assert ask("SELECT source_row, field FROM bad_records") == [(0, "score"), (1, "uid")]


@BOTH
def test_without_uid_prompt_and_truth_make_a_group(sift: Sift) -> None:
    """Both must be equal, null and empty truths are two, and nothing runs from one into the other;
    ids of groups tell as much in every step."""
    prompts, truths = ["ab", "a", "ab", "ab", "ab", "a"], ["c", "bc", None, "", "c", "bc"]
    logged = rows(*[None] * 6, input=prompts, gts=truths)
    ask = sift(logged, logged[:1])
    ids = [row[0] for row in ask(GROUPS)]
    assert [ids.index(group) for group in ids] == [0, 1, 2, 3, 0, 1, 0]
    assert ask("SELECT DISTINCT group_source, uid FROM rollouts") == [("prompt", None)]


@pytest.mark.parametrize(("uid", "field"), [("a", "uid"), (None, "prompt")])
def test_a_row_of_no_group_is_bad(sift: Sift, uid: str | None, field: str) -> None:
    """A null uid among others, and a null prompt where there is no uid, is a bad record."""
    logged = rows(uid, None, uid, None, input=["p", None, "p", None])
    with pytest.raises(InputError) as caught:
        sift(logged)
    assert [(bad.source_row, bad.field) for bad in caught.value.bad] == [(1, field), (3, field)]
    assert sift(logged, skip_bad=True)(REASONS) == [(None, 2), ("outranked", 2)]


@BOTH
def test_padding_counts_nowhere(sift: Sift) -> None:
    """verl's synthetic rows are in no group, whether others' uids are row keys or not; what only
    looks like one is a rollout."""
    pads = rows(PAD + "0_0", PAD + "11_0", input=["", ""])
    keys, plain = rows("q_0_0", "q_1_0"), rows("q", "q", PAD + "0_1", PAD.upper() + "0_0")
    ask = sift([*pads, *keys], [*plain, *pads], pads)
    padding, pair = [("padding", None)] * 2, [(None, 2), ("outranked", 2)]
    assert ask(REASONS) == [*padding, *pair, *pair, (None, 1), (None, 1), *padding, *padding]
    assert ask("SELECT groups, rollouts FROM steps") == [(1, 2), (3, 4), (0, 0)]


def test_a_batch_logged_again_is_a_repeat(sift: Sift) -> None:
    """Without uid, a step that equals any earlier one counts nowhere; one that differs does."""
    logged = rows(None, None)
    ask = sift(logged, rows(None, None, None), logged, rows(None, None, score=[1.0, 0.5]))
    two, three = [(None, 2), ("outranked", 2)], [(None, 3), *[("outranked", 3)] * 2]
    assert ask(REASONS) == [*two, *three, *[("repeat", 0)] * 2, *two]


def test_a_uid_in_two_steps_is_two_groups(sift: Sift) -> None:
    """Each step ranks its own, and each cuts its own uids."""
    ask = sift(rows("a", "a"), rows("a", "a", "a"), rows("a_0_0", "a_1_0"))
    found = ask("SELECT group_id, group_size, kept_count FROM groups ORDER BY step")
    assert found == [("a", 2, 1), ("a", 3, 1), ("a", 2, 1)]


@pytest.mark.parametrize("incomplete", ["keep", "drop", "error"])
def test_groups_of_another_size(sift: Sift, incomplete: str) -> None:
    """Groups too small and too large are kept with a note of file, group and count, dropped, or
    refused; what does not count makes a group too small."""
    logged, notes = rows(*"aabbbbcccc", score=[1.0] * 5 + [None] + [1.0] * 4), list[str]()
    odd = "1.parquet: group 'a' has 2 of 3 rollouts, and 1 more groups"
    if incomplete == "error":
        with pytest.raises(InputError, match=odd):
            sift(logged, group_size=3, incomplete=incomplete)
        return
    ask = sift(logged, group_size=3, incomplete=incomplete, notes=notes)
    out = "outranked" if incomplete == "keep" else "incomplete_group"
    first = None if incomplete == "keep" else out
    whole = [(None, 3), ("outranked", 3), ("outranked", 3), ("no_reward", 3)]
    assert ask(REASONS) == [(first, 2), (out, 2), *whole, (first, 4), *[(out, 4)] * 3]
    assert odd in notes


@pytest.mark.parametrize(("k", "said"), [(3, True), (2, False)])
def test_k_beyond_a_group_keeps_all_of_it(sift: Sift, k: int, said: bool) -> None:
    """A group of no more than k is kept whole; that every one is, is said."""
    notes: list[str] = []
    ask = sift(rows(*"aaab"), k=k, notes=notes)
    assert ask("SELECT kept_count, k FROM groups ORDER BY group_id") == [(k, k), (1, k)]
    assert ("k keeps every group whole: the largest has 3 rollouts" in notes) == said
