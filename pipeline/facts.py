"""Facts: a chunk of logged rows to the light columns that the stages work on.

Light columns of a row: `source_row`, `line`, `uid`, `prompt` (text; only where groups need it),
`truth`, `reward` (finite or null), `response_length`, `no_response`, `policy_version`, `truncated`,
`finish_reason`, and `field:<name>` for each logged field that an expression of the recipe reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from rollsift.schemas.errors import BadRecord

from .expressions import numbers
from .fields import IDS, MASK, PROMPT_IDS, Fields, Length
from .readers import Chunk

TRUE_TEXT = ("True", "true", "False", "false")
_NUMBER_KINDS = {"Boolean": "bool", "Int64": "int", "Float64": "float"}


@dataclass(slots=True)
class Facts:
    """The light columns of a chunk, its rows as logged (without the bad ones) and what their fields
    hold, what was wrong, and how many values of which field were read as numbers from text."""

    light: pl.DataFrame
    rows: pl.DataFrame
    kinds: dict[str, str]
    bad: list[BadRecord]
    from_text: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """How a file is read: its fields' roles, where reward and length come from, what expressions
    need. `as_numbers` are the logged fields whose every value must be a number; `group_by_prompt`
    says that the prompts are needed to find the groups."""

    file: str
    step: int
    fields: Fields
    reward: str
    length: Length
    wanted: frozenset[str]
    as_numbers: frozenset[str]
    group_by_prompt: bool
    count_tokens: Callable[[pl.Series], pl.Series] | None = None

    def columns(self, kinds: Mapping[str, str]) -> list[str]:
        """The fields to read of a file in which each can be read alone, in its own order."""
        roles = ["step", "uid", "policy_version", "truncated", "finish_reason"]
        if self.group_by_prompt:
            roles += ["prompt", "ground_truth"]
        names = {self.fields.columns[role] for role in roles if role in self.fields.columns}
        names |= {self.reward, *self.length.fields}
        names |= {found for name in self.wanted if (found := self.fields.find(name))}
        if self.group_by_prompt and "prompt" not in self.fields.columns:
            names.add(PROMPT_IDS)
        return [name for name in kinds if name in names]


def facts(chunk: Chunk, reading: Reading) -> Facts:
    """Read a chunk by `reading`. Rows that break the contract become bad records."""
    check = _Check(chunk, reading.file)
    rows, columns = chunk.rows, reading.fields.columns
    light: dict[str, pl.Series] = {}
    from_text: dict[str, int] = {}
    kinds = dict(chunk.kinds)

    def logged(column: str) -> pl.Series | None:
        return rows[columns[column]] if columns.get(column) in rows.columns else None

    def number(name: str) -> pl.Series:
        if name not in rows.columns:
            return pl.repeat(None, len(rows), dtype=pl.Float64, eager=True)
        found = _unquoted(rows[name], chunk.kinds.get(name))
        values, texts, _ = numbers(found)
        check.refuse(found.is_not_null() & values.is_null(), name, "a number", found)
        if texts:
            from_text[name] = from_text.get(name, 0) + texts
        return values

    if (step := logged("step")) is not None:
        name = columns["step"]
        wrong = (number(name) != reading.step).fill_null(False)
        check.refuse(wrong, name, f"{reading.step} as the file's name says", step)
    reward = number(reading.reward)
    light["reward"] = reward.set(~reward.is_finite(), None)
    light["response_length"], light["no_response"] = _length(rows, reading, number, check)
    light["policy_version"] = _whole(
        number(columns.get("policy_version", "")), columns.get("policy_version", ""), check
    )
    finish = logged("finish_reason")
    light["finish_reason"] = _text(finish, len(rows))
    truncated = number(columns.get("truncated", "")) != 0
    light["truncated"] = truncated.zip_with(
        truncated.is_not_null(), light["finish_reason"] == "length"
    )
    light["uid"] = _text(logged("uid"), len(rows))
    if reading.group_by_prompt:
        prompt = logged("prompt")
        prompt = prompt if prompt is not None else rows.get_column(PROMPT_IDS, default=None)
        light["prompt"] = _text(prompt, len(rows))
        light["truth"] = _text(logged("ground_truth"), len(rows))
    for wanted in sorted(reading.wanted):
        field = reading.fields.find(wanted)
        if field is None or field not in rows.columns:
            continue
        # What is used as a number must be one; `acc` is merely looked at, if it is one.
        found = _unquoted(rows[field], kinds.get(field))
        if field in reading.as_numbers or (wanted == "acc" and numbers(found)[2] is None):
            rows = rows.with_columns(_as_read(found, number(field)))
            kinds[field] = _NUMBER_KINDS.get(str(rows[field].dtype), kinds[field])
        light[f"field:{wanted}"] = rows[field]
    frame = chunk.places.with_columns(**light)
    good = ~check.wrong
    return Facts(frame.filter(good), rows.filter(good), kinds, chunk.bad + check.bad, from_text)


class _Check:
    """Collects rows that break the contract; the first fault of a row is its bad record."""

    def __init__(self, chunk: Chunk, file: str) -> None:
        self.places, self.file = chunk.places, file
        self.wrong = pl.repeat(False, len(chunk.places), dtype=pl.Boolean, eager=True)
        self.bad: list[BadRecord] = []

    def refuse(self, where: pl.Series, field: str, expected: str, found: pl.Series) -> None:
        where = where & ~self.wrong
        if not where.any():
            return
        hits = self.places.with_columns(found=found).filter(where)
        for row, line, value in hits.iter_rows():
            shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
            reason = f"found {shown}, expected {expected}"
            self.bad.append(BadRecord(self.file, row, line, field, reason))
        self.wrong = self.wrong | where


def _text(values: pl.Series | None, count: int) -> pl.Series:
    """Any logged values as text; lists become their items joined by commas."""
    if values is None or values.dtype == pl.Null:
        return pl.repeat(None, count, dtype=pl.String, eager=True)
    if isinstance(values.dtype, pl.List):
        items = values.cast(pl.List(pl.String), strict=False)
        return items.list.join(",")
    return values.cast(pl.String)


def _whole(values: pl.Series, name: str, check: _Check) -> pl.Series:
    check.refuse(
        ((values != values.floor()) | ~values.is_finite()).fill_null(False),
        name,
        "a whole number",
        values,
    )
    return values.cast(pl.Int64, strict=False)


def _length(
    rows: pl.DataFrame, reading: Reading, number: Callable[[str], pl.Series], check: _Check
) -> tuple[pl.Series, pl.Series]:
    """Length or null, and whether the response is null."""
    source, names = reading.length.source, reading.length.fields
    held = [name for name in names if name in rows.columns]
    nothing = pl.repeat(None, len(rows), dtype=pl.Int64, eager=True)
    response = reading.fields.columns.get("response", "")
    if source == "logged":
        lengths = _whole(number(names[0]), names[0], check)
        check.refuse((lengths < 0).fill_null(False), names[0], "a length", lengths)
        gone = rows[response].is_null() if response in rows.columns else lengths.is_null() & False
        return lengths, gone
    if not held:
        return nothing, nothing.is_null()
    if source == "tokens":
        return _tokens(rows, held, check)
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
        if not isinstance(rows[name].dtype, pl.List) and rows[name].dtype != pl.Null:
            check.refuse(rows[name].is_not_null(), name, "a list of numbers", rows[name])
            return pl.repeat(None, len(rows), dtype=pl.Int64, eager=True), rows[name].is_null()
    ids = rows[IDS] if IDS in held else None
    if MASK not in held or rows[MASK].dtype == pl.Null:
        ids = rows[held[0]] if ids is None else ids
        if ids.dtype == pl.Null:
            return ids.cast(pl.Int64), ids.is_null()
        return ids.list.len().cast(pl.Int64), ids.is_null()
    mask = rows[MASK]
    gone = mask.is_null() if ids is None else ids.is_null()
    inner = mask.cast(pl.List(pl.Int64), strict=False)
    odd = ~inner.list.eval(pl.element().is_in([0, 1]).fill_null(False)).list.all()
    check.refuse((odd & ~gone).fill_null(False), MASK, "0 and 1 only", mask)
    if ids is not None and ids.dtype != pl.Null:
        unfit = (mask.list.len() != ids.list.len()) | (mask.is_null() & ~gone)
        check.refuse(unfit.fill_null(False), MASK, f"one value per value of {IDS}", mask.list.len())
    return inner.list.sum().set(gone, None), gone


def _unquoted(values: pl.Series, kind: str | None) -> pl.Series:
    """Mixed values are JSON text, in which strings stand in quotes."""
    return values.str.replace(r'(?s)^"(.*)"$', "$1") if kind == "mixed" else values


def _as_read(values: pl.Series, read: pl.Series) -> pl.Series:
    """A field used as a number, as it is shown: bools, integers or floats, also from text."""
    if values.dtype != pl.String:
        return values
    if values.drop_nulls().is_in(TRUE_TEXT).all():
        return (read != 0).alias(values.name)
    whole = read.cast(pl.Int64, strict=False)
    exact = (whole.cast(pl.Float64) == read).fill_null(read.is_null())
    return (whole if exact.all() else read).alias(values.name)
