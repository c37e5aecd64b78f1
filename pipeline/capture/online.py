"""Online: the recipe's verdict on a batch before verl trains on it.

The rows that a step will write are judged by what judges them later: their light columns go through
the same file format, reader and stages as `rollsift filter` puts the captured file through.
"""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from rollsift.pipeline import difficulty, recipes
from rollsift.pipeline.carried import Carried
from rollsift.pipeline.judge import Judged, Scored, judge, measure
from rollsift.pipeline.load import Loaded, load
from rollsift.pipeline.remarks import Remarks
from rollsift.pipeline.score import rules
from rollsift.pipeline.sources import STEP_FILE, Source, discover
from rollsift.pipeline.store import Spool
from rollsift.schemas.captured import TOKENS, Captured
from rollsift.schemas.errors import InputError, RecipeError
from rollsift.schemas.recipe import KPerBucket

from .background import say
from .writer import write_parquet

VARIABLE = "ROLLSIFT_RECIPE"


class Online:
    """One recipe over the steps of one training run that is captured into `folder`."""

    def __init__(self, text: str, folder: Path) -> None:
        """`text` is a shipped recipe's name or a file, and after it `key=value` to change.

        Raises RecipeError where there is no such recipe, or it cannot be followed step by step.
        """
        name, *sets = shlex.split(text)
        self.recipe = recipes.load(name, sets, files("rollsift.jobs") / "recipes", say)
        if self.recipe.difficulty.scope == "global":
            raise RecipeError("difficulty.scope: global needs all steps; online only running works")
        self.by = rules(self.recipe)
        self.folder = folder
        self.estimator = difficulty.estimator(self.recipe.difficulty)
        self.remarks = Remarks(self.recipe, say)
        self.started = False

    @property
    def by_bucket(self) -> bool:
        """Whether k depends on the other prompts of the step."""
        return isinstance(self.recipe.k, KPerBucket)

    def judge(self, step: int, table: pa.Table, note: Captured) -> Judged:
        """Judge the rows of a step, as they will be written; `source_row` is the row.

        The first step is preceded by what is captured of earlier ones, so that the running
        difficulty goes on where a resumed run does. Raises InputError for rows that the recipe
        cannot judge, RecipeError where it reads a field that is not there when verl samples.
        """
        first, self.started = not self.started, True
        if first:
            self._resume(step)
        light = table.drop_columns([c.name for c in TOKENS])
        with TemporaryDirectory() as place:
            path = Path(place) / f"{step}.parquet"
            write_parquet(path, light, note)
            source = Source(path, path.name, step, 1, "parquet")
            loaded, scored = self._measured(source)
        self.remarks.loaded(source, loaded)
        if first:
            self.by.check_names(loaded.carried.fields())
        if scored.rows["reward"].null_count() == len(scored.rows):
            raise InputError(
                f"{VARIABLE}: step {step} has no rewards when verl samples; a colocated reward "
                "model scores later: set reward.reward_model.enable_resource_pool=True"
            )
        earlier = self.estimator.seen
        self.estimator.add(scored.groups["difficulty"])
        edges = difficulty.thresholds(self.estimator, earlier)
        judged = judge(scored, self.recipe, edges)
        if refusal := self.remarks.judged(source, loaded, judged):
            raise InputError(refusal)
        return judged

    def kept(self, step: int, table: pa.Table, note: Captured) -> np.ndarray[Any, Any]:
        """[rows] whether the recipe keeps each row of a step."""
        rows = self.judge(step, table, note).rows
        found = np.zeros(len(table), np.bool_)
        found[rows.filter(pl.col("kept"))["source_row"].to_numpy()] = True
        return found

    def _measured(self, source: Source) -> tuple[Loaded, Scored]:
        loaded = load(source, self.by, Carried(), Spool(source.path.parent))
        if loaded.bad:
            raise InputError(f"{VARIABLE}: step {source.step} cannot be judged", loaded.bad)
        return loaded, measure(loaded.rows, self.by)

    def _resume(self, step: int) -> None:
        """Count the captured steps before this one."""
        if not any(STEP_FILE.fullmatch(path.name) for path in self.folder.iterdir()):
            return
        earlier = [source for source in discover([self.folder]).sources if source.step < step]
        for source in earlier:
            self.estimator.add(self._measured(source)[1].groups["difficulty"])
        if earlier:
            say(f"{VARIABLE}: difficulty goes on from {len(earlier)} captured steps before {step}")
