"""The command line when something is wrong: exit status, message, and what is left behind."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollsift.jobs.main import main

COMMAND = str(Path(sys.executable).with_name("rollsift"))
# What steers a terminal: C0 but tab and line feed, DEL, C1, line separators, marks of direction.
STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]"
)
HOSTILE = "\x1b]0;owned\x07\r\x9b2J\u202eabc\u2066\x7f\u2028"
LINE = f"{HOSTILE}\nrollsift: all is well"


class Done(NamedTuple):
    """What a command left."""

    status: int
    out: str
    err: str


@pytest.fixture
def rollsift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run a command in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        assert isinstance(exit_.value.code, int)
        return Done(exit_.value.code, *capsys.readouterr())

    return run


def _record(**changes: Any) -> dict[str, Any]:
    return {
        "input": "q",
        "output": "abc",
        "gts": "4",
        "score": 1.0,
        "step": 1,
        "uid": "u",
        **changes,
    }


def _log(path: Path, *records: dict[str, Any] | str) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("".join(f"{line}\n" for line in lines))


def _good(folder: Path) -> None:
    _log(folder / "1.jsonl", _record(), _record(output="ab"))


FILTER = ("filter", "logs", "-r", "gfpo-shortest", "-s", "k=1", "-o", "run")
# Line 2 of the file, with where it begins to be wrong, the field, what is found and expected.
# The record before it takes 81 bytes with its line feed; bytes count from 0.
BAD: dict[str, tuple[str, list[str]]] = {
    "cut": ('{"input": "q", "out', ["line 2", "byte 96", "not JSON"]),
    "number for text": (json.dumps(_record(output=7)), ["line 2", "'output'", "a number", "text"]),
    "list for uid": (json.dumps(_record(uid=["u"])), ["line 2", "'uid'", "a list", "text"]),
    "not an object": ("[1]", ["line 2", "byte 81", "found a list, expected an object"]),
    "key twice": ('{"score": 1, "score": 2}', ["line 2", "byte 81", "'score'", "twice"]),
    "reward": (json.dumps(_record(score="high")), ["line 2", "'score'", "'high'", "number"]),
    "step": (json.dumps(_record(step=9)), ["line 2", "'step'", "9", "1"]),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_record_is_told_with_its_place_and_what_to_do(
    tmp_path: Path, rollsift: Callable[..., Done], what: str
) -> None:
    """Exit status 3 with file, line or byte, field, found, expected and the way on, all on stderr;
    there is no run folder."""
    line, words = BAD[what]
    assert len(json.dumps(_record())) + 1 == 81
    _log(tmp_path / "logs" / "1.jsonl", _record(), line, _record())
    done = rollsift(*FILTER)
    assert (done.status, done.out) == (3, "")
    told = next(text for text in done.err.splitlines() if "1.jsonl" in text)
    assert [word for word in words if word not in told] == [], told
    assert "nothing was published" in done.err
    assert "--skip-bad" in done.err
    assert not (tmp_path / "run").exists()


def test_all_bad_files_are_told_at_once(tmp_path: Path, rollsift: Callable[..., Done]) -> None:
    """Of five bad files among seven each is named in one message, however different the faults."""
    logs = tmp_path / "logs"
    _good(logs)
    _log(logs / "2.jsonl", "{")
    (logs / "3.jsonl.gz").write_bytes(gzip.compress(json.dumps(_record(step=3)).encode())[:-9])
    _log(logs / "4.jsonl", _record(step=4))
    (logs / "5.parquet").write_bytes(b"PAR1 and then nothing PAR1")
    _log(logs / "6.jsonl", _record(step=6, input=None), _record(step=6, score=[]))
    (logs / "7.jsonl").write_bytes(b'{"input": "\xff"}\n')
    done = rollsift(*FILTER)
    assert (done.status, done.out) == (3, "")
    bad = ["2.jsonl", "3.jsonl.gz", "5.parquet", "6.jsonl", "7.jsonl"]
    assert [name for name in bad if f"  {name}" not in done.err] == []
    assert "  1.jsonl" not in done.err
    assert "  4.jsonl" not in done.err
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_there_is_left_as_it_was(
    tmp_path: Path, rollsift: Callable[..., Done]
) -> None:
    """Where a new step is bad, no file of the run changes, its times included."""
    _good(tmp_path / "logs")
    assert rollsift(*FILTER).status == 0

    def state() -> dict[str, tuple[int, bytes]]:
        files = [path for path in (tmp_path / "run").rglob("*.*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = {name: kept for name, kept in state().items() if not name.endswith(".lock")}
    _log(tmp_path / "logs" / "2.jsonl", _record(step=2), "{")
    assert rollsift(*FILTER).status == 3
    assert {name: kept for name, kept in state().items() if not name.endswith(".lock")} == before
    assert "2.jsonl" not in rollsift("stats", "run").out


WRONG: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "recipe": (("-r", "gfpo-shortset"), ["gfpo-shortset", "gfpo-shortest"]),
    "key": (("-s", "metrik=reward"), ["metrik", "metric"]),
    "word": (("-s", "no_signal=dorp"), ["no_signal: found 'dorp', expected drop or keep"]),
    "words": (("-s", "incomplete=throw"), ["found 'throw', expected drop or error or keep"]),
    "number": (("-s", "k=0"), ["k: found '0', expected a whole number from 1 to "]),
    "no number": (("-s", "min_length=short"), ["found 'short', expected a whole number of 0 or"]),
    "no bound": (("-s", "min_mean=low"), ["min_mean: found 'low', expected a number or null"]),
    "inner": (("-s", "difficulty.ties=odd"), ["difficulty.ties: found 'odd', expected midrank or"]),
    "outer": (("-s", "difficulty=hard"), ["found 'hard', expected the keys of, scope, quantiles"]),
    "no value": (("-s", "k"), ["k", "key=value"]),
    "expression": (("-s", "metric=length("), ["metric", "length("]),
    "aggregate": (("-s", "metric=max(reward)"), ["metric", "max", "one row"]),
    "field": (("-s", "exclude_where=raward > 1"), ["exclude_where", "'raward'", "reward"]),
    "option": (("--skipbad",), ["--skipbad", "--skip-bad"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_names_the_key_and_what_could_be_meant(
    tmp_path: Path, rollsift: Callable[..., Done], what: str
) -> None:
    """Exit status 2; the message names key, value and what is known or allowed; nothing is made."""
    _good(tmp_path / "logs")
    arguments, words = WRONG[what]
    done = rollsift(*FILTER, *arguments)
    assert (done.status, done.out) == (2, "")
    assert [word for word in words if word not in done.err] == [], done.err
    assert not (tmp_path / "run").exists()


def test_paths_that_hold_no_log(tmp_path: Path, rollsift: Callable[..., Done]) -> None:
    """A missing path is usage, 2; a folder without a step file that can be read is input, 3; each
    message names the path and what was expected, a broken link that looks like a step too."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "1.jsonl").symlink_to("nowhere")
    (tmp_path / "folders" / "1.jsonl").mkdir(parents=True)
    (tmp_path / "link").symlink_to("nowhere")
    cases = {
        "missing": (2, ["missing: no such file or folder"]),
        "*.none": (2, ["*.none: no such file or folder, and no glob"]),
        "link": (2, ["link: "]),
        "empty": (3, ["empty: no step files", "<step>.jsonl"]),
        "links": (3, ["links: no step files", "1.jsonl (a broken link"]),
        "folders": (3, ["folders: no step files"]),
    }
    for path, (status, words) in cases.items():
        done = rollsift("filter", path, "-r", "gfpo-shortest", "-o", "run")
        assert (done.status, done.out) == (status, ""), path
        assert [word for word in words if word not in done.err] == [], done.err
        assert not (tmp_path / "run").exists()


def test_an_output_that_is_no_run_folder(tmp_path: Path, rollsift: Callable[..., Done]) -> None:
    """A file, what would lie in one, or a folder with somebody's files, is refused as usage and
    stays as it was; a file is no run to be asked."""
    _good(tmp_path / "logs")
    (tmp_path / "file").write_text("mine")
    _log(tmp_path / "taken" / "thesis.txt", "mine")
    refused = dict.fromkeys(["file", "file/x", "file/x/y"], "file is a file, no folder")
    for path, word in {**refused, "taken": "thesis.txt"}.items():
        done = rollsift(*FILTER, "-o", path)
        assert (done.status, done.out) == (2, "")
        assert word in done.err
        assert "choose another -o" in done.err
    asked = rollsift("sql", "file", "SELECT 1")
    assert (asked.status, asked.err[:28]) == (2, "rollsift: file: no run here;")
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path / "taken") == ["thesis.txt"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("SELEC 1", "SELEC"),
        ("SELECT rewrad FROM rollouts", "rewrad"),
        ("SELECT * FROM rolouts", 'Did you mean "rollouts"?'),
        ("SELECT * FROM bad_recods", 'Did you mean "bad_records"?'),
        ("SELECT 1; SELECT 2", "one SELECT"),
        ("DROP TABLE rollouts", "only read"),
        ("", "one SELECT"),
        ("SELECT error('half ' || 'way') FROM rollouts", "half way"),
    ],
)
def test_wrong_sql(tmp_path: Path, rollsift: Callable[..., Done], text: str, word: str) -> None:
    """Exit status 2 with the engine's words and the name that is wrong; stdout has nothing."""
    _good(tmp_path / "logs")
    rollsift(*FILTER)
    for form in ("table", "json", "csv", "parquet"):
        done = rollsift("sql", "run", text, "-f", form)
        assert (done.status, done.out.strip("[\n")) == (2, "")
        assert done.err.startswith("rollsift: SQL: ")
        assert word in done.err
    assert rollsift("sql", "logs", "SELECT 1").status == 2


def test_a_damaged_manifest_fails_the_check(tmp_path: Path, rollsift: Callable[..., Done]) -> None:
    """One changed digit of a manifest is exit status 4, naming the file."""
    _good(tmp_path / "logs")
    rollsift(*FILTER)
    manifest = tmp_path / "run" / "manifests" / "000001.v1.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"rows":2', b'"rows":3', 1))
    done = rollsift("sql", "run", "SELECT * FROM steps")
    assert (done.status, done.out) == (4, "")
    assert "000001.v1.json" in done.err


def _hostile(folder: Path) -> None:
    records = [
        _record(output=HOSTILE * n, uid=HOSTILE, score=n) | {LINE: HOSTILE, HOSTILE: n}
        for n in range(4)
    ]
    _log(folder / "1.jsonl", *records)
    (folder / LINE).touch()


def _on_terminal(folder: Path, *arguments: str) -> str:
    """All that a command writes to a terminal that is its stdout and stderr."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs, termios.TCSANOW)
    with subprocess.Popen([COMMAND, *arguments], cwd=folder, stdout=theirs, stderr=theirs):
        os.close(theirs)
        written = b""
        try:
            while data := os.read(ours, 1 << 16):
                written += data
        except OSError:  # Linux's way to say that the last writer has gone
            pass
    os.close(ours)
    return written.decode()


def test_no_log_steers_a_terminal(tmp_path: Path, rollsift: Callable[..., Done]) -> None:
    """Escapes, C1, carriage returns and marks of direction in texts, field names, uids and file
    names reach no terminal as they are, and no file name or field begins a line of its own."""
    _hostile(tmp_path / "logs")
    assert rollsift(*FILTER).status == 0
    query = 'SELECT *, uid AS "\x1b[31m\nrollsift: all is well" FROM rollouts'
    assert STEERS.findall(_on_terminal(tmp_path, "stats", "run")) == []
    for arguments in [("sql", "run", query), ("stats", "logs")]:
        shown = _on_terminal(tmp_path, *arguments)
        assert STEERS.findall(shown) == [], arguments
        assert not re.search("^rollsift: all is well", shown, re.M), arguments
        assert r"\x1b]0;owned\x07\r\x9b2J\u202eabc" in shown, arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ("filter", "bad", "-r", "gfpo-shortest", "-o", "run"),
        ("filter", "other", "-r", "gfpo-shortest", "-o", "run"),
        ("filter", "other", "-r", "gfpo-shortest", "-s", "length=x", "-o", "run"),
        ("filter", f"no{LINE}", "-r", "gfpo-shortest", "-o", "run"),
        ("filter", f"bad/{LINE}", "-r", "gfpo-shortest", "-o", "run"),
        ("filter", f"bad/{LINE}.gz", "-r", "gfpo-shortest", "-o", "run"),
        ("filter", "bad/1.jsonl", f"{LINE}/1.jsonl", "-r", "gfpo-shortest", "-o", "run"),
        ("sql", "good", "SELECT error(prompt) FROM rollouts WHERE prompt <> 'q'"),
        ("filter", "bad", "-r", f"gfpo{HOSTILE}", "-o", "run"),
        ("filter", "bad", "-r", "gfpo-shortest", "-s", f"k{HOSTILE}=1", "-o", "run"),
        ("filter", "bad", "-r", "gfpo-shortest", "-s", f"metric={HOSTILE}", "-o", "run"),
        ("sql", f"run{HOSTILE}", "SELECT 1"),
        ("sql", "good", f"SELECT {HOSTILE}"),
        ("sql", "good", "SELECT 1", f"{HOSTILE}"),
        ("stats", f"--{HOSTILE}"),
        (HOSTILE,),
    ],
)
def test_no_message_steers_a_terminal(
    tmp_path: Path, rollsift: Callable[..., Done], arguments: tuple[str, ...]
) -> None:
    """What a message repeats of a log, a path, an option or SQL is shown as escapes, and begins no
    line of its own."""
    _log(tmp_path / "logs" / "1.jsonl", _record(), _record(input=LINE))
    rollsift(*FILTER, "-o", "good")
    _log(tmp_path / LINE / "1.jsonl", "{")
    _log(tmp_path / "bad" / LINE, _record(step=3), "{")
    (tmp_path / "bad" / f"{LINE}.gz").touch()
    _log(tmp_path / "bad" / "1.jsonl", _record(uid=HOSTILE) | {HOSTILE: 1}, _record(uid=None))
    twice = json.dumps(HOSTILE)
    _log(
        tmp_path / "bad" / "2.jsonl", f"{{{twice}: 1, {twice}: 2}}", _record(step=2, score=HOSTILE)
    )
    _log(tmp_path / "other" / "1.jsonl", {"step": 1, "output": "", HOSTILE: 1, LINE: 1})
    shown = _on_terminal(tmp_path, *arguments)
    # click's own bar hides the cursor and goes back to the line's start.
    shown = re.sub("\x1b\\[\\?25[lh]|\r[^\r\n]*\x1b\\[K|\r", "", shown)
    assert STEERS.findall(shown) == []
    assert not re.search("^rollsift: all is well", shown, re.M)
    assert "owned" in shown


def _shell(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    quoted = f"rollsift() {{ '{COMMAND}' \"$@\"; }}\n"
    return subprocess.run(
        ["bash", "-c", quoted + script],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["table", "json", "jsonl", "csv", "parquet"])
def test_a_reader_that_goes_is_no_error(
    tmp_path: Path, rollsift: Callable[..., Done], form: str
) -> None:
    """Into a closed pipe a result of any form ends with status 0 and without a word."""
    _good(tmp_path / "logs")
    rollsift(*FILTER)
    query = "SELECT range, hash(range) FROM range(200000)"
    done = _shell(
        tmp_path,
        f'rollsift sql run "{query}" -f {form} | head -c 5 >/dev/null; echo ${{PIPESTATUS[0]}}',
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_nobody_on_stderr_changes_nothing(tmp_path: Path) -> None:
    """With stderr closed early the work is done and the exit status is what it would have been."""
    _good(tmp_path / "logs")
    (tmp_path / "logs" / "notes.txt").touch()
    filter_ = "rollsift filter {} -r gfpo-shortest -s k=1 -o run"
    gone = "{{ sleep 0.2; {}; echo $? >&3; }} 3>&1 >/dev/null 2> >(exec true)"
    for logs, status in {"missing": 2, "logs": 0}.items():
        done = _shell(tmp_path, gone.format(filter_.format(logs)))
        assert (done.stdout, done.stderr) == (f"{status}\n", "")
    assert (tmp_path / "run" / "manifests" / "000001.v1.json").exists()


def test_a_fault_of_ours_is_told_as_one(
    tmp_path: Path, rollsift: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody thought of is exit status 1 and says whose fault it is, with all that is
    needed to mend it, and nothing that steers a terminal."""
    _good(tmp_path / "logs")

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError(HOSTILE)

    monkeypatch.setattr("rollsift.jobs.filter.filter_logs", broken)
    done = rollsift(*FILTER)
    assert (done.status, done.out) == (1, "")
    assert "ZeroDivisionError" in done.err
    assert done.err.splitlines()[-1].startswith("rollsift: could not finish: a fault of rollsift")
    assert STEERS.findall(done.err) == []


@pytest.mark.parametrize("moment", ["reading", "publishing"])
def test_ctrl_c_leaves_whole_steps_or_none(
    tmp_path: Path, rollsift: Callable[..., Done], moment: str
) -> None:
    """SIGINT ends with 130 and one word; what is published by then is whole, nothing else is left,
    and the next filter ends as if nothing had been."""
    logs, run = tmp_path / "logs", tmp_path / "run"
    for step in range(1, 31):
        _log(
            logs / f"{step}.jsonl",
            *(_record(step=step, uid=f"u{i // 8}", output="x" * (i % 99)) for i in range(2000)),
        )
    with subprocess.Popen(
        [COMMAND, *FILTER],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        seen = run / (".staging/groups-000003.v1.parquet" if moment == "reading" else "run.json")
        limit = time.monotonic() + 60
        while not seen.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    if moment == "reading":
        assert not run.exists()
    else:
        assert not (run / ".staging").exists()
        assert rollsift("sql", "run", "SELECT count(*) FROM rollouts").status == 0
    assert rollsift(*FILTER).status == 0
    done = rollsift("sql", "run", "SELECT count(*), sum(rows) FROM steps", "-f", "csv")
    assert done.out.splitlines()[1] == "30,60000"


HOURS = "FROM range(10000000) a, range(10000000) b WHERE xor(hash(a.range), hash(b.range)) = 7"


@pytest.mark.parametrize("shown", ["count(*)", "a.range"])
def test_a_query_of_hours_is_stopped_at_once(
    tmp_path: Path, rollsift: Callable[..., Done], shown: str
) -> None:
    """Ctrl-C ends it with 130 and one word, `--timeout` with 1 and what to do, while the first row
    is made as while later ones are; a bound of 0 is usage."""
    _good(tmp_path / "logs")
    rollsift(*FILTER)
    began = time.monotonic()
    done = rollsift("sql", "run", f"SELECT {shown} {HOURS}", "--timeout", "0.5")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("rollsift: SQL: not done within 0.5 s; ")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    ctrl_c = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    ctrl_c.start()
    done = rollsift("sql", "run", f"SELECT {shown} {HOURS}")
    signal.signal(signal.SIGINT, before)
    assert (done.status, done.out, done.err.strip()) == (130, "", "interrupted")
    assert time.monotonic() - began < 20
    assert rollsift("sql", "run", "SELECT 1", "--timeout", "0").status == 2


def _parquet(path: Path) -> None:
    path.parent.mkdir()
    rows = {"uid": ["a"] * 9, "step": [1] * 9, "score": [1.0] * 9, "output": list("abcdefghi")}
    pq.write_table(pa.table(rows), path, compression="none", use_dictionary=False)


@pytest.mark.parametrize("cut", [True, False])
def test_a_log_that_was_damaged_since_is_named(
    tmp_path: Path, rollsift: Callable[..., Done], cut: bool
) -> None:
    """SQL that needs the text of a Parquet log that is cut, or whose text is none any more, ends
    with 3 and the log's path; SQL that does not is answered."""
    log = tmp_path / "logs" / "1.parquet"
    _parquet(log)
    rollsift(*FILTER)
    whole = log.read_bytes()
    text = b"".join(b"\x01\0\0\0" + bytes([letter]) for letter in b"abcdefghi")
    assert whole.count(text) == 1
    log.write_bytes(whole[:-9] if cut else whole.replace(text, b"\xff" * len(text)))
    done = rollsift("sql", "run", "SELECT response FROM rollouts")
    assert (done.status, done.out) == (3, "")
    assert done.err.startswith(f"rollsift: {log}: cannot be read as Parquet: ")
    assert (
        rollsift("sql", "run", "SELECT count(*) FROM rollouts", "-f", "csv").out
        == "count_star()\n9\n"
    )


@pytest.mark.parametrize("table", ["rollouts", "groups"])
def test_a_damaged_table_is_named(
    tmp_path: Path, rollsift: Callable[..., Done], table: str
) -> None:
    """SQL over a table of the run that is cut, or gone, ends with 4, its path and what to do."""
    _good(tmp_path / "logs")
    rollsift(*FILTER)
    path = tmp_path / "run" / table / "000001.v1.parquet"
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-30]), path.unlink):
        damage()
        done = rollsift("sql", "run", f"SELECT * FROM {table}")
        assert (done.status, done.out) == (4, "")
        assert done.err.startswith(f"rollsift: run/{table}/000001.v1.parquet: cannot be read")
        assert "`rollsift verify run`" in done.err


def test_a_plot_is_drawn_though_nobody_reads_the_table(tmp_path: Path) -> None:
    """Where the reader of sweep's table has gone, its drawing is there."""
    _good(tmp_path / "logs")
    sweep = "rollsift sweep logs -r gfpo-shortest --grid k=1,2 --plot it.html"
    done = _shell(tmp_path, f"{{ sleep 0.2; {sweep}; echo $? >&3; }} 3>&1 > >(exec true)")
    assert done.stdout == "0\n"
    assert "k=2" in (tmp_path / "it.html").read_text()
