"""The recorder: collects what belongs to a step, and has it written when the step is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rollsift.schemas.errors import RecipeError, RollsiftError

from .background import Background, say
from .online import VARIABLE, Online
from .rows import SAMPLED, TRAINED, from_padded, from_queue, joined, key_of, with_trained
from .settings import Settings, settings_of
from .writer import sweep, write

Part = Callable[[], pa.Table]  # makes some of a step's rows, in the background
Fetch = Callable[[Sequence[str], Sequence[str]], Any]  # keys and fields to what the queue has


class _Sampled(NamedTuple):
    """A batch that was sampled, with what was evicted before it: `table` has the rows of `keys`
    first, of which verl trains on the `chosen`."""

    table: pa.Table
    keys: list[str]
    chosen: list[str]


class Recorder:
    """One folder of captured steps. What fails here is told and counted, and never raised into
    training; a recipe that cannot judge is, for the user asked to train on what it keeps."""

    def __init__(self, folder: Path, recipe: str | None) -> None:
        self.folder, self.recipe = folder, recipe
        self.background = Background()
        self.seconds = 0.0  # that the trainer spent in here
        self.online: Online | None = None
        self.mask: Any = None  # V0's response mask from before rejection
        self._reset()

    def _reset(self) -> None:
        self._settings: Settings | None = None
        self._evicted: list[Callable[[int, Settings], pa.Table]] = []
        self._sampled: _Sampled | None = None
        self._step = -1
        self._parts: list[Part] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of what is done inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Count the seconds of what is done inside; tell and count its errors."""
        with self.timed():
            try:
                yield
            except Exception as error:
                self.background.fail(what, error)

    def begin(self, trainer: Any, recipes: bool) -> None:
        """A trainer starts: say which, and where to.

        Raises RecipeError for a recipe that cannot be used, or by a trainer without `recipes`.
        """
        import verl

        self._reset()
        if self.recipe:
            if not recipes:
                raise RecipeError(f"{VARIABLE}: only verl's V1 trainer can follow a recipe")
            self.online = Online(self.recipe, self.folder)
        kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
        recipe = f", trained on what {self.online.recipe.name} keeps" if self.online else ""
        say(f"verl {verl.__version__}, {kind}, to {self.folder}{recipe}")
        with self.guarded(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)

    def evict(self, keys: Sequence[str], tags: Sequence[Any], reason: str, fetch: Fetch) -> None:
        """Take groups that leave the queue; they belong to the step that ends next."""
        keys, tags = in_order(keys, tags)
        data = fetch(keys, SAMPLED)
        self._evicted.append(partial(from_queue, keys, tags, data, reason))

    def choose(self, trainer: Any, batch: Any, fetch: Fetch) -> list[str]:
        """Judge a batch that was sampled; -> the keys that verl is to train on, in its order.

        Raises RollsiftError where the recipe cannot be followed.
        """
        assert self.online is not None
        if self.online.by_bucket and getattr(trainer, "parameter_sync_step", 1) > 1:
            raise RollsiftError(
                f"{VARIABLE}: k by bucket needs all prompts of a step at once, and "
                "parameter_sync_step cuts the step: set that to 1, or k to one number"
            )
        step, settings = trainer.global_steps, self._settings_of(trainer)
        keys, tags = in_order(batch.keys, batch.tags)
        parts = [from_queue(keys, tags, fetch(keys, SAMPLED), None, step, settings)]
        table = joined([*parts, *(part() for part in self._left(step, settings))])
        kept = self.online.kept(step, table, settings.note)[: len(keys)]
        if not kept.any():
            say(f"step {step}: {VARIABLE} keeps nothing, so the whole batch is trained on")
            kept[:] = True
        chosen = [key for key, keep in zip(keys, kept.tolist(), strict=True) if keep]
        self._sampled, wanted = _Sampled(table, keys, chosen), set(chosen)
        return [key for key in batch.keys if key in wanted]

    def trained(self, trainer: Any, batch: Any, fetch: Fetch) -> None:
        """Take a batch that verl trained on; with the last of a step, have the step written."""
        step, settings = trainer.global_steps, self._settings_of(trainer)
        if step != self._step:
            self._step, self._parts = step, []
        sampled, self._sampled = self._sampled, None
        if sampled:
            late = fetch(sampled.chosen, TRAINED)
            self._parts.append(partial(with_trained, *sampled, late))
        else:
            keys, tags = in_order(batch.keys, batch.tags)
            data = fetch(keys, [*SAMPLED, *TRAINED])
            self._parts.append(partial(from_queue, keys, tags, data, None, step, settings))
        updates = getattr(trainer, "local_trigger_step", 0) + 1
        if updates < getattr(trainer, "parameter_sync_step", 1):
            return
        # What was evicted after the recipe judged belongs to the next step that it judges.
        parts = [*self._parts, *([] if sampled else self._left(step, settings))]
        lost, self._parts = updates - len(self._parts), []
        if lost:
            raise ValueError(f"{lost} of its {updates} updates could not be taken")
        self._write(step, parts, settings)

    def logged(self, trainer: Any, batch: Any, components: Mapping[str, Any]) -> None:
        """Take a V0 batch, which is a whole step; its tensors are copied here."""
        step, settings = trainer.global_steps, self._settings_of(trainer)
        mask, self.mask = self.mask, None
        table = from_padded(batch, components, mask, step, settings)
        self._write(step, [lambda: table], settings)

    def close(self) -> None:
        """Have all written that was taken, and tell what came of it."""
        self.background.flush()
        done, failed, waited = (getattr(self.background, n) for n in ("done", "failed", "waited"))
        left = ", groups evicted after the last step left out" if self._evicted else ""
        self._evicted.clear()
        say(
            f"{done} steps in {self.folder}, {failed} failures, {self.seconds:.2f} s inside the "
            f"trainer, {waited:.2f} s of it waiting for the disk{left}"
        )

    def _settings_of(self, trainer: Any) -> Settings:
        if self._settings is None:
            self._settings = settings_of(trainer)
            if not self._settings.note.sampling["calculate_log_probs"]:
                say("actor_rollout_ref.rollout.calculate_log_probs is off: no rollout_log_probs")
        return self._settings

    def _left(self, step: int, settings: Settings) -> list[Part]:
        evicted, self._evicted = self._evicted, []
        return [partial(part, step, settings) for part in evicted]

    def _write(self, step: int, parts: list[Part], settings: Settings) -> None:
        def job() -> None:
            write(self.folder, step, joined([part() for part in parts]), settings.note)

        self.background.submit(f"step {step}", job)


def in_order(keys: Sequence[str], tags: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """The rows that are no padding, sorted by group, session and output: an order that does not
    depend on how verl balanced them."""
    real = [at for at in range(len(keys)) if not tags[at].get("is_padding")]
    real.sort(key=lambda at: key_of(keys[at]))
    return [keys[at] for at in real], [tags[at] for at in real]


def executor(trainer: Any, recorder: Recorder, recipes: bool) -> None:
    """Wrap the methods of a trainer class that begin and end verl's own writer of dumps: capture
    begins and ends with it. Without `recipes` a trainer refuses to follow one."""
    init, shutdown = trainer._init_dump_executor, trainer._shutdown_dump_executor

    @wraps(init)
    def _init_dump_executor(self: Any) -> Any:
        recorder.begin(self, recipes)
        return init(self)

    @wraps(shutdown)
    def _shutdown_dump_executor(self: Any) -> Any:
        try:
            return shutdown(self)
        finally:
            recorder.close()

    trainer._init_dump_executor = _init_dump_executor
    trainer._shutdown_dump_executor = _shutdown_dump_executor
