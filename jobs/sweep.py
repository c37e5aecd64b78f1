"""rollsift sweep: many settings compared, nothing stored."""

from __future__ import annotations

from pathlib import Path

import click

from rollsift.pipeline import recipes
from rollsift.pipeline.aids import Aids
from rollsift.pipeline.chart import chart
from rollsift.pipeline.points import COLUMNS, Point, grid
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sweep import sweep

from .list_recipes import SHIPPED
from .options import aids_options, recipe_options
from .output import note, progress, write_rows


@click.command(
    "sweep",
    epilog="Example: rollsift sweep logs/ -r gfpo-shortest --grid k=2,4,8 "
    "--grid metric=response_length,token_efficiency",
)
@click.argument("logs", nargs=-1, required=True, metavar="LOGS...")
@recipe_options
@click.option(
    "--grid",
    "grids",
    multiple=True,
    required=True,
    metavar="KEY=VALUE,...",
    help="values to try for a key, every one with all of the other keys'; `;` separates where a "
    "value holds a comma: 'metric=greatest(response_length, 50);reward'",
)
@aids_options
@click.option("--skip-bad", is_flag=True, help="leave bad records out")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="an HTML file to draw into: mean length against mean reward",
)
@click.option(
    "-f",
    "--format",
    "format_",
    type=click.Choice(["table", "json", "jsonl", "csv"]),
    default="table",
    show_default=True,
    help="json is one array of objects",
)
def command(
    logs: tuple[str, ...],
    recipe: str,
    sets: tuple[str, ...],
    grids: tuple[str, ...],
    aids: Aids,
    skip_bad: bool,
    plot: Path | None,
    format_: str,
) -> None:
    """Judge LOGS by a recipe at every point of a grid; print what each point keeps.

    Counts are of rollouts. tokens_ratio is what an update would see of all tokens, length_change
    compares mean lengths; _all is over all rollouts that count. groups_no_signal are those whose
    kept rewards are all equal. Every value is what filter gives for these settings.
    """
    points: list[Point] = []
    for keys in grid(grids):
        settings = [*sets, *(f"{key}={value}" for key, value in keys.items())]
        chosen = recipes.load(recipe, settings, SHIPPED, (lambda _: None) if points else note)
        points.append(Point(keys, chosen))
    found = discover(logs)
    for text in found.notes:
        note(text)
    notes: list[str] = []
    size = sum(source.path.stat().st_size for source in found.sources)
    with progress(size, "sweep") as bar:
        sweep(
            found,
            points,
            aids=aids,
            skip_bad=skip_bad,
            notify=notes.append,
            progress=bar.update,
        )
    for text in notes:
        note(text)
    if plot:  # first, for whoever reads the table may go
        plot.write_text(chart(points), encoding="utf-8")
    rows = [point.row() for point in points]
    write_rows([*points[0].keys, *COLUMNS], [list(row.values()) for row in rows], format_)
