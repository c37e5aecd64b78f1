"""rollsift filter: the main job."""

from __future__ import annotations

from pathlib import Path

import click

from rollsift.pipeline import recipes
from rollsift.pipeline.aids import Aids
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.summary import summary

from .list_recipes import SHIPPED
from .options import aids_options, recipe_options
from .output import note, printable, progress


@click.command(
    "filter",
    epilog="Example: rollsift filter logs/ -r gfpo-shortest -s k=4 -o run",
)
@click.argument("logs", nargs=-1, required=True, metavar="LOGS...")
@recipe_options
@aids_options
@click.option("--skip-bad", is_flag=True, help="leave bad records out and list them in bad_records")
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="the run folder to write"
)
def command(
    logs: tuple[str, ...],
    recipe: str,
    sets: tuple[str, ...],
    aids: Aids,
    skip_bad: bool,
    out: Path,
) -> None:
    """Judge every rollout in LOGS (files, folders, globs) by a recipe; write a run folder.

    Steps whose logs are unchanged are skipped, new ones added. Unusable input publishes nothing.
    """
    chosen = recipes.load(recipe, sets, SHIPPED, note)
    found = discover(logs)
    for text in found.notes:
        note(text)
    notes: list[str] = []
    size = sum(source.path.stat().st_size for source in found.sources)
    with progress(size, "filter") as bar:
        outcome = filter_logs(
            found,
            chosen,
            out,
            aids=aids,
            skip_bad=skip_bad,
            notify=notes.append,
            progress=bar.update,
        )
    for text in notes:
        note(text)
    click.echo(printable(summary(out, outcome)))
