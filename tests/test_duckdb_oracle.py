"""The stages in Polars against one query in DuckDB that ranks and judges by window functions."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve

SAME = "ROLLSIFT_EXAMPLES" not in os.environ
EXAMPLES = int(os.environ.get("ROLLSIFT_EXAMPLES", "25"))

# Order of rank, as SQL, by metric.
ORDERS = {
    "response_length": "size",
    "token_efficiency": "-(reward / greatest(size, 1)), size",
}
VERDICTS = """
    WITH logged AS (
        SELECT step, place, uid, length(output) AS size,
            CASE WHEN isfinite(score) THEN score END AS reward
        FROM log
    ), counted AS (
        SELECT *, CASE WHEN reward IS NULL THEN 'no_reward' WHEN size IS NULL THEN 'no_response' END
            AS uncounted
        FROM logged
    ), figures AS (
        SELECT *, count(*) FILTER (uncounted IS NULL) OVER whole AS group_size,
            avg(reward) FILTER (uncounted IS NULL) OVER whole AS average,
            max(reward) FILTER (uncounted IS NULL) OVER whole
                - min(reward) FILTER (uncounted IS NULL) OVER whole AS spread,
            coalesce(uncounted, CASE WHEN size < $min_length THEN 'empty' END) AS early
        FROM counted WINDOW whole AS (PARTITION BY step, uid)
    ), ranked AS (
        SELECT *, CASE WHEN early IS NULL THEN
            row_number() OVER (PARTITION BY step, uid, early IS NULL ORDER BY {order}, place) END
            AS rank
        FROM figures
    ), judged AS (
        SELECT *, CASE
            WHEN early IS NOT NULL THEN early
            WHEN $flat AND group_size > 1 AND spread <= 1e-6 THEN 'zero_variance'
            WHEN average < $low OR average > $high THEN 'mean_out_of_range'
            WHEN rank > $k THEN 'outranked' END AS reason
        FROM ranked
    )
    SELECT step, place, rank, reason IS NULL AS kept, reason, group_size, average
    FROM judged ORDER BY step, place"""
OURS = """
    SELECT step, source_row, rank, kept, reason, r.group_size, g.mean_reward
    FROM rollouts r JOIN groups g USING (step, group_id) ORDER BY step, source_row"""

# On a binary grid, so that any engine's mean is exact; two of them are equal within 1e-6.
REWARDS = [0.0, 2.0**-21, 0.25, 0.5, 1.0, 1.0, -1.0, None, math.nan, math.inf]
ANSWERS = ["", "a", "b", "é", "ab", "cd", "abc", "abcd\n", None]


@st.composite
def records(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A log of a few steps whose groups are interleaved, ragged, tied and partly flat."""
    draw_from = draw(st.randoms(use_true_random=False))
    flat = draw(st.booleans())
    found = []
    for step in (1, 2):
        names = [f"prompt {n}" for n in range(draw(st.integers(1, 12)))]
        even = {name: draw_from.choice(REWARDS[:6]) for name in names}
        for place in range(draw(st.integers(1, 80))):
            name = draw_from.choice(names)
            score = even[name] if flat and draw_from.random() < 0.9 else draw_from.choice(REWARDS)
            output = draw_from.choice(ANSWERS)
            found.append(
                {"step": step, "place": place, "uid": name, "output": output, "score": score}
            )
    return found


@settings(
    max_examples=EXAMPLES, derandomize=SAME, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    log=records(),
    metric=st.sampled_from(sorted(ORDERS)),
    k=st.integers(1, 5),
    min_length=st.integers(0, 3),
    flat=st.booleans(),
    edges=st.sampled_from([(-2.0, 2.0), (0.0, 0.5), (0.25, 1.0), (0.5, 0.5)]),
)
def test_polars_stages_agree_with_one_duckdb_query(
    tmp_path_factory: pytest.TempPathFactory,
    log: list[dict[str, Any]],
    metric: str,
    k: int,
    min_length: int,
    flat: bool,
    edges: tuple[float, float],
) -> None:
    """Rank, verdict, reason, group size and mean of every row are those of an SQL query over the
    raw log, written apart from the stages."""
    folder = tmp_path_factory.mktemp("log")
    for step in (1, 2):
        lines = [json.dumps(record) + "\n" for record in log if record["step"] == step]
        (folder / f"{step}.jsonl").write_text("".join(lines))
    recipe = {
        "metric": metric, "k": k, "min_length": min_length, "min_mean": edges[0],
        "max_mean": edges[1], "zero_variance": "drop" if flat else "keep",
    }  # fmt: skip
    filter_logs(discover([folder]), resolve(recipe), folder / "run")
    found = query(Run(folder / "run"), OURS).fetchall()
    schema = {"step": pa.int64(), "place": pa.int64(), "uid": pa.string()}
    schema |= {"output": pa.string(), "score": pa.float64()}
    with duckdb.connect() as connection:
        connection.register("log", pa.Table.from_pylist(log, pa.schema(schema)))
        parameters = {"k": k, "min_length": min_length, "flat": flat}
        parameters |= {"low": edges[0], "high": edges[1]}
        text = VERDICTS.format(order=ORDERS[metric])
        expected = connection.execute(text, parameters).fetchall()
    assert [row for row in zip(found, expected, strict=True) if row[0] != row[1]] == []
