"""Facts: a chunk of logged rows to the light columns that the stages work on.

Light columns of a row: `source_row`, `line`, `uid`, `prompt` (text; only where groups need it),
`truth`, `reward` (finite or null), `response_length`, `no_response`, `policy_version`, `truncated`,
`finish_reason`, `session` and `output` where the file is captured, and `field:<name>` for each
logged field that an expression of the recipe reads, or `truth:<name>` (a number or null) where the
expression is that name alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from rollsift.schemas.errors import BadRecord

from .fields import IDS, MASK, OUTPUT, PROMPT_IDS, SESSION, Fields, Length
from .readers import Chunk, constant
from .readers.records import EXACT
from .values import as_text, numbers, unquoted

MOST = 1 << 40  # of a length: the sum over any step still fits into int64
_NUMBERS = {int, float, bool, type(None)}


@dataclass(slots=True)
class Facts:
    """The light columns of a chunk, its rows as logged (without the bad ones, and fields that are
    used as numbers as these), what was wrong, and how many values of which field were read as
    numbers from text."""

    light: pl.DataFrame
    rows: pl.DataFrame
    bad: list[BadRecord]
    from_text: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """How a file is read: its fields' roles, where reward and length come from, what expressions
    need. `as_numbers` are the logged fields whose every value must be a number; of `as_truths`,
    names in an expression, values may be; `group_by_prompt` says that the prompts are needed to
    find the groups, `scored` that a reward function needs what verl gives it, `captured` that the
    file tells of its sessions."""

    file: str
    step: int
    fields: Fields
    reward: str
    length: Length
    wanted: frozenset[str]
    as_numbers: frozenset[str]
    as_truths: frozenset[str]
    group_by_prompt: bool
    count_tokens: Callable[[pl.Series], pl.Series] | None = None
    scored: bool = False
    captured: bool = False

    def columns(self, kinds: Mapping[str, str]) -> list[str]:
        """The fields to read of a file in which each can be read alone, in its own order."""
        roles = ["step", "uid", "policy_version", "truncated", "finish_reason"]
        if self.group_by_prompt:
            roles += ["prompt", "ground_truth"]
            roles += [] if "uid" in self.fields.columns else ["response"]  # tells repeats
        if self.scored:
            roles += ["data_source", "response", "ground_truth"]
        names = {self.fields.columns[role] for role in roles if role in self.fields.columns}
        names |= {self.reward, *self.length.fields}
        wanted = self.wanted | self.as_truths
        names |= {found for name in wanted if (found := self.fields.find(name))}
        if self.scored:
            names.add("extra_info")
        if self.captured:
            names |= {SESSION, OUTPUT}
        if self.group_by_prompt and "prompt" not in self.fields.columns:
            names.add(PROMPT_IDS)
        return [name for name in kinds if name in names]


def facts(chunk: Chunk, reading: Reading) -> Facts:
    """Read a chunk by `reading`. Rows that break the contract become bad records."""
    check = _Check(chunk, reading.file)
    rows, columns = chunk.rows, reading.fields.columns
    light: dict[str, pl.Series] = {}
    from_text: dict[str, int] = {}

    def logged(column: str) -> pl.Series | None:
        return rows[columns[column]] if columns.get(column) in rows.columns else None

    def text(column: str, default: pl.Series | None = None) -> pl.Series:
        values = logged(column)
        kind = chunk.kinds.get(columns.get(column) or "\0")
        if values is not None and values.dtype == pl.Categorical:
            return values
        return as_text(default if values is None else values, len(rows), kind)

    def number(name: str | None) -> pl.Series:
        if name is None or name not in rows.columns:
            return constant(None, len(rows), pl.Float64)
        found = unquoted(rows[name], chunk.kinds.get(name))
        values, texts = numbers(found)
        if values.null_count() > found.null_count():
            check.refuse(found.is_not_null() & values.is_null(), name, "a number", found)
        if texts and chunk.kinds.get(name) == "mixed":  # numbers among text are JSON text, too
            texts = int((rows[name].str.starts_with('"') & values.is_not_null()).sum())
        if texts:
            from_text[name] = texts
        return values

    if (step := logged("step")) is not None:
        name = columns["step"]
        check.refuse(number(name) != reading.step, name, f"{reading.step}, the file's step", step)
    reward = number(reading.reward or None)
    finite = reward.is_finite()
    light["reward"] = reward if finite.all() else reward.set(~finite, None)
    light["response_length"], light["no_response"] = _length(rows, reading, number, check)
    light["policy_version"] = _whole(rows, columns.get("policy_version"), number, check)
    light["finish_reason"] = text("finish_reason")
    light["truncated"] = light["finish_reason"] == "length"
    if columns.get("truncated") in rows.columns:
        truncated = number(columns["truncated"]) != 0
        light["truncated"] = truncated.zip_with(truncated.is_not_null(), light["truncated"])
    light["uid"] = text("uid")
    if reading.group_by_prompt:
        light["prompt"] = text("prompt", rows.get_column(PROMPT_IDS, default=None))
        light["truth"] = text("ground_truth")
    if reading.captured:
        light["session"], light["output"] = (rows[n].cast(pl.Int64) for n in (SESSION, OUTPUT))
    if texts := [name for name in reading.as_numbers if rows.schema.get(name) == pl.String]:
        rows = rows.with_columns(number(name).alias(name) for name in sorted(texts))
    light |= _named(chunk, rows, reading)
    frame = chunk.places.hstack([values.alias(name) for name, values in light.items()])
    if check.bad:
        frame, rows = frame.filter(~check.wrong), rows.filter(~check.wrong)
    return Facts(frame, rows, chunk.bad + check.bad, from_text)


def _named(chunk: Chunk, rows: pl.DataFrame, reading: Reading) -> dict[str, pl.Series]:
    """The fields that the recipe's expressions name; `rows` has numbers where they must be."""
    found: dict[str, pl.Series] = {}
    for wanted in sorted(reading.as_truths):
        field = reading.fields.find(wanted)
        if field in chunk.rows.columns:
            logged = unquoted(chunk.rows[field], chunk.kinds.get(field))
            found[f"truth:{wanted}"] = numbers(logged)[0]
    for wanted in sorted(reading.wanted):
        field = reading.fields.find(wanted)
        if field in rows.columns:
            found[f"field:{wanted}"] = rows[field]
    return found


class _Check:
    """Collects rows that break the contract; the first fault of a row is its bad record."""

    def __init__(self, chunk: Chunk, file: str) -> None:
        self.places, self.file, self.kinds = chunk.places, file, chunk.kinds
        self.wrong = constant(False, len(chunk.places), pl.Boolean)
        self.bad: list[BadRecord] = []

    def refuse(self, where: pl.Series, field: str, expected: str, found: pl.Series) -> None:
        """Note the rows in which `where` is true; where it is null it is not."""
        if not where.any():
            return
        where = where.fill_null(False) & ~self.wrong
        hits = self.places.with_columns(found=found).filter(where)
        for row, line, value in hits.iter_rows():
            shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
            reason = f"found {shown}, expected {expected}"
            self.bad.append(BadRecord(self.file, row, line, field, reason))
        self.wrong = self.wrong | where


def _whole(
    rows: pl.DataFrame, name: str | None, number: Callable[[str], pl.Series], check: _Check
) -> pl.Series:
    if name is None or name not in rows.columns:
        return constant(None, len(rows), pl.Int64)
    values = rows[name] if rows[name].dtype == pl.Int64 else number(name)
    odd = ~values.is_between(-EXACT, EXACT)
    if values.dtype.is_float():
        odd |= values != values.floor()
    check.refuse(odd, name, "a whole number", values)
    return (values.set(odd, None) if odd.any() else values).cast(pl.Int64)


def _length(
    rows: pl.DataFrame, reading: Reading, number: Callable[[str], pl.Series], check: _Check
) -> tuple[pl.Series, pl.Series]:
    """Length or null, and whether the response is null."""
    source, names = reading.length.source, reading.length.fields
    held = [name for name in names if name in rows.columns]
    nothing = constant(None, len(rows), pl.Int64)
    response = reading.fields.columns.get("response")
    if source == "logged":
        lengths = _whole(rows, names[0], number, check)
        unfit = ~lengths.is_between(0, MOST)
        check.refuse(unfit, names[0], f"a length from 0 to {MOST:,}", lengths)
        if response in rows.columns:
            return lengths, rows[response].is_null()
        return lengths, constant(False, len(rows), pl.Boolean)
    if not held:
        return nothing, nothing.is_null()
    if source == "tokens":
        as_json = [name for name in held if check.kinds.get(name) in ("nested", "mixed")]
        lists = [_lists(rows[name], check) for name in as_json if rows[name].dtype == pl.String]
        return _tokens(rows.with_columns(lists), held, check)
    text = rows[held[0]]
    if text.dtype == pl.Null:
        return nothing, nothing.is_null()
    if text.dtype != pl.String:
        check.refuse(text.is_not_null(), held[0], "text", text)
        return nothing, nothing.is_null()
    if source == "tokenizer" and reading.count_tokens:
        return reading.count_tokens(text), text.is_null()
    lengths = text.str.len_bytes() if source == "bytes" else text.str.len_chars()
    return lengths.cast(pl.Int64), text.is_null()


def _tokens(rows: pl.DataFrame, held: Sequence[str], check: _Check) -> tuple[pl.Series, pl.Series]:
    for name in held:
        if rows[name].dtype != pl.Null and not _is_list_of_numbers(rows[name].dtype):
            check.refuse(rows[name].is_not_null(), name, "a list of numbers", rows[name])
            return constant(None, len(rows), pl.Int64), rows[name].is_null()
    ids = rows[IDS] if IDS in held else None
    if MASK not in held or rows[MASK].dtype == pl.Null:
        ids = rows[held[0]] if ids is None else ids
        if ids.dtype == pl.Null:
            return ids.cast(pl.Int64), ids.is_null()
        return ids.list.len().cast(pl.Int64), ids.is_null()
    mask = rows[MASK]
    gone = mask.is_null() if ids is None else ids.is_null()
    odd = ~mask.list.eval(
        pl.element().cast(pl.Float64).is_in([0.0, 1.0]).fill_null(False)
    ).list.all()
    check.refuse(odd & ~gone, MASK, "0 and 1 only", mask)
    inner = mask.cast(pl.List(pl.Int64), strict=False)
    if ids is not None and ids.dtype != pl.Null:
        unfit = (mask.list.len() != ids.list.len()) | (mask.is_null() & ~gone)
        check.refuse(unfit, MASK, f"one value per value of {IDS}", mask.list.len())
    return inner.list.sum().set(gone, None), gone


def _lists(values: pl.Series, check: _Check) -> pl.Series:
    """Lists of numbers from JSON text. Ids may be of any size: only 0 and 1 stay as they are."""
    found: list[list[float | None] | None] = []
    wrong = []
    for text in values:
        items = None if text is None else json.loads(text)
        fits = items is None or (isinstance(items, list) and set(map(type, items)) <= _NUMBERS)
        wrong.append(not fits)
        items = items if fits else None
        found.append(items and [x and max(-2, min(2, x)) for x in items])
    check.refuse(pl.Series(wrong, dtype=pl.Boolean), values.name, "a list of numbers", values)
    return pl.Series(values.name, found, pl.List(pl.Float64), strict=False)


def _is_list_of_numbers(dtype: pl.DataType) -> bool:
    if not isinstance(dtype, pl.List):
        return False
    inner: Any = dtype.inner
    return inner.is_numeric() or inner in (pl.Boolean, pl.Null)
