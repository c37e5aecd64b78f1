"""`rollsift`: the group of commands. A command's module is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

COMMANDS = {
    "filter": "keep the rollouts worth training on",
    "sweep": "compare settings before choosing",
    "sql": "ask a run what was kept and dropped",
    "stats": "what a log or a run holds",
    "recipes": "the shipped recipes",
}
MODULES = {"recipes": "list_recipes"}  # jobs/recipes is the folder of the recipes themselves


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"rollsift.jobs.{MODULES.get(name, name)}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: rollsift filter logs/ -r gfpo-shortest -o run",
)
@click.version_option(package_name="rollsift")
def cli() -> None:
    """Sift rollouts that verl logged: keep the ones worth training on, say why the others go."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 could not finish, 2 usage, recipe or SQL, 3 unusable
    input, 4 a check failed, 130 interrupted."""
    from rollsift.schemas.errors import RollsiftError

    from .output import printable

    try:
        status: Any = cli.main(args, prog_name="rollsift", standalone_mode=False)
        sys.stdout.flush()
    except RollsiftError as error:
        click.echo(printable(f"rollsift: {error.text()}"), err=True)
        status = error.exit_status
    except click.ClickException as error:
        error.show()
        status = 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        status = 130
    except BrokenPipeError:
        # The reader has gone, say `head`: nothing is left to say, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        click.echo(printable(f"rollsift: could not finish: {error}"), err=True)
        status = 1
    sys.exit(status if isinstance(status, int) else 0)
