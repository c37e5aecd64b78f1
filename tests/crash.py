"""What the tests of crashes stand on: small logs, a watch over every call that writes, a disk that
loses what was not synced, and, run as a program, a server that forks commands of rollsift: a kill
then costs no new interpreter."""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

from rollsift.jobs.list_recipes import SHIPPED
from rollsift.jobs.main import main
from rollsift.pipeline import recipes
from rollsift.pipeline.batch import Outcome, filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.store import Run, sha256_of

NAMES = ("mkdir", "link", "fsync", "unlink", "rmdir", "rename", "replace")
Event = Callable[..., None]
Tree = dict[str, bytes]


def log(folder: Path, step: int, seed: int = 0) -> None:
    """A step of 2 groups of 6, as large whatever the seed; in step 2 one record is bad."""
    draw = random.Random(f"{step} {seed}")
    lines = [
        json.dumps({"input": f"p{row % 2}", "output": "x" * (row + 1), "gts": "4", "step": step,
                    "score": draw.randint(0, 9), "uid": f"u{row % 2}"})
        for row in draw.sample(range(12), 12)
    ]  # fmt: skip
    if step == 2:
        lines[5] = "{"
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(f"{line}\n" for line in lines))


SETS = ("k.very_hard=4", "k.hard=3", "k.medium=2", "k.easy=1")


def sift(logs: Path, out: Path, *sets: str) -> Outcome:
    """Filter a folder."""
    recipe = recipes.load("gfpo-adaptive", (*SETS, *sets), SHIPPED)
    return filter_logs(discover([logs]), recipe, out, skip_bad=True)


def command(logs: Path | str, out: Path | str) -> list[str]:
    """The arguments that do what `sift` does."""
    sets = [word for text in SETS for word in ("-s", text)]
    return ["filter", str(logs), "-r", "gfpo-adaptive", *sets, "-o", str(out), "--skip-bad"]


def tree(out: Path) -> Tree:
    """All files of a run but its lock, with their bytes."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def whole(out: Path) -> dict[int, str]:
    """Step -> id, as a reader sees it; every table that is named must be the one that was meant."""
    steps = Run(out).steps()
    for step, found in steps.items():
        for kind, digest in msgspec.to_builtins(found.tables).items():
            assert sha256_of(Run(out).table(kind, step, found.version)) == digest
    assert not steps or Run(out).info
    return {step: found.id for step, found in steps.items()}


@contextmanager
def watched(before: Event, after: Event = lambda *_: None) -> Iterator[None]:
    """Tell of each call that writes: those of os, files opened to be written, and of Parquet files
    the opening, each row group and the end."""
    places = [(os, name) for name in NAMES] + [(io, "open")]
    places += [(pq.ParquetWriter, name) for name in ("__init__", "write_table", "close")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]

    def telling(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not {*"wxa+"} & {*(args[1:] or ("r",))[0]}:
                return original(*args, **options)
            before(name, *args)
            result = original(*args, **options)
            after(name, *args)
            return result

        return call

    for owner, name, original in originals:
        setattr(owner, name, telling(name, original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class Disk:
    """What a power cut may leave of a folder. A file's bytes are lost, torn or zeros until it is
    synced, each name that came or went is there or not until its folder is. What was there at the
    start is durable, but for names where `named` is false."""

    def __init__(self, root: Path, named: bool = True) -> None:
        self.root, self.keys, self.count = root, {}, 0
        self.data: dict[int, bytes | None] = {}  # None is a folder
        self.durable: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}  # as they are
        self.kept: dict[int, dict[str, int]] = {}  # as they are durably
        self.changes: dict[int, list[tuple[str, int | None]]] = {}
        self.states: list[Any] = []
        self.lock = threading.RLock()
        self.top = self._look(root)
        self.durable = {key: data for key, data in self.data.items() if data is not None}
        if named:
            self.kept, self.changes = {key: {**value} for key, value in self.names.items()}, {}

    keys: dict[int, int]

    def _look(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self.keys:
            self.count += 1
            self.keys[inode] = self.count
        key = self.keys[inode]
        self.data[key] = None if path.is_dir() else path.read_bytes()
        if path.is_dir():
            found = {entry.name: self._look(entry) for entry in sorted(path.iterdir())}
            old, changes = self.names.get(key, {}), self.changes.setdefault(key, [])
            changes += [(name, None) for name in old if name not in found]
            changes += [(name, to) for name, to in found.items() if old.get(name) != to]
            self.names[key] = found
        return key

    def before(self, *_: Any) -> None:
        """Note what a power cut would find now."""
        with self.lock:
            self._look(self.root)
            alive = {path.stat().st_ino for path in (self.root, *self.root.rglob("*"))}
            self.keys = {inode: key for inode, key in self.keys.items() if inode in alive}
            changes = {key: [*each] for key, each in self.changes.items()}
            kept = {key: {**each} for key, each in self.kept.items()}
            self.states.append((kept, changes, {**self.data}, {**self.durable}))

    def after(self, name: str, *args: Any) -> None:
        """A sync makes durable what it is called for."""
        with self.lock:
            inode = os.fstat(args[0]).st_ino if name == "fsync" else None
            if inode in self.keys:
                self._look(self.root)
                key = self.keys[inode]
                data = self.data[key]
                if data is not None:
                    self.durable[key] = data
                else:
                    self.kept[key], self.changes[key] = {**self.names[key]}, []

    def cut(self, state: Any, target: Path, draw: random.Random, chance: float) -> None:
        """Write what one power cut leaves, where each thing that can be lost is by `chance`."""
        kept, changes, data, durable = state

        def build(key: int, path: Path) -> None:
            path.mkdir()
            names = {**kept.get(key, {})}
            for name, to in changes.get(key, []):
                if draw.random() >= chance:
                    names.pop(name, None)
                    names.update({} if to is None else {name: to})
            for name, to in names.items():
                if (now := data[to]) is None:
                    build(to, path / name)
                    continue
                old = durable.get(to, b"")
                lost = now != old and draw.random() < chance
                losses = [old, now[: len(now) // 2], bytes(len(now))]
                (path / name).write_bytes(draw.choice(losses) if lost else now)

        build(self.top, target)


def serve() -> None:
    """Do the jobs that stdin names, a JSON value a line: a shell's, or a command of rollsift in a
    fork, which may get a signal at its n-th call that writes, or a limit to its files' size."""
    for name in ("filter", "sql"):
        importlib.import_module(f"rollsift.jobs.{name}")
    pipes: dict[int, int] = {}
    for line in sys.stdin:
        job = json.loads(line)
        pid = job.get("pid", 0)
        if "shell" in job:
            done = subprocess.run(["sh", "-ec", job["shell"]], capture_output=True, text=True)
            print(json.dumps([done.returncode, done.stdout + done.stderr]), flush=True)
            continue
        if "args" in job:
            reader, writer = os.pipe()
            if not (pid := os.fork()):
                _command(writer, **job)
            os.close(writer)
            pipes[pid] = reader
        elif job.get("go"):
            os.kill(pid, signal.SIGCONT)
        status, text = None, ""
        if not job.get("go") and not job.get("beside"):
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with open(pipes.pop(pid)) as told:
                text = told.read()
        elif job.get("stop"):
            os.waitpid(pid, os.WUNTRACED)
        print(json.dumps([status, text, pid]), flush=True)


def _command(
    told: int, args: list[str], at: int = 0, size: int = 0, stop: bool = False, **_: Any
) -> None:
    os.dup2(told, 1)
    os.dup2(told, 2)
    if size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    seen, lock = iter(range(1, 10**9)), threading.Lock()

    def hit(name: str, *_: Any) -> None:
        with lock:
            if next(seen) == at:
                os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)

    with watched(hit):
        try:
            main(args)
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else 99)
    os._exit(98)


class Forks:
    """A server of commands."""

    def __init__(self, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, __file__], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"POLARS_MAX_THREADS": "1"},
        )  # fmt: skip

    def do(self, **job: Any) -> Any:
        """-> [exit status, what was said, process]; the status is None for one that goes on."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def shell(self, script: str) -> str:
        """What a script says that must not fail."""
        status, text = self.do(shell=script)
        assert status == 0, text
        return str(text)


if __name__ == "__main__":
    serve()
