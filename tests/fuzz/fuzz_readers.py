"""Mutation fuzz of the readers: `make fuzz MINUTES=10`.

Small logs, broken at random, go through filter_logs in a forked worker under a limit of memory and
of time. An input is made from its kind and seed alone: `--kind gzip --seed 7 --inputs 1` makes it
again. A find is all but a run whose rows add up and can be read, and an error that names a file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inputs import KINDS, RECIPES, REWARD, write

MEMORY, SECONDS = 4 << 30, 30  # that one input may take
INPUTS = 400  # a worker's, before a fresh one takes over: none holds what many have left behind
LONGEST = 50_000  # characters of a message
TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # of the direction of text


class Find(Exception):
    """What must not happen."""


def check_message(text: str) -> None:
    """A terminal can show it as it is."""
    if len(text) > LONGEST:
        raise Find(f"a message of {len(text)} characters: {text[:200]}")
    for char in text:
        control = unicodedata.category(char) in ("Cc", "Zl", "Zp") and char not in "\n\t"
        if control or unicodedata.bidirectional(char) in TURNS:
            raise Find(f"a control character in {text!r}")


def outcome(kind: str, keys: dict[str, Any], folder: Path, out: Path, skip_bad: bool) -> str:
    """The ids of what was published, or the message of why nothing was."""
    from rollsift.jobs.output import printable
    from rollsift.pipeline.aids import Aids
    from rollsift.pipeline.batch import filter_logs
    from rollsift.pipeline.sources import discover
    from rollsift.pipeline.sql import query
    from rollsift.pipeline.store import Run
    from rollsift.schemas.errors import InputError, UsageError
    from rollsift.schemas.recipe import resolve

    aids = Aids.named(None, f"{folder / 'reward.py'}:score" if kind == "generation" else None)
    recipe, notes = resolve({"k": 1, **keys}), list[str]()
    try:
        logs = discover([folder / "logs"])
        filter_logs(logs, recipe, out, aids=aids, skip_bad=skip_bad, notify=notes.append)
    except (InputError, UsageError) as error:
        text = printable(error.text())
        check_message(text)
        if not any(known in text for known in (".jsonl", ".parquet", *keys)):
            raise Find(f"neither file nor key is named: {text}") from error
        if out.exists():
            raise Find(f"a run folder is there after: {text}") from error
        return f"refused: {text}"
    for note in notes:
        check_message(printable(note))
    steps = Run(out).steps().values()
    counts = [step.manifest.counts for step in steps]
    if any(c.rows != c.kept + sum(c.dropped.values()) + c.bad_records for c in counts):
        raise Find(f"rows do not add up: {counts}")
    try:
        rows = query(Run(out), "SELECT * FROM rollouts").fetchall()
    except (UsageError, InputError) as error:
        check_message(printable(error.text()))
        if kind not in ("parquet", "trl"):
            raise
        return "its own columns cannot be read"  # which the filter has not looked at
    if len(rows) != sum(c.rows - c.bad_records for c in counts):
        raise Find(f"{len(rows)} rows in SQL, in the manifests {counts}")
    return " ".join(step.id for step in steps)


def attempt(kind: str, seed: int, folder: Path) -> str:
    """Make an input, filter it, with skip_bad where it is refused, JSONL by the slow path, too."""
    from rollsift.pipeline.readers import flat

    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    rng = random.Random(f"{kind} {seed}")
    keys = rng.choice(RECIPES) | ({"reward": "accuracy"} if kind == "trl" else {})
    write(rng, kind, folder / "logs")
    told = outcome(kind, keys, folder, folder / "strict", False)
    refused = told.startswith("refused")
    if refused:
        told = outcome(kind, keys, folder, folder / "lenient", True)
    if kind == "jsonl":
        fast, flat.read = flat.read, lambda *_, **__: None
        try:
            slow = outcome(kind, keys, folder, folder / "slow", True)
        finally:
            flat.read = fast
        if slow != told:
            raise Find(f"the fast path gives {told}, the slow one {slow}")
    return "filtered" if not refused else "refused" if told.startswith("refused") else "skipped"


def work(kind: str, seeds: range, folder: Path, finds: Path, pipe: Connection) -> None:
    """A worker: tells of each input that it begins it, then what became of it."""
    os.environ |= {"POLARS_MAX_THREADS": "2", "MALLOC_ARENA_MAX": "2"}
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.dup2(os.open(folder.with_suffix(".txt"), os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    os.fsync = lambda fd: None  # durability is tried elsewhere
    for seed in seeds:
        pipe.send((seed, None))
        try:
            told = attempt(kind, seed, folder)
        except BaseException:  # Rust's panics are no Exception
            told = "find"
            keep(kind, seed, traceback.format_exc(), folder, finds)
        pipe.send((seed, told))
    pipe.send((seeds.stop, None))


def fuzz(kind: str, seeds: range, until: float, finds: Path, counts: Counter[str]) -> None:
    """Try inputs of a kind, keep those that are finds."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        folder = Path(temporary) / "input"
        while len(seeds) and time.monotonic() < until:
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(
                target=work, args=(kind, seeds[:INPUTS], folder, finds, theirs)
            )
            worker.start()
            theirs.close()
            seed, lost = seeds.start, ""
            try:
                while seed < seeds[:INPUTS].stop and time.monotonic() < until and not lost:
                    if ours.poll(SECONDS):
                        seed, told = ours.recv()
                        counts.update([told] if told else [])
                    else:
                        lost = f"no answer within {SECONDS} s"
            except EOFError:
                worker.join()
                lost = f"the worker died with exit code {worker.exitcode}"
            worker.kill()
            worker.join()
            if lost:
                keep(kind, seed, lost, folder, finds)
                counts["find"] += 1
            seeds = range(seed + bool(lost), seeds.stop)
            print(f"{kind} up to seed {seed}: {dict(counts)}", file=sys.stderr)


def keep(kind: str, seed: int, told: str, folder: Path, finds: Path) -> None:
    """Keep an input that is a find, with what was seen."""
    place = finds / f"{kind}-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)
    stderr = folder.with_suffix(".txt").read_bytes()[-4000:].decode(errors="replace")
    text = f"--kind {kind} --seed {seed} --inputs 1\n{told}\n{stderr}"
    (place / "find.txt").write_text(text, errors="backslashreplace")


def main() -> int:
    """Fuzz every kind in turn; 4 where there was a find."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10, help="for all kinds together")
    parser.add_argument("--inputs", type=int, default=10**9, help="of each kind, at most")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--kind", choices=KINDS, action="append", help="one or more; default: all")
    parser.add_argument("--finds", type=Path, default=Path("runs/fuzz"), help="where they are kept")
    options = parser.parse_args()
    kinds = options.kind or KINDS
    counts = Counter(dict.fromkeys(("refused", "skipped", "filtered", "find"), 0))
    for kind in kinds:
        until = time.monotonic() + options.minutes * 60 / len(kinds)
        seeds = range(options.seed, options.seed + options.inputs)
        fuzz(kind, seeds, until, options.finds, counts)
    told = (f"{counts[word]} {word}" for word in ("refused", "skipped", "filtered"))
    finds = counts["find"]
    print(
        f"{sum(counts.values())} inputs: {', '.join(told)} (skipped: with skip_bad), {finds} finds"
    )
    return 4 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
