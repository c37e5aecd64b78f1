"""When a filter ends badly: power cuts, kills, full and read-only disks, two writers, and readers
beside a writer."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollsift.pipeline import verify
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import RollsiftError

SPEC = importlib.util.spec_from_file_location("crash", Path(__file__).with_name("crash.py"))
assert SPEC
assert SPEC.loader
crash = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(crash)
command, log, sift, tree, whole = crash.command, crash.log, crash.sift, crash.tree, crash.whole
Tree = dict[str, bytes]
# Every n-th call that writes is tried, all of them where ROLLSIFT_EXAMPLES is set.
EVERY = 1 if "ROLLSIFT_EXAMPLES" in os.environ else 4


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A log of two steps."""
    for step in (1, 2):
        log(tmp_path / "logs", step)
    return tmp_path / "logs"


@pytest.mark.parametrize("start", ["fresh", "changed", "killed"])
def test_a_power_cut_leaves_whole_steps(tmp_path: Path, logs: Path, start: str) -> None:
    """After a power cut at any call, whatever unsynced data and names it takes, each step is there
    whole or not at all; once the filter is done all of it lasts, also what a killed one had named;
    the next filter ends as if nothing had been."""
    place = tmp_path / "place"
    place.mkdir()
    out = place / "new" / "run" if start == "fresh" else place / "run"
    if start != "fresh":
        sift(logs, out)
    may_be = [{None, id_} for id_ in whole(out).values()] if start == "killed" else [{None}] * 2
    if start == "changed":
        may_be = [{id_} for id_ in whole(out).values()]
        log(logs, 1, seed=1)
    disk = crash.Disk(place, named=start != "killed")
    with crash.watched(disk.before, disk.after):
        sift(logs, out)
        disk.before()
    expected, ids = tree(out), whole(out)
    may_be = [old | {ids[step]} for step, old in zip((1, 2), may_be, strict=True)]
    # Names that a killed writer left unsynced are those after the last sync: only the end is known.
    states = disk.states[-1:] if start == "killed" else disk.states
    for at, state in enumerate(states):
        for seed, chance in enumerate([1, 0, 0.4, 0.7]):
            cut = tmp_path / f"cut-{at}-{seed}"
            disk.cut(state, cut, random.Random(f"{at} {seed}"), chance)
            again = cut / out.relative_to(place)
            found = whole(again)
            assert all(found.get(step) in may_be[step - 1] for step in (1, 2))
            if state is disk.states[-1]:
                assert found == ids
            if 4 * seed == at % 16:
                sift(logs, again)
                assert tree(again) == expected
    assert len(disk.states) > {"fresh": 50, "changed": 40, "killed": 6}[start]


@pytest.fixture(scope="module")
def forks() -> Iterator[Any]:
    """A server of commands."""
    server = crash.Forks()
    with server.process:
        yield server
        server.process.communicate()


@pytest.fixture(scope="module")
def mounting() -> Iterator[Any]:
    """A server that may mount, where nobody else sees it."""
    for own in (["unshare", "-m"], ["unshare", "-rm"]):
        with suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([*own, "mount", "-t", "tmpfs", "none", "/mnt"], check=True)
            break
    else:
        pytest.skip("no file system can be mounted here")
    server = crash.Forks(*own)
    with server.process:
        yield server
        server.process.communicate()


@pytest.mark.parametrize("start", ["fresh", "changed"])
def test_a_kill_leaves_whole_steps(tmp_path: Path, logs: Path, forks: Any, start: str) -> None:
    """A filter killed at any call that writes leaves whole steps, and the next one ends with the
    files, byte for byte, of one that was never killed, and no others."""
    sift(logs, tmp_path / "before")
    old = (
        [{None}] * 2 if start == "fresh" else [{id_} for id_ in whole(tmp_path / "before").values()]
    )
    if start == "changed":
        log(logs, 1, seed=1)
        shutil.copytree(tmp_path / "before", tmp_path / "never")
    sift(logs, tmp_path / "never")
    expected, ids = tree(tmp_path / "never"), whole(tmp_path / "never")
    for at in range(1 if start == "fresh" else 2, 999, EVERY):
        out = tmp_path / str(at)
        if start == "changed":
            shutil.copytree(tmp_path / "before", out)
        status, said, _ = forks.do(args=command(logs, out), at=at)
        assert status in (0, -signal.SIGKILL), said
        found = whole(out)
        assert all(found.get(step) in old[step - 1] | {ids[step]} for step in (1, 2))
        left = tree(out)
        sift(logs, out)
        assert tree(out) == expected
        if status == 0:
            break
    assert left == expected
    assert at > 40


@pytest.mark.parametrize("scope", ["running", "global"])
def test_a_renewal_that_was_cut_short_goes_on(tmp_path: Path, logs: Path, scope: str) -> None:
    """Where a changed step was published, but not yet those after it, which depend on it, the next
    filter publishes them, too."""
    log(logs, 3)
    out, scope = tmp_path / "run", f"difficulty.scope={scope}"
    sift(logs, out, scope)
    log(logs, 1, seed=1)
    assert sift(logs, out, scope).replaced == [1, 2, 3]
    ids = whole(out)
    for step in (2, 3):
        Run(out).table("manifests", step, 2).unlink()
    assert {*sift(logs, out, scope).replaced} >= {2, 3}
    assert whole(out) == ids
    assert sift(logs, out, scope).unchanged == [1, 2, 3]
    assert verify.verify(Run(out)).findings == []


def spent(out: Path, logs: Path, before: Tree, expected: Tree, said: str) -> None:
    """A filter that could not write said so; it left whole steps, and the next one ends well."""
    found, left = whole(out), tree(out)
    assert re.match(r"rollsift: \S+: cannot be written: .*(too large|No space left)", said), said
    done = f"published up to step {max(found)}," if max(found) > 2 else "nothing was published"
    assert done in said
    assert before.items() <= left.items()
    assert not (out / ".staging").exists()
    sift(logs, out)
    assert tree(out) == expected


@pytest.fixture
def more(tmp_path: Path, logs: Path) -> tuple[Path, Tree, Tree]:
    """A run that lacks two steps of its log; the files that it has, and those it would have."""
    sift(logs, tmp_path / "run")
    for step in (3, 4):
        log(logs, step)
    shutil.copytree(tmp_path / "run", tmp_path / "never")
    sift(logs, tmp_path / "never")
    return tmp_path / "run", tree(tmp_path / "run"), tree(tmp_path / "never")


@pytest.mark.parametrize("size", [1, 500, 1600])
def test_a_file_that_grows_too_large(logs: Path, more: Any, forks: Any, size: int) -> None:
    """Where a file's size is limited the exit status is 1 and the file is named; steps that were
    there stay, nothing else is left, and the next filter succeeds."""
    out, before, expected = more
    status, said, _ = forks.do(args=command(logs, out), size=size)
    assert (status, "too large" in said) == (1, True)
    spent(out, logs, before, expected, said)


@pytest.mark.parametrize("kind", ["blocks", "inodes"])
def test_a_full_disk(tmp_path: Path, logs: Path, more: Any, mounting: Any, kind: str) -> None:
    """Where the disk is full, at any of a filter's files or names, the exit status is 1 and what
    could not be written is named, and how far it came; nothing else is left, and the next filter
    succeeds."""
    out, before, expected = more
    disk, said_all = tmp_path / "disk", []
    disk.mkdir()
    room = (0, 1, 2, 5) if kind == "blocks" else (0, 1, 4, 7)
    for free in room:
        copy = tmp_path / f"free-{free}"
        mounting.shell(f"mount -t tmpfs -o size=1m none {disk}; cp -r {out} {disk}/run")
        if kind == "blocks":
            mounting.shell(f"""n=$(df --output=avail -k {disk} | tail -1)
                head -c $(((n - 4 * {free}) * 1024)) /dev/zero > {disk}/full""")
        else:
            mounting.shell(f"""n=$(df --output=iused {disk} | tail -1)
                mount -o remount,nr_inodes=$((n + {free})) {disk}""")
        status, said, _ = mounting.do(args=command(logs, disk / "run"))
        assert status == 1
        said_all.append(said)
        mounting.shell(f"cp -r {disk}/run {copy}; umount {disk}")
        spent(copy, logs, before, expected, said)
    files = {re.sub(r"-?0.*", "", Path(said.split(": ")[1]).name) for said in said_all}
    assert files >= (
        {"rollouts", "groups", "manifests"} if kind == "blocks" else {"run", "rollouts"}
    )


@pytest.mark.parametrize("names", range(6))
def test_a_disk_that_is_full_for_names(
    logs: Path, more: Any, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    """Where no more names can be had, what was published is whole, and the message tells how far it
    came. Here `os.link` stands in for the disk."""
    out, before, expected = more
    link, left = os.link, iter(range(names))

    def until_full(*args: Any) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *args[:1], None, *args[1:])
        link(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", until_full)
        with pytest.raises(RollsiftError) as error:
            sift(logs, out)
    spent(out, logs, before, expected, f"rollsift: {error.value}")
    assert ("published up to step 3" in str(error.value)) == (names >= 5)


def test_a_disk_that_is_read_only(tmp_path: Path, logs: Path, more: Any, mounting: Any) -> None:
    """On a read-only disk filter ends with exit status 1 and says why, for a run that is there and
    for a new one; the run can be asked."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting.shell(
        f"mount -t tmpfs none {disk}; cp -r {more[0]} {disk}/run; mount -o remount,ro {disk}"
    )
    for name in ("run", "new/run"):
        status, said, _ = mounting.do(args=command(logs, disk / name))
        assert status == 1
        assert said.startswith(f"rollsift: {disk / name}: cannot be written: [Errno 30] Read-only")
        assert said.endswith("nothing was published\n")
    status, said, _ = mounting.do(args=["sql", f"{disk}/run", "SELECT count(*) AS n FROM rollouts"])
    assert (status, said.split()) == (0, ["n", "--", "23"])
    mounting.shell(f"ls {disk} | grep -qx run; umount {disk}")


def test_two_writers(tmp_path: Path, logs: Path, forks: Any) -> None:
    """While one filter writes, at whatever call it is, another ends with exit status 1 and says so;
    of several at once one wins, and the run is as of one alone."""
    sift(logs, tmp_path / "alone")
    for at in (12, 30, 45):
        out = tmp_path / f"stopped-{at}"
        _, _, first = forks.do(args=command(logs, out), at=at, stop=True, beside=True)
        status, said, _ = forks.do(args=command(logs, out))
        assert (status, said) == (
            1,
            f"rollsift: {out}: another rollsift is writing into it; nothing was published\n",
        )
        forks.do(pid=first, go=True)
        assert forks.do(pid=first)[0] == 0
        assert tree(out) == tree(tmp_path / "alone")
    out = tmp_path / "at-once"
    several = [forks.do(args=command(logs, out), beside=True)[2] for _ in range(4)]
    ends = [forks.do(pid=pid)[:2] for pid in several]
    assert {status for status, _ in ends} <= {0, 1}
    assert 0 in {status for status, _ in ends}
    assert all("another rollsift is writing" in said for status, said in ends if status)
    assert tree(out) == tree(tmp_path / "alone")


def test_a_lock_is_of_the_folder_that_is_there(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a folder that another writer took away meanwhile, as one does whose new run came to
    nothing, lets nobody write into the folder that then stands there, nor without one."""
    out, other = tmp_path / "run", tmp_path / "other"

    def taken_away(*_: Any) -> None:
        shutil.rmtree(out)
        if other.exists():
            other.rename(out)

    sift(logs, other)
    log(logs, 3)
    expected = tree(other)
    monkeypatch.setattr("rollsift.pipeline.store.fcntl.flock", taken_away)
    for left in (expected, {}):
        with pytest.raises(RollsiftError, match="another rollsift is writing"):
            sift(logs, out)
        assert tree(out) == left


def test_readers_beside_a_writer(tmp_path: Path, logs: Path, forks: Any) -> None:
    """At every call of a writer, and beside one in another process, a reader sees whole steps, each
    as it was or as it will be, and never an error."""
    out = tmp_path / "run"
    sums = "SELECT step, count(*), sum(reward), sum(k) FROM rollouts GROUP BY step"
    sift(logs, out)
    allowed, seen = {*query(Run(out), sums).fetchall()}, []

    def read(*_: Any) -> None:
        whole(out)
        seen.append({*query(Run(out), sums).fetchall()})

    log(logs, 1, seed=1)
    with crash.watched(read):
        sift(logs, out)
    allowed |= {*query(Run(out), sums).fetchall()}
    log(logs, 1, seed=2)
    pid = forks.do(args=command(logs, out), beside=True)[2]
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        read()
    assert forks.do(pid=pid)[0] == 0
    allowed |= {*query(Run(out), sums).fetchall()}
    assert all(len(rows) == 2 and rows <= allowed for rows in seen)
    assert len({frozenset(rows) for rows in seen}) > 2
