"""rollsift sql: ask a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run

from .output import format_option, write


@click.command(
    "sql",
    epilog='Example: rollsift sql run "SELECT reason, count(*) AS n FROM discarded GROUP BY ALL"',
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("text", required=False, metavar="[QUERY]")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="how long the query may work",
)
@format_option
def command(run: Path, text: str | None, timeout: float, format_: str) -> None:
    """Run one SELECT over a run: views rollouts, kept, discarded, groups, steps, bad_records.

    Without QUERY it is read from stdin. The dialect is DuckDB's.
    """
    asked = sys.stdin.read() if text is None else text
    write(query(Run(run), asked, seconds=timeout), format_)
