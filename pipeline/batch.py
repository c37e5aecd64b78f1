"""Batch: filter a finished run's logs. Every step is read, judged and staged; only when all of the
input proved usable are the steps published, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from rollsift.schemas.errors import BadRecord, InputError, RollsiftError
from rollsift.schemas.manifest import FORMAT, Encoded, encode
from rollsift.schemas.recipe import Recipe, plain

from . import difficulty
from .aids import NOTHING, Aids
from .carried import Carried
from .difficulty import Thresholds
from .info import RunInfo
from .judge import Judged, Scored, judge, measure
from .load import Loaded, digest_of, load
from .remarks import Remarks
from .score import Rules, rules
from .sources import Logs, Source, source_at
from .store import Run, Spool, Step, Writer
from .tables import manifest_of, note, tables_of

T = TypeVar("T")
Notify = Callable[[str], None]
Progress = Callable[[int], None]


@dataclass(slots=True)
class Outcome:
    """What a filter did: steps by what became of them, and the bad records of the new ones."""

    published: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    unchanged: list[int] = field(default_factory=list)
    bad_records: int = 0


def filter_logs(
    logs: Logs,
    recipe: Recipe,
    out: Path,
    *,
    aids: Aids = NOTHING,
    skip_bad: bool = False,
    notify: Notify = lambda _: None,
    progress: Progress = lambda _: None,
) -> Outcome:
    """Filter `logs` by `recipe` into the run folder `out`; equal inputs give equal manifest ids.

    `aids` are a tokenizer and a reward function to read the logs by, `notify` takes remarks for a
    person, `progress` the number of bytes read. Raises InputError where input is unusable, with all
    bad records found: then nothing is published.
    """
    by = rules(recipe, aids)
    info = RunInfo(FORMAT, plain(recipe), aids.settings, str(logs.root))
    outcome = "nothing was published"
    try:
        with Run(out).writing(info) as writer:
            work = _Filter(logs, by, writer, skip_bad, Remarks(recipe, notify), progress)
            try:
                return work.run()
            finally:
                if work.done is not None:
                    outcome = f"published up to step {work.done}, filter again for the rest"
    except RollsiftError as error:
        if type(error) is not RollsiftError:  # those say by their kind that nothing was published
            raise
        raise RollsiftError(f"{error}; {outcome}") from None


class _Filter:
    def __init__(
        self,
        logs: Logs,
        by: Rules,
        writer: Writer,
        skip_bad: bool,
        remarks: Remarks,
        progress: Progress,
    ) -> None:
        self.logs, self.by, self.writer, self.skip_bad = logs, by, writer, skip_bad
        self.remarks, self.progress = remarks, progress
        self.versions = writer.run.versions()  # of the published steps
        self.carried = Carried()
        self.estimator = difficulty.estimator(by.recipe.difficulty)
        self.earlier = 0
        self.ready: list[tuple[int, int]] = []  # steps and their versions
        self.done: int | None = None  # the last step that was published
        self.bad: list[BadRecord] = []
        self.errors: list[str] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        sources = self._sources()
        everything = self.by.recipe.difficulty.scope == "global" and self._see_all(sources)
        todo, previous = list(sources.values()), None
        while todo and not everything and (old := self._unchanged(todo[0], previous)):
            self._keep(old)
            todo, previous = todo[1:], old.id
        # A step is read while the one before it is judged and the one before that is written.
        for _ in _ahead(self._judged(todo, previous)):
            pass
        self._raise_errors()
        self.remarks.close()
        for step in self.writer.publish(self.ready):
            self.done = step
        return self.outcome

    def _sources(self) -> dict[int, Source]:
        """The sources of all steps in order: those named now, and those of published steps."""
        sources = {source.step: source for source in self.logs.sources}
        for step in self.versions:
            if step not in sources:
                path = self._old(step).log(self.logs.root)
                if not path.exists():
                    raise InputError(
                        f"{path}: vanished; step {step} was made from it. Bring it back, or filter "
                        "into another folder"
                    )
                sources[step] = source_at(path, self.logs.root)
        return dict(sorted(sources.items()))

    def _old(self, step: int) -> Step:
        return self.writer.run.step(step, self.versions[step], rows=False)

    def _unchanged(self, source: Source, previous: str | None) -> Step | None:
        """The published step that was made from a source as it is now, after the step with the id
        `previous`: a writer that was killed may have renewed that one alone."""
        if source.step not in self.versions:
            return None
        old = self._old(source.step)
        if (old.manifest.sources[0].file, old.manifest.previous) != (source.file, previous):
            return None
        now = digest_of(source, self.by, Carried.of(old.manifest))
        return old if old.manifest.sources[0].digest == now else None

    def _keep(self, old: Step) -> None:
        """Take over what later steps depend on from a published step."""
        note = self.writer.run.note(old)
        self.carried = Carried.of(old.manifest, self.carried.fingerprints)
        self.carried.fingerprints.setdefault(note.get("fingerprint", ""), old.step)
        if self.by.recipe.difficulty.scope == "running":
            self.estimator.add(self.writer.run.difficulties(old))
        self.progress(old.log(self.logs.root).stat().st_size)
        self.outcome.unchanged.append(old.step)

    def _see_all(self, sources: Mapping[int, Source]) -> bool:
        """Give the estimator every step; -> whether anything is new, so that all are renewed."""
        previous = None
        for source in sources.values():
            if not (old := self._unchanged(source, previous)):
                break
            previous = old.id
        else:
            return False
        for source in sources.values():
            if loaded := self._usable(self._load(source, lambda _: None)):
                self.estimator.add(measure(loaded.rows, self.by).groups["difficulty"])
                loaded.close()
        self._raise_errors()
        self.carried, self.bad = Carried(), []
        return True

    def _load(self, source: Source, progress: Progress) -> Loaded | InputError:
        """Read a step; the error where its log cannot be used."""
        try:
            loaded = load(source, self.by, self.carried, Spool(self.writer.staging), progress)
        except InputError as error:
            return error
        self.carried = loaded.carried
        return loaded

    def _usable(self, loaded: Loaded | InputError) -> Loaded | None:
        """A step that can be judged; what is wrong with others is kept for the end, and then
        nothing more is judged."""
        if isinstance(loaded, InputError):
            self.errors.append(str(loaded))
            return None
        self.bad += loaded.bad
        return None if self.errors or (self.bad and not self.skip_bad) else loaded

    def _judged(
        self, sources: Sequence[Source], previous: str | None
    ) -> Iterator[Callable[[], None]]:
        """Judge the steps as they are read; -> for each that is new what stages it. `previous` is
        the id of the step before them."""
        loads = (partial(self._load, source, self.progress) for source in sources)
        # A person's own function runs in the main thread, where it can be interrupted.
        read = (job() for job in loads) if self.by.aids.reward else _ahead(loads)
        for source, found in zip(sources, read, strict=True):
            loaded = self._usable(found)
            if loaded is None:
                continue
            self.remarks.loaded(source, loaded)
            scored = measure(loaded.rows, self.by)
            edges = self._edges(scored)
            judged = judge(scored, self.by.recipe, edges)
            if refusal := self.remarks.judged(source, loaded, judged):
                self.errors.append(refusal)
                continue
            version = self.versions.get(source.step, 0) + 1
            made = manifest_of(source, self.by.recipe, loaded, judged, edges, previous)
            manifest = encode(made)
            yield partial(self._stage, version, manifest, source, loaded, judged)
            self.ready.append((source.step, version))
            previous = manifest[0]
            new = self.outcome.published if version == 1 else self.outcome.replaced
            new.append(source.step)
            self.outcome.bad_records += len(loaded.bad)

    def _stage(
        self, version: int, manifest: Encoded, source: Source, loaded: Loaded, judged: Judged
    ) -> None:
        tables = tables_of(source, loaded, judged)
        self.writer.stage(source.step, version, manifest, tables, note(loaded))
        loaded.close()

    def _edges(self, scored: Scored) -> Thresholds:
        difficulties = scored.groups["difficulty"]
        earlier = self.earlier
        if self.by.recipe.difficulty.scope == "running":
            earlier = self.estimator.seen
            self.estimator.add(difficulties)
        self.earlier += len(difficulties.drop_nulls())
        return difficulty.thresholds(self.estimator, earlier)

    def _raise_errors(self) -> None:
        if self.errors or (self.bad and not self.skip_bad):
            raise InputError("\n".join(self.errors), self.bad)
        if self.carried.kinds and self.ready:
            self.by.check_names(self.carried.fields())


def _ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The jobs' results, in order; while one is used, the next job runs in a thread."""
    with ThreadPoolExecutor(1) as worker:
        running: Future[T] | None = None
        for job in jobs:
            following = worker.submit(job)
            if running:
                yield running.result()
            running = following
        if running:
            yield running.result()
