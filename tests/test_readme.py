"""The README's commands, run. `python tests/test_readme.py` writes what they print into it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(?ms)^```console\n(.*?)^```$")


def commands_and_outputs(block: str) -> Iterator[tuple[str, str]]:
    """Each `$ command` of a block with the lines shown after it."""
    for part in re.split(r"(?m)^\$ ", block)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def workplace(folder: Path) -> Path:
    """A folder as the README's reader has it: the project's files, and `logs` that verl wrote."""
    for name in ("data", "Makefile", "jobs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "logs").symlink_to(ROOT / "data" / "verl_v1")
    return folder


def run(command: str, folder: Path) -> str:
    """What a command prints on stdout; `make run` is its own recipe with this environment's bin."""
    bin_ = Path(sys.executable).parent
    if command == "make run":
        dry = ["make", "-n", "-o", ".venv/.run", "run"]
        command = subprocess.check_output(dry, cwd=folder, text=True).replace(".venv/bin/", "")
    # A process group of other tests in this process is not the command's.
    group = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in group}
    environment = {**kept, "PATH": f"{bin_}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_every_command_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """What the README shows is what its commands print, byte for byte, in its order."""
    folder = workplace(tmp_path)
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert blocks
    for block in blocks:
        for command, output in commands_and_outputs(block):
            assert run(command, folder) == output, command


def test_the_readme_leads_with_the_two_commands() -> None:
    """A newcomer sees `make run` and `make test` on the first screen."""
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    assert "make run" in first_screen
    assert "make test" in first_screen


def rewrite() -> None:
    """Run every command and write what it prints below it."""
    folder = Path("/tmp/rollsift-readme")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    workplace(folder)

    def fresh(match: re.Match[str]) -> str:
        parts = [f"$ {c}\n{run(c, folder)}" for c, _ in commands_and_outputs(match[1])]
        return "```console\n" + "".join(parts) + "```"

    readme = ROOT / "README.md"
    readme.write_text(BLOCK.sub(fresh, readme.read_text()))


if __name__ == "__main__":
    rewrite()
