"""Parquet rollout logs under verl's names, in every dress that Arrow's writers give them."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollsift.jobs.main import main
from rollsift.pipeline.aids import NOTHING, Aids
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.readers import parquet
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import InputError
from rollsift.schemas.recipe import resolve

IDS = [[11, 12, 13], [14], [15, 16], [17, 18, 19, 20]]
MASK = [[1, 1, 0], [1], [1, 1], [1, 1, 1, 1]]
TEXT = ["abc", "d", "ef", "ghij"]
REASONS = "SELECT reason FROM rollouts ORDER BY step, source_row"
# By the mask's sums 2, 1, 2 and 4 the shortest of group a is row 1, of group b row 2.
USUAL = [("outranked",), (None,), (None,), ("outranked",)]
STRINGS = [
    pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.uint32(), pa.large_string()),
]  # fmt: skip
NUMBERS = [pa.float16(), pa.float32(), pa.decimal32(5, 2), pa.decimal128(9, 2), pa.decimal256(9, 2)]
LISTS = [
    (pa.list_, pa.bool_()), (pa.large_list, pa.uint8()), (pa.list_view, pa.float16()),
    (pa.large_list_view, pa.float32()),
]  # fmt: skip
WORDS = ["1", "0.0", "True", "false"]
LENGTHS = "SELECT reason, response_length, reward FROM rollouts ORDER BY step, source_row"


def table(number: int = 1, **changes: Any) -> pa.Table:
    """Step `number`: two groups of two rollouts, some columns changed; None leaves one out."""
    columns: dict[str, Any] = {
        "uid": ["a", "a", "b", "b"], "step": [number] * 4, "score": [1.0, 0.0, 1.0, 0.0],
        "response_ids": IDS, "response_mask": MASK, "input": ["p", "p", "q", "q"], "output": TEXT,
    }  # fmt: skip
    return pa.table({k: v for k, v in {**columns, **changes}.items() if v is not None})


def data(log: pa.Table, **options: Any) -> bytes:
    """A log as the bytes of a Parquet file."""
    file = io.BytesIO()
    pq.write_table(log, file, **options)
    return file.getvalue()


class Filtered(NamedTuple):
    """A filter's run, and what was said of it."""

    run: Run
    notes: list[str]

    def ask(self, text: str = REASONS) -> list[tuple[Any, ...]]:
        """Rows of a query."""
        return query(self.run, text).fetchall()


Sift = Callable[..., Filtered]


@pytest.fixture
def sift(tmp_path: Path) -> Sift:
    """Filter a table, or files given by name and content; other keywords are recipe keys."""

    def run(
        files: Any, logs: str = "logs", out: str = "run", skip_bad: bool = False, **keys: Any
    ) -> Filtered:
        aids = keys.pop("aids", NOTHING)
        for name, log in ({"1.parquet": files} if isinstance(files, pa.Table) else files).items():
            (tmp_path / logs).mkdir(parents=True, exist_ok=True)
            (tmp_path / logs / name).write_bytes(log if isinstance(log, bytes) else data(log))
        found, recipe = discover([tmp_path / logs]), resolve({"k": 1, **keys})
        notes, folder = list(found.notes), tmp_path / out
        filter_logs(found, recipe, folder, skip_bad=skip_bad, aids=aids, notify=notes.append)
        return Filtered(Run(folder), notes)

    return run


def bad(sift: Sift, *logs: Any, **named: Any) -> list[str]:
    """The bad records that a refusal lists."""
    with pytest.raises(InputError) as caught:
        sift(*logs, **named)
    assert caught.value.exit_status == 3
    return [str(record) for record in caught.value.bad]


@pytest.mark.parametrize("type_", STRINGS, ids=str)
def test_text_in_any_dress(sift: Sift, type_: pa.DataType) -> None:
    """uid, prompt, response and extras of any type of text group, and are shown, as that text."""
    names = {"uid": ["a", "a", "b", "b"], "input": ["p", "p", "q", "q"], "output": TEXT, "x": TEXT}
    found = sift(table(**{name: pa.array(values, type_) for name, values in names.items()}))
    shown = found.ask("SELECT group_id, uid, prompt, response, x FROM kept ORDER BY source_row")
    assert shown == [("a", "a", "p", "d", "d"), ("b", "b", "q", "ef", "ef")]


@pytest.mark.parametrize("type_", NUMBERS, ids=str)
def test_a_number_in_any_dress(sift: Sift, type_: pa.DataType) -> None:
    """Reward, metric and extras are the same numbers, whatever type holds them."""
    made = Decimal if pa.types.is_decimal(type_) else float
    column = pa.array([made(text) for text in ("1.5", "-0.25", "0", "64")], type_)
    found = sift(table(score=column, seconds=column), metric="seconds")
    shown = found.ask("SELECT reward, seconds::DOUBLE, metric FROM kept ORDER BY source_row")
    assert shown == [(-0.25, -0.25, -0.25), (0.0, 0.0, 0.0)]


@pytest.mark.parametrize("score", [[True, False] * 2, WORDS, pa.array(WORDS).dictionary_encode()])
def test_a_reward_may_be_no_number(sift: Sift, score: Any) -> None:
    """Bools, and numbers and numpy's words as text, are rewards of 1 and 0."""
    assert [row[2] for row in sift(table(score=score)).ask(LENGTHS)] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(("made", "bit"), LISTS)
def test_tokens_in_any_list(sift: Sift, made: Any, bit: pa.DataType) -> None:
    """Ids and masks count alike in lists of every kind and width."""
    mask = [[bool(x) for x in row] if bit == pa.bool_() else row for row in MASK]
    ids = pa.array(IDS, made(pa.uint16()))
    found = sift(table(response_ids=ids, response_mask=pa.array(mask, made(bit))))
    assert [row[1] for row in found.ask(LENGTHS)] == [2, 1, 2, 4]


def test_tokens_in_lists_of_one_size(sift: Sift) -> None:
    """Padded to one width, the mask alone says how long a response is; a null list is none."""
    mask = [[1, 1, 0, 0], [0, 0, 0, 1], None, [1, 1, 1, 1]]
    fixed = pa.array(mask, pa.list_(pa.int64(), 4))
    found = sift(table(response_ids=fixed, response_mask=fixed)).ask(LENGTHS)
    reasons = ["outranked", None, "no_response", None]
    assert [row[:2] for row in found] == list(zip(reasons, [2, 1, None, 4], strict=True))


@pytest.mark.parametrize(("size", "at_a_time"), [(1, 1 << 13), (3, 1), (3, 1 << 13)])
def test_row_groups_that_cut_groups(
    sift: Sift, monkeypatch: pytest.MonkeyPatch, size: int, at_a_time: int
) -> None:
    """Groups are whole wherever row groups and batches end, nulls come first, groups interleave or
    columns go in another order; text is joined to its own row."""
    monkeypatch.setattr(parquet, "HEAVY_ROWS", at_a_time)
    ids, mask, acc = [None, *IDS[1:]], [None, *MASK[1:]], [None, None, None, True]
    columns = {"uid": list("abab"), "score": [None, None, 1.0, 0.5], "acc": acc}
    rows = table(response_ids=ids, response_mask=mask, **columns)
    found = sift({"1.parquet": data(rows.select(rows.column_names[::-1]), row_group_size=size)})
    assert found.ask(LENGTHS) == [
        ("no_reward", None, None), ("no_reward", 1, None), (None, 2, 1.0), (None, 4, 0.5),
    ]  # fmt: skip
    assert found.ask("SELECT response, acc FROM kept ORDER BY 1") == [("ef", None), ("ghij", True)]


def test_times_numbers_and_indexes_are_what_they_are(sift: Sift) -> None:
    """A timestamp keeps its type, in SQL and in a recipe; an integer uid is its digits; the index
    that pandas adds is an extra, and rows are numbered by their place in the file."""
    times, uid = [datetime(2026, 1, day) for day in (1, 2, 3, 4)], pa.array([7, 7, 100, 100])
    began = pa.array(times, pa.timestamp("ms"))
    rows = table(uid=uid, began=began, __index_level_0__=[3, 2, 1, 0])
    pandas = {"index_columns": ["__index_level_0__"], "columns": [], "column_indexes": []}
    rows = rows.replace_schema_metadata({"pandas": json.dumps(pandas)})
    found = sift(rows, exclude_where="day(began) = 2")
    wanted = "source_row, group_id, uid, began, __index_level_0__, response"
    assert found.ask(f"SELECT {wanted} FROM kept ORDER BY source_row") == [
        (0, "7", "7", times[0], 3, "abc"), (2, "100", "100", times[2], 1, "ef"),
    ]  # fmt: skip
    assert found.ask("SELECT source_row FROM rollouts WHERE reason = 'excluded'") == [(1,)]


def cells(*values: int, type_: pa.DataType) -> pa.Array:
    """Raw values of a type of time."""
    return pa.array(values, pa.int32() if type_.bit_width == 32 else pa.int64()).view(type_)


YEARS, DAYS = "a time in the years 1 to 9999", "at most 106,751,990 days"
# A value that Python's datetime or DuckDB's interval cannot hold, what is expected, and the first
# and the last that they can.
BEYOND = [
    (pa.date32(), 1 << 30, YEARS, -719_162, 2_932_896),
    (pa.timestamp("us"), 1 << 62, YEARS, -62_135_596_800_000_000, 253_402_300_799_999_999),
    (pa.timestamp("ms", "Asia/Tokyo"), 253_402_300_799_999, YEARS, 0, 253_402_214_399_999),
    (pa.duration("ms"), 1 << 62, DAYS, -9_223_371_936_000_000, 9_223_372_022_399_999),
]  # fmt: skip


@pytest.mark.parametrize("home", ["score", "uid", "x", "gts struct", "gts list"])
@pytest.mark.parametrize(("type_", "beyond", "expected"), [row[:3] for row in BEYOND], ids=str)
def test_a_time_that_python_does_not_have_is_refused(
    sift: Sift, type_: Any, beyond: int, expected: str, home: str
) -> None:
    """What no message could show, deep in a column too, is a bad record: the message names the
    column, the number found and what is expected."""
    name, _, nested = home.partition(" ")
    column: Any = cells(*[beyond] * 4, type_=type_)
    if nested == "struct":
        column = pa.StructArray.from_arrays([column], ["at"])
    elif nested:
        column = pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), column)
    columns = {"uid": None} if nested else {}
    keys = {"exclude_where": "x is null"} if name == "x" else {}
    reason = f"found {beyond} as {type_}, expected {expected}"
    assert bad(sift, table(**columns, **{name: column}), **keys) == [
        f"1.parquet, row {row}, field {name!r}: {reason}" for row in range(4)
    ]


@pytest.mark.parametrize(("type_", "least", "most"), [(r[0], *r[3:]) for r in BEYOND], ids=str)
def test_the_first_and_the_last_time_are_fine(
    sift: Sift, type_: Any, least: int, most: int
) -> None:
    """All that Python can show is a uid, and an extra, like any other."""
    column = cells(least, least, most, most, type_=type_)
    found = sift(table(uid=column, x=column), exclude_where="x is null")
    assert found.ask() == USUAL


def test_a_time_of_day_beyond_the_day_is_refused(sift: Sift) -> None:
    """The file is bad; the column, the number found and the range expected are told."""
    (told,) = bad(sift, table(uid=cells(*[1 << 62] * 4, type_=pa.time64("us"))))
    assert re.search(r"column uid: .* 4611686018427387904 .* \[0, 86400000000\)", told)


UUID = pa.array([b"a" * 16, b"b" * 16], pa.binary(16))
PAIRS = [
    cells(5, 6, type_=pa.duration("us")), cells(5, 6, type_=pa.time64("us")),
    pa.array([b"\xff", b"\xfe"]), pa.array([[b"\xff"] * 9, [b"\xff"] * 8]),
    pa.array([[[1.0]], [[2.0]]]), pa.array([[1, 2], [1]], pa.list_view(pa.int8())),
    pa.array([[("k", 1)], [("k", 2)]], pa.map_(pa.string(), pa.int64())),
    pa.ExtensionArray.from_storage(pa.uuid(), UUID),
    pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1], pa.int8())),
    pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", "2"])),
    pa.array([Decimal("1.5"), Decimal("1.25")]), pa.array([True, False]),
    pa.array([1.5, 2.5]).dictionary_encode(),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: str(pair.type))
def test_values_of_every_type_are_told_apart(sift: Sift, pair: Any) -> None:
    """Equal uids of any type are one group; without uid, a step whose values of any type are those
    of an earlier one is a repeat, and one where they stand otherwise is none."""
    one, two = pair.take(pa.array([0, 0, 1, 1])), pair.take(pa.array([1, 1, 0, 0]))
    assert sift(table(uid=one)).ask() == USUAL
    steps = {1: one, 2: one, 3: two}
    files = {f"{n}.parquet": table(n, uid=None, x=column) for n, column in steps.items()}
    found = sift(files, logs="other", out="two", exclude_where="x is null")
    assert found.ask() == [*USUAL, *[("repeat",)] * 4, *USUAL]


def test_a_chat_is_a_prompt(sift: Sift) -> None:
    """Without uid, equal lists of messages are one group; they and nested truths are shown as JSON,
    however they are quoted."""
    asked = [[{"role": "user", "content": text}] for text in ("p, 'é'\"", "p, 'é'\"", "q", "q")]
    found = sift(table(uid=None, input=None, prompt=asked, gts=[{"a": [1, None]}] * 4))
    assert found.ask() == USUAL
    shown = found.ask("SELECT prompt, ground_truth, group_source FROM kept ORDER BY source_row")
    assert [(json.loads(prompt), json.loads(truth), by) for prompt, truth, by in shown] == [
        (asked[1], {"a": [1, None]}, "prompt"), (asked[2], {"a": [1, None]}, "prompt"),
    ]  # fmt: skip


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(
    ("names", "expected"),
    [("score", "no_reward"), ("response_ids response_mask", "no_response"), ("uid output x", None)],
)
def test_a_column_of_nulls(sift: Sift, names: str, expected: Any, typed: bool) -> None:
    """What holds nulls only, of whatever type, says nothing and is null in SQL; a later step may
    give it values."""
    lists = pa.list_(pa.int64())
    types = {"score": pa.float64(), "response_ids": lists, "response_mask": lists}
    kinds = {name: types.get(name, pa.string()) if typed else pa.null() for name in names.split()}
    nulls = {name: pa.nulls(4, kind) for name, kind in kinds.items()}
    found = sift({"1.parquet": table(**nulls), "2.parquet": table(2, x=TEXT)})
    assert found.ask() == [*([(expected,)] * 4 if expected else USUAL), *USUAL]
    shown = found.ask(f"SELECT DISTINCT {', '.join(nulls)} FROM rollouts WHERE step = 1")
    assert shown == [(None,) * len(nulls)]
    assert found.ask("SELECT x FROM kept WHERE step = 2 ORDER BY source_row") == [("d",), ("ef",)]


@pytest.mark.parametrize("type_", [pa.float64(), pa.float16()], ids=str)
def test_a_reward_that_is_not_finite_is_none(sift: Sift, type_: pa.DataType) -> None:
    """Null, NaN and infinite rewards are dropped as no_reward; the text can still be read."""
    odd = pa.array([None, float("nan"), float("inf"), float("-inf")], type_)
    shown = sift(table(score=odd)).ask("SELECT reason, reward, response FROM rollouts ORDER BY ALL")
    assert shown == [("no_reward", None, text) for text in TEXT]


def test_no_response_and_an_empty_one_are_two_things(sift: Sift) -> None:
    """Null ids or a null text are no_response; no ids, a mask of zeros and no text are empty, and
    count in the group."""
    lists = table(response_ids=[None, [], *IDS[2:]], response_mask=[None, [], [0, 0], MASK[3]])
    texts = table(response_ids=None, response_mask=None, output=[None, "", "", "ghij"])
    for found in (sift(lists), sift(texts, logs="texts", out="two")):
        assert [row[:2] for row in found.ask(LENGTHS)] == [
            ("no_response", None), ("empty", 0), ("empty", 0), (None, 4),
        ]  # fmt: skip
        assert found.ask("SELECT group_size FROM groups ORDER BY group_id") == [(1,), (2,)]


@pytest.mark.parametrize("other", [str, str.upper])
def test_columns_may_be_called_like_duckdb_s_own(sift: Sift, other: Callable[[str], str]) -> None:
    """Extras called filename and file_row_number, in any case, are shown as logged, and text is
    joined to its own row, however many row groups and files there are."""
    names = {other("filename"): ["w", "x", "y", "z"], other("file_row_number"): [3, 3, 0, 1]}
    found = sift({"1.parquet": data(table(**names), row_group_size=1), "2.parquet": table(2)})
    shown = f"response, {', '.join(names)}"
    for source in ("kept", "(SELECT * FROM kept)"):
        assert found.ask(f"SELECT {shown} FROM {source} ORDER BY step, source_row") == [
            ("d", "x", 3), ("ef", "y", 0), ("d", None, None), ("ef", None, None),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("logs", "out"),
    [("output=zz", "run'"), ("logs", "k=4/metric=x/kept=0"), ("log?", "run?"), ("lo[gs]", "r*")],
)
def test_folders_names_mean_nothing(sift: Sift, logs: str, out: str) -> None:
    """Names like k=4, which tools take for a column's value, and names that would be patterns of
    other folders', change no value and add no row."""
    sift(table(output=["no"] * 4), logs="logx", out="runx")
    found = sift(table(), logs=logs, out=out)
    shown = found.ask("SELECT k, metric, response FROM rollouts WHERE kept ORDER BY source_row")
    assert shown == [(1, 1.0, "d"), (1, 2.0, "ef")]


def test_names_that_differ_in_case_stay_apart(sift: Sift) -> None:
    """Fields of two steps that only case tells apart are two extras; in one file they are refused,
    as are two columns of one name."""
    steps = {"1.parquet": table(Acc=[1, 2, 3, 4]), "2.parquet": table(2, acc=[5, 6, 7, 8])}
    shown = sift(steps).ask("SELECT step, acc, extra_Acc FROM kept ORDER BY ALL")
    assert shown == [(1, None, 2), (1, None, 3), (2, 6, None), (2, 7, None)]
    for twin in ("Score", "score"):
        (found,) = bad(sift, table().append_column(twin, [[0.0] * 4]), logs=twin, out="no")
        assert found.startswith(f"1.parquet, field '{twin}': ")


@pytest.mark.parametrize(
    ("column", "wrong", "reason"),
    [
        ("score", [1.0], "found [1.0], expected a number"),
        ("score", "one", "found 'one', expected a number"),
        ("step", 2, "found 2, expected 1, the file's step"),
        ("response_mask", ["a"], "found ['a'], expected a list of numbers"),
        ("response_mask", [1] * 5, "found 5, expected one value per value of response_ids"),
        ("response_mask", [], "found 0, expected one value per value of response_ids"),
        ("response_mask", [1, 2], "found [1, 2], expected 0 and 1 only"),
        ("response_mask", [1, None], "found [1, None], expected 0 and 1 only"),
        ("policy_version", 0.5, "found 0.5, expected a whole number"),
    ],
)
def test_a_needed_column_must_hold_what_it_should(
    sift: Sift, column: str, wrong: Any, reason: str
) -> None:
    """The message names file, row, column, what was found and what was expected."""
    assert bad(sift, table(**{column: [wrong] * 4})) == [
        f"1.parquet, row {row}, field {column!r}: {reason}" for row in range(4)
    ]


WHOLE = data(table())


def lying(rows: int, group: int) -> bytes:
    """A file of 77 rows in one row group, whose footer says others of the file and of the group."""
    columns = {"uid": ["aa"] * 77, "score": [1.0] * 77, "response_length": [2] * 77}
    whole = bytearray(data(pa.table(columns)))
    foot = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    said = b"\x16\x9a\x01"  # an int64 field of 77 in Thrift's compact protocol
    places = [at for at in range(foot, len(whole)) if whole.startswith(said, at)]
    assert len(places) == 5  # of the file, of three columns, of the row group
    for at, count in ((places[0], rows), (places[-1], group)):
        whole[at + 1 : at + 3] = bytes([2 * count & 0x7F | 0x80, 2 * count >> 7])
    return bytes(whole)


def test_all_bad_files_are_told_of_at_once(tmp_path: Path, sift: Sift) -> None:
    """Files cut, empty, foreign, or whose footer lies about their rows are a bad record each, told
    together with bad rows of others, and nothing is published; without them the rest is."""
    broken = [
        WHOLE[:-5], WHOLE[: len(WHOLE) // 2], b"", b"PAR1", b"no Parquet", lying(76, 77),
        lying(77, 70), lying(70, 70), lying(90, 90),
    ]  # fmt: skip
    files = {f"{step}.parquet": content for step, content in enumerate(broken, 2)}
    rows = {"11.parquet": table(11, score=["x", "0", "1", "0"]), "12.jsonl": b"{\n"}
    logs = {"1.parquet": table(), **files, **rows}
    told = [text.split(" cannot be read as Parquet: ")[0] for text in bad(sift, logs)]
    assert told[:9] == [f"{name}:" for name in files]
    assert told[9] == "11.parquet, row 0, field 'score': found 'x', expected a number"
    assert told[10].startswith("12.jsonl, line 1: ")
    assert len(told) == 11
    assert not list((tmp_path / "run").glob("*/*.parquet"))
    found = sift(logs, skip_bad=True)
    listed = found.ask("SELECT source_file, source_row, line, field FROM bad_records")
    others = [("11.parquet", 0, None, "score"), ("12.jsonl", 0, 1, None)]
    assert set(listed) == {*((name, None, None, None) for name in files), *others}
    assert found.ask("SELECT source_row FROM kept WHERE step = 11") == [(1,), (2,)]
    assert found.ask("SELECT step, kept FROM steps WHERE kept > 0") == [(1, 2), (11, 2)]


def test_a_footer_that_contradicts_itself_kills_no_process(tmp_path: Path) -> None:
    """A column that is required by the schema and optional by its chunk's statistics makes a bad
    file, though pyarrow, asked for that chunk, would abort the process."""
    optional, required = b"\x25\x02\x18\x05score", b"\x25\x00\x18\x05score"
    assert WHOLE.count(optional) == 1
    (tmp_path / "1.parquet").write_bytes(WHOLE.replace(optional, required))
    program = "import sys; from rollsift.jobs.main import main; main(sys.argv[1:])"
    words = ["filter", "1.parquet", "-r", "gfpo-shortest", "-o", "run"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "1.parquet: cannot be read as Parquet: " in done.stderr


def test_a_file_without_rows_is_a_step(sift: Sift) -> None:
    """It gets a manifest that keeps nothing, between its neighbours or alone."""
    empty = {"2.parquet": table(2).slice(0, 0)}
    found = sift({"1.parquet": table(), **empty, "3.parquet": table(3)})
    assert found.ask("SELECT step, rows, kept FROM steps") == [(1, 4, 2), (2, 0, 0), (3, 4, 2)]
    for run in (found.run, sift(empty, logs="alone", out="one").run):
        assert (run.steps()[2].manifest.row, run.steps()[2].manifest.offsets) == ([], [0])


@pytest.mark.parametrize("other", ["7.parquet", "7.v2.parquet", "completions_00007.parquet"])
def test_one_step_in_two_folders_is_two_runs(tmp_path: Path, capsys: Any, other: str) -> None:
    """Files of one step in different folders are refused, both named, whatever their version."""
    files = [tmp_path / "a" / "7.parquet", tmp_path / "b" / other]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(data(table(7)))
    with pytest.raises(SystemExit, match=r"^3$"):
        main(["filter", *map(str, files), "-r", "gfpo-shortest", "-o", str(tmp_path / "run")])
    assert " and ".join(map(str, files)) in capsys.readouterr().err


def test_a_later_version_supersedes(sift: Sift) -> None:
    """Of several versions of a step the highest number counts, not the last name; a note tells."""
    scores = {"7.parquet": 1.0, "7.v9.parquet": 9.0, "7.v10.parquet": 10.0}
    found = sift({name: table(7, score=[score] * 4) for name, score in scores.items()})
    assert found.ask("SELECT DISTINCT source_file, reward FROM rollouts") == [("7.v10.parquet", 10)]
    assert "7.v10.parquet supersedes 7.v9.parquet" in found.notes


def test_generations_need_a_reward_function(tmp_path: Path, sift: Sift) -> None:
    """verl's generation Parquet has no score: the refusal names the option that then scores it."""
    responses = pa.array([["so 4", "5"], ["4"]], pa.large_list(pa.large_string()))
    rows = pa.table({"reward_model": [{"ground_truth": "4"}] * 2, "responses": responses})
    with pytest.raises(InputError, match="--reward-fn"):
        sift(rows)
    words = "data_source, solution_str, ground_truth, extra_info"
    rule = f"def score({words}):\n    return float(solution_str.endswith(ground_truth))\n"
    (tmp_path / "rule.py").write_text(rule)
    aids = Aids.named(None, f"{tmp_path / 'rule.py'}:score")
    # Reward by length: 1/4 and 0/1 for the first prompt, 1/1 for the second.
    assert sift(rows, aids=aids, metric="token_efficiency").ask(LENGTHS) == [
        (None, 4, 1.0), ("outranked", 1, 0.0), (None, 1, 1.0),
    ]  # fmt: skip


def test_a_batch_that_trl_logs_again_is_a_repeat(sift: Sift) -> None:
    """TRL's completions group by prompt; a batch under a later step again counts nowhere, but one
    that differs in a single completion does."""
    columns = {"prompt": ["p", "p", "q", "q"], "reward": [1.0, 0.0, float("nan"), 2.0]}
    logs = {}
    for step, texts in ((1, TEXT), (2, TEXT), (3, [*TEXT[:3], "gh"])):
        columns |= {"step": [step] * 4, "completion": texts}
        logs[f"completions_0000{step}.parquet"] = pa.table(columns)
    found = sift(logs)
    judged = [("outranked",), (None,), ("no_reward",), (None,)]
    assert found.ask() == [*judged, *[("repeat",)] * 4, *judged]
    assert "completions_00002.parquet: the same rollouts as step 1 (`repeat`)" in found.notes
