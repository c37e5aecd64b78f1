"""Checkpoints in the layout of verl's PPO trainer, whole or absent.

    OUT/global_step_12/actor/                     verl's own files: shards, optimizer, schedule
    OUT/global_step_12/rollsift.json              where in the run this is
    OUT/latest_checkpointed_iteration.txt         12; written last

A folder gets its name when all of it is on the disk. Loading one reads verl's shards, which are
pickles: only a folder that the user named is ever loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollsift.pipeline.files import naming, put, sync
from rollsift.schemas.errors import InputError, UsageError

from .devices import together

FORMAT = 1
TRACKER, STATE = "latest_checkpointed_iteration.txt", "rollsift.json"
_NAME = re.compile(r"global_step_([0-9]+)")


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where replay is: `done` updates of a run, the last of them that of `step`, whose manifest
    (and through it all before it) is `manifest`; `version` is the learner's."""

    format: int
    version: int
    done: int
    step: int
    manifest: str


def latest(out: Path) -> Path | None:
    """The folder that the tracker names; None where there is none."""
    tracker = out / TRACKER
    if not tracker.exists():
        return None
    number = tracker.read_text().strip()
    folder = out / f"global_step_{number}"
    if not number.isdecimal() or not folder.is_dir():
        raise InputError(f"{tracker}: names {number!r}, but {folder} is no checkpoint; remove it")
    return folder


def version_of(folder: Path) -> int:
    """The learner's version of weights: as noted beside them, else by the folder's name, else 0."""
    if state := state_of(folder):
        return state.version
    named = _NAME.fullmatch(folder.name)
    return int(named[1]) if named else 0


def state_of(folder: Path) -> State | None:
    """What was noted beside weights; None where rollsift did not write them."""
    file = folder / STATE
    try:
        state = msgspec.json.decode(file.read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise InputError(
            f"{file}: not the state of a replay ({error}); take another checkpoint"
        ) from None
    if state.format != FORMAT:
        raise InputError(f"{file}: format {state.format}; this rollsift reads format {FORMAT}")
    return state


def check_shards(folder: Path, ranks: int) -> Path:
    """The folder with verl's shards; raises InputError where they are not for so many ranks."""
    actor = folder / "actor"
    found = sorted(path.name for path in actor.glob("model_world_size_*_rank_*.pt"))
    if not found:
        raise InputError(f"{actor}: no checkpoint of verl's FSDP worker (model_world_size_*.pt)")
    written_by = int(found[0].split("_")[3])
    if written_by != ranks:
        raise UsageError(
            f"{actor}: written by {written_by} processes, this run has {ranks}, and verl's "
            "shards cannot be cut anew. Run as many, or start from weights: --model with what "
            "--publish wrote, or verl's model merger made (the optimizer begins anew)"
        )
    missing = [
        name
        for rank in range(ranks)
        for kind in ("model", "optim", "extra_state")
        if not (actor / (name := f"{kind}_world_size_{ranks}_rank_{rank}.pt")).is_file()
    ]
    if missing:
        raise InputError(f"{actor}: no {', '.join(missing)}; take another checkpoint")
    return actor


def write_whole(
    out: Path, name: str, state: State, fill: Callable[[Path], None], rank: int
) -> None:
    """Let all ranks `fill` a folder; it gets its name, and the tracker names it, once all of it is
    on the disk. One that is there already under this name, and not yet tracked, gives way."""
    building = out / f".building-{name}"
    together(lambda: _empty(building) if rank == 0 else None)
    together(lambda: fill(building))
    together(lambda: _name(building, out / name, state) if rank == 0 else None)


def _empty(folder: Path) -> None:
    with naming(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _name(building: Path, folder: Path, state: State) -> None:
    out = folder.parent
    with naming(folder):
        put(building / STATE, msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
        for inner, _, files in os.walk(building):
            for file in (*files, "."):
                sync(Path(inner) / file)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
        sync(out)
        put(out / f".{TRACKER}", str(state.version).encode())
        (out / f".{TRACKER}").rename(out / TRACKER)
        sync(out)
