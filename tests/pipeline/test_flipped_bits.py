"""A flipped bit in anything that a run holds or was made of is found by verify, wherever it is."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.store import Run
from rollsift.pipeline.verify import verify
from rollsift.schemas.recipe import resolve

FLIPS = 4 * int(os.environ.get("ROLLSIFT_EXAMPLES", "20"))  # bits flipped in a file
Regions = dict[str, tuple[int, int]]


def made(folder: Path, form: str) -> Path:
    """A run of one step of 16 records, as JSONL with a bad one more or as Parquet."""
    draw = random.Random(1)
    records = [
        {
            "uid": f"u{row % 4}", "step": 1, "score": float(draw.random() < row % 4 / 3),
            "output": "x" * draw.randint(1, 9), "response_length": draw.randint(1, 9),
        }
        for row in range(16)
    ]  # fmt: skip
    (folder / "logs").mkdir()
    if form == "jsonl":
        lines = [*map(json.dumps, records), "{"]
        (folder / "logs" / "1.jsonl").write_text("".join(f"{line}\n" for line in lines))
    else:
        light = pa.Table.from_pylist(records).drop_columns(["output"])
        pq.write_table(light, folder / "logs" / "1.parquet")
    logs = discover([folder / "logs"])
    filter_logs(logs, resolve({"k": 2}), folder / "run", skip_bad=True)
    return folder / "run"


def flips(data: bytes, regions: Regions) -> Iterator[bytes]:
    """The data with one bit flipped, equally often in every region."""
    draw = random.Random(len(data))
    for start, end in regions.values():
        for _ in range(FLIPS // len(regions)):
            flipped = bytearray(data)
            flipped[draw.randrange(start, end)] ^= 1 << draw.randrange(8)
            yield bytes(flipped)


def regions_of(path: Path) -> Regions:
    """The kinds of bytes in a file. The first four of a Parquet log are read by nobody."""
    size = path.stat().st_size
    if path.suffix != ".parquet":
        return {"all": (0, size)}
    footer = size - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
    regions = {"pages": (4, footer), "footer": (footer, size - 8), "end": (size - 8, size)}
    return regions if path.parent.name == "logs" else {"magic": (0, 4), **regions}


@pytest.mark.parametrize(
    "name",
    [
        "run/run.json",
        "run/manifests/000001.v1.json",
        "run/rollouts/000001.v1.parquet",
        "run/groups/000001.v1.parquet",
        "run/bad_records/000001.v1.parquet",
        "logs/1.jsonl",
        "logs/1.parquet",
    ],
)
def test_any_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    """One flipped bit in whatever part of a file of the run, or of what is read of a log, is told:
    it never passes, and never is a fault of rollsift; tables and logs are named."""
    run, path = (
        Run(made(tmp_path, "parquet" if name == "logs/1.parquet" else "jsonl")),
        tmp_path / name,
    )
    data = path.read_bytes()
    assert verify(run).findings == []
    named = name.removeprefix("run/").removeprefix("logs/")
    for number, flipped in enumerate(flips(data, regions_of(path))):
        path.write_bytes(flipped)
        found = {finding.file for finding in verify(run).findings}
        assert found, number
        assert named in found or path.suffix == ".json", (number, found)
    path.write_bytes(data)
    assert verify(run).findings == []


@pytest.mark.parametrize("kind", ["rollouts", "groups"])
def test_a_bit_flipped_before_the_digest_was_taken(tmp_path: Path, kind: str) -> None:
    """Where a table was damaged before its digest was taken, the pages' checksums tell: a flip in
    them is found, or the values read are those that were written."""
    run = Run(made(tmp_path, "jsonl"))
    path, sealed = run.table(kind, 1, 1), run.table("manifests", 1, 1)
    data, text, whole = path.read_bytes(), sealed.read_text(), pq.read_table(path)
    digest, seen = hashlib.sha256(data).hexdigest(), 0
    for number, flipped in enumerate(flips(data, {"pages": regions_of(path)["pages"]})):
        path.write_bytes(flipped)
        sealed.write_text(text.replace(digest, hashlib.sha256(flipped).hexdigest()))
        if verify(run).findings:
            seen += 1
        else:
            assert pq.read_table(path).equals(whole), number
    assert seen > FLIPS // 2
