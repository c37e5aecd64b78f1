"""Batch: filter a finished run's logs. Every step is read, judged and staged; only when all of the
input proved usable are the steps published, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollsift.schemas.errors import BadRecord, InputError
from rollsift.schemas.manifest import FORMAT, Manifest, encode
from rollsift.schemas.recipe import Recipe, plain

from . import difficulty
from .aids import NOTHING, Aids
from .difficulty import Thresholds
from .judge import Scored, judge, measure
from .load import Carried, Loaded, digest_of, load
from .remarks import Remarks
from .score import Rules, rules
from .sources import Logs, Source, source_at
from .store import Run, RunInfo, Spool, Step, Writer
from .tables import groups_table, manifest_of, rollouts_table

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
    with Run(out).writing(info) as writer:
        return _Filter(logs, by, writer, skip_bad, Remarks(recipe, notify), progress).run()


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
        self.old = writer.run.steps()
        self.carried = Carried()
        self.estimator = difficulty.estimator(by.recipe.difficulty)
        self.earlier = 0
        self.ready: list[tuple[int, Manifest]] = []
        self.bad: list[BadRecord] = []
        self.errors: list[str] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        sources = self._sources()
        everything = self.by.recipe.difficulty.scope == "global" and self._see_all(sources)
        previous: str | None = None
        for step, source in sources.items():
            old = self.old.get(step)
            if old and not self.ready and not everything and self._unchanged(source, old):
                self._keep(old)
                previous = old.id
            else:
                previous = self._renew(source, old, previous)
        self._raise_errors()
        self.remarks.close()
        for version, manifest in self.ready:
            self.writer.publish(version, manifest)
        return self.outcome

    def _sources(self) -> dict[int, Source]:
        """The sources of all steps in order: those named now, and those of published steps."""
        sources = {source.step: source for source in self.logs.sources}
        for step, old in self.old.items():
            if step not in sources:
                path = self.logs.root / old.manifest.sources[0].file
                if not path.exists():
                    raise InputError(
                        f"{path}: vanished; step {step} was made from it. Bring it back, or filter "
                        "into another folder"
                    )
                sources[step] = source_at(path, self.logs.root)
        return dict(sorted(sources.items()))

    def _unchanged(self, source: Source, old: Step) -> bool:
        pinned = old.manifest.sources[0]
        if pinned.file != source.file:
            return False
        return pinned.digest == digest_of(source, self.by, Carried.of(old.manifest))

    def _keep(self, old: Step) -> None:
        """Take over what later steps depend on from a published step."""
        note = self.writer.run.note(old)
        self.carried = Carried.of(old.manifest, self.carried.fingerprints)
        self.carried.fingerprints.setdefault(note.get("fingerprint", ""), old.step)
        if self.by.recipe.difficulty.scope == "running":
            self.estimator.add(self.writer.run.difficulties(old))
        self.progress((self.logs.root / old.manifest.sources[0].file).stat().st_size)
        self.outcome.unchanged.append(old.step)

    def _see_all(self, sources: Mapping[int, Source]) -> bool:
        """Give the estimator every step; -> whether anything is new, so that all are renewed."""
        same = set(sources) == set(self.old) and all(
            self._unchanged(source, self.old[step]) for step, source in sources.items()
        )
        if same:
            return False
        for source in sources.values():
            if loaded := self._load(source, lambda _: None):
                self.estimator.add(measure(loaded.rows, self.by).groups["difficulty"])
                loaded.close()
        self._raise_errors()
        self.carried, self.bad = Carried(), []
        return True

    def _load(self, source: Source, progress: Progress) -> Loaded | None:
        """Read a step; None where its log cannot be used, which is kept for the end."""
        spool = Spool(self.writer.staging)
        try:
            loaded = load(source, self.by, self.carried, spool, progress)
        except InputError as error:
            self.errors.append(str(error))
            return None
        self.bad += loaded.bad
        self.carried = loaded.carried
        return loaded

    def _renew(self, source: Source, old: Step | None, previous: str | None) -> str | None:
        """Read, judge and stage a step; -> its id."""
        loaded = self._load(source, self.progress)
        if loaded is None or self.errors or (self.bad and not self.skip_bad):
            return previous
        self.remarks.loaded(source, loaded)
        scored = measure(loaded.rows, self.by)
        edges = self._edges(scored)
        judged = judge(scored, self.by.recipe, edges)
        if refusal := self.remarks.judged(source, loaded, judged):
            self.errors.append(refusal)
            return previous
        version = old.version + 1 if old else 1
        self.writer.stage(
            source.step,
            version,
            rollouts_table(source, loaded, judged),
            groups_table(source, loaded, judged),
            loaded.bad,
            {"fingerprint": loaded.fingerprint},
        )
        loaded.close()
        manifest = manifest_of(source, self.by.recipe, loaded, judged, edges, previous)
        self.ready.append((version, manifest))
        (self.outcome.replaced if old else self.outcome.published).append(source.step)
        self.outcome.bad_records += len(loaded.bad)
        return encode(manifest)[0]

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
