"""`rollsift`: the group of commands. A command's module is imported only when it is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from typing import Any

import click

COMMANDS = {
    "filter": "keep the rollouts worth training on",
    "sweep": "compare settings before choosing",
    "sql": "ask a run what was kept and dropped",
    "stats": "what a log or a run holds",
    "verify": "whether a run and its logs are what they were",
    "replay": "train on the kept rollouts with verl's actor update",
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

    from .output import say

    # What the encoding of stdout lacks is shown as an escape, a name that is no UTF-8 among it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    status: Any
    try:
        status = cli.main(args, prog_name="rollsift", standalone_mode=False)
        sys.stdout.flush()
    except RollsiftError as error:
        say(f"rollsift: {error.text()}")
        status = error.exit_status
    except click.ClickException as error:
        error.show(shown := io.StringIO())
        say(shown.getvalue().rstrip("\n"))
        status = 2
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        status = 130
    except (BrokenPipeError, SystemExit):
        # click's word, too, for a reader that has gone, say `head`: nothing is left to say, at exit
        # neither. No other exit comes here: the user's own function is caught where it is called.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        say(f"rollsift: could not finish: {error}")
        status = 1
    except BaseException:  # Rust's panics are no Exception
        say(traceback.format_exc())
        say("rollsift: could not finish: a fault of rollsift, not of what it was given")
        status = 1
    sys.exit(status if isinstance(status, int) else 0)
