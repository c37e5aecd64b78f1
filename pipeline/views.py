"""Views: those of the contract as SQL over a run's tables and its Parquet sources, built for the
tables and columns that a query can see.

Joining the text of Parquet sources costs ten times a light query, so a view holds only what the
query can see: its columns by name, or all of them where it says `*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rollsift.schemas.columns import BAD_RECORDS, GROUPS, ROLLOUTS, VIEWS
from rollsift.schemas.errors import InputError
from rollsift.schemas.reasons import NOT_COUNTED

from .fields import Fields, length_of, resolve
from .store import TABLES, Run, Step
from .texts import TEXTS, stored_name

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_TYPES = {
    "string": "::VARCHAR", "bool": "::BOOLEAN", "nested": "::JSON", "mixed": "::JSON",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What a query can see: tables and columns by name, in lower case; None for all of them."""

    tables: frozenset[str] | None = None
    columns: frozenset[str] | None = None


class Views:
    """Definitions of the views over the newest version of each step."""

    def __init__(self, run: Run, connection: DuckDBPyConnection, seen: Seen) -> None:
        self.run, self.connection, self.seen = run, connection, seen
        self.root = Path(run.info.log_root)
        self.joined: dict[Path, set[str]] = {}  # Parquet logs and the columns read of them

    @cached_property
    def steps(self) -> list[Step]:
        """The newest version of each step; read only where a view needs it."""
        return list(self.run.steps(rows=False).values())

    @property
    def kinds(self) -> dict[str, str]:
        """What the run's fields hold, as its last step knows them."""
        return self.steps[-1].manifest.field_types if self.steps else {}

    @cached_property
    def fields(self) -> Fields:
        """The roles of these fields."""
        if not self.steps:
            return resolve({}, None, None)
        manifest = self.steps[-1].manifest
        wanted, tokenizer = manifest.recipe["length"], "tokenizer" in self.run.info.reader
        try:
            length = length_of(manifest.field_types, wanted, tokenizer, "")
        except InputError:
            length = None
        return resolve(manifest.field_types, manifest.reward_field, length)

    def needed(self) -> list[str]:
        """The views that the query names, each after those that it is made from."""
        wanted = VIEWS if self.seen.tables is None else self.seen.tables & set(VIEWS)
        base = ["rollouts"] if {"kept", "discarded"} & set(wanted) else []
        return list(dict.fromkeys(base + sorted(wanted, key=list(VIEWS).index)))

    def definition(self, name: str) -> str:
        """The SELECT that a view stands for."""
        if name in ("kept", "discarded"):
            return f"SELECT * FROM rollouts WHERE {'' if name == 'kept' else 'NOT '}kept"
        if name == "groups" and self.steps:
            columns = ", ".join(column.name for column in GROUPS)
            return f"SELECT {columns} FROM {self._tables('groups')}"
        makers = {
            "rollouts": self._rollouts, "steps": self._steps, "bad_records": self._bad_records,
        }  # fmt: skip
        return makers[name]() if self.steps else _no_rows(VIEWS[name])

    def _wants(self, name: str) -> bool:
        # `kept` and `discarded` are made by that column.
        return self.seen.columns is None or name.lower() in self.seen.columns | {"kept"}

    def tables(self) -> list[Path]:
        """All tables of the run's newest steps."""
        return [
            self.run.table(kind, step.step, step.version)
            for step in self.steps
            for kind in TABLES
            if kind != "bad_records" or step.manifest.counts.bad_records
        ]

    def _tables(self, kind: str, steps: Sequence[Step] | None = None, union: bool = False) -> str:
        paths = [
            self.run.table(kind, step.step, step.version)
            for step in (self.steps if steps is None else steps)
        ]
        return _read(paths, "union_by_name = true" if union else "")

    def _rollouts(self) -> str:
        wanted = self._wanted()
        if not wanted:
            return self._part(self.steps, {}, "")
        stored = self._stored()
        # SQL does not see case: names that differ by it are told apart in one source alone.
        apart = len({name.lower() for name in self.kinds}) < len(self.kinds)
        homes: dict[tuple[bool, int | None], list[Step]] = {}
        for step in self.steps:
            counts = step.manifest.counts
            copied = counts.rows == counts.bad_records or "response" in stored[step.step]
            alone = step.step if apart and not copied else None
            homes.setdefault((copied, alone), []).append(step)
        parts = []
        for (copied, _), steps in homes.items():
            columns = frozenset().union(*(stored[step.step] for step in steps))
            parts.append(self._part(steps, *self._texts(steps, wanted, columns, copied)))
        return " UNION ALL BY NAME ".join(f"({part})" for part in parts)

    def _part(self, steps: Sequence[Step], texts: Mapping[str, str], join: str) -> str:
        """SELECT of the rollouts of some steps; `texts` maps shown text columns to expressions."""
        shown, read = [], set()
        for column in ROLLOUTS:
            if not self._wants(column.name):
                continue
            if column.name == "metric":  # see tables.rollouts_table
                shown.append("nullif(coalesce(r.metric, r.response_length), 'NaN') AS metric")
            elif column.home in ("rollouts", "groups", "steps"):
                shown.append(f"{column.home[0]}.{column.name}")
                read.add(column.home)
            else:
                shown.append(f"{texts.get(column.name, 'NULL::VARCHAR')} AS {column.name}")
        others = {name: text for name, text in texts.items() if name not in TEXTS}
        shown += [f"{text} AS {_quote(name)}" for name, text in others.items()]
        shown += [
            f"r.{column} AS {_quote(logged)}"
            for logged, column in self.fields.aliases.items()
            if column not in TEXTS and self._wants(logged)
        ]
        union = any(text.startswith("r.") for text in texts.values())
        source = f"{self._tables('rollouts', steps, union=union)} r"
        if "steps" in read or join:
            source += f" LEFT JOIN {self._of_steps(steps)} ON r.step = s.step"
        if "groups" in read:
            same = 'r.step = g.step AND r."group" = g."group"'
            source += f" LEFT JOIN {self._tables('groups', steps)} g ON {same}"
        return f"SELECT {', '.join(shown)} FROM {source} {join}"

    def _of_steps(self, steps: Sequence[Step]) -> str:
        """What is the same in all rows of a step, and is not stored in each."""
        files = {self.run.table("groups", s.step, s.version).as_posix(): s for s in steps}
        lengths: dict[str, str] = {}
        if self._wants("length_source"):
            query = f"""SELECT file_name, decode(value)
                FROM parquet_kv_metadata({_files(map(Path, files))}) WHERE key = 'length_source'"""
            lengths = dict(self.connection.execute(query).fetchall())
        rows = (
            f"({s.step}, {_literal(s.manifest.sources[0].file)}, {_literal(lengths.get(file, ''))})"
            for file, s in files.items()
        )
        return f"(VALUES {', '.join(rows)}) s(step, source_file, length_source)"

    def _stored(self) -> dict[int, frozenset[str]]:
        """Step -> the columns of its rollouts table: with the text, where that was copied."""
        paths = {s.step: self.run.table("rollouts", s.step, s.version) for s in self.steps}
        files = f"parquet_schema({_files(list(paths.values()))})"
        query = f"SELECT file_name, list(name) FROM {files} GROUP BY ALL"
        names = dict(self.connection.execute(query).fetchall())
        return {step: frozenset(names[path.as_posix()]) for step, path in paths.items()}

    def _wanted(self) -> dict[str, tuple[str, str | None, str]]:
        """Text and extras that the query can see: shown name -> (stored column, logged field, cast
        of what is stored)."""
        texts = {name: name for name in TEXTS}
        texts |= {logged: name for logged, name in self.fields.aliases.items() if name in TEXTS}
        wanted = {
            shown: (name, self.fields.columns.get(name), "::VARCHAR")
            for shown, name in texts.items()
        }
        for field, shown in self.fields.extras.items():
            wanted[shown] = (stored_name(field), field, _TYPES.get(self.kinds[field], ""))
        return {shown: found for shown, found in wanted.items() if self._wants(shown)}

    def _texts(
        self,
        steps: Sequence[Step],
        wanted: Mapping[str, tuple[str, str | None, str]],
        stored: frozenset[str],
        copied: bool,
    ) -> tuple[dict[str, str], str]:
        """What is wanted as expressions over steps, and the join with their sources if it needs it:
        the text of a Parquet source is not stored again."""
        texts, absent = {}, {}
        for shown, (column, field, cast) in wanted.items():
            there = column in stored
            texts[shown] = f"r.{_quote(column)}{cast}" if there else f"NULL{cast}"
            if field is not None and not (there or copied):
                absent[shown] = field
        if not absent:
            return texts, ""
        paths = [step.log(self.root) for step in steps]
        for path in paths:
            if not path.exists():
                raise InputError(
                    f"{path}: the text and tokens of this run stay in its logs, and this one is "
                    "gone; bring it back"
                )
            self.joined.setdefault(path, set()).update(absent.values())
        plain = _read(paths, "union_by_name = true")
        rows = self.connection.execute(f"DESCRIBE SELECT * FROM {plain}").fetchall()
        logged = {row[0]: row[1] for row in rows}
        for shown, field in absent.items():
            if field not in logged:
                continue
            texts[shown] = f"l.{_quote(field)}"
            if field not in self.fields.extras:
                nested = logged[field].startswith(("STRUCT", "MAP")) or logged[field].endswith("]")
                texts[shown] = (
                    f"to_json({texts[shown]})" if nested else texts[shown]
                ) + "::VARCHAR"
        source, file, row = _numbered(paths, logged)
        where = f"l.{file} = {_literal(f'{self.root.as_posix()}/')} || s.source_file"
        return texts, f"LEFT JOIN {source} l ON {where} AND l.{row} = r.source_row"

    def _steps(self) -> str:
        values = ", ".join(
            f"({s.step}, {c.rows}, {c.kept}, {sum(c.dropped.values())}, {c.bad_records})"
            for s in self.steps
            for c in [s.manifest.counts]
        )
        uncounted = ", ".join(_literal(reason) for reason in NOT_COUNTED)
        return f"""
            WITH counts(step, rows, kept, dropped, bad_records) AS (VALUES {values}),
            counted AS (
                SELECT step, "group", kept, response_length, truncated
                FROM {self._tables("rollouts")} WHERE coalesce(reason, '') NOT IN ({uncounted})
            ),
            sizes AS (
                SELECT step, sum(group_size) AS rollouts, count(*) FILTER (group_size > 0) AS groups
                FROM {self._tables("groups")} GROUP BY step
            ),
            lengths AS (
                SELECT step,
                    sum(response_length) AS before, sum(response_length) FILTER (kept) AS after,
                    count(*) AS rows_before, count(*) FILTER (kept) AS rows_after,
                    avg(truncated::INT) AS clip_before,
                    avg(truncated::INT) FILTER (kept) AS clip_after
                FROM counted GROUP BY step
            )
            SELECT step, c.rows::BIGINT AS rows, coalesce(rollouts, 0)::BIGINT AS rollouts,
                coalesce(groups, 0)::BIGINT AS groups, c.kept::BIGINT AS kept,
                c.dropped::BIGINT AS dropped, c.bad_records::BIGINT AS bad_records,
                coalesce(before, 0)::BIGINT AS tokens_before,
                coalesce(after, 0)::BIGINT AS tokens_after,
                before / rows_before AS mean_length_before,
                after / nullif(rows_after, 0) AS mean_length_after,
                clip_before AS clip_ratio_before, clip_after AS clip_ratio_after
            FROM counts c LEFT JOIN sizes USING (step) LEFT JOIN lengths USING (step)
            ORDER BY step"""

    def _bad_records(self) -> str:
        bad = [step for step in self.steps if step.manifest.counts.bad_records]
        return f"SELECT * FROM {self._tables('bad_records', bad)}" if bad else _no_rows(BAD_RECORDS)


def _read(paths: Sequence[Path], options: str = "") -> str:
    # DuckDB would take a folder's name like k=4 for a column.
    options = ", ".join(filter(None, ["hive_partitioning = false", options]))
    return f"read_parquet({_files(paths)}, {options})"


def _files(paths: Iterable[Path]) -> str:
    """A list of files; characters that would make patterns of their names stand for themselves."""
    names = (re.sub(r"[*?[]", r"[\g<0>]", path.as_posix()) for path in paths)
    return f"[{', '.join(map(_literal, names))}]"


def _numbered(paths: Sequence[Path], logged: Mapping[str, str]) -> tuple[str, str, str]:
    """Logs with each row's file and number beside what is logged; -> (source, names of both)."""
    taken = {name.lower() for name in logged}
    file, row = "filename", "file_row_number"
    while file in taken:
        file += "_"
    options = f"union_by_name = true, filename = '{file}'"
    if row not in taken:
        return _read(paths, f"{options}, file_row_number = true"), file, row
    # DuckDB has no other name for it, but counts over one file at a time in the order of its rows.
    while row in taken:
        row += "_"
    parts = [
        f"SELECT *, row_number() OVER () - 1 AS {row} FROM {_read([path], options)}"
        for path in paths
    ]
    return f"({' UNION ALL BY NAME '.join(parts)})", file, row


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_SQL_TYPES = {
    pa.int64(): "BIGINT", pa.int32(): "INTEGER", pa.float64(): "DOUBLE", pa.bool_(): "BOOLEAN",
}  # fmt: skip


def _no_rows(columns: Sequence[Any]) -> str:
    shown = [f"NULL::{_SQL_TYPES.get(c.type, 'VARCHAR')} AS {c.name}" for c in columns]
    return f"SELECT {', '.join(shown)} WHERE false"
