"""The benchmarks: `make bench`, or `SIZE=full make bench` for the sizes of the goals.

Each row is a ratio of two jobs measured side by side, round by round, for machines are shared and
noisy: one JSON line with the median of the rounds' ratios, the goal, and whether it is met.
"""

from __future__ import annotations

import json
import os
import shutil
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
import replay
from measure import compare

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.readers.jsonl import Reader
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve

FULL = os.environ.get("SIZE", "small") == "full"
ROWS, FILES = (10_000_000, 20) if FULL else (1_000_000, 20)
STEPS, PROMPTS = (8, 256) if FULL else (4, 64)
# The same rows in as many step files; and the rows to hold the memory of ten times as many against.
MANY = 1_000 if FULL else 200
MEMORY = 10_000_000 if FULL else 500_000
ROLLSIFT = str(Path(sys.executable).with_name("rollsift"))
LIGHT = ["uid", "step", "score", "response_length"]
RECIPE = resolve({"name": "gfpo-shortest", "k": 8})


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
    paths = logs.light(folder / "many", ROWS, MANY, "uniform")

    def read_many() -> None:
        for path in paths:
            pq.read_table(path, columns=LIGHT)

    def many() -> None:
        into_run(folder / "many", folder)

    compare("filter_many_files", many, read_many, None, rows=ROWS, files=MANY)


def peak(command: list[object]) -> float:
    """MiB that a command had in memory at most."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0
    return usage.ru_maxrss / 1024


def memory(folder: Path) -> None:
    """Peak memory of a filter of ten times the rows, in files of one size, against that of one."""
    peaks = []
    for times in (1, 10):
        source, out = folder / f"memory{times}", folder / f"run-{time.monotonic_ns()}"
        logs.light(source, times * MEMORY, times * 20, "uniform")
        peaks.append(peak([ROLLSIFT, "filter", source, "-r", "gfpo-shortest", "-o", out]))
        shutil.rmtree(source)
        shutil.rmtree(out)
    ratio = peaks[1] / peaks[0]
    row = {"name": "filter_peak_memory", "ratio": round(ratio, 2), "goal": 1.5}
    row |= {"met": ratio <= 1.5 and peaks[1] < 1024, "MiB": [round(peak) for peak in peaks]}
    print(json.dumps(row | {"rows": 10 * MEMORY}), flush=True)


def loop(folder: Path) -> None:
    """The whole process against a loop over rows in the trainer's manner."""
    paths = sorted((folder / "uniform").glob("*.parquet"))
    command = [ROLLSIFT, "filter", str(folder / "uniform")]

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

    duck = start(sys.executable, "-c", "import duckdb")
    compare("start_help", start(ROLLSIFT, "-h"), duck, 5, against="python -c 'import duckdb'")
    one = start(ROLLSIFT, "sql", str(run.path), "SELECT 1")
    compare("start_sql", one, duck, 5, against="python -c 'import duckdb'")


def main() -> None:
    """Run them all in a temporary folder."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        jsonl(folder)
        parquet(folder)
        loop(folder)
        memory(folder)
        sql(folder)
        replay.bench(folder)
    # In a process of its own, for it wraps verl's classes.
    subprocess.run([sys.executable, Path(__file__).with_name("capture.py")], check=True)


if __name__ == "__main__":
    main()
