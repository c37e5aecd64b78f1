"""A flipped bit in anything that a run holds or was made of is found by verify, wherever it is."""

from __future__ import annotations

import json
import os
import random
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
NAMES = [
    "run/run.json", "run/manifests/000001.v1.json", "run/rollouts/000001.v1.parquet",
    "run/groups/000001.v1.parquet", "run/bad_records/000001.v1.parquet", "logs/1.jsonl",
    "logs/1.parquet",
]  # fmt: skip


def regions(path: Path) -> list[tuple[int, int]]:
    """The kinds of bytes in a file. The first four of a Parquet log are read by nobody."""
    size = path.stat().st_size
    if path.suffix != ".parquet":
        return [(0, size)]
    footer = size - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
    found = [(0, 4), (4, footer), (footer, size - 8), (size - 8, size)]
    return found[1:] if path.parent.name == "logs" else found


@pytest.mark.parametrize("name", NAMES)
def test_any_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    """One flipped bit in whatever part of a file of the run, or of what is read of a log, is told:
    it never passes, and never is a fault of rollsift; tables and logs are named."""
    draw, path, logs = random.Random(name), tmp_path / name, tmp_path / "logs"
    rows = [{"uid": f"u{row % 4}", "step": 1, "score": row % 3, "response_length": row % 5}
            for row in range(16)]  # fmt: skip
    logs.mkdir()
    if name == "logs/1.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = [json.dumps(row | {"output": "x"}) for row in rows]
        (logs / "1.jsonl").write_text("\n".join([*lines, "{"]))
    filter_logs(discover([logs]), resolve({"k": 2}), tmp_path / "run", skip_bad=True)
    data, run, parts = path.read_bytes(), Run(tmp_path / "run"), regions(path)
    assert verify(run).findings == []
    for number in range(FLIPS):
        flipped = bytearray(data)
        flipped[draw.randrange(*parts[number % len(parts)])] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        found = {finding.file for finding in verify(run).findings}
        assert found, number
        assert name.split("/", 1)[1] in found or path.suffix == ".json", (number, found)
