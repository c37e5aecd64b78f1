"""Capture is never in the way: it writes behind training, and its failures stay its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import capture_rig as rig
import pyarrow.parquet as pq
import pytest

from rollsift.pipeline.capture import recorder as recording
from rollsift.pipeline.capture.background import Background


def test_a_full_queue_waits_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    """The fourth job waits until one of the three before it is done, and the seconds are told."""
    began, gate, background = threading.Event(), threading.Event(), Background(most=2)
    order: list[str] = []
    background.submit("a", lambda: began.set() or gate.wait())
    began.wait()
    for name in "bc":
        background.submit(name, lambda name=name: order.append(name))  # type: ignore[misc]
    threading.Timer(0.3, gate.set).start()
    background.submit("d", lambda: order.append("d"))
    background.flush()
    assert order == ["b", "c", "d"]
    assert background.waited >= 0.05
    told = capsys.readouterr().err
    assert re.fullmatch(r"rollsift capture: d: waited 0\.\d s for earlier steps .*\n", told)


def test_a_failure_is_counted_and_the_rest_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be written is told in one line, whatever its message, and ends nothing."""
    background, done = Background(), []

    def fails() -> None:
        raise OSError("disk\nfull")

    background.submit("step 1", fails)
    background.submit("step 2", lambda: done.append(2))
    background.flush()
    assert (background.failed, background.done, done) == (1, 1, [2])
    assert capsys.readouterr().err == (
        "rollsift capture: step 1: not captured: OSError: disk\\nfull\n"
    )


FORKED = """
import os, threading
from rollsift.pipeline.capture.background import Background
began, gate, background = threading.Event(), threading.Event(), Background()
background.submit("a", lambda: began.set() or gate.wait())
began.wait()
child = os.fork()
if not child:
    background.flush()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gate.set()
"""


def test_a_forked_child_waits_for_nothing() -> None:
    """verl's data loaders fork: a child that ends does not wait for its parent's thread."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_a_folder_that_is_gone_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that cannot be written are counted, and the next that can be is."""
    folder = tmp_path / "cap"
    recorder = rig.install(monkeypatch, folder)
    made = rig.trainer(rig.buffer())
    for seed in range(3):
        if seed == 1:
            shutil.rmtree(folder)
            folder.write_text("in the way")
        rig.put(rig.make_rows(seed=seed))
        rig.step(made, 3)
        recorder.background.flush()
        if seed == 1:
            folder.unlink()
            folder.mkdir()
    made._shutdown_dump_executor()
    assert (recorder.background.done, recorder.background.failed) == (2, 1)
    assert [path.name for path in folder.iterdir()] == ["9.parquet"]
    told = capsys.readouterr().err.splitlines()
    assert "step 8: not captured: RollsiftError" in told[1]
    assert f"2 steps in {folder}, 1 failures" in told[-1]


def test_what_verl_does_not_have_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that fails while evicted or trained rows are fetched is counted, and verl's own code
    goes on as without capture."""
    recorder = rig.install(monkeypatch, tmp_path)
    made, rows = rig.trainer(rig.buffer()), rig.make_rows()
    rig.put(rows)
    monkeypatch.setattr(recorder, "evict", lambda *_: 1 / 0)
    monkeypatch.setattr(recorder, "trained", lambda *_: 1 / 0)
    made.replay_buffer._sync_metadata_from_transfer_queue()
    made.replay_buffer._clear_groups("train", {rows[0].uid})
    batch = rig.step(made, 2)
    assert len(batch.keys) == 12  # 8, and 4 of verl's padding
    assert recorder.background.failed == 2
    made._shutdown_dump_executor()


def test_verls_shutdown_waits_for_what_is_not_written_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When verl's own writer of dumps is shut down, every captured step is on the disk; the
    trainer itself waited for none."""
    gate, real = threading.Event(), recording.write

    def slow(*arguments: Any) -> Any:
        gate.wait(20)
        return real(*arguments)

    monkeypatch.setattr(recording, "write", slow)
    rig.install(monkeypatch, tmp_path)
    made = rig.trainer(rig.buffer())
    for seed in range(2):
        rig.put(rig.make_rows(seed=seed))
        rig.step(made, 3)
    assert not list(tmp_path.iterdir())
    threading.Timer(0.2, gate.set).start()
    made._shutdown_dump_executor()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.parquet", "8.parquet"]


KILLED = """
import os, pathlib, random, signal, sys, time
sys.path.insert(0, sys.argv[3])
import pyarrow.parquet as pq
from rollsift.pipeline.capture import writer
import test_writer
folder, nameless = pathlib.Path(sys.argv[1]), sys.argv[2] == "nameless"
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def child(point):
    if not nameless:
        real = os.open
        def refuse(path, flags, *rest, **named):
            if flags & os.O_TMPFILE == os.O_TMPFILE: raise OSError(95, "not supported")
            return real(path, flags, *rest, **named)
        os.open = refuse
    step = 1
    while True:
        if point and step == 2: setattr(*point, die)
        writer.write(folder, step, test_writer.rows(40, 8, 64), test_writer.NOTE); step += 1
points = [(writer, "digest"), (writer, "_row_groups"), (os, "fsync"), (writer, "_link"),
          (os, "link"), (writer, "sync"), *[None] * 12]
draw = random.Random(1)
for point in points:
    before = set(os.listdir(folder))
    pid = os.fork()
    if not pid: child(point)
    if point is None:
        time.sleep(draw.uniform(0.03, 0.3)); os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    left = [n for n in os.listdir(folder) if n.startswith(".")]
    assert not (nameless and left), left
    assert len(left) <= 1, left
    writer.sweep(folder)
    new = set(os.listdir(folder)) - before
    for name in new:
        table = pq.read_table(folder / name, page_checksum_verification=True)
        assert len(table) == 320 and name.endswith(".parquet"), name
    print(len(new), flush=True)
"""


@pytest.mark.parametrize("kind", ["nameless", "hidden"])
def test_killed_at_any_moment_it_leaves_whole_files(tmp_path: Path, kind: str) -> None:
    """SIGKILL at each point of writing and at random ones: every file that is there can be read to
    its last page, and nothing else is left, or (where files need names) one that is swept."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), kind, os.path.dirname(__file__)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = [int(line) for line in done.stdout.split()]
    assert len(counts) == 18
    assert counts[:5] == [1] * 5  # the first step, for death came in the second
    assert counts[5] == 2  # named, and gone before the folder was synced
    assert sum(counts[6:]) > 6


def test_the_hook_takes_little_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds inside the hooks are told with verl's own timings."""
    recorder = rig.install(monkeypatch, tmp_path)
    made = rig.trainer(rig.buffer())
    rig.put(rig.make_rows())
    timing: dict[str, float] = {}
    made._step_once({}, timing, 3)
    made._shutdown_dump_executor()
    assert 0 < timing["capture"] <= recorder.seconds
    assert pq.read_metadata(tmp_path / "7.parquet").num_rows == 12
