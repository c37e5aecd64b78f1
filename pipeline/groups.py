"""Groups: which rows answer one prompt, and which rows make one rollout.

A logged uid wins. verl's V1 trainer logs row keys `<group>_<session>_<output>` instead; they are
cut only where all of a file's uids are unique, have that form, and the sessions of each group so
cut begin with equal prompts. Without uid, equal prompt and ground truth make a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import polars as pl

from rollsift.schemas.errors import BadRecord

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
    uid = rows["uid"]
    named = uid.is_not_null().any()
    rows = rows.with_columns(padding=uid.str.contains(PADDING).fill_null(False))
    rows, bad = _ungroupable(rows, file, "uid" if named else "prompt")
    notes = []
    keys = _row_keys(rows) if named else None
    if keys is not None:
        rows = rows.with_columns(keys)
        if lossy:
            rows, torn = _torn_sessions(rows, file)
            bad += torn
    elif named:
        rows = rows.with_columns(key=pl.col("uid"), session=None, output=pl.lit(0, pl.Int64))
        if _looks_like_row_keys(rows):
            notes.append(
                f"{file}: every uid is unique and ends in two numbers, but prompts differ within "
                "the groups these would make: no uid is cut"
            )
    else:
        rows = _by_prompt(rows)
    codes, ids = _codes(rows["key"].set(rows["padding"], None))
    if not named:  # a name of fixed length for what may be pages of text
        ids = ids.map_elements(lambda key: sha256(key.encode()).hexdigest()[:32], pl.String)
    rows = rows.with_columns(group=codes)
    place = (pl.int_range(pl.len()).over("group")).cast(pl.Int32)
    if keys is None:
        rows = rows.with_columns(rollout=pl.int_range(pl.len(), dtype=pl.UInt32), sample=place)
    else:
        rollouts, _ = _codes(
            pl.select(rows["key"] + "_" + rows["session"].cast(pl.String)).to_series()
        )
        rows = rows.with_columns(
            rollout=rollouts, sample=pl.col("session").cast(pl.Int32, strict=False)
        )
    keep = [name for name in rows.columns if name not in ("key", "session", "prompt", "truth")]
    return Grouped(
        rows.select(keep), ids, "uid" if named else "prompt", keys is not None, notes, bad
    )


def _ungroupable(rows: pl.DataFrame, file: str, key: str) -> tuple[pl.DataFrame, list[BadRecord]]:
    lost = rows.filter(pl.col(key).is_null())
    why = "found null among uids" if key == "uid" else "found neither uid nor prompt"
    bad = [
        BadRecord(file, row, line, key, f"{why}; its group cannot be told")
        for row, line in lost.select("source_row", "line").iter_rows()
    ]
    return (rows.filter(pl.col(key).is_not_null()) if bad else rows), bad


def _torn_sessions(rows: pl.DataFrame, file: str) -> tuple[pl.DataFrame, list[BadRecord]]:
    """Take out what is left of sessions that lack an output; verl numbers them from 0."""
    whole = pl.len().over("key", "session") == pl.col("output").max().over("key", "session") + 1
    torn = rows.filter(~whole)
    reason = "another output of its session is a bad record"
    places = torn.select("source_row", "line").iter_rows()
    return rows.filter(whole), [BadRecord(file, row, line, "uid", reason) for row, line in places]


def _looks_like_row_keys(rows: pl.DataFrame) -> bool:
    uid = rows.filter(~pl.col("padding"))["uid"]
    return len(uid) > 1 and bool(uid.str.contains(ROW_KEY).all()) and uid.n_unique() == len(uid)


def _row_keys(rows: pl.DataFrame) -> list[pl.Series] | None:
    """key, session and output of every row, or None where the uids are no row keys."""
    uid = rows["uid"]
    real = rows.filter(~pl.col("padding"))["uid"]
    if not len(uid) or not real.str.contains(ROW_KEY).all() or real.n_unique() != len(real):
        return None
    cut = pl.DataFrame(
        {
            "key": uid.str.extract(ROW_KEY, 1),
            "session": uid.str.extract(ROW_KEY, 2).cast(pl.Int64),
            "output": uid.str.extract(ROW_KEY, 3).cast(pl.Int64),
        }
    )
    prompts = rows["prompt"] if "prompt" in rows.columns else pl.repeat("", len(rows), eager=True)
    first = (
        cut.with_columns(prompt=prompts, padding=rows["padding"])
        .filter(~pl.col("padding"))
        .sort("output", maintain_order=True)
        .unique(["key", "session"], keep="first", maintain_order=True)
    )
    same = first.group_by("key").agg(pl.col("prompt").n_unique() == 1)["prompt"].all()
    return cut.get_columns() if same else None


def _by_prompt(rows: pl.DataFrame) -> pl.DataFrame:
    # A length before the prompt keeps (prompt, truth) pairs apart whatever they hold.
    truth = pl.col("truth").fill_null("\0")
    pair = pl.format("{}:{}{}", pl.col("prompt").str.len_bytes(), "prompt", truth)
    return rows.with_columns(key=pair, session=None, output=pl.lit(0, pl.Int64))


def _codes(keys: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Number keys by their first row; -> (UInt32 per row, null for null; the distinct keys)."""
    keys = keys.alias("key")
    runs = keys.rle_id()
    starts = keys.filter(runs.diff().fill_null(1) != 0)
    if starts.null_count() == 0 and starts.n_unique() == len(starts):
        return runs.cast(pl.UInt32), starts
    ids = starts.drop_nulls().unique(maintain_order=True)
    numbered = pl.DataFrame(
        {"key": ids, "code": pl.int_range(len(ids), dtype=pl.UInt32, eager=True)}
    )
    codes = keys.to_frame().join(numbered, on="key", how="left", maintain_order="left")["code"]
    return codes, ids
