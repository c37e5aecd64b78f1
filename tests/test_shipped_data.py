"""The shipped rollouts, one batch of them logged three ways, through the whole path."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve

DATA = Path(__file__).parents[1] / "data"
FORMS = ("verl_v1", "verl_v0", "tokens")


def filtered(form: str, out: Path, **recipe: Any) -> Run:
    """A run of one of the shipped logs."""
    filter_logs(discover([DATA / form]), resolve(recipe), out)
    return Run(out)


def by_hand(k: int) -> dict[tuple[int, str], list[int]]:
    """Kept lengths in characters of each (step, prompt) of the V1 dump: sorted, k taken."""
    groups: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    for path in (DATA / "verl_v1").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if not row["uid"].startswith("pad"):
                groups[row["step"], row["input"], row["uid"].split("_")[0]].append(
                    len(row["output"])
                )
    return {
        (step, prompt): sorted(length for length in lengths if length)[:k]
        for (step, prompt, _), lengths in groups.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_form_keeps_the_lengths_a_sort_by_hand_keeps(form: str, tmp_path: Path) -> None:
    """Whatever wrote the log, the k shortest of each prompt are those of a plain sort."""
    run = filtered(form, tmp_path / "run", k=5, length="chars")
    kept: dict[tuple[int, str], list[int]] = defaultdict(list)
    rows = query(run, "SELECT step, prompt, response_length FROM kept").fetchall()
    for step, prompt, length in rows:
        kept[step, prompt].append(length)
    assert {key: sorted(lengths) for key, lengths in kept.items()} == by_hand(5)


@pytest.mark.parametrize("form", FORMS)
def test_two_runs_give_equal_ids_and_equal_bytes(form: str, tmp_path: Path) -> None:
    """Equal logs and recipe give the same files, byte for byte."""
    first, second = (filtered(form, tmp_path / name, k=4) for name in "ab")
    names = [path.relative_to(first.path) for path in first.path.rglob("*") if path.is_file()]
    assert len(names) > 24
    for name in names:
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes(), name


def test_padding_rows_are_told_apart_and_every_row_is_accounted_for(tmp_path: Path) -> None:
    """verl's padding rows are no rollouts; rows = kept + dropped by reason in every step."""
    run = filtered("verl_v1", tmp_path / "run", k=8)
    for step in run.steps().values():
        lines = (DATA / "verl_v1" / f"{step.step}.jsonl").read_text().splitlines()
        padding = sum(json.loads(line)["uid"].startswith("pad") for line in lines)
        counts = step.manifest.counts
        assert counts.dropped["padding"] == padding
        assert counts.rows == len(lines) == counts.kept + sum(counts.dropped.values())


def test_lengths_are_the_tokens_the_policy_wrote(tmp_path: Path) -> None:
    """With a mask, a response's length is the mask's sum, and the unit is said to be tokens."""
    import pyarrow.parquet as pq

    run = filtered("tokens", tmp_path / "run")
    rows = query(run, "SELECT step, source_row, response_length FROM rollouts").fetchall()
    masks = {
        int(path.stem): pq.read_table(path)["response_mask"].to_pylist()
        for path in (DATA / "tokens").glob("*.parquet")
    }
    assert len(rows) == sum(map(len, masks.values()))
    assert all(length == sum(masks[step][row]) for step, row, length in rows)
    assert {step.manifest.length_unit for step in run.steps().values()} == {"tokens"}


def test_the_manifest_names_the_kept_rows_in_training_order(tmp_path: Path) -> None:
    """Groups in order of their first row, rows in source order inside, cut by offsets."""
    run = filtered("verl_v0", tmp_path / "run", k=3, length="chars")
    for step in run.steps().values():
        manifest = step.manifest
        lines = (DATA / "verl_v0" / f"{step.step}.jsonl").read_text().splitlines()
        prompts = [(json.loads(line)["input"], json.loads(line)["gts"]) for line in lines]
        order = list(dict.fromkeys(prompts))
        cut = [
            manifest.row[start:end]
            for start, end in zip(manifest.offsets, manifest.offsets[1:], strict=False)
        ]
        assert [prompts[rows[0]] for rows in cut] == order
        assert all(rows == sorted(rows) and len({prompts[r] for r in rows}) == 1 for rows in cut)
        assert manifest.group_rows == [Counter(prompts)[key] for key in order]
