"""Sweep: many recipes judged from one reading of a log, and nothing stored.

Steps are outside, points inside, so what is held at a time is one step's light rows. Points that
read the log alike share the reading, points that differ in k alone share the scores too; each is
judged by the filter's own stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from rollsift.schemas.errors import BadRecord, InputError
from rollsift.schemas.recipe import Recipe

from . import difficulty
from .aids import NOTHING, Aids
from .carried import Carried
from .difficulty import Thresholds
from .judge import Scored, judge, measure
from .load import Loaded, load
from .points import Point, Totals
from .remarks import Remarks
from .score import Rules, rules
from .sources import Logs, Source
from .store import Spool

Notify = Callable[[str], None]
Progress = Callable[[int], None]


def sweep(
    logs: Logs,
    points: Sequence[Point],
    *,
    aids: Aids = NOTHING,
    skip_bad: bool = False,
    notify: Notify = lambda _: None,
    progress: Progress = lambda _: None,
) -> None:
    """Count in every point what a filter by its recipe would keep.

    `aids` are a tokenizer and a reward function to read the logs by; `notify` takes remarks for a
    person, `progress` the number of bytes read. Raises what the filter would raise.
    """
    work = _Sweep(logs, skip_bad, notify, progress)
    for point in points:
        work.add(point, rules(point.recipe, aids))
    work.run()


class _Scoring:
    """Points that differ in k alone: one scoring and one estimator serve them all."""

    def __init__(self, by: Rules) -> None:
        self.by = by
        self.points: list[tuple[Point, Remarks]] = []
        self.estimator = difficulty.estimator(by.recipe.difficulty)
        self.over_run = by.recipe.difficulty.scope == "global"
        self.earlier = 0
        self.all = Totals()

    def see(self, source: Source, loaded: Loaded) -> list[str]:
        """Add a step to the quartiles over the whole run."""
        self.estimator.add(measure(loaded.rows, self.by).groups["difficulty"])
        return []

    def judge(self, source: Source, loaded: Loaded) -> list[str]:
        """Judge a step by every point; -> why it is refused, where it is."""
        scored = measure(loaded.rows, self.by)
        edges = self._edges(scored)
        counted = scored.rollouts.filter(pl.col("invalid").is_null())
        self.all.add(counted)
        refusals = []
        for point, remarks in self.points:
            remarks.loaded(source, loaded)
            judged = judge(scored, point.recipe, edges)
            refusals.append(remarks.judged(source, loaded, judged))
            kept = judged.rows.filter("kept").select("rollout")
            point.add(counted.join(kept, on="rollout", how="semi"))
        return [refusal for refusal in refusals if refusal]

    def _edges(self, scored: Scored) -> Thresholds:
        difficulties = scored.groups["difficulty"]
        if not self.over_run:
            self.estimator.add(difficulties)
        edges = difficulty.thresholds(self.estimator, self.earlier)
        self.earlier += len(difficulties.drop_nulls())
        return edges


@dataclass(slots=True)
class _Reading:
    """Points for which a log is read alike: their scorings, by the recipe without its k."""

    by: Rules
    scorings: dict[Recipe, _Scoring] = field(default_factory=dict)
    carried: Carried = field(default_factory=Carried)


class _NoSpool(Spool):
    """Takes no text: nothing is stored."""

    def add(self, part: pl.DataFrame) -> None:
        pass


class _Sweep:
    def __init__(self, logs: Logs, skip_bad: bool, notify: Notify, progress: Progress) -> None:
        self.logs, self.skip_bad, self.notify, self.progress = logs, skip_bad, notify, progress
        self.points = 0
        self.readings: dict[Any, _Reading] = {}
        self.notes: dict[str, list[str]] = {}
        self.bad: list[BadRecord] = []
        self.errors: list[str] = []

    def add(self, point: Point, by: Rules) -> None:
        """Put a point to those that it shares work with."""
        self.points += 1
        fields = (by.named, by.as_numbers, by.as_truths)
        read_alike = (point.recipe.reward, point.recipe.length, *fields)
        reading = self.readings.setdefault(read_alike, _Reading(by))
        without_k = msgspec.structs.replace(point.recipe, k=1)
        if without_k not in reading.scorings:
            reading.scorings[without_k] = _Scoring(by)
        scoring = reading.scorings[without_k]
        point.all = scoring.all

        def note(text: str) -> None:
            self.notes.setdefault(text, []).append(point.label)

        scoring.points.append((point, Remarks(point.recipe, note)))

    def run(self) -> None:
        scorings = [s for reading in self.readings.values() for s in reading.scorings.values()]
        if over_run := [scoring for scoring in scorings if scoring.over_run]:
            self._pass(over_run, _Scoring.see, lambda _: None)
        self._pass(scorings, _Scoring.judge, self.progress)
        for scoring in scorings:
            for _, remarks in scoring.points:
                remarks.close()
        self._tell()

    def _pass(
        self,
        scorings: Sequence[_Scoring],
        do: Callable[[_Scoring, Source, Loaded], list[str]],
        progress: Progress,
    ) -> None:
        """Read every step, and do with it what is to be done for each of these scorings."""
        turns = []
        for reading in self.readings.values():
            reading.carried = Carried()
            if served := [s for s in reading.scorings.values() if s in scorings]:
                turns.append((reading, served))
        self.bad = []
        for source in self.logs.sources:
            for reading, served in turns:
                loaded = self._load(source, reading, progress if reading is turns[0][0] else None)
                if loaded and not self._unusable():
                    for scoring in served:
                        self.errors += do(scoring, source, loaded)
        if self._unusable():
            raise InputError("\n".join(dict.fromkeys(self.errors)), list(dict.fromkeys(self.bad)))
        for reading, _ in turns:
            if reading.carried.kinds:
                reading.by.check_names(reading.carried.fields())

    def _load(self, source: Source, reading: _Reading, progress: Progress | None) -> Loaded | None:
        """Read a step; None where it cannot be used, which is kept for the end."""
        try:
            loaded = load(source, reading.by, reading.carried, _NoSpool(Path()), progress)
        except InputError as error:
            self.errors.append(str(error))
            return None
        self.bad += loaded.bad
        reading.carried = loaded.carried
        return loaded

    def _unusable(self) -> bool:
        return bool(self.errors or (self.bad and not self.skip_bad))

    def _tell(self) -> None:
        """Say each remark once, and of which points it holds, unless of all."""
        for text, labels in self.notes.items():
            told = list(dict.fromkeys(labels))
            more = f" and {len(told) - 3} more" if len(told) > 3 else ""
            whose = "" if len(told) == self.points else f"{'; '.join(told[:3])}{more}: "
            self.notify(f"{whose}{text}")
