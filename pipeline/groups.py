"""Groups: which rows answer one prompt, and which rows make one rollout.

A logged uid wins. verl's V1 trainer logs row keys `<group>_<session>_<output>` instead; they are
cut only where all of a file's uids are unique, have that form, and the sessions of each group so
cut begin with equal prompts. Without uid, equal prompt and ground truth make a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import polars as pl

from rollsift.schemas.errors import BadRecord

from . import segments
from .readers import constant

# Numbers as Python writes them: \d would take any script's digits, and 01 is no number of verl's.
_NUMBER = "(0|[1-9][0-9]{0,17})"
ROW_KEY = f"(?s)^(.*)_{_NUMBER}_{_NUMBER}$"
PADDING = f"^pad[0-9a-f]{{32}}_{_NUMBER}_0$"


@dataclass(slots=True)
class Grouped:
    """`rows` gains `padding`, `group` (UInt32, by first row; null for padding), `rollout` (UInt32,
    by first row; the rows of one session share it), `sample` (Int32) and `output` (Int64, order
    within the rollout). `ids` are the groups' names, `source` what they were cut by; `cut` says
    that uids were row keys."""

    rows: pl.DataFrame
    ids: pl.Series
    source: str
    cut: bool
    notes: list[str]
    bad: list[BadRecord]


def group(rows: pl.DataFrame, file: str, lossy: bool = False) -> Grouped:
    """Cut one step's light rows into groups and rollouts. Rows that belong to no group are bad, and
    in a `lossy` file, one with bad records, the sessions that lost an output to them."""
    named = rows["uid"].null_count() < len(rows)
    rows, bad = _ungroupable(rows, file, "uid" if named else "prompt")
    keys = rows["uid"] if named else _pairs(rows)
    codes, ids = _codes(keys)
    pads = ids.str.starts_with("pad") if named else ids.is_null()
    if pads.any():
        pads = ids.str.contains(PADDING)
    padding = pads.gather(codes) if pads.any() else constant(False, len(rows), pl.Boolean)
    rows = rows.hstack([padding.alias("padding")])
    # Row keys are unique, most uids are not: only then is each looked at.
    cut, note = _row_keys(rows) if named and len(ids) == len(rows) else (None, None)
    notes = [f"{file}: every uid is unique and {note}: no uid is cut"] if note else []
    if named and len(rows) < 2 * len(ids) < 2 * len(rows) and ids.str.contains(ROW_KEY).all():
        twice = keys.filter(keys.is_duplicated())[0]
        notes.append(
            f"{file}: the uids look like row keys, but {twice!r} stands twice: none is cut"
        )
    if cut is None and "session" in rows.columns:  # captured files have columns for what is cut
        cut = [rows["uid"].cast(pl.String).alias("key"), rows["session"], rows["output"]]
    if cut is not None:
        rows = rows.with_columns(cut)
        if lossy:
            rows, torn = _torn_sessions(rows, file)
            bad += torn
        codes, ids = _codes(rows["key"].set(rows["padding"], None))
        rollout, _ = _codes(rows.select(pl.format("{}_{}", "key", "session")).to_series())
        sample, output = rows["session"].cast(pl.Int32, strict=False), rows["output"]
    else:
        if pads.any():
            codes = ((~pads).cum_sum() - 1).set(pads, None).gather(codes)
            ids = ids.filter(~pads)
        rollout = pl.int_range(len(rows), dtype=pl.UInt32, eager=True)
        sample = segments.places(codes.fill_null(len(ids)) if codes.has_nulls() else codes)
        output = constant(0, len(rows), pl.Int64)
    if not named:  # a name of fixed length for what may be pages of text
        ids = ids.map_elements(lambda key: sha256(key.encode()).hexdigest()[:32], pl.String)
    rows = rows.drop("key", "session", "output", "prompt", "truth", strict=False)
    made = {"group": codes.cast(pl.UInt32), "rollout": rollout, "sample": sample, "output": output}
    rows = rows.hstack(pl.DataFrame(made))
    return Grouped(rows, ids, "uid" if named else "prompt", cut is not None, notes, bad)


def _ungroupable(rows: pl.DataFrame, file: str, key: str) -> tuple[pl.DataFrame, list[BadRecord]]:
    if not rows[key].has_nulls():
        return rows, []
    lost = rows.filter(pl.col(key).is_null())
    why = "found null among uids" if key == "uid" else "found neither uid nor prompt"
    bad = [
        BadRecord(file, row, line, key, f"{why}; its group cannot be told")
        for row, line in lost.select("source_row", "line").iter_rows()
    ]
    return rows.filter(pl.col(key).is_not_null()), bad


def _torn_sessions(rows: pl.DataFrame, file: str) -> tuple[pl.DataFrame, list[BadRecord]]:
    """Take out what is left of sessions that lack an output; verl numbers them from 0."""
    whole = pl.len().over("key", "session") == pl.col("output").max().over("key", "session") + 1
    torn = rows.filter(~whole)
    reason = "another output of its session is a bad record"
    places = torn.select("source_row", "line").iter_rows()
    return rows.filter(whole), [BadRecord(file, row, line, "uid", reason) for row, line in places]


def _row_keys(rows: pl.DataFrame) -> tuple[list[pl.Series] | None, str | None]:
    """Key, session and output of every row whose uid is unique; None where they are no row keys,
    with what tells them from these where some look like them."""
    uid = rows["uid"].cast(pl.String)
    real = uid.filter(~rows["padding"])
    fits = real.str.contains(ROW_KEY)
    if not fits.all():
        odd = f"some end in two numbers, but {real.filter(~fits)[0]!r} does not"
        return None, odd if fits.any() else None
    cut = pl.DataFrame(
        {
            "key": uid.str.extract(ROW_KEY, 1),
            "session": uid.str.extract(ROW_KEY, 2).cast(pl.Int64),
            "output": uid.str.extract(ROW_KEY, 3).cast(pl.Int64),
        }
    )
    prompts = rows["prompt"] if "prompt" in rows.columns else constant("", len(rows), pl.String)
    first = (
        cut.with_columns(prompt=prompts, padding=rows["padding"])
        .filter(~pl.col("padding"))
        .sort("output", maintain_order=True)
        .unique(["key", "session"], keep="first", maintain_order=True)
    )
    same = first.group_by("key").agg(pl.col("prompt").n_unique() == 1)["prompt"].all()
    if not same:
        apart = "ends in two numbers, but prompts differ within the groups these would make"
        return None, apart if len(real) > 1 else None
    return cut.get_columns(), None


def _pairs(rows: pl.DataFrame) -> pl.Series:
    """Prompt and ground truth as one key."""
    # A length before the prompt keeps the pairs apart whatever they hold.
    truth = pl.col("truth").fill_null("\0")
    pair = pl.format("{}:{}{}", pl.col("prompt").str.len_bytes(), "prompt", truth)
    return rows.select(pair).to_series()


def _codes(keys: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Number keys by their first row; -> (UInt32 per row, null for null; the distinct keys)."""
    words = keys.cast(pl.Categorical)
    seen = words.drop_nulls().unique(maintain_order=True)
    places = seen.to_physical().to_numpy()
    numbers = np.zeros(int(places.max(initial=0)) + 1, np.uint32)
    numbers[places] = np.arange(len(places))
    return pl.Series(numbers).gather(words.to_physical()), seen.cast(pl.String)
