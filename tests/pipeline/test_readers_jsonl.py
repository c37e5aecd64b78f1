"""JSON Lines in every shape that writers, crashes and strangers leave them in."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.readers import flat, jsonl
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import BadRecord, InputError
from rollsift.schemas.recipe import resolve

ABSENT = object()


def record(**changes: Any) -> dict[str, Any]:
    """A record as verl's V1 trainer logs it, with some fields changed or left out."""
    usual = {"input": "2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 1, "uid": "q"}
    return {name: value for name, value in {**usual, **changes}.items() if value is not ABSENT}


def log(*records: dict[str, Any] | bytes, end: bytes = b"\n") -> bytes:
    """Records as lines; bytes stand as they are."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    return b"".join(line + end for line in lines)


def one(name: str, json_text: str) -> bytes:
    """A record's line in which one more field has a value that json.dumps would not write."""
    return json.dumps(record()).encode()[:-1] + f', "{name}": {json_text}}}'.encode()


def zstd(data: bytes) -> bytes:
    """One frame."""
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


@dataclass
class Read:
    """All that a reader gave, row by row."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[Mapping[str, str]] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    records: int = 0
    digest: str = ""

    def column(self, name: str) -> list[Any]:
        """The values of one field."""
        return [row.get(name) for row in self.rows]


def read(folder: Path, data: bytes, kinds: Mapping[str, str] | None = None) -> Read:
    """Read bytes as a log file."""
    path = folder / "1.jsonl"
    path.write_bytes(data)
    reader, found = jsonl.Reader(path, path.name), Read()
    for chunk in reader.chunks(kinds or {}, {}):
        found.rows += chunk.rows.to_dicts() if chunk.rows.width else [{}] * len(chunk.places)
        found.places += chunk.places.select("source_row", "line").rows()
        found.kinds.append(chunk.kinds)
        found.bad += chunk.bad
    found.records, found.digest = reader.records, reader.digest
    return found


@dataclass
class Filtered:
    """A filter's run, to be asked in SQL."""

    run: Run
    notes: list[str]

    def ask(self, text: str) -> list[tuple[Any, ...]]:
        """Rows of a query."""
        return query(self.run, text).fetchall()


@pytest.fixture
def sift(tmp_path: Path) -> Callable[..., Filtered]:
    """Filter files given by name and content; keyword arguments are recipe keys."""
    count = iter(range(1000))

    def run(files: Mapping[str, bytes], skip_bad: bool = False, **keys: Any) -> Filtered:
        folder = tmp_path / f"try{next(count)}"
        (folder / "logs").mkdir(parents=True)
        for name, data in files.items():
            (folder / "logs" / name).write_bytes(data)
        notes: list[str] = []
        filter_logs(
            discover([folder / "logs"]),
            resolve({"k": 1, **keys}),
            folder / "run",
            skip_bad=skip_bad,
            notify=notes.append,
        )
        return Filtered(Run(folder / "run"), notes)

    return run


@pytest.fixture(autouse=True, params=["fast path and line by line", "line by line"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path gives what the line reader gives, so every property holds without it, too."""
    if request.param == "line by line":
        monkeypatch.setattr(flat, "read", lambda data, fixed, known: None)


def chunks_of(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Read about so many bytes at a time."""
    monkeypatch.setattr(jsonl, "CHUNK", size)
    monkeypatch.setattr(jsonl, "BLOCK", max(64, min(size, 4 << 20)))


# --- text ----------------------------------------------------------------------------------------


def test_only_a_line_feed_ends_a_record(tmp_path: Path) -> None:
    """Other line separators inside a string, raw or escaped, neither end a record nor change."""
    separators = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\rj\x00k\nl"
    records = [record(output=separators), record(output="next")]
    raw = json.dumps(records[0], ensure_ascii=False).encode() + b"\n" + log(records[1])
    assert b"\xe2\x80\xa8" in raw
    for data in (raw, log(*records)):
        assert read(tmp_path, data).column("output") == [separators, "next"]


def test_every_escape_is_its_character(tmp_path: Path) -> None:
    """Escapes of JSON, NUL and surrogate pairs among them, are read as what they stand for."""
    line = one("x", r'"\" \\ \/ \b \f \n \r \t \u0000 \u001f \ud83d\ude00 \uD834\uDD1E é"')
    expected = '" \\ / \b \f \n \r \t \0 \x1f \U0001f600 \U0001d11e é'
    assert read(tmp_path, log(line, line)).column("x") == [expected] * 2


def test_text_that_looks_like_an_escape_is_text(tmp_path: Path) -> None:
    """A backslash that is itself escaped starts no escape: the text may look like one."""
    texts = ["\\ud800", "\\\\ud800", "\\", '\\"', 'a\\\\"', "\\n", "\\u0041"]
    records = [record(output=text) for text in texts]
    assert read(tmp_path, log(*records)).column("output") == texts


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    """A BOM at the start changes neither the first record nor any number."""
    plain = read(tmp_path, log(record(), record(output="x")))
    marked = read(tmp_path, b"\xef\xbb\xbf" + log(record(), record(output="x")))
    assert (marked.rows, marked.places, marked.bad) == (plain.rows, plain.places, [])


def test_a_byte_order_mark_elsewhere_is_not_skipped(tmp_path: Path) -> None:
    """A BOM before a later record makes that record bad, not a field of another name."""
    found = read(tmp_path, log(record(), b"\xef\xbb\xbf" + log(record()).strip(), record()))
    assert [(bad.source_row, bad.line) for bad in found.bad] == [(1, 2)]
    assert [row for row, _ in found.places] == [0, 2]


def test_windows_line_ends_and_blank_lines_are_no_records(tmp_path: Path) -> None:
    """Blank lines count as lines, not as records; a carriage return before a line feed is none."""
    data = b"\n \t\r\n" + log(record(output="a"), end=b"\r\n") + b"\r\n\n" + log(record(output="b"))
    found = read(tmp_path, data)
    assert found.column("output") == ["a", "b"]
    assert found.places == [(0, 3), (1, 6)]
    assert found.records == 2
    assert not found.bad


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("chunk", [1, 100, 16 << 20])
@pytest.mark.parametrize(
    ("broken", "byte"),
    [(b"\xff", 0xFF), (b"\xc0\xaf", 0xC0), (b"\xed\xa0\x80", 0xED), (b"\xf4\x90\x80\x80", 0xF4)],
    ids=["never a byte", "overlong", "surrogate", "beyond Unicode"],
)
def test_bytes_that_are_not_utf_8_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pack: Callable[[bytes], bytes],
    chunk: int,
    broken: bytes,
    byte: int,
) -> None:
    """The message names the first wrong byte, its place in the decompressed file from 0, and the
    line; the row keeps its number, and its neighbours stay."""
    chunks_of(monkeypatch, chunk)
    wrong = json.dumps(record(output="é@")).encode().replace(b"@", broken)
    data = b"\xef\xbb\xbf" + log(record(output="é" * 50), b"", wrong, record())
    found = read(tmp_path, pack(data))
    (bad,) = found.bad
    assert (bad.source_file, bad.source_row, bad.line) == ("1.jsonl", 1, 3)
    assert bad.reason.startswith(f"byte {data.index(broken)}: 0x{byte:02x} ")
    assert "UTF-8" in bad.reason
    assert found.places == [(0, 1), (2, 4)]


@pytest.mark.parametrize("half", [r"\ud800", r"\uDBFF", r"\udc00", r"\ude00\ud83d", r"\ud83dx"])
@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"uid": "q", "x": "HALF"}', "x"),
        ('{"uid": "q", "x": ["HALF"]}', "x"),
        ('{"uid": "q", "x": {"HALF": 1}}', "x"),
        ('{"uid": "q", "HALF": 1}', None),
    ],
    ids=["value", "nested value", "nested key", "key"],
)
def test_half_of_a_surrogate_pair_is_no_text(
    tmp_path: Path, half: str, line: str, name: str | None
) -> None:
    """A lone surrogate makes its record bad, under a field name that can itself be written."""
    found = read(tmp_path, log(record(), line.replace("HALF", half).encode(), record()))
    (bad,) = found.bad
    assert (bad.source_row, bad.line) == (1, 2)
    assert "surrogate" in bad.reason
    assert bad.field is not None
    assert name in (None, bad.field)
    str(bad).encode()
    bad.field.encode()
    assert len(found.rows) == 2


@pytest.mark.parametrize(
    "line",
    [b"[1]", b"12", b"null", b'"text"', b"true", b"[]", b"NaN", b"[" + b'{"score": 1}' + b"]"],
)
def test_a_record_is_an_object(tmp_path: Path, line: bytes) -> None:
    """Any other JSON value in a line is a bad record that says what was found and expected."""
    data = log(record(), line, record())
    (bad,) = read(tmp_path, data).bad
    assert (bad.source_row, bad.line) == (1, 2)
    assert re.fullmatch(rf"byte {data.index(line)}: found .+, expected an object", bad.reason)


@pytest.mark.parametrize(
    "line",
    [
        b"{'input': 'p'}",
        b'{"input": "a\tb"}',
        b'{"input": "a\x00b"}',
        b'{"input": "\\x41"}',
        b'{"input": "\\u12"}',
        b'{"input": 01}',
        b'{"input": .5}',
        b'{"input": 1.}',
        b'{"input": +1}',
        b'{"input": 0x10}',
        b'{"input": 1_000}',
        b'{"input": nan}',
        b'{"input": inf}',
        b'{"input": None}',
        b'{"input": True}',
        b'{"input": 1,}',
        b'{"input" 1}',
        b"{input: 1}",
        b'{"input": 1} // why',
        b'{"input": 1}{"input": 2}',
        b'{"input": 1}, {"input": 2}',
        b"\x00\x00\x00\x00",
        b"{",
        b"}",
    ],
)
def test_what_is_not_json_is_refused(tmp_path: Path, line: bytes) -> None:
    """A line that is not JSON is a bad record naming line and byte; its neighbours stay."""
    data = log(record(), line, record())
    found = read(tmp_path, data)
    (bad,) = found.bad
    assert (bad.source_row, bad.line) == (1, 2)
    at = re.match(r"byte (\d+): not JSON", bad.reason)
    assert at
    assert len(log(record())) <= int(at[1]) <= len(log(record(), line))
    assert [row for row, _ in found.places] == [0, 2]


@pytest.mark.parametrize("levels", [65, 1_000, 100_000])
@pytest.mark.parametrize("kind", ["[", "{"])
def test_deep_nesting_is_refused(tmp_path: Path, levels: int, kind: str) -> None:
    """A record nested deeper than 64 levels is a bad record at any depth, never a crash."""
    deep = "[" * levels + "1" + "]" * levels
    if kind == "{":
        deep = '{"a":' * levels + "1" + "}" * levels
    found = read(tmp_path, log(record(), one("x", deep), record()))
    (bad,) = found.bad
    assert (bad.source_row, bad.line) == (1, 2)
    assert "nested deeper than 64 levels" in bad.reason
    assert len(found.rows) == 2


def test_some_nesting_is_read(tmp_path: Path) -> None:
    """Nesting within the limit, and any number of brackets inside a text, is no fault."""
    deep = "[" * 63 + "1" + "]" * 63
    found = read(tmp_path, log(one("x", deep), one("x", json.dumps("[{" * 1000))))
    assert not found.bad
    assert [json.loads(text) for text in found.column("x")] == [json.loads(deep), "[{" * 1000]


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b'{"score": 0, "uid": "q", "score": 1}', "score"),
        (b'{"score": 0, "score": 0}', "score"),
        (b'{"uid": "q", "info": {"a": 1, "a": 2}}', "a"),
        (b'{"uid": "q", "info": [[{"b": 1, "c": 2, "b": 1}]]}', "b"),
        (b'{"s\\u0063ore": 0, "score": 1}', "score"),
    ],
)
def test_a_key_twice_in_a_record_is_refused(tmp_path: Path, line: bytes, key: str) -> None:
    """A repeated key, nested or escaped or of equal value, makes the record bad and is named."""
    found = read(tmp_path, log(record(), line, record()))
    (bad,) = found.bad
    assert (bad.source_row, bad.line) == (1, 2)
    assert f"{key!r} stands twice" in bad.reason
    assert len(found.rows) == 2


def test_late_and_sparse_keys_are_null_elsewhere(tmp_path: Path) -> None:
    """A key that first appears in the last record, or in one alone, is there; elsewhere null."""
    records = [record() for _ in range(2000)]
    records[1000]["rare"], records[-1]["late"] = "r", 7
    found = read(tmp_path, log(*records))
    assert [row for row, value in enumerate(found.column("rare")) if value is not None] == [1000]
    assert [row for row, value in enumerate(found.column("late")) if value is not None] == [1999]


def test_keys_are_kept_as_they_are(tmp_path: Path) -> None:
    """Names that differ in case, odd or empty names and reserved words are names like others."""
    names = ["acc", "Acc", "ACC", "", " ", "a b", 'a"b', "a'b", "a.b", "a\nb", "a\tb", "\\", "%41"]
    names += ["line", "source_row", "kept", "rank", "extra_acc", "group", "select", "é", "e\u0301"]
    extras = {name: number for number, name in enumerate(names)}
    found = read(tmp_path, log(record(**extras), record(**extras)))
    assert found.rows == [record(**extras)] * 2


def test_every_field_can_be_asked_for_in_sql(sift: Callable[..., Filtered]) -> None:
    """Each extra has one name in the view: its own, or `extra_` before it where that is taken."""
    extras = {
        "acc": 1, "Acc": 2, "ACC": 3, "extra_acc": 4, "source_row": 5, "line": 6, "kept": "k",
        "rank": 7, "reason": "r", 'a"b': 8, "a.b": 9, "a\nb": 10, "a'b": 11, "%41": 12, "A": 13,
        "Score": 14, "group": 15, "extra.x": 16, "Kept": 17,
    }  # fmt: skip
    found = sift({"1.jsonl": log(record(**extras), record(output="55"))})
    result = query(found.run, "SELECT * FROM rollouts WHERE source_row = 0")
    names = [column[0] for column in result.description or ()]
    row = dict(zip(names, result.fetchall()[0], strict=True))
    assert len({name.lower() for name in names}) == len(names)
    for name, value in extras.items():
        shown = [key for key in names if key == name or re.fullmatch(f"(extra_)+{name}", key)]
        assert value in [row[key] for key in shown], name
    assert (row["kept"], row["rank"], row["reason"], row["source_row"]) == (True, 1, None, 0)
    assert (row["acc"], row["score"], row["extra_Score"]) == (1, 1.0, 14)
    assert (row["extra_kept"] == "k") != (row["extra_kept"] == 17)


def test_an_empty_key_leaves_the_view_usable(sift: Callable[..., Filtered]) -> None:
    """A field without a name does not take the others' views away."""
    found = sift({"1.jsonl": log(record(**{"": 5}))})
    result = query(found.run, "SELECT * FROM rollouts")
    assert 5 in result.fetchall()[0]


# --- numbers and kinds ---------------------------------------------------------------------------


def test_numbers_that_json_lacks_are_read(tmp_path: Path) -> None:
    """NaN, Infinity and a number beyond float64 are read as what they are."""
    data = log(*(one("x", text) for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400")))
    nan, *infinite = read(tmp_path, data).column("x")
    assert math.isnan(nan)
    assert infinite == [math.inf, -math.inf, math.inf, -math.inf]


def test_a_reward_that_is_not_finite_is_none(sift: Callable[..., Filtered]) -> None:
    """Rows whose reward is missing, null, NaN or infinite, also as text, are dropped as such, their
    text is still there, and no row after them is lost."""
    odd = [math.nan, math.inf, -math.inf, None, ABSENT, "NaN", "Infinity", "-Infinity"]
    records = [record(score=score, output=f"{i}") for i, score in enumerate(odd)]
    records += [record(output="short"), record(output="longer")]
    found = sift({"1.jsonl": log(*records)})
    rows = found.ask("SELECT kept, reason, reward, response FROM rollouts ORDER BY source_row")
    assert rows[:8] == [(False, "no_reward", None, str(i)) for i in range(8)]
    assert rows[8:] == [(True, None, 1.0, "short"), (False, "outranked", 1.0, "longer")]


def test_numpy_words_for_numbers_that_are_not_finite_count(sift: Callable[..., Filtered]) -> None:
    """verl writes numpy scalars by str(): `nan`, `inf` and `-inf` are no rewards, and no faults."""
    records = [record(score=score) for score in ("1.0", "nan", "inf", "-inf")]
    found = sift({"1.jsonl": log(*records)})
    assert found.ask("SELECT count(*) FROM rollouts WHERE reason = 'no_reward'") == [(3,)]


def test_integers_beyond_64_bits_keep_every_digit(tmp_path: Path) -> None:
    """An integer that no column can hold exactly stays as its digits."""
    digits = ["9223372036854775807", "9223372036854775808", "-9223372036854775809", "9" * 400]
    found = read(tmp_path, log(*(one("x", text) for text in digits)))
    assert [str(value) for value in found.column("x")] == digits
    assert not found.bad


def test_an_integer_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    """A number that takes quadratic time to read makes its record bad, in words for a person."""
    found = read(tmp_path, log(record(), one("x", "9" * 5000), record()))
    (bad,) = found.bad
    assert (bad.source_row, bad.line) == (1, 2)
    assert re.fullmatch(r"byte \d+: an integer of more than 4,300 digits", bad.reason)


def test_floats_are_read_to_the_last_bit(tmp_path: Path) -> None:
    """A float64 that Python wrote comes back as it was, the least and the greatest too."""
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2.0**53 + 2, 1e22, 123456.789e-10]
    found = read(tmp_path, log(*(record(score=value) for value in values)))
    assert list(map(repr, found.column("score"))) == list(map(repr, values))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2"], {"string"}),
        ([1, 2], {"int"}),
        ([1, 2.5], {"float"}),
        ([1.0, None], {"float"}),
        ([None, None], {"null"}),
        ([True, None], {"bool"}),
        ([[1], {"a": 1}, None], {"nested"}),
        ([1, "1"], {"mixed"}),
        ([1, True], {"mixed"}),
        (["x", ["x"]], {"mixed"}),
    ],
)
def test_a_field_is_what_all_its_values_are(
    tmp_path: Path, values: list[Any], kind: set[str]
) -> None:
    """No kind is guessed from a sample, and no value is turned into one of another kind."""
    found = read(tmp_path, log(*(record(x=value) for value in values)))
    assert {kinds["x"] for kinds in found.kinds} == kind
    given = found.column("x")
    if kind & {"nested", "mixed"}:
        given = [None if text is None else json.loads(text) for text in given]
    assert given == values
    assert list(map(type, given)) == list(map(type, values)) or kind == {"float"}


@pytest.mark.parametrize(
    ("fixed", "right", "wrong", "words"),
    [
        ("string", "a", 1, "found a number, expected text"),
        ("number", 1.5, "1.5", "found text, expected a number"),
        ("number", 1, True, "found a bool, expected a number"),
        ("bool", False, 0, "found a number, expected true or false"),
        ("nested", [1], "[1]", "found text, expected a list or an object"),
        ("text", "a", None, None),
        ("number", 2, 2.5, None),
        ("mixed", "a", 1, None),
        ("any", "a", 1, None),
    ],
)
def test_a_field_keeps_the_kind_of_earlier_steps(
    tmp_path: Path, fixed: str, right: Any, wrong: Any, words: str | None
) -> None:
    """A later value of another kind is a bad record naming line, field, found and expected; null
    and numbers of the other kind are not."""
    found = read(tmp_path, log(record(x=right), record(x=wrong), record(x=None)), {"x": fixed})
    if words is None:
        assert not found.bad
        return
    (bad,) = found.bad
    assert (bad.source_row, bad.line, bad.field) == (1, 2, "x")
    assert bad.reason.startswith(words)
    assert [row for row, _ in found.places] == [0, 2]


def test_a_step_of_another_kind_is_refused(sift: Callable[..., Filtered]) -> None:
    """What a batch takes for an extra is what a feed took for it when only step 1 was there."""
    files = {"1.jsonl": log(record(m=9), record(m=10)), "2.jsonl": log(record(m="x", step=2))}
    with pytest.raises(InputError) as caught:
        sift(files)
    (bad,) = caught.value.bad
    assert (bad.source_file, bad.line, bad.field) == ("2.jsonl", 1, "m")


def test_numbers_written_as_text_count_as_numbers(sift: Callable[..., Filtered]) -> None:
    """A field used as a number ranks by value, not by text, and the reader is told of it."""
    files = {"1.jsonl": log(*(record(m=m) for m in ("9", "10", "1e2", 11)))}
    found = sift(files, metric="m", k=2)
    assert found.ask("SELECT m FROM kept ORDER BY rank") == [(9.0,), (10.0,)]
    assert any("m: " in note and "read as numbers from text" in note for note in found.notes)


@pytest.mark.parametrize("text", ["array([9])", "", " 9", "9 ", "+9", "0x9", "1_0", "٣", "nine"])
def test_text_that_is_no_number_is_refused(sift: Callable[..., Filtered], text: str) -> None:
    """A field used as a number is never guessed: the first value that is none is the bad record."""
    with pytest.raises(InputError) as caught:
        sift({"1.jsonl": log(record(m="9"), record(m=text))}, metric="m")
    (bad,) = caught.value.bad
    assert (bad.line, bad.field) == (2, "m")
    assert "expected a number" in bad.reason


@pytest.mark.parametrize("name", ["input", "output", "uid"])
@pytest.mark.parametrize("value", [5, 1.5, True, ["a"], {"a": 1}])
def test_text_is_due_where_verl_writes_text(tmp_path: Path, name: str, value: Any) -> None:
    """A prompt, response or uid that is no text is named, not turned into text."""
    found = read(tmp_path, log(record(), record(**{name: value})), {name: "text"})
    (bad,) = found.bad
    assert (bad.line, bad.field) == (2, name)
    assert "expected text" in bad.reason


TRUTHS = ["4", ["4", 4], {"a": 1}, None, 4, 4.5, True, "null", '["4", 4]']


@pytest.mark.parametrize("chunk", [1, 200, 16 << 20])
def test_groups_do_not_depend_on_what_is_read_together(
    sift: Callable[..., Filtered], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Ground truths of any kind, differing by row, make the same groups in chunks of any size."""
    records = [record(uid=ABSENT, gts=truth) for truth in [*TRUTHS, *reversed(TRUTHS)]]
    chunks_of(monkeypatch, chunk)
    rows = sift({"1.jsonl": log(*records)}).ask("SELECT group_id FROM rollouts ORDER BY source_row")
    ids = [row[0] for row in rows]
    assert ids == ids[::-1]
    # A text and a list or number that is written as that text cannot be told apart, nor need be.
    assert len(set(ids)) == len(
        {t if t is None or type(t) is str else json.dumps(t) for t in TRUTHS}
    )


@pytest.mark.parametrize("chunk", [1, 200, 16 << 20])
def test_values_shown_do_not_depend_on_what_is_read_together(
    sift: Callable[..., Filtered], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Ground truths and extras of mixed kinds look the same in chunks of any size."""
    chunks_of(monkeypatch, chunk)
    records = [record(gts=truth, x=truth) for truth in TRUTHS]
    found = sift({"1.jsonl": log(*records)})
    rows = found.ask("SELECT ground_truth, x FROM rollouts ORDER BY source_row")
    as_json = [None if truth is None else json.dumps(truth) for truth in TRUTHS]
    plain = [
        truth if isinstance(truth, str) else text
        for truth, text in zip(TRUTHS, as_json, strict=True)
    ]
    assert [row[0] for row in rows] == plain
    assert [row[1] for row in rows] == as_json


@pytest.mark.parametrize("chunk", [1, 16 << 20])
def test_expressions_do_not_depend_on_what_is_read_together(
    sift: Callable[..., Filtered], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A predicate on a field of mixed kinds excludes the same rows in chunks of any size."""
    chunks_of(monkeypatch, chunk)
    records = [record(x=x, uid=str(i)) for i, x in enumerate(["a", 1, "a", [1], None, "b"])]
    found = sift({"1.jsonl": log(*records)}, exclude_where="x->>'$' = 'a'")
    rows = found.ask("SELECT source_row FROM rollouts WHERE reason = 'excluded' ORDER BY 1")
    assert rows == [(0,), (2,)]


MASKS: list[Any] = [[1, 1, 0], [True, False, False], [0, 0, 0], [1.0, 1.0, 1.0]]


def test_token_lists_are_measured(sift: Callable[..., Filtered]) -> None:
    """Lists of ids and masks in JSON lines count as tokens: the mask's sum, 0 where all are 0."""
    records = [record(response_ids=[5, 2**70, 7], response_mask=mask) for mask in MASKS]
    records.append(record(response_ids=None, response_mask=None))
    found = sift({"1.jsonl": log(*records)})
    rows = found.ask("SELECT response_length, reason FROM rollouts ORDER BY source_row")
    assert [row[0] for row in rows] == [2, 1, 0, 3, None]
    assert (rows[2][1], rows[4][1]) == ("empty", "no_response")
    assert found.ask("SELECT DISTINCT length_source FROM rollouts") == [("tokens",)]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1, 1], "expected one value per value of response_ids"),
        ([1, 1, 2], "expected 0 and 1 only"),
        ([1, 1, 0.5], "expected 0 and 1 only"),
        ([1, 1, None], "expected 0 and 1 only"),
        ([1, 1, "1"], "expected a list of numbers"),
        ({"1": 1}, "expected a list of numbers"),
        ("[1, 1, 1]", "expected a list of numbers"),
        (3, "expected a list of numbers"),
        (None, "expected one value per value of response_ids"),
    ],
)
def test_a_mask_that_is_no_mask_of_its_tokens_is_refused(
    sift: Callable[..., Filtered], mask: Any, words: str
) -> None:
    """A mask of another length or with other values than 0 and 1 makes its own record bad only."""
    fine = record(response_ids=[1, 2, 3], response_mask=[1, 1, 1])
    with pytest.raises(InputError) as caught:
        sift({"1.jsonl": log(fine, {**fine, "response_mask": mask}, fine)})
    (bad,) = caught.value.bad
    assert (bad.line, bad.field) == (2, "response_mask")
    assert words in bad.reason


# --- ends ----------------------------------------------------------------------------------------


def test_a_cut_anywhere_in_the_last_record_takes_the_file_out(tmp_path: Path) -> None:
    """Of a file cut within a record, none is used: it is one bad record without a row, naming the
    line. Only a cut before the last line feed or before the record begins leaves a whole file."""
    head, tail = log(record(output="a"), record(output="b")), log(record(output="ü\n"))
    whole = len(tail) - 1
    for at in range(len(tail) + 1):
        found = read(tmp_path, head + tail[:at])
        if at in (0, whole, len(tail)):
            assert (found.bad, len(found.rows)) == ([], 2 if at == 0 else 3), at
            continue
        (bad,) = found.bad
        assert (bad.source_row, bad.line) == (None, 3), at


def test_a_file_cut_half_way_is_out_whole(sift: Callable[..., Filtered]) -> None:
    """With skipping allowed a cut file counts as one bad record, and other steps are unharmed."""
    cut = log(record(), record())[:-9]
    found = sift({"1.jsonl": log(record()), "2.jsonl": cut}, skip_bad=True)
    assert found.ask("SELECT step, source_row FROM rollouts") == [(1, 0)]
    assert found.ask("SELECT source_file, source_row, line FROM bad_records") == [
        ("2.jsonl", None, 2)
    ]
    assert found.ask("SELECT step, rows, kept, bad_records FROM steps") == [
        (1, 1, 1, 0),
        (2, 1, 0, 1),
    ]


def test_the_first_step_may_be_out_whole(sift: Callable[..., Filtered]) -> None:
    """A first step without any row, cut or empty, warns of nothing and stops nothing."""
    cut = log(record(), record())[:-9]
    found = sift({"1.jsonl": b"", "2.jsonl": cut, "3.jsonl": log(record(step=3))}, skip_bad=True)
    assert found.ask("SELECT step, kept FROM steps") == [(1, 0), (2, 0), (3, 1)]


@pytest.mark.parametrize(
    "line",
    [b'{"score": 0, "score": 1}', one("x", r'"\ud800"'), b"[1]", one("x", "9" * 5000)],
)
def test_a_last_record_that_is_whole_costs_only_itself(tmp_path: Path, line: bytes) -> None:
    """A record that is JSON to its end was not cut: without a line feed after it, it is one bad
    record with its row."""
    found = read(tmp_path, log(record(), record()) + line)
    (bad,) = found.bad
    assert (bad.source_row, bad.line) == (2, 3)
    assert len(found.rows) == 2


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"\n\n\r\n", b"  ", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"]
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_a_file_without_content_has_no_records(
    tmp_path: Path, data: bytes, pack: Callable[[bytes], bytes]
) -> None:
    """Nothing, blank lines or a byte order mark alone are an empty step, not a fault."""
    found = read(tmp_path, pack(data))
    assert (found.rows, found.bad, found.records) == ([], [], 0)


def test_zero_filled_tails_are_cut_files(tmp_path: Path) -> None:
    """NULs after the last record, as a power cut leaves them, take the file out."""
    (bad,) = read(tmp_path, log(record(), record()) + bytes(4096)).bad
    assert (bad.source_row, bad.line) == (None, 3)


# --- compression ---------------------------------------------------------------------------------


def test_compressed_files_of_several_parts_are_read_whole(tmp_path: Path) -> None:
    """Every gzip member, zstd frame and skippable frame is read; content decides, not the name."""
    parts = [log(record(output=name)) for name in "abc"]
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"
    for data in (
        b"".join(map(gzip.compress, parts)),
        b"".join(map(zstd, parts)),
        zstd(parts[0]) + skippable + zstd(parts[1]) + zstd(b"") + zstd(parts[2]),
        gzip.compress(b"".join(parts)[:50]) + gzip.compress(b"".join(parts)[50:]),
    ):
        found = read(tmp_path, data)
        assert (found.column("output"), found.bad) == (["a", "b", "c"], [])
        assert found.digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_a_cut_compressed_file_never_gives_fewer_rows(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """Cut at any byte, a compressed file is a bad record without a row that says why."""
    data = pack(log(*(record(output=str(i) * i) for i in range(30))))
    for at in range(1, len(data)):
        found = read(tmp_path, data[:at])
        assert [bad.source_row for bad in found.bad][-1:] == [None], at


@pytest.mark.parametrize("tail", [b"garbage", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x00" * 8])
@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_garbage_after_a_compressed_file_is_refused(
    tmp_path: Path, pack: Callable[[bytes], bytes], tail: bytes
) -> None:
    """Bytes after the last member that are no member take the file out."""
    found = read(tmp_path, pack(log(record())) + tail)
    assert found.bad[-1].source_row is None
    assert "cannot be read" in found.bad[-1].reason


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    """A gzip file whose content, checksum or length does not fit takes the file out."""
    data = gzip.compress(log(record()))
    for at in (-1, -8):
        broken = bytearray(data)
        broken[at] ^= 1
        assert [bad.source_row for bad in read(tmp_path, bytes(broken)).bad] == [None]


# --- what no table can store, no group take -----------------------------------------------------


def test_a_name_that_holds_nul_is_refused(sift: Callable[..., Filtered]) -> None:
    """No table can hold such a column: its record is bad; deeper down, or in a value, it is
    text."""
    data = log(record(), one(r"a\u0000b", "1"), one("x", r'{"a\u0000b": "\u0000"}'))
    assert len(log(record())) == 82
    with pytest.raises(InputError, match=r"^$") as caught:
        sift({"1.jsonl": data})
    reason = "byte 82: its name holds NUL, which no table can store; rename it"
    assert list(map(str, caught.value.bad)) == [f"1.jsonl, line 2, field 'a\\x00b': {reason}"]
    found = sift({"1.jsonl": data}, skip_bad=True)
    assert found.ask("SELECT source_row, x->>'$.*' FROM rollouts WHERE x IS NOT NULL") == [
        (2, ["\0"])
    ]


def test_a_step_of_which_no_row_is_left_is_a_step(sift: Callable[..., Filtered]) -> None:
    """Where the one row that can be read has no group, all of the step's rows are bad records."""
    files = {"1.jsonl": log(record(n=1)), "2.jsonl": log({}, record(step=2, n="x"))}
    found = sift(files, skip_bad=True)
    counts = found.ask("SELECT step, rows, kept, dropped, bad_records FROM steps")
    assert counts == [(1, 1, 1, 0, 0), (2, 2, 0, 0, 2)]
    assert found.ask("SELECT step, n FROM rollouts") == [(1, 1)]


# --- numbers, and what could be one --------------------------------------------------------------


@pytest.mark.parametrize("metric", ["m", "m * 1", "-m * -1", "m % 100", "0 + m / 1", "+m ** 1"])
def test_a_field_that_a_metric_calculates_with_is_a_number(
    sift: Callable[..., Filtered], metric: str
) -> None:
    """Numbers written as text count as numbers, which is said; the first value that is neither is
    the bad record."""
    rows = [record(m="10"), record(m="9"), record(m=11)]
    found = sift({"1.jsonl": log(*rows)}, metric=metric)
    assert found.ask("SELECT metric FROM rollouts ORDER BY rank") == [(9.0,), (10.0,), (11.0,)]
    assert "m: 2 values read as numbers from text" in found.notes
    with pytest.raises(InputError) as caught:
        sift({"1.jsonl": log(*rows, record(m="much"))}, metric=metric)
    told = "1.jsonl, line 4, field 'm': found 'much', expected a number"
    assert list(map(str, caught.value.bad)) == [told]


@pytest.mark.parametrize(
    ("fields", "hint"),
    [({"advantage": 1, "acc": True}, "-s reward=NAME could be one of advantage, acc;"),
     ({"policy_version": 1, "truncated": True}, "none is numeric;")],
)  # fmt: skip
def test_a_reward_that_is_missing_may_be_another_field(
    sift: Callable[..., Filtered], fields: dict[str, Any], hint: str
) -> None:
    """The refusal lists the numeric fields, but not those that mean something else, as `step`."""
    with pytest.raises(InputError, match=rf"Of its fields, {hint} --reward-fn"):
        sift({"1.jsonl": log(record(score=ABSENT, **fields))})


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_record_larger_than_the_cap_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes], end: bytes
) -> None:
    """A line above the cap takes the file out and is named, whether or not it ends."""
    monkeypatch.setattr(jsonl, "MAX_RECORD", 1 << 20)
    monkeypatch.setattr(jsonl, "BLOCK", 1 << 16)
    long = log(record(), record(output="x" * (1 << 20)))[:-1] + end
    found = read(tmp_path, pack(long))
    assert found.bad[-1].source_row is None
    assert "line 2 has more than 1 MiB" in found.bad[-1].reason
    assert not read(tmp_path, pack(log(record(output="x" * 1_000_000)))).bad


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("filling", [b"\n", b" ", b"x", log(record())], ids=repr)
def test_a_bomb_is_refused_before_it_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes], filling: bytes
) -> None:
    """A file that unpacks to hundreds of times its size is refused early, whatever it holds."""
    monkeypatch.setattr(jsonl, "RATIO_FROM", 1 << 20)
    monkeypatch.setattr(jsonl, "MAX_RATIO", 50)
    monkeypatch.setattr(jsonl, "MAX_RECORD", 4 << 20)
    monkeypatch.setattr(jsonl, "BLOCK", 1 << 18)
    data = pack(filling * ((64 << 20) // len(filling)))
    unpacked = []
    blocks = jsonl._blocks
    monkeypatch.setattr(jsonl, "_blocks", lambda file: map(_counting(unpacked), blocks(file)))
    found = read(tmp_path, data)
    assert found.bad[-1].source_row is None
    assert re.search("unpacks to over 50 times its size|has more than 4 MiB", found.bad[-1].reason)
    assert sum(unpacked) <= max(8 << 20, 60 * len(data))
    assert found.digest == hashlib.sha256(data).hexdigest()


def _counting(sizes: list[int]) -> Callable[[bytes], bytes]:
    def count(block: bytes) -> bytes:
        sizes.append(len(block))
        return block

    return count


# --- all of it -----------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
SCALAR = st.none() | st.booleans() | NUMBER | TEXT
VALUE = st.recursive(
    SCALAR, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3)
)
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
RECORDS = st.lists(st.dictionaries(NAME, VALUE, min_size=1, max_size=5), min_size=1, max_size=6)
ALIKE = st.lists(NAME, min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.lists(
        st.fixed_dictionaries(dict.fromkeys(names, SCALAR)), min_size=1, max_size=8
    )
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(records=RECORDS | ALIKE, ascii_=st.booleans(), chunk=st.sampled_from([1, 64, 1 << 20]))
def test_what_was_written_is_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[Any], ascii_: bool, chunk: int
) -> None:
    """Any records that json.dumps writes come back, value by value, in chunks of any size."""
    chunks_of(monkeypatch, chunk)
    lines = [json.dumps(r, ensure_ascii=ascii_).encode() for r in records]
    path = tmp_path / "1.jsonl"
    path.write_bytes(log(*lines))
    reader = jsonl.Reader(path, path.name)
    seen: list[dict[str, Any]] = []
    for chunk_ in reader.chunks({}, {}):
        assert not chunk_.bad
        rows = chunk_.rows.to_dicts() if chunk_.rows.width else [{}] * len(chunk_.places)
        seen += [{name: _given(row[name], chunk_.kinds[name]) for name in row} for row in rows]
    assert len(seen) == len(records) == reader.records
    for found, written in zip(seen, records, strict=True):
        assert {name: found.get(name) for name in written} == written
        assert all(found[name] is None for name in found.keys() - written.keys())


def _given(value: Any, kind: str) -> Any:
    return json.loads(value) if kind in ("nested", "mixed") and value is not None else value


def _broken(data: bytes) -> Iterable[bytes]:
    for at in range(0, len(data), 3):
        yield data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
        yield data[:at] + data[at + 1 :]


def test_no_record_is_lost_without_a_word(sift: Callable[..., Filtered]) -> None:
    """However a file is broken, rows = kept + dropped + bad records, and skipping goes on."""
    data = log(*(record(output="x" * i, uid="ab"[i % 2]) for i in range(4)))
    whole = {"1.jsonl": log(record())}
    pieces = list(_broken(data))[::9]
    files = {f"{step}.jsonl": piece for step, piece in enumerate(pieces, 2)}
    files = {name: piece.replace(b'"step": 1', b'"step": null') for name, piece in files.items()}
    found = sift(whole | files, skip_bad=True)
    rows = found.ask("SELECT rows, kept + dropped + bad_records FROM steps")
    assert len(rows) == len(files) + 1
    assert all(read == told for read, told in rows)
    listed = found.ask("SELECT count(*), (SELECT sum(bad_records) FROM steps) FROM bad_records")
    assert listed[0][0] == listed[0][1] > 0
