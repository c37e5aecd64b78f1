"""rollsift verify: whether a run and its logs are what they were."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import click

from rollsift.pipeline.aids import Aids
from rollsift.pipeline.store import Run
from rollsift.pipeline.verify import verify
from rollsift.schemas.errors import CheckError

from .options import aids_options
from .output import format_option, note, printable, progress, write_rows


@click.command("verify", epilog="Example: rollsift verify run --deep")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="also judge the logs again, and compare every value")
@click.option(
    "--logs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="where the logs lie now, if not where they were filtered",
)
@aids_options
@format_option
def command(run: Path, deep: bool, logs: Path | None, aids: Aids, format_: str) -> None:
    """Check that a run is as it was published and that its logs are those that it was made from.

    Every finding is a row: file, expected, found, next; then the exit status is 4. A run that was
    filtered with --tokenizer or --reward-fn needs them again for --deep.
    """
    found = verify(Run(run), deep=deep, logs=logs, aids=aids, bars=progress)
    for text in found.notes:
        note(text)
    if found.findings or format_ != "table":
        write_rows(["file", "expected", "found", "next"], map(astuple, found.findings), format_)
    else:
        click.echo(printable(f"{run}: as published{' and as its logs are judged again' * deep}"))
        click.echo(f"steps {found.steps:,}, rows {found.rows:,}, files looked at {found.files:,}")
    if found.findings:
        raise CheckError(f"{run}: {len(found.findings):,} finding{'s' * (len(found.findings) > 1)}")
