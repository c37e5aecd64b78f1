"""Load: one step's file to light rows in groups, with its text set aside chunk by chunk."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord, InputError
from rollsift.schemas.manifest import Source as Pinned

from .captured import captured
from .carried import Carried
from .facts import Reading, facts
from .fields import REWARDS, SESSION, Fields, format_of, length_of, resolve, reward_field
from .files import sha256_of
from .groups import ROW_KEY, group
from .readers import Chunk, Chunks, arrow_types, constant, footer, generation, jsonl, parquet
from .rewards import Answers, RewardFunction
from .score import Rules
from .sources import Source
from .store import Spool
from .texts import Fingerprint, text_part

Progress = Callable[[int], None]


@dataclass(slots=True)
class Loaded:
    """A step as read. `rows` are light (see facts and groups), `texts` what is stored beside them;
    `ids` and `group_source` name the groups; `pins` are the aids' files; `carried` is handed on."""

    rows: pl.DataFrame
    texts: Spool | None
    ids: pl.Series
    format: str | None
    group_source: str
    length_source: str | None
    records: int
    digest: str
    fingerprint: str
    bad: list[BadRecord]
    notes: list[str]
    from_text: dict[str, int]
    pins: list[Pinned]
    carried: Carried

    def close(self) -> None:
        """Let go of the text."""
        if self.texts:
            self.texts.close()


def load(
    source: Source,
    by: Rules,
    carried: Carried,
    spool: Spool,
    progress: Progress | None = None,
    need_reward: bool = True,
) -> Loaded:
    """Read a step. What is wrong with records stands in `bad`.

    Raises InputError where the log as a whole cannot be used: no reward, no length, no response.
    """
    return _Loader(source, by, carried, spool, progress, need_reward).load()


@dataclass(slots=True)
class _Read:
    """What came of reading a file; `settled` says that every chunk was read by all that its fields
    hold."""

    settled: bool = True
    light: list[pl.DataFrame] = field(default_factory=lambda: [_empty()])
    bad: list[BadRecord] = field(default_factory=list)
    from_text: dict[str, int] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    reading: Reading | None = None
    records: int = 0
    digest: str = ""


class _Loader:
    def __init__(
        self,
        source: Source,
        by: Rules,
        carried: Carried,
        spool: Spool,
        progress: Progress | None,
        need_reward: bool = True,
    ) -> None:
        self.source, self.by, self.spool, self.progress = source, by, spool, progress
        self.need_reward = need_reward
        self.carried = carried.copy()
        self.format = _format(source)
        # Rows of a Parquet log are found again by their number, responses of one row are not.
        self.copied = self.format != "parquet"
        self.stored = self.copied or by.aids.reward is not None  # or its results are
        self.enforced = carried.enforced(by, self.copied)
        # What the file's fields hold, and what a reward function's results do.
        self.logged: dict[str, str] = {}
        self.results: dict[str, str] = {}
        self.answers: dict[int, Answers] = {}
        self.by_prompt = self.format == "jsonl"
        self.captured = False

    @property
    def kinds(self) -> dict[str, str]:
        return self.logged | self.results

    def load(self) -> Loaded:
        read = self._read(self.progress)
        if not read.settled:  # what a field holds, or that there is one, was told by a later chunk
            self.spool.close()
            again = self._read(None, again=True)
            if again.digest != read.digest:
                raise InputError(f"{self.source.file}: changed while it was read; filter again")
            read = again
        if whole := [record for record in read.bad if record.source_row is None]:
            # A file cut half-way may lack any row of any group: all of it is out.
            lost = read.records - 1
            read.light, read.bad, read.records = read.light[:1], whole[:1], 1
            self.spool.close()
        light = [part for part in read.light[1:] if len(part)] or read.light[:1]
        rows = light[0] if len(light) == 1 else pl.concat(light, how="diagonal_relaxed")
        step = constant(self.source.step, len(rows), pl.Int64)
        rows = rows.hstack([step.alias("step")])
        grouped = group(rows, self.source.file, lossy=bool(read.bad))
        fingerprint = read.fingerprint.hexdigest()
        repeated = self._repeated(fingerprint)
        repeat = constant(repeated is not None, len(grouped.rows), pl.Boolean)
        notes = grouped.notes
        if whole and lost > 0:
            notes.append(
                f"{self.source.file}: cut, so its {lost:,} other records are left out, too"
            )
        if repeated is not None:
            notes.append(f"{self.source.file}: the same rollouts as step {repeated} (`repeat`)")
        return Loaded(
            rows=grouped.rows.hstack([repeat.alias("repeat")]),
            texts=self.spool if self.stored else None,
            ids=grouped.ids,
            format=format_of(self.kinds, self.format, grouped.cut) if self.kinds else None,
            group_source=grouped.source,
            length_source=read.reading.length.source if read.reading else None,
            records=read.records,
            digest=read.digest,
            fingerprint=fingerprint,
            bad=read.bad + grouped.bad,
            notes=notes,
            from_text=read.from_text,
            pins=self.by.aids.pins,
            carried=self.carried.after(self.kinds, read.reading),
        )

    def _read(self, progress: Progress | None, again: bool = False) -> _Read:
        """Read all chunks, each by what is known of the file's fields when it is read. Once a chunk
        tells more than those before it, the rest is read for that alone."""
        reader, chunks = self._open(progress)
        read, function = _Read(), self.by.aids.reward
        for number, chunk in enumerate(chunks):
            read.settled &= len(read.light) == 1 or chunk.kinds == self.logged
            self.logged.update(chunk.kinds)
            if function and len(chunk.places):
                chunk = self._scored(chunk, function, number)
                read.settled &= len(read.light) == 1 or chunk.kinds == self.kinds
                self.results = {
                    name: k for name, k in chunk.kinds.items() if name not in self.logged
                }
            read.bad += chunk.bad
            if read.settled and len(chunk.places):
                try:
                    self._add(chunk, read)
                except InputError:  # a field that is missing may yet come
                    if again:
                        raise
                    read.settled = False
        read.records, read.digest = reader.records, reader.digest or sha256_of(self.source.path)
        return read

    def _add(self, chunk: Chunk, read: _Read) -> None:
        reading = read.reading = self._reading()
        found = facts(replace(chunk, bad=[]), reading)
        read.bad += found.bad
        read.light.append(found.light)
        for name, count in found.from_text.items():
            read.from_text[name] = read.from_text.get(name, 0) + count
        if reading.group_by_prompt and found.light["uid"].null_count() == len(found.light):
            read.fingerprint.add(found.rows, reading.fields)
        if self.stored:
            place = found.light["source_row"]
            self.spool.add(text_part(found.rows, place, reading.fields, chunk.kinds, self.copied))

    def _repeated(self, fingerprint: str) -> int | None:
        """The earlier step that holds the same rollouts, if one does."""
        if not fingerprint:
            return None
        first = self.carried.fingerprints.setdefault(fingerprint, self.source.step)
        return first if first != self.source.step else None

    def _open(self, progress: Progress | None) -> tuple[jsonl.Reader | parquet.Reader, Chunks]:
        source = self.source
        if not self.copied:
            reader = parquet.Reader(source.path, source.file)
            return reader, reader.chunks(self.enforced, self._choose, progress)
        reader_class = generation.Reader if self.format == "generation" else jsonl.Reader
        lines = reader_class(source.path, source.file)
        return lines, lines.chunks(self.enforced, self.logged, progress)

    def _scored(self, chunk: Chunk, function: RewardFunction, number: int) -> Chunk:
        """The chunk with the reward function's results; it is called once for each row."""
        if number not in self.answers:
            fields = resolve({**self.carried.kinds, **self.kinds}, function.name, None)
            self.answers[number] = function.answers(chunk, fields, self.source.file)
        answers = self.answers[number]
        return function.scored(chunk, answers, self.source.file, self.enforced, self.results)

    def _choose(self, kinds: Mapping[str, str]) -> list[str]:
        self.logged = dict(kinds)
        # Where uids may be verl's row keys, prompts must be compared.
        uid = parquet.first(self.source.path, "uid")
        self.by_prompt = uid is None or bool(re.match(ROW_KEY, str(uid)))
        if SESSION in kinds:
            self.captured = captured(pq.read_metadata(self.source.path)) is not None
        return self._reading().columns(kinds)

    def _reading(self) -> Reading:
        file, recipe = self.source.file, self.by.recipe
        known = {**self.carried.kinds, **self.kinds}
        tokenizer, function = self.by.aids.tokenizer, self.by.aids.reward
        reward = self.carried.reward
        if function:
            reward = function.name
        elif self.need_reward or any(name in self.kinds for name in REWARDS):
            reward = reward_field(self.kinds, reward or recipe.reward, file)
        length = length_of(self.kinds, recipe.length, tokenizer is not None, file, self.captured)
        if length.unit != (self.carried.unit or length.unit):
            raise InputError(
                f"{file}: length would be in {length.unit}, earlier steps' is in "
                f"{self.carried.unit}; one run has one unit: set length= or filter apart"
            )
        fields = resolve(known, reward, length)
        # An `acc` that was logged with another score says nothing of a reward function's.
        stale = function is not None and fields.find("acc") not in fields.results
        return Reading(
            file=file,
            step=self.source.step,
            fields=fields,
            reward=reward or "",
            length=length,
            wanted=self.by.named,
            as_numbers=self._numbers(fields),
            as_truths=self.by.as_truths - ({"acc"} if stale else set()),
            group_by_prompt=self.by_prompt,
            count_tokens=tokenizer.count if tokenizer else None,
            scored=function is not None,
            captured=self.captured,
        )

    def _numbers(self, fields: Fields) -> frozenset[str]:
        """The fields whose every value must be a number, for the recipe uses it as one."""
        found = {fields.find(name) for name in self.by.as_numbers}
        return frozenset(name for name in found if name)


def digest_of(source: Source, by: Rules, carried: Carried) -> str:
    """What pins a source's content now, read as a step that `carried` goes on from would be."""
    loader = _Loader(source, by, carried, Spool(source.path.parent), None)
    if loader.format == "jsonl":
        return sha256_of(source.path)
    try:
        with pq.ParquetFile(source.path) as file:
            if loader.copied:
                read = generation.columns(file.schema_arrow)
            else:
                kinds = {field.name: arrow_types.kind_of(field.type) for field in file.schema_arrow}
                read = loader._choose(kinds)
            footer.check(file.metadata)
            return footer.digest(source.path, file.metadata, read)
    except (ValueError, pa.ArrowException, OSError, InputError):
        return sha256_of(source.path)


def _format(source: Source) -> str:
    """Which reader reads a source; told by its content, by its name where that is broken."""
    if not parquet.matches(source.path):
        return source.kind
    return "generation" if generation.matches(source.path) else "parquet"


def _empty() -> pl.DataFrame:
    return pl.DataFrame(
        schema={
            "source_row": pl.Int64, "line": pl.Int64, "uid": pl.String, "prompt": pl.String,
            "truth": pl.String, "reward": pl.Float64, "response_length": pl.Int64,
            "no_response": pl.Boolean, "policy_version": pl.Int64, "truncated": pl.Boolean,
            "finish_reason": pl.String,
        }
    )  # fmt: skip
