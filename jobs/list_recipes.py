"""rollsift recipes: what is shipped."""

from __future__ import annotations

from importlib.resources import files

import click

from rollsift.pipeline import recipes

SHIPPED = files("rollsift.jobs") / "recipes"


@click.command("recipes", epilog="Example: rollsift recipes gfpo-shortest > mine.yaml")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the shipped recipes, or print the one called NAME, to be copied and changed."""
    if name is not None:
        click.echo(recipes.text_of(name, SHIPPED), nl=False)
        return
    for shipped in recipes.names(SHIPPED):
        first = recipes.text_of(shipped, SHIPPED).splitlines()[0].removeprefix("# ")
        click.echo(f"{shipped:24}{first}")
