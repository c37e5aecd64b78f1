"""Flat records: the fast path of the JSONL reader gives what the line reader gives, or nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsift.pipeline.readers import flat, jsonl

DATA = Path(__file__).parents[2] / "data"
DUMPS = sorted(DATA.glob("verl_v[01]/*.jsonl"))
KNOWN = [{}, {"a": "float"}, {"a": "mixed"}, {"b": "string"}, {"late": "int", "a": "null"}]


def by_lines(data: bytes, known: dict[str, str]) -> tuple[pl.DataFrame, dict[str, str], list[Any]]:
    """What the line reader makes of the same bytes."""
    chunk = jsonl.Reader(Path("1.jsonl"), "1.jsonl")._lines(data, 0, 0, {}, known)
    return chunk.rows, dict(chunk.kinds), chunk.bad


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_verl_s_own_dumps_take_it(path: Path) -> None:
    """Every line that verl's own writers made is read by the fast path, to what is read by line."""
    data = path.read_bytes()
    read = flat.read(data, {}, {})
    assert read is not None
    rows, kinds, bad = by_lines(data, {})
    assert (dict(read[1]), bad) == (kinds, [])
    assert read[0].equals(rows)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 66), 1 << 66),
    st.floats(allow_nan=False),
    st.text(alphabet=st.characters(codec="utf-8"), max_size=6),
    st.sampled_from(["\\", '"', "\\\\\\", "\u2028", "\ud7ff", "", "é", "\x7f", -0.0, 1e308]),
)
CHANGES = b'"\\{}[],:\n\t 0e-u\xff\x00'


@given(
    records=st.lists(st.fixed_dictionaries({"a": VALUES, "b": VALUES}), min_size=1, max_size=4),
    ascii_only=st.booleans(),
    known=st.sampled_from(KNOWN),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=400, deadline=None)
def test_it_agrees_with_the_line_reader_or_hands_over(
    records: list[dict[str, Any]], ascii_only: bool, known: dict[str, str], seed: int
) -> None:
    """Whatever the values, what is known of the file, and the bytes that are changed, left out or
    put in between: rows and kinds are those of the line reader, which then finds nothing wrong."""
    lines = [json.dumps(record, ensure_ascii=ascii_only) + "\n" for record in records]
    data = bytearray("".join(lines).encode(errors="surrogatepass"))
    draw = random.Random(seed)
    for _ in range(draw.choice([0, 0, 1, 2])):
        at = draw.randrange(len(data))
        data[at : at + draw.randint(0, 1)] = draw.choice([b"", bytes([draw.choice(CHANGES)])])
    read = flat.read(bytes(data), {}, known)
    if read is None:
        return
    rows, kinds, bad = by_lines(bytes(data), known)
    assert (dict(read[1]), bad) == (kinds, [])
    assert read[0].select(sorted(read[0].columns)).equals(rows.select(sorted(rows.columns)))


def test_it_is_taken_by_plain_records_of_every_kind() -> None:
    """Text, whole numbers, others, true, false and null: a file of them is no case for the line
    reader, so that the test above compares something."""
    lines = [
        {"text": 'a\n\\"é', "whole": 1, "number": 0.5, "flag": True, "none": None},
        {"text": "", "whole": -7, "number": 1e-7, "flag": False, "none": None},
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    read = flat.read(data, {}, {})
    assert read is not None
    assert read[0].to_dicts() == lines
