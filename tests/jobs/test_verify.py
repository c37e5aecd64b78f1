"""rollsift verify: what it prints where, and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollsift.jobs.main import main

HOSTILE = "\x1b]0;owned\x07\r\u202eabc\nrollsift: all is well"
Command = Callable[..., tuple[object, str, str]]  # arguments -> exit status, stdout, stderr


@pytest.fixture
def rollsift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Command:
    """Run a command in a folder with `logs` of two steps and the `run` made of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    for step in (1, 2):
        row = {"input": "q", "output": "a", "gts": "4", "score": 1, "step": step, "uid": "u"}
        (tmp_path / "logs" / f"{step}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)

    def run(*arguments: str) -> tuple[object, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return end.value.code, *capsys.readouterr()

    run("filter", "logs", "-r", "gfpo-shortest", "-s", "k=1", "-o", "run")
    return run


@pytest.mark.parametrize("more", [(), ("--deep",), ("--logs", "logs")])
def test_an_intact_run_ends_with_0(rollsift: Command, more: tuple[str, ...]) -> None:
    """A short summary on stdout, with the numbers of steps, rows and files; json has no finding."""
    status, out, err = rollsift("verify", "run", *more)
    assert (status, err) == (0, "")
    assert "steps 2, rows 6, files looked at 9" in out
    assert json.loads(rollsift("verify", "run", "-f", "json", *more)[1]) == []


def test_findings_end_with_4(tmp_path: Path, rollsift: Command) -> None:
    """All findings are on stdout, as rows or as an array of objects; their number on stderr."""
    (tmp_path / "run" / "groups" / "000002.v1.parquet").unlink()
    (tmp_path / "logs" / "1.jsonl").write_text("")
    done, shown = rollsift("verify", "run", "-f", "json"), rollsift("verify", "run")
    found = json.loads(done[1])
    assert [finding["file"] for finding in found] == ["1.jsonl", "groups/000002.v1.parquet"]
    assert all(list(finding) == ["file", "expected", "found", "next"] for finding in found)
    assert done[::2] == shown[::2] == (4, "rollsift: run: 2 findings\n")
    assert [line.split()[0] for line in shown[1].splitlines()[2:]] == [f["file"] for f in found]


@pytest.mark.parametrize("path", ["nowhere", "logs"])
def test_what_is_no_run_is_usage(rollsift: Command, path: str) -> None:
    """A folder that is none, or logs in place of a run, end with 2 and the path."""
    status, out, err = rollsift("verify", path)
    assert (status, out, path in err) == (2, "", True)


def test_no_name_steers_a_terminal(tmp_path: Path, rollsift: Command) -> None:
    """Controls in names of files, of sources and of recipes are shown as escapes, and no name
    begins a line of its own."""
    (tmp_path / "run" / HOSTILE).touch()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    info["recipe"]["name"] = info["log_root"] = HOSTILE
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    status, out, err = rollsift("verify", "run")
    assert (status, "owned" in out, "owned" in err) == (4, True, True)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    assert not re.search("(?m)^rollsift: all is well", out + err)
