"""rollsift verify: what it prints where, and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rollsift.jobs.main import main

HOSTILE = "\x1b]0;owned\x07\r\u202eabc\nrollsift: all is well"


class Done(NamedTuple):
    """What a command left."""

    status: int
    out: str
    err: str


@pytest.fixture
def rollsift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run a command in a folder with `logs` of two steps and the `run` made of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    for step in (1, 2):
        row = {"input": "q", "output": "a", "gts": "4", "score": 1, "step": step, "uid": "u"}
        (tmp_path / "logs" / f"{step}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        assert isinstance(exit_.value.code, int)
        return Done(exit_.value.code, *capsys.readouterr())

    run("filter", "logs", "-r", "gfpo-shortest", "-s", "k=1", "-o", "run")
    return run


def test_an_intact_run_ends_with_0(rollsift: Callable[..., Done]) -> None:
    """A short summary on stdout, with the numbers of steps, rows and files; json has no finding."""
    for more in ((), ("--deep",), ("--logs", "logs")):
        done = rollsift("verify", "run", *more)
        assert (done.status, done.err) == (0, "")
        assert "steps 2, rows 6, files looked at 9" in done.out
        assert json.loads(rollsift("verify", "run", "-f", "json", *more).out) == []


def test_findings_end_with_4(tmp_path: Path, rollsift: Callable[..., Done]) -> None:
    """All findings are on stdout, as rows or as an array of objects; their number on stderr."""
    (tmp_path / "run" / "groups" / "000002.v1.parquet").unlink()
    (tmp_path / "logs" / "1.jsonl").write_text("")
    done = rollsift("verify", "run", "-f", "json")
    found = json.loads(done.out)
    assert [finding["file"] for finding in found] == ["1.jsonl", "groups/000002.v1.parquet"]
    assert all(list(finding) == ["file", "expected", "found", "next"] for finding in found)
    shown = rollsift("verify", "run")
    assert (done.status, shown.status) == (4, 4)
    assert done.err == shown.err == "rollsift: run: 2 findings\n"
    assert [line.split()[0] for line in shown.out.splitlines()[2:]] == [f["file"] for f in found]


def test_what_is_no_run_is_usage(tmp_path: Path, rollsift: Callable[..., Done]) -> None:
    """A folder that is none, or logs in place of a run, end with 2 and the path."""
    for path in ("nowhere", "logs"):
        done = rollsift("verify", path)
        assert (done.status, done.out) == (2, "")
        assert path in done.err


def test_no_name_steers_a_terminal(tmp_path: Path, rollsift: Callable[..., Done]) -> None:
    """Controls in names of files, of sources and of recipes are shown as escapes, and no name
    begins a line of its own."""
    (tmp_path / "run" / HOSTILE).touch()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    info["recipe"]["name"] = info["log_root"] = HOSTILE
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    done = rollsift("verify", "run")
    assert done.status == 4
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", done.out + done.err)
    assert not re.search("(?m)^rollsift: all is well", done.out + done.err)
    assert "owned" in done.out
    assert "owned" in done.err
