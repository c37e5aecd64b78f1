"""rollsift sql: ask a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import UsageError

from .output import format_option, write


@click.command(
    "sql",
    epilog='Example: rollsift sql run "SELECT reason, count(*) AS n FROM discarded GROUP BY ALL"',
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("text", required=False, metavar="[QUERY]")
@format_option
def command(run: Path, text: str | None, format_: str) -> None:
    """Run one SELECT over a run: views rollouts, kept, discarded, groups, steps, bad_records.

    Without QUERY it is read from stdin. The dialect is DuckDB's.
    """
    import duckdb

    try:
        write(query(Run(run), sys.stdin.read() if text is None else text), format_)
    except duckdb.Error as error:  # rows are made as they are fetched
        raise UsageError(f"SQL: {error}") from None
    except RuntimeError as error:
        if str(error) == "Query interrupted":  # DuckDB's word for Ctrl-C
            raise KeyboardInterrupt from None
        raise
