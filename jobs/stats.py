"""rollsift stats: what a log or a run holds."""

from __future__ import annotations

from pathlib import Path

import click

from rollsift.pipeline.aids import Aids
from rollsift.pipeline.sources import discover
from rollsift.pipeline.stats import stats_of_logs, stats_of_run
from rollsift.pipeline.store import Run

from .options import aids_options
from .output import format_option, note, say, write_rows


@click.command("stats", epilog="Example: rollsift stats logs/")
@click.argument("logs", nargs=-1, required=True, metavar="LOGS...|RUN")
@aids_options
@format_option
def command(logs: tuple[str, ...], aids: Aids, format_: str) -> None:
    """Say what was recognised in LOGS, or what RUN holds: format, steps, G, reward field, length
    unit; then verl's metrics by their names. Reads everything, writes nothing."""
    if len(logs) == 1 and (Path(logs[0]) / "run.json").exists():
        found = stats_of_run(Run(Path(logs[0])))
    else:
        sources = discover(logs)
        for text in sources.notes:
            note(text)
        found = stats_of_logs(sources, aids=aids)
    for record in found.bad[:20]:
        say(f"bad: {record}")
    write_rows(["name", "value"], list((found.facts | found.metrics).items()), format_)
