"""Load: one step's file to light rows in groups, with its text set aside chunk by chunk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.schemas.errors import BadRecord, InputError
from rollsift.schemas.manifest import Manifest
from rollsift.schemas.manifest import Source as Pinned

from .facts import Reading, facts
from .fields import IDS, MASK, REWARDS, Fields, format_of, length_of, resolve, reward_field
from .groups import ROW_KEY, group
from .readers import Chunk, Chunks, generation, jsonl, parquet
from .score import Rules
from .sources import Source
from .store import Spool
from .texts import Fingerprint, joint, json_texts, text_part

Progress = Callable[[int], None]

# Fields whose values may be of any kind, by role: they are shown as text.
_ANY = ("prompt", "ground_truth", "step", "policy_version", "truncated")


@dataclass(slots=True)
class Carried:
    """What steps hand on: the reward's field, the unit of length, the kinds of fields (the first
    step that has a field fixes it), and the content of logs in which a batch can stand twice."""

    reward: str | None = None
    unit: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, fingerprints: dict[str, int] | None = None) -> Carried:
        """What the step of a manifest hands on."""
        kinds = dict(manifest.field_types)
        return cls(manifest.reward_field, manifest.length_unit, kinds, fingerprints or {})

    def fields(self) -> Fields:
        """The roles of all fields seen so far."""
        return resolve(self.kinds, self.reward, None)


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
        self.carried = replace(
            carried, kinds=dict(carried.kinds), fingerprints=dict(carried.fingerprints)
        )
        self.fixed = dict(carried.kinds)
        self.format = _format(source)
        # Rows of a Parquet log are found again by their number, responses of one row are not.
        self.copied = self.format != "parquet"
        self.stored = self.copied or by.aids.reward is not None  # or its results are
        self.kinds: dict[str, str] = {}
        self.as_read: dict[str, str] = {}  # kinds of text fields that were read as numbers
        self.by_prompt = self.format == "jsonl"

    def load(self) -> Loaded:
        light, bad = [_empty()], []
        held: list[dict[str, str]] = []
        from_text: dict[str, int] = {}
        fingerprint, length_source = Fingerprint(), None
        reader, chunks = self._open()
        for chunk in map(self._scored, chunks):
            bad += chunk.bad
            for name, kind in chunk.kinds.items():
                self.kinds[name] = joint(self.kinds.get(name), kind)
            if not len(chunk.places):
                continue
            reading = self._reading()
            length_source = reading.length.source
            read = facts(replace(chunk, bad=[]), reading)
            bad += read.bad
            for name, count in read.from_text.items():
                from_text[name] = from_text.get(name, 0) + count
            light.append(read.light)
            held.append(read.kinds)
            for name, kind in read.kinds.items():
                if kind != chunk.kinds.get(name):
                    self.as_read[name] = joint(self.as_read.get(name), kind)
            if reading.group_by_prompt and read.light["uid"].null_count() == len(read.light):
                fingerprint.add(read.rows, reading.fields)
            if self.stored:
                place = read.light["source_row"]
                self.spool.add(
                    *text_part(read.rows, place, reading.fields, read.kinds, self.copied)
                )
        records, digest = reader.records, reader.digest or _sha256(self.source.path)
        if whole := [record for record in bad if record.source_row is None]:
            # A file cut half-way may lack any row of any group: all of it is out.
            light, bad, records = light[:1], whole[:1], 1
            self.spool.close()
        light[1:] = [self._as_mixed(*part) for part in zip(light[1:], held, strict=False)]
        rows = pl.concat(light, how="diagonal_relaxed").with_columns(
            step=pl.lit(self.source.step, pl.Int64)
        )
        grouped = group(rows, self.source.file, lossy=bool(bad))
        repeated = self._repeated(fingerprint.hexdigest())
        notes = grouped.notes
        if repeated is not None:
            notes.append(f"{self.source.file}: the same rollouts as step {repeated} (`repeat`)")
        return Loaded(
            rows=grouped.rows.with_columns(repeat=pl.lit(repeated is not None)),
            texts=self.spool if self.stored else None,
            ids=grouped.ids,
            format=format_of(self.kinds, self.format, grouped.cut) if self.kinds else None,
            group_source=grouped.source,
            length_source=length_source,
            records=records,
            digest=digest,
            fingerprint=fingerprint.hexdigest(),
            bad=bad + grouped.bad,
            notes=notes,
            from_text=from_text,
            pins=self.by.aids.pins,
            carried=self._carry(),
        )

    def _as_mixed(self, light: pl.DataFrame, kinds: Mapping[str, str]) -> pl.DataFrame:
        """A chunk's fields for expressions, as JSON text where other chunks made them mixed."""
        for wanted in self.by.wanted:
            field, name = self._reading().fields.find(wanted) or "", f"field:{wanted}"
            plain = kinds.get(field) in ("bool", "int", "float", "string")
            if plain and self.kinds.get(field) == "mixed" and field not in self.as_read:
                light = light.with_columns(json_texts(light[name]))
        return light

    def _repeated(self, fingerprint: str) -> int | None:
        """The earlier step that holds the same rollouts, if one does."""
        if not fingerprint:
            return None
        first = self.carried.fingerprints.setdefault(fingerprint, self.source.step)
        return first if first != self.source.step else None

    def _open(self) -> tuple[jsonl.Reader | parquet.Reader, Chunks]:
        source = self.source
        if not self.copied:
            reader = parquet.Reader(source.path, source.file)
            return reader, reader.chunks(self._enforced(), self._choose, self.progress)
        reader_class = generation.Reader if self.format == "generation" else jsonl.Reader
        lines = reader_class(source.path, source.file)
        return lines, lines.chunks(self._enforced(), self.progress)

    def _scored(self, chunk: Chunk) -> Chunk:
        """The chunk with a reward function's results, if there is one."""
        function = self.by.aids.reward
        if function is None or not len(chunk.places):
            return chunk
        fields = resolve({**self.fixed, **self.kinds, **chunk.kinds}, function.name, None)
        return function.score(chunk, fields, self.source.file, self._enforced())

    def _enforced(self) -> dict[str, str]:
        """The kinds that values must be of: those of earlier steps, text where text is due."""
        fixed = dict(self.fixed)
        roles = self.carried.fields()
        free = {roles.columns.get(role) for role in _ANY} | {self.carried.reward}
        free |= {roles.find(name) for name in self.by.as_numbers | {"acc"}}
        free |= {MASK, IDS, "response_length", self.by.recipe.length}
        fixed |= {name: "any" for name in fixed if name in free}
        if self.copied:
            fixed |= dict.fromkeys(("input", "output", "uid", "completion", "response"), "text")
        return fixed

    def _choose(self, kinds: Mapping[str, str]) -> list[str]:
        self.kinds = dict(kinds)
        # Where uids may be verl's row keys, prompts must be compared.
        uid = parquet.first(self.source.path, "uid")
        self.by_prompt = uid is None or bool(re.match(ROW_KEY, str(uid)))
        return self._reading().columns(kinds)

    def _reading(self) -> Reading:
        file, recipe = self.source.file, self.by.recipe
        known = {**self.fixed, **self.kinds}
        tokenizer, function = self.by.aids.tokenizer, self.by.aids.reward
        if function:
            self.carried.reward = function.name
        elif self.need_reward or any(name in self.kinds for name in REWARDS):
            wanted = self.carried.reward or recipe.reward
            self.carried.reward = reward_field(self.kinds, wanted, file)
        length = length_of(self.kinds, recipe.length, tokenizer is not None, file)
        self.carried.unit = self.carried.unit or length.unit
        if length.unit != self.carried.unit:
            raise InputError(
                f"{file}: length would be in {length.unit}, earlier steps' is in "
                f"{self.carried.unit}; one run has one unit: set length= or filter apart"
            )
        fields = resolve(known, self.carried.reward, length)
        # An `acc` that was logged with another score says nothing of a reward function's.
        stale = function is not None and fields.find("acc") not in fields.results
        numbers = {fields.find(name) for name in self.by.as_numbers}
        return Reading(
            file=file,
            step=self.source.step,
            fields=fields,
            reward=self.carried.reward or "",
            length=length,
            wanted=self.by.named if stale else self.by.wanted,
            as_numbers=frozenset(name for name in numbers if name),
            group_by_prompt=self.by_prompt,
            count_tokens=tokenizer.count if tokenizer else None,
            scored=function is not None,
        )

    def _carry(self) -> Carried:
        for name, kind in (self.kinds | self.as_read).items():
            if kind != "null":
                word = "number" if kind in ("int", "float") else kind
                self.carried.kinds.setdefault(name, word)
        return self.carried


def digest_of(source: Source, by: Rules, carried: Carried) -> str:
    """What pins a source's content now, read as a step that `carried` goes on from would be."""
    loader = _Loader(source, by, carried, Spool(source.path.parent), None)
    if loader.format == "jsonl":
        return _sha256(source.path)
    try:
        with pq.ParquetFile(source.path) as file:
            if loader.copied:
                read = generation.columns(file.schema_arrow)
            else:
                kinds = {field.name: parquet.kind_of(field.type) for field in file.schema_arrow}
                read = loader._choose(kinds)
            return parquet.digest(source.path, file.metadata, read)
    except (pa.ArrowException, OSError, InputError):
        return _sha256(source.path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
