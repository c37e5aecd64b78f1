"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from rollsift.pipeline.aids import Aids


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`-r/--recipe` and `-s/--set`."""
    command = click.option(
        "-s", "--set", "sets", multiple=True, metavar="KEY=VALUE", help="change a key of the recipe"
    )(command)
    return click.option(
        "-r",
        "--recipe",
        required=True,
        metavar="NAME|FILE",
        help="a shipped recipe, or a YAML file: one of your own, or verl's with filter_sample or "
        "filter_groups",
    )(command)


def aids_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--tokenizer` and `--reward-fn`, which the command gets loaded, as `aids`."""

    @click.option(
        "--tokenizer",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="a tokenizer.json or its folder: gives logs of text only their lengths in tokens",
    )
    @click.option(
        "--reward-fn",
        metavar="FILE.py:NAME",
        help="a function in the form of verl's compute_score, also package.module:NAME: "
        "scores every response, in place of a logged score",
    )
    @wraps(command)
    def with_aids(tokenizer: Path | None, reward_fn: str | None, **rest: Any) -> Any:
        return command(aids=Aids.named(tokenizer, reward_fn), **rest)

    return with_aids
