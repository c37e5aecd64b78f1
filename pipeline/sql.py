"""SQL over a run: one SELECT over the views of the contract, in DuckDB."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollsift.schemas.errors import UsageError

from .store import Run
from .views import Seen, Views

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


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
            return _with_views(run, connection, Seen()).execute(text, values)
    except duckdb.Error as error:
        raise UsageError(f"SQL: {error}") from None


def _with_views(run: Run, connection: DuckDBPyConnection, seen: Seen) -> DuckDBPyConnection:
    views = Views(run, connection, seen)
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


def _seen(connection: DuckDBPyConnection, text: str) -> Seen:
    row = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchone()
    tree = json.loads(row[0]) if row else {"error": True}
    if tree["error"]:
        return Seen()  # EXPLAIN and what cannot be serialised
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
    return Seen(None if listing else frozenset(tables), None if everything else frozenset(columns))
