"""The plan: what a run replays. A step is an update, its kept rows in training order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rollsift.pipeline.files import sha256_of
from rollsift.pipeline.groups import ROW_KEY
from rollsift.pipeline.sources import STEP_FILE
from rollsift.pipeline.store import Run, Step
from rollsift.schemas.errors import RESTORE, CheckError, InputError
from rollsift.schemas.reasons import NOT_COUNTED

from .tokens import light

# Rows that count in their group, kept ones among them.
_COUNTS = ~pl.col("reason").cast(pl.String).is_in(NOT_COUNTED).fill_null(False)
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Update:
    """The kept rows of one step, n of them in g groups, in training order.

    `rows` [n] are records of `path`, `offsets` [g + 1] cut them into groups; `group_rows` and
    `group_tokens` [g] count the whole groups, rejected rows too. `session` [n] numbers the
    rollouts, `final` [n] says which row is its rollout's last output. `reward` [n] is float64;
    `version` [g] is the oldest policy version in the whole group, -1 where one is not known.
    """

    step: int
    manifest: str
    path: Path
    length_unit: str | None
    rows: Ints
    offsets: Ints
    group_rows: Ints
    group_tokens: Ints
    session: Ints
    final: np.ndarray[Any, np.dtype[np.bool_]]
    reward: np.ndarray[Any, np.dtype[np.float64]]
    version: Ints

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def groups(self) -> Ints:
        """[n] the number of each row's group."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def without(self, dropped: np.ndarray[Any, np.dtype[np.bool_]]) -> Update:
        """The update without some of its groups; `dropped` is [g]."""
        rows = ~dropped[self.groups]
        sizes = np.diff(self.offsets)[~dropped]
        return Update(
            self.step, self.manifest, self.path, self.length_unit, self.rows[rows],
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            self.group_rows[~dropped], self.group_tokens[~dropped], self.session[rows],
            self.final[rows], self.reward[rows], self.version[~dropped],
        )  # fmt: skip


class Plan:
    """The updates of a run, one for each step that kept rows, in step order; each is read when it
    is asked for.

    Raises UsageError where there is no run, CheckError where a manifest is not whole or not the one
    that follows, InputError for a run over logs of text, which have no tokens.
    """

    def __init__(self, run: Path, logs: Path | None = None) -> None:
        self.run = Run(run)
        self.root = logs or Path(self.run.info.log_root)
        steps = list(self.run.steps(rows=False).values())
        for before, step in zip([None, *steps], steps, strict=False):
            if step.manifest.previous != (before and before.id):
                raise CheckError(
                    f"{self.run.table('manifests', step.step, step.version)}: it does not follow "
                    f"{f'step {before.step}' if before else 'nothing'}; {RESTORE}"
                )
        self.steps = [step for step in steps if _kept(step)]
        for step in self.steps:
            source = step.manifest.sources[0].file
            named = STEP_FILE.fullmatch(Path(source).name)
            if (
                named and named["kind"] == "jsonl"
            ) or "prompt_ids" not in step.manifest.field_types:
                raise InputError(
                    f"{source}: only Parquet with prompt_ids and response_ids can be replayed: "
                    "verl's own dumps are text. Let verl capture its rollouts (see "
                    "pipeline/capture/README.md) and filter those"
                )

    def __len__(self) -> int:
        return len(self.steps)

    def head(self, index: int) -> Step:
        """A step's manifest without its rows."""
        return self.steps[index]

    def update(self, index: int) -> Update:
        """An update's rows, and what the run's tables say of them."""
        step = self.run.step(self.steps[index].step, self.steps[index].version)
        path = step.log(self.root)
        if not path.is_file():
            raise InputError(f"{path}: no such file; bring it back, or say with --logs where it is")
        manifest = step.manifest
        kept, version = self._kept(step)
        if kept["source_row"].to_list() != manifest.row:
            file = self.run.table("rollouts", step.step, step.version)
            raise CheckError(f"{file}: its kept rows are not those of the manifest; {RESTORE}")
        offsets = np.array(manifest.offsets, np.int64)
        session, final = _sessions(kept, path)
        return Update(
            step=step.step,
            manifest=step.id,
            path=path,
            length_unit=manifest.length_unit,
            rows=np.array(manifest.row, np.int64),
            offsets=offsets,
            group_rows=np.array(manifest.group_rows, np.int64),
            group_tokens=np.array(manifest.group_tokens, np.int64),
            session=session,
            final=final,
            reward=kept["reward"].to_numpy(),
            version=version,
        )

    def rejected(self, index: int, update: Update) -> Ints:
        """The rows of the update's groups that count but were not kept, in source order; without
        those that hold no token of the policy's, which have no weight."""
        step = self.steps[index]
        file = self.run.table("rollouts", step.step, step.version)
        columns = ["group", "source_row", "reason", "response_length", "kept"]
        table = pl.read_parquet(file, columns=columns, glob=False).filter(_COUNTS)
        groups = table.filter(pl.col("source_row").is_in(update.rows))["group"].unique()
        here = pl.col("group").is_in(groups.implode()) & (pl.col("response_length") > 0)
        return table.filter(~pl.col("kept") & here)["source_row"].to_numpy()

    def _kept(self, step: Step) -> tuple[pl.DataFrame, Ints]:
        """The kept rows by group, and the oldest version of each of these groups."""
        file = self.run.table("rollouts", step.step, step.version)
        found = sha256_of(file) if file.is_file() else "no such file"
        if found != step.tables.rollouts:
            raise CheckError(
                f"{file}: not the table that was published: expected SHA-256 "
                f"{step.tables.rollouts}, found {found}; {RESTORE}"
            )
        columns = ["group", "source_row", "sample", "reward", "policy_version", "kept", "reason"]
        table = pl.read_parquet(file, columns=columns, glob=False).filter(_COUNTS)
        oldest = table.group_by("group").agg(
            pl.col("policy_version").fill_null(-1).min(), pl.col("kept").any()
        )
        version = oldest.filter("kept").sort("group")["policy_version"].to_numpy()
        return table.filter("kept").sort("group", maintain_order=True), version


def _kept(step: Step) -> bool:
    return step.manifest.counts.kept > 0


def _sessions(kept: pl.DataFrame, path: Path) -> tuple[Ints, Any]:
    """Numbers of the rollouts, and whether each row is its rollout's last output."""
    key = kept.select("group", pl.col("sample").fill_null(-1 - pl.int_range(pl.len())))
    session = key.select(pl.struct(pl.all()).rank("dense") - 1).to_series().cast(pl.Int64)
    numbers = session.to_numpy()
    if session.n_unique() == len(session):
        return numbers, np.ones(len(session), np.bool_)
    frame = pl.DataFrame({"session": session, "output": _outputs(path, kept["source_row"])})
    final = frame.select(pl.col("output") == pl.col("output").max().over("session"))
    return numbers, final.to_series().to_numpy()


def _outputs(path: Path, rows: pl.Series) -> pl.Series:
    """The number of each row's output in its session: as captured, else as in verl's row keys."""
    places = rows.to_numpy()
    numbers: Any = light(path, places, "output_index")
    if numbers is not None:
        return pl.Series(pl.from_arrow(numbers)).cast(pl.Int64)
    uids: Any = light(path, places, "uid")
    return pl.Series(pl.from_arrow(uids)).cast(pl.String).str.extract(ROW_KEY, 3).cast(pl.Int64)
