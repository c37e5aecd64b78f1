"""The benchmarks: `make bench`, or `SIZE=full make bench` for the sizes of the goals.

Each row is a ratio of two jobs measured side by side, round by round, for machines are shared and
noisy: one JSON line with the median of the rounds' ratios, the goal, and whether it is met.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import logs
import polars as pl
import pyarrow.parquet as pq

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.readers.jsonl import Reader
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve

FULL = os.environ.get("SIZE", "small") == "full"
ROWS, FILES = (10_000_000, 20) if FULL else (1_000_000, 20)
STEPS, PROMPTS = (8, 256) if FULL else (4, 64)
ROUNDS = 5
LIGHT = ["uid", "step", "score", "response_length"]
RECIPE = resolve({"name": "gfpo-shortest", "k": 8})


def seconds(job: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def compare(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], goal: float, **more: object
) -> None:
    """Print ours / theirs; a goal below 0 is the least of theirs / ours."""
    ours(), theirs()  # both warm
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
    ratio = statistics.median(a / b if goal > 0 else b / a for a, b in pairs)
    met = ratio <= goal if goal > 0 else ratio >= -goal
    row = {"name": name, "ratio": round(ratio, 2), "goal": abs(goal), "met": met}
    best = [round(min(pair[side] for pair in pairs), 3) for side in (0, 1)]
    print(json.dumps(row | {"seconds": best} | more), flush=True)


def into_run(source: Path, folder: Path) -> Path:
    """Filter a log into a fresh run folder."""
    out = folder / f"run-{time.monotonic_ns()}"
    filter_logs(discover([source]), RECIPE, out)
    return out


def jsonl(folder: Path) -> None:
    """JSONL to a published run, and the reader alone, against Polars' scan to Parquet."""
    paths = logs.jsonl(folder / "jsonl", STEPS, PROMPTS)
    target = folder / "polars.parquet"

    def polars() -> None:
        for path in paths:
            pl.scan_ndjson(path).sink_parquet(target, compression="zstd")

    def reader() -> None:
        for path in paths:
            for _ in Reader(path, path.name).chunks({}, {}):
                pass

    size = sum(path.stat().st_size for path in paths)
    note = {"MB": round(size / 1e6), "against": "polars scan_ndjson -> sink_parquet(zstd)"}
    compare("jsonl_in", lambda: into_run(folder / "jsonl", folder), polars, 1.5, **note)
    compare("jsonl_reader_alone", reader, polars, 1.5, **note)


def parquet(folder: Path) -> None:
    """The filter over light Parquet against pyarrow reading the same columns."""
    for shape in ("uniform", "ragged", "shuffled"):
        paths = logs.light(folder / shape, ROWS, FILES, shape)

        def read(paths: list[Path] = paths) -> None:
            for path in paths:
                pq.read_table(path, columns=LIGHT)

        def ours(source: Path = folder / shape) -> None:
            into_run(source, folder)

        compare(f"filter_{shape}", ours, read, 4, rows=ROWS, against="pyarrow.read_table")


def loop(folder: Path) -> None:
    """The whole process against a loop over rows in the trainer's manner."""
    paths = sorted((folder / "uniform").glob("*.parquet"))
    command = [str(Path(sys.executable).with_name("rollsift")), "filter", str(folder / "uniform")]

    def ours() -> None:
        out = folder / f"run-{time.monotonic_ns()}"
        subprocess.run(
            [*command, "-r", "gfpo-shortest", "-o", out], capture_output=True, check=True
        )

    def by_rows() -> None:
        for path in paths:
            groups: dict[str, list[tuple[int, int]]] = {}
            for place, row in enumerate(pq.read_table(path, columns=LIGHT).to_pylist()):
                groups.setdefault(row["uid"], []).append((row["response_length"], place))
            kept = [place for rows in groups.values() for _, place in sorted(rows)[:8]]
            assert kept

    compare("filter_vs_loop", ours, by_rows, -5, rows=ROWS, against="a Python loop over rows")


def sql(folder: Path) -> None:
    """A light query over the view against the same by hand; start-up against importing DuckDB."""
    run = Run(into_run(folder / "uniform", folder))
    files = [str(path) for path in (run.path / "rollouts").glob("*.parquet")]
    text = "SELECT reason, count(*), avg(response_length) FROM {} GROUP BY reason"

    def by_hand() -> None:
        duckdb.connect().execute(text.format(f"read_parquet({files})")).fetchall()

    compare("sql_view", lambda: query(run, text.format("rollouts")).fetchall(), by_hand, 1.3)

    def start(*arguments: str) -> Callable[[], object]:
        return lambda: subprocess.run(arguments, capture_output=True, check=True)

    rollsift = str(Path(sys.executable).with_name("rollsift"))
    duck = start(sys.executable, "-c", "import duckdb")
    compare("start_help", start(rollsift, "-h"), duck, 5, against="python -c 'import duckdb'")
    one = start(rollsift, "sql", str(run.path), "SELECT 1")
    compare("start_sql", one, duck, 5, against="python -c 'import duckdb'")


def main() -> None:
    """Run them all in a temporary folder."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        jsonl(folder)
        parquet(folder)
        loop(folder)
        sql(folder)


if __name__ == "__main__":
    main()
