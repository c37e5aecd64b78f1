"""SQL over a run: the views of the contract in DuckDB, built for the columns that a query names.

Joining the text of Parquet sources costs ten times a light query, so a view holds only what the
query can see: its columns by name, or all of them where it says `*`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rollsift.schemas.columns import BAD_RECORDS, GROUPS, ROLLOUTS, VIEWS
from rollsift.schemas.errors import InputError, UsageError
from rollsift.schemas.reasons import NOT_COUNTED

from .fields import Fields, length_of, resolve
from .store import Run, Step
from .texts import TEXTS, stored_name

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_TYPES = {"string": "VARCHAR", "bool": "BOOLEAN", "nested": "JSON", "mixed": "JSON"}


def query(run: Run, text: str, parameters: Mapping[str, Any] | None = None) -> DuckDBPyConnection:
    """Run one SELECT over the views of a run; -> a connection to fetch the result from.

    Raises UsageError with DuckDB's words for what is no single SELECT or does not run.
    """
    import duckdb

    try:
        _check_one_select(text)
        values = dict(parameters) if parameters else None
        connection = duckdb.connect(config={"python_enable_replacements": "false"})
        seen = _seen(connection, text)
        try:
            return _with_views(run, connection, seen).execute(text, values)
        except duckdb.BinderException:
            # Over all columns DuckDB can say which name was perhaps meant.
            return _with_views(run, connection, _Seen()).execute(text, values)
    except duckdb.Error as error:
        raise UsageError(f"SQL: {error}") from None


def _with_views(run: Run, connection: DuckDBPyConnection, seen: _Seen) -> DuckDBPyConnection:
    views = _Views(run, connection, seen)
    for name in views.needed():
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {views.definition(name)}")
    return connection


def _check_one_select(text: str) -> None:
    import duckdb

    statements = duckdb.extract_statements(text)
    kinds = [statement.type.name for statement in statements]
    if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN"):
        found = ", ".join(kinds) or "nothing"
        raise UsageError(f"SQL: expected one SELECT, found {found}; a run is only read")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a query can see: tables and columns by name, in lower case; None for all of them."""

    tables: frozenset[str] | None = None
    columns: frozenset[str] | None = None


def _seen(connection: DuckDBPyConnection, text: str) -> _Seen:
    row = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchone()
    tree = json.loads(row[0]) if row else {"error": True}
    if tree["error"]:
        return _Seen()  # EXPLAIN and what cannot be serialised
    columns: set[str] = set()
    tables: set[str] = set()
    everything = False
    pending: list[Any] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            everything |= node.get("class") == "STAR" or node.get("join_type") == "NATURAL"
            columns.update(node.get("column_names") or ())
            columns.update(node.get("using_columns") or ())
            if table := node.get("table_name"):
                tables |= {table.lower(), node.get("alias", "").lower()}
            pending += node.values()
    columns = {name.lower() for name in columns}
    # A view's own name as a value is the whole row.
    everything = everything or bool(columns & tables)
    listing = "show_type" in str(tree)  # SHOW and DESCRIBE
    return _Seen(None if listing else frozenset(tables), None if everything else frozenset(columns))


class _Views:
    """Definitions of the views over the newest version of each step."""

    def __init__(self, run: Run, connection: DuckDBPyConnection, seen: _Seen) -> None:
        self.run, self.connection, self.seen = run, connection, seen
        self.steps = list(run.steps().values())
        self.root = Path(run.info.log_root)

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
        return self.seen.columns is None or name.lower() in self.seen.columns

    def _tables(self, kind: str, steps: Sequence[Step] | None = None, union: bool = False) -> str:
        paths = [
            self.run.table(kind, step.step, step.version)
            for step in (self.steps if steps is None else steps)
        ]
        return _read(paths, "union_by_name = true" if union else "")

    def _rollouts(self) -> str:
        copied = [step for step in self.steps if _is_copied(step)]
        referenced = [step for step in self.steps if not _is_copied(step)]
        parts = []
        if copied:
            parts.append(self._part(copied, self._copied_text(copied)))
        if referenced:
            parts.append(self._part(referenced, *self._referenced_text(referenced)))
        return " UNION ALL BY NAME ".join(f"({part})" for part in parts)

    def _part(self, steps: Sequence[Step], texts: Mapping[str, str], join: str = "") -> str:
        """SELECT of the rollouts of some steps; `texts` maps shown text columns to expressions."""
        shown = []
        from_groups = False
        for column in ROLLOUTS:
            if not self._wants(column.name):
                continue
            if column.home == "rollouts":
                shown.append(f"r.{column.name}")
            elif column.home == "groups":
                shown.append(f"g.{column.name}")
                from_groups = True
            else:
                shown.append(f"{texts.get(column.name, 'NULL::VARCHAR')} AS {column.name}")
        others = {name: text for name, text in texts.items() if name not in TEXTS}
        shown += [f"{text} AS {_quote(name)}" for name, text in others.items()]
        if "kept" not in {name.removeprefix("r.") for name in shown}:
            shown.append("r.kept")
        source = f"{self._tables('rollouts', steps, union=bool(texts) and not join)} r {join}"
        if from_groups:
            same = 'r.step = g.step AND r."group" = g."group"'
            source += f" LEFT JOIN {self._tables('groups', steps)} g ON {same}"
        return f"SELECT {', '.join(shown)} FROM {source}"

    def _fields(self, steps: Sequence[Step]) -> Fields:
        manifest = steps[-1].manifest
        kinds = manifest.field_types
        try:
            length = length_of(kinds, manifest.recipe["length"], False, "")
        except InputError:
            length = None
        return resolve(kinds, manifest.reward_field, length)

    def _copied_text(self, steps: Sequence[Step]) -> dict[str, str]:
        fields = self._fields(steps)
        kinds = steps[-1].manifest.field_types
        wanted = {name: f"r.{name}" for name in TEXTS if self._wants(name)}
        extras = {
            shown: stored_name(field)
            for field, shown in fields.extras.items()
            if self._wants(shown)
        }
        if extras:
            stored = self._columns(self._tables("rollouts", steps, union=True))
            for shown, name in extras.items():
                type_ = _TYPES.get(kinds[_key(fields.extras, shown)])
                cast = f"::{type_}" if type_ else ""
                wanted[shown] = f"r.{_quote(name)}{cast}" if name in stored else "NULL"
        return wanted | self._aliases(fields)

    def _aliases(self, fields: Fields, source: Mapping[str, str] | None = None) -> dict[str, str]:
        """Consumed fields under their logged names."""
        return {
            logged: f"r.{column}"
            for logged, column in fields.aliases.items()
            if self._wants(logged) and (source is None or column not in source)
        }

    def _referenced_text(self, steps: Sequence[Step]) -> tuple[dict[str, str], str]:
        """Text columns of Parquet sources, and the join that brings them in."""
        fields = self._fields(steps)
        logged = {
            name: fields.columns[name]
            for name in TEXTS
            if name in fields.columns and self._wants(name)
        }
        logged |= {shown: field for field, shown in fields.extras.items() if self._wants(shown)}
        text_aliases = {
            alias: alias
            for alias, column in fields.aliases.items()
            if column in TEXTS and self._wants(alias)
        }
        light = {
            alias: f"r.{column}"
            for alias, column in fields.aliases.items()
            if column not in TEXTS and self._wants(alias)
        }
        logged |= text_aliases
        if not logged:
            return light, ""
        paths = [self.root / step.manifest.sources[0].file for step in steps]
        for path in paths:
            if not path.exists():
                raise InputError(
                    f"{path}: the text and tokens of this run stay in its logs, and this one is "
                    "gone; bring it back"
                )
        source = _read(paths, "union_by_name = true, filename = true, file_row_number = true")
        stored = self._columns(source)
        texts = {}
        for shown, field in logged.items():
            cast = "::VARCHAR" if shown in TEXTS or shown in text_aliases else ""
            texts[shown] = f"s.{_quote(field)}{cast}" if field in stored else "NULL::VARCHAR"
        where = f"s.filename = {_literal(f'{self.root.as_posix()}/')} || r.source_file"
        return (
            texts | light,
            f"LEFT JOIN {source} s ON {where} AND s.file_row_number = r.source_row",
        )

    def _columns(self, source: str) -> set[str]:
        rows = self.connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
        return {row[0] for row in rows}

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


def _is_copied(step: Step) -> bool:
    """Whether a step's text was copied into its table: so it is unless its source is Parquet."""
    return ".parquet" not in step.manifest.sources[0].file


def _key(mapping: Mapping[str, str], value: str) -> str:
    return next(key for key, held in mapping.items() if held == value)


def _read(paths: Sequence[Path], options: str = "") -> str:
    files = ", ".join(_literal(path.as_posix()) for path in paths)
    return f"read_parquet([{files}]{', ' + options if options else ''})"


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
