"""The trainer: one SPMD loop over a run's updates, on every rank alike. No Ray, no inference."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from rollsift.schemas.errors import CheckError, UsageError

from . import checkpoints, preflight
from .advantages import Advantages
from .checkpoints import State
from .dataset import Item, Replay, Rules
from .devices import gathered, together
from .plan import Plan
from .settings import refuse, settings
from .share import Normalizer, Odd, Split
from .update import Updater
from .worker import Worker

OldLogProbs = Literal["recompute", "logged"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a replay is told. `sets` are verl's settings as KEY=VALUE; the learner's weights are
    those of `model`, or of `resume`, a checkpoint's folder, else of the newest one in `out`."""

    run: Path
    model: Path
    out: Path
    sets: tuple[str, ...] = ()
    advantages: Advantages = "verl"
    normalizer: Normalizer = "kept"
    odd: Odd = "pad"
    old_log_probs: OldLogProbs = "recompute"
    max_lag: int | None = None
    assume_version: bool = False
    reference: Path | None = None
    resume: Path | None = None
    publish: Path | None = None
    every: int = 1
    logs: Path | None = None
    workers: int = 1


@dataclass(slots=True)
class Telling:
    """Where a replay tells of itself, on the first rank: metrics of each update, notes for people,
    and progress."""

    metrics: Callable[[dict[str, Any]], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None
    progress: Callable[[str, int, int], None] = lambda what, done, total: None


def replay(options: Options, device: str, telling: Telling) -> bool:
    """Make all updates of a run that are not made yet; -> whether all of them are. To be called by
    every rank, inside `devices.process_group`.

    SIGTERM ends it after the update in hand, saved. Raises UsageError, InputError or CheckError
    before any update where something cannot be used.
    """
    return _Trainer(options, device, telling).run()


class _Trainer:
    def __init__(self, options: Options, device: str, telling: Telling) -> None:
        self.options, self.telling = options, telling
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        self.plan = Plan(options.run, options.logs)
        tree = settings(options.model, options.sets, device, max(1, len(self.plan)))
        refuse(tree, options.advantages, options.normalizer)
        self.tree, self.actor_rules = tree, tree.actor_rollout_ref.actor
        self.correction = tree.algorithm.rollout_correction
        self.source, self.state = self._start()
        if options.publish and (newest := checkpoints.latest(options.publish)):
            self._same_run(newest, "choose another --publish")
        self.from_log = self._from_log()

    def run(self) -> bool:
        options, state, count = self.options, self.state, len(self.plan)
        done = state.done if state else 0
        version = checkpoints.version_of(self.source or options.model)
        if done == count:
            self.telling.note(f"{options.run}: all of its {count} updates are made")
            return True
        actor = Worker(self.tree)
        reference = Worker(self.tree, str(options.reference)) if options.reference else None
        updater = Updater(self.tree, actor, reference)
        rank, ranks = actor.ranks
        rules = Rules(
            options.advantages, bool(self.tree.algorithm.norm_adv_by_std_in_grpo), self.from_log,
            self.tree.temperature, options.max_lag, options.assume_version,
            updater.normalised, actor.vocabulary,
        )  # fmt: skip
        data = Replay(
            options.run, self._split(ranks), rules,
            logs=options.logs, rank=rank, version=version - done,
        )  # fmt: skip
        together(lambda: self._preflight(data, done))
        if source := self.source:
            together(lambda: actor.load(source / "actor"))
        return self._loop(data, updater, done, version)

    def _loop(self, data: Replay, updater: Updater, done: int, version: int) -> bool:
        save_every, actor = int(self.tree.trainer.save_freq), updater.actor
        with _terminated() as stop:
            for item in self._items(data, done):
                began = time.perf_counter()
                metrics = updater.update(item)
                done, version = done + 1, version + 1
                state = State(checkpoints.FORMAT, version, done, item.step, item.manifest)
                metrics["timing_s/step"] = time.perf_counter() - began
                self._tell(item, state, metrics)
                if self.options.publish and (done % self.options.every == 0 or done == len(data)):
                    self._write(self.options.publish, state, actor.publish)
                stopped = any(gathered([bool(stop)]))
                if stopped or done == len(data) or (save_every > 0 and done % save_every == 0):
                    self._write(self.options.out, state, lambda path: actor.save(path / "actor"))
                if stopped:
                    self.telling.note(f"ended after update {done} of {len(data)}, which is saved")
                    return done == len(data)
        return True

    def _start(self) -> tuple[Path | None, State | None]:
        """The checkpoint to go on from, and where in the run it is."""
        newest, wanted = checkpoints.latest(self.options.out), self.options.resume
        if wanted and newest and wanted.resolve() != newest.resolve():
            raise UsageError(
                f"{self.options.out}: its newest checkpoint is {newest.name}, --resume names "
                f"{wanted}; choose another -o, or resume from that"
            )
        source = wanted or newest
        if source is None:
            return None, None
        checkpoints.check_shards(source, self.world)
        again = "bring back what it was, or begin anew with --model and another -o"
        return source, self._same_run(source, again)

    def _same_run(self, folder: Path, next_: str) -> State | None:
        """What was noted in a folder; raises CheckError where it was made from other updates."""
        state = checkpoints.state_of(folder)
        if state:
            found = self.plan.head(state.done - 1) if state.done <= len(self.plan) else None
            if found is None or found.id != state.manifest:
                here = f"step {found.step}, manifest {found.id}" if found else "no such update"
                raise CheckError(
                    f"{folder}: made from another run, or from this one before it changed: update "
                    f"{state.done} was step {state.step}, manifest {state.manifest}; here it is "
                    f"{here}. What to do: {next_}"
                )
        return state

    def _from_log(self) -> tuple[str, ...]:
        """The log-probs to read beside the tokens; raises UsageError for those that are missing."""
        rules, options = self.correction, self.options
        needed = {}
        if rules.rollout_is or rules.rollout_rs:
            needed["rollout_log_probs"] = (
                "importance weights need them: let verl log them (rollout.calculate_log_probs), or "
                "go without by -s algorithm.rollout_correction.rollout_is=null"
            )
        if options.old_log_probs == "logged":
            needed["old_log_probs"] = "--old-log-probs recompute computes them"
        if self.actor_rules.use_kl_loss and not (options.reference or self._lora):
            needed["ref_log_prob"] = "name the reference model: --reference PATH"
        if options.advantages == "logged":
            needed["advantages"] = "choose --advantages verl or paper"
        for name, next_ in needed.items():
            if lacking := next((s for s in self.plan.steps if name not in _fields(s)), None):
                file = lacking.manifest.sources[0].file
                raise UsageError(f"{file}: no column {name}, and {next_}")
        return tuple(name for name in needed if name != "advantages")

    @property
    def _lora(self) -> bool:
        return int(self.tree.actor_rollout_ref.model.lora_rank) > 0

    def _split(self, ranks: int) -> Split:
        actor, rollout = self.actor_rules, self.tree.actor_rollout_ref.rollout
        micro = 1
        if not actor.use_dynamic_bsz:
            infer = rollout.log_prob_micro_batch_size_per_gpu
            micro = math.lcm(actor.ppo_micro_batch_size_per_gpu, infer)
        options = self.options
        return Split(actor.ppo_mini_batch_size, ranks, micro, options.odd, options.normalizer)

    def _preflight(self, data: Replay, done: int) -> None:
        preflight.check(
            data,
            recomputed=self.options.old_log_probs == "recompute",
            part=(done + self.rank, self.world),
            progress=lambda at: self.telling.progress("check", at, len(data)),
        )  # fmt: skip

    def _items(self, data: Replay, done: int) -> Iterator[Item]:
        """The updates from `done` on, each read while the one before is used."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        workers = self.options.workers
        with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 has deprecated
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            loader = StatefulDataLoader(
                data, batch_size=None, sampler=range(done, len(data)), num_workers=workers,
                multiprocessing_context="spawn" if workers else None,
            )  # fmt: skip
        items = iter(loader)
        for number in range(done, len(data)):
            item: list[Item] = []
            together(lambda held=item: held.append(next(items)))  # type: ignore[misc]
            self.telling.progress("replay", number, len(data))
            yield item[0]
        self.telling.progress("replay", len(data), len(data))

    def _tell(self, item: Item, state: State, metrics: dict[str, Any]) -> None:
        counts = item.counts
        if counts.get("singletons") and self.options.advantages == "verl":
            self.telling.note(
                f"step {item.step}: {counts['singletons']} groups keep one rollout, whose "
                "advantage is then its raw reward, as in verl"
            )
        if counts.get("trimmed_groups"):
            self.telling.note(f"step {item.step}: {counts['trimmed_groups']} groups trimmed")
        if counts.get("stale_groups"):
            self.telling.note(
                f"step {item.step}: {counts['stale_groups']} groups left out, more than "
                f"{self.options.max_lag} updates behind"
            )
        said = {f"replay/{name}": value for name, value in counts.items()}
        head = {"training/global_step": state.version, "replay/step": item.step}
        self.telling.metrics({**head, **said, **item.metrics, **metrics})

    def _write(self, out: Path, state: State, fill: Callable[[Path], None]) -> None:
        name = f"global_step_{state.version}"
        checkpoints.write_whole(out, name, state, fill, self.rank)


def _fields(step: Any) -> dict[str, str]:
    fields: dict[str, str] = step.manifest.field_types
    return fields


@contextmanager
def _terminated() -> Iterator[list[int]]:
    """A list that holds SIGTERM once it came; the update in hand goes on."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
