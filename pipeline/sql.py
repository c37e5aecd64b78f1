"""SQL over a run: one SELECT over the views of the contract, in DuckDB."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from rollsift.schemas.errors import CheckError, InputError, RollsiftError, UsageError, one_line

from .readers import parquet
from .store import Run
from .views import Seen, Views

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_T = TypeVar("_T")


def query(
    run: Run, text: str, parameters: Mapping[str, Any] | None = None, seconds: float | None = None
) -> Answer:
    """Run one SELECT over the views of a run.

    Raises UsageError with DuckDB's words for what is no single SELECT or does not run, InputError
    and CheckError where a log or a table is damaged, RollsiftError past `seconds` of DuckDB's work.
    """
    return Answer(run, text, parameters, seconds)


class Answer:
    """The result of a SELECT. Its rows are made as they are fetched, which raises as `query` does.

    DuckDB works in a thread beside, for only from outside it can be interrupted at once.
    """

    def __init__(
        self, run: Run, text: str, parameters: Mapping[str, Any] | None, seconds: float | None
    ) -> None:
        import duckdb

        self._run, self._seconds, self._left = run, seconds, seconds
        self._views: Views | None = None
        self._connection = duckdb.connect(config={"python_enable_replacements": "false"})
        self._connection.execute("SET enable_progress_bar = false")
        self._thread = ThreadPoolExecutor(1)
        self._do(lambda: self._execute(text, dict(parameters) if parameters else None))

    @property
    def description(self) -> Sequence[tuple[Any, ...]]:
        """Name and type of each column."""
        return self._connection.description or ()

    def fetchone(self) -> tuple[Any, ...] | None:
        """The next row."""
        return self._do(self._connection.fetchone)

    def fetchmany(self, size: int) -> list[tuple[Any, ...]]:
        """The next rows, none at the end."""
        return self._do(lambda: self._connection.fetchmany(size))

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows that are left."""
        return self._do(self._connection.fetchall)

    def read_all(self) -> pa.Table:
        """All rows as an Arrow table."""
        reader = self._do(self._connection.to_arrow_reader)
        assert reader is not None  # there is a result
        return self._do(reader.read_all)

    def _do(self, work: Callable[[], _T]) -> _T:
        import duckdb

        began, future = time.monotonic(), self._thread.submit(work)
        try:
            if not wait([future], self._left).done:
                raise RollsiftError(
                    f"SQL: not done within {self._seconds:g} s; ask for less, or allow it more "
                    "with --timeout"
                )
            return future.result()
        except duckdb.Error as error:
            raise self._told(error) from None
        finally:  # out of time, or Ctrl-C
            while not future.done():
                self._connection.interrupt()
                wait([future], 0.05)
            if self._left is not None:
                self._left = max(0.0, self._left - (time.monotonic() - began))
            del future  # its error's traceback leads here: nothing of it would go away

    def _execute(self, text: str, values: dict[str, Any] | None) -> None:
        import duckdb

        _check_one_select(text)
        try:
            self._with_views(_seen(self._connection, text)).execute(text, values)
        except (duckdb.BinderException, duckdb.CatalogException) as error:
            try:  # over all views and columns DuckDB can say which name was perhaps meant
                self._with_views(Seen())
            except InputError:
                raise error from None
            self._connection.execute(text, values)

    def _with_views(self, seen: Seen) -> duckdb.DuckDBPyConnection:
        views = self._views = Views(self._run, self._connection, seen)
        for name in views.needed():
            self._connection.execute(
                f"CREATE OR REPLACE TEMP VIEW {name} AS {views.definition(name)}"
            )
        return self._connection

    def _told(self, error: duckdb.Error) -> RollsiftError:
        """DuckDB's error for a person; where a file may be at fault, which one it is."""
        import duckdb

        of_files = (
            duckdb.IOException, duckdb.InvalidInputException, duckdb.SerializationException,
            duckdb.InternalException,
        )  # fmt: skip
        # DuckDB's readers also raise what has no class of its own.
        if self._views and (type(error) is duckdb.Error or isinstance(error, of_files)):
            for path in self._views.tables():
                if reason := parquet.damage(path):
                    return CheckError(
                        f"{path}: {reason}; `rollsift verify {self._run.path}` tells what else is "
                        "damaged"
                    )
            logs = self._views.joined.items()
            damaged = [(path, parquet.damage(path, fields)) for path, fields in logs]
            if told := [one_line(f"{path}: {reason}") for path, reason in damaged if reason]:
                return InputError("\n".join(told))
        # Lines that the query or a log breaks begin none of their own.
        return UsageError("\n  ".join(f"SQL: {error}".split("\n")))


def _check_one_select(text: str) -> None:
    import duckdb

    statements = duckdb.extract_statements(text)
    kinds = [statement.type.name for statement in statements]
    if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN"):
        found = ", ".join(kinds) or "nothing"
        raise UsageError(f"SQL: expected one SELECT, found {found}; a run is only read")


def _seen(connection: duckdb.DuckDBPyConnection, text: str) -> Seen:
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
