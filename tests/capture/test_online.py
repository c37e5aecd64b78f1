"""The recipe online: a stock V1 run trains on what `rollsift filter` says of its captured files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import capture_rig as rig
import pyarrow.parquet as pq
import pytest
from capture_rig import Row

from rollsift.pipeline import recipes
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import InputError, RecipeError, RollsiftError

ADAPTIVE = "gfpo-adaptive k.easy=1 k.medium=2 k.hard=3 k.very_hard=4"
VERDICT = ["source_row", "kept", "reason", "metric", "rank", "correct"]
GROUP = ["group_size", "kept_count", "mean_reward", "difficulty", "bucket", "k"]


def in_sql(run: Run, view: str, names: list[str], step: int) -> set[Any]:
    """The rows of a step in a view."""
    return set(query(run, f"SELECT {', '.join(names)} FROM {view} WHERE step = {step}").fetchall())


def batches(steps: int, groups: int = 4, samples: int = 6, **named: Any) -> dict[int, list[Row]]:
    """The rollouts of some steps."""
    return {
        step: rig.make_rows(groups, samples, seed=step, step=step, **named)
        for step in range(1, steps + 1)
    }


def train(made: Any, rows: list[Row], groups: int) -> list[str]:
    """A step; -> the keys that verl's actor trained on, without padding."""
    rig.put(rows, step=made.global_steps)
    rig.step(made, groups)
    return [key for key in made.actor_rollout_wg.batches[-1] if not key.startswith("pad")]


def filtered(tmp_path: Path, logs: Path, recipe: str) -> Run:
    """The run that `rollsift filter -r ... -s ...` makes of captured files."""
    from importlib.resources import files

    name, *sets = recipe.split()
    chosen = recipes.load(name, sets, files("rollsift.jobs") / "recipes")
    filter_logs(discover([logs]), chosen, tmp_path / "run")
    return Run(tmp_path / "run")


def chosen_by(run: Run, logs: Path, step: int) -> list[str]:
    """The keys of a step's kept rows, by its manifest."""
    table = pq.read_table(logs / run.steps()[step].manifest.sources[0].file)
    rows = table.take(run.steps()[step].manifest.row).to_pylist()
    return [f"{r['uid']}_{r['session_id']}_{r['output_index']}" for r in rows]


@pytest.mark.parametrize("recipe", ["gfpo-shortest k=3", ADAPTIVE, "gfpo-token-efficiency k=2"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_verl_trains_on_what_a_filter_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, outputs: int
) -> None:
    """In each step verl's actor gets the rows that filtering the captured files keeps, and every
    verdict, difficulty and bucket is equal, bit for bit."""
    logs = tmp_path / "logs"
    recorder = rig.install(monkeypatch, logs, recipe)
    made = rig.trainer(rig.buffer(), step=1, mini=1, n=6)
    judged: dict[int, Any] = {}
    real = recorder.online.judge
    monkeypatch.setattr(recorder.online, "judge", lambda *a: judged.setdefault(a[0], real(*a)))
    trained = {step: train(made, rows, 4) for step, rows in batches(3, outputs=outputs).items()}
    made._shutdown_dump_executor()
    run = filtered(tmp_path, logs, recipe)
    assert sorted(run.steps()) == [1, 2, 3]
    for step, keys in trained.items():
        assert sorted(keys) == sorted(chosen_by(run, logs, step))
        rows, groups = judged[step].rows, judged[step].groups
        assert in_sql(run, "rollouts", VERDICT, step) == set(rows.select(VERDICT).iter_rows())
        assert in_sql(run, "groups", GROUP, step) == set(groups.select(GROUP).iter_rows())


def test_all_is_captured_and_the_chosen_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has every row with its tokens; advantages are those among the chosen, null in the
    others, and nothing stays in the queue."""
    import torch
    import transfer_queue as tq

    rig.install(monkeypatch, tmp_path, "gfpo-shortest k=3")
    made, rows = rig.trainer(rig.buffer(), mini=1), rig.make_rows()
    keys = train(made, rows, 3)
    made._shutdown_dump_executor()
    by_key = {row.key: row for row in rows}
    found = pq.read_table(tmp_path / "7.parquet").to_pylist()
    assert len(found) == len(rows)
    for got in found:
        key = f"{got['uid']}_{got['session_id']}_0"
        assert got["response_ids"] == by_key[key].response
        assert (got["old_log_probs"] is not None) == (key in keys)
        if key not in keys:
            assert got["advantages"] is None
            continue
        rewards = torch.tensor([by_key[k].reward for k in keys if k.startswith(got["uid"])])
        wanted = (got["score"] - rewards.mean()) / (rewards.std() + 1e-6)
        torch.testing.assert_close(torch.tensor(got["advantages"][0]), wanted)
    assert not tq.kv_list()["train"]


def test_a_resumed_run_goes_on_with_its_difficulty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after step 2 and resumed at step 2: the repeated step supersedes, and verdicts are
    those that a filter gives over the files as they then stand."""
    logs, all_rows = tmp_path / "logs", batches(4)
    with monkeypatch.context() as first:
        rig.install(first, logs, ADAPTIVE)
        made = rig.trainer(rig.buffer(), step=1, mini=1, n=6)
        for step in (1, 2):
            train(made, all_rows[step], 4)
        made._shutdown_dump_executor()
    rig.install(monkeypatch, logs, ADAPTIVE)
    made = rig.trainer(rig.buffer(), step=2, mini=1, n=6)
    again = {2: rig.make_rows(4, 6, seed=99), 3: all_rows[3], 4: all_rows[4]}
    trained = {step: train(made, rows, 4) for step, rows in again.items()}
    made._shutdown_dump_executor()
    assert (logs / "2.v2.parquet").exists()
    run = filtered(tmp_path, logs, ADAPTIVE)
    for step, keys in trained.items():
        assert sorted(keys) == sorted(chosen_by(run, logs, step))


def test_evicted_groups_count_in_difficulty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that verl filters out are judged with the sampled ones, as they are in the file."""
    logs, rows = tmp_path / "logs", rig.make_rows(6, 6, seed=4)
    uids = list(dict.fromkeys(row.uid for row in rows))
    for row in rows:
        row.reward = 1.0 if row.uid in uids[:2] else float(row.session * uids.index(row.uid))
    rig.install(monkeypatch, logs, ADAPTIVE)
    replay = rig.buffer(refill_fn=lambda _: None, filter_groups_metric="reward",
                        train_batch_size=4, gen_batch_size=1)  # fmt: skip
    made = rig.trainer(replay, mini=1, n=6)
    keys = train(made, rows, 4)
    made._shutdown_dump_executor()
    run = filtered(tmp_path, logs, ADAPTIVE)
    wanted = [key for key in chosen_by(run, logs, 7) if key.rsplit("_", 2)[0] not in uids[:2]]
    assert sorted(keys) == sorted(wanted)
    assert run.steps()[7].manifest.thresholds.seen == 6


def test_validation_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sampled for validation is not judged."""
    rig.install(monkeypatch, tmp_path, "gfpo-shortest k=1")
    made, rows = rig.trainer(rig.buffer(), mini=1), rig.make_rows()
    train(made, rows, 3)
    other = rig.make_rows(seed=5)
    rig.put(other, partition="val")
    batch, _ = made.replay_buffer.sample(global_steps=8, partition_id="val", batch_size=3)
    assert sorted(batch.keys) == sorted(row.key for row in other)
    made._shutdown_dump_executor()


def test_a_recipe_that_keeps_nothing_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl cannot train on an empty batch: then all of it is trained on, and a line says so."""
    rig.install(monkeypatch, tmp_path, "dapo-dynamic-sampling")
    made, rows = rig.trainer(rig.buffer(), mini=1), rig.make_rows()
    for row in rows:
        row.reward = 1.0
    assert len(train(made, rows, 3)) == len(rows)
    made._shutdown_dump_executor()
    assert "step 7: ROLLSIFT_RECIPE keeps nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("gfpo-shortst", "did you mean gfpo-shortest"),
        ("gfpo-adaptive difficulty.scope=global", "only running"),
        ("gfpo-shortest k=none", "^k"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, told: str
) -> None:
    """When the trainer starts: one that is not there, or that needs steps to come."""
    rig.install(monkeypatch, tmp_path, recipe)
    with pytest.raises(RecipeError, match=told):
        rig.trainer(rig.buffer())


@pytest.mark.parametrize(
    ("recipe", "error", "told"),
    [
        ("gfpo-shortest metric=advantage", RecipeError, "no field 'advantage'"),
        ("gfpo-shortest group_size=9 incomplete=error", InputError, "4 of 9 rollouts"),
    ],
)
def test_what_a_recipe_cannot_judge_stops_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, error: type[Exception], told: str
) -> None:
    """Training on all rows would not be what was asked for."""
    rig.install(monkeypatch, tmp_path, recipe)
    made = rig.trainer(rig.buffer(), mini=1)
    with pytest.raises(error, match=told):
        train(made, rig.make_rows(), 3)
    made._shutdown_dump_executor()


def test_rewards_that_come_later_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A colocated reward model scores after verl has sampled."""
    rig.install(monkeypatch, tmp_path, "gfpo-shortest")
    made, rows = rig.trainer(rig.buffer(), mini=1), rig.make_rows()
    for row in rows:
        row.reward = None  # type: ignore[assignment]
    with pytest.raises(InputError, match="no rewards when verl samples"):
        train(made, rows, 3)
    made._shutdown_dump_executor()


def test_k_by_bucket_needs_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where verl cuts a step into updates, a bucket would depend on prompts not yet sampled."""
    rig.install(monkeypatch, tmp_path, ADAPTIVE)
    made = rig.trainer(rig.buffer(), mini=1)
    made.parameter_sync_step = 2
    with pytest.raises(RollsiftError, match="parameter_sync_step"):
        train(made, rig.make_rows(), 3)
    made._shutdown_dump_executor()


def test_what_verl_trained_on_is_what_replay_makes_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured, filtered and read for replay, the kept rows have the very tokens, log-probs and
    advantages, bit for bit, that stood in the queue when verl's actor was to be updated."""
    import torch
    import transfer_queue as tq

    from rollsift.pipeline.replay.dataset import Replay, Rules
    from rollsift.pipeline.replay.share import Split

    recipe, logs = "gfpo-shortest k=3", tmp_path / "logs"
    rig.install(monkeypatch, logs, recipe)
    made = rig.trainer(rig.buffer(), mini=1)
    queue: dict[str, dict[str, Any]] = {}

    def note(batch: Any) -> Any:
        for key in batch.keys:
            data = tq.kv_batch_get(keys=[key], partition_id=batch.partition_id)
            queue[key] = {n: v.unbind()[0] for n, v in data.items() if isinstance(v, torch.Tensor)}
        return {"metrics": {"mfu": [0.0]}}

    monkeypatch.setattr(made.actor_rollout_wg, "update_actor", note)
    rig.put(rig.make_rows(tools=True, outputs=2))
    rig.step(made, 3)
    made._shutdown_dump_executor()
    run = filtered(tmp_path, logs, recipe)
    keys = chosen_by(run, logs, 7)
    wanted = ["input_ids", "old_log_probs", "rollout_log_probs", "advantages", "response_mask"]
    for by in ("verl", "logged"):
        rules = Rules(by, log_probs=("old_log_probs", "rollout_log_probs"))
        [mini] = Replay(run.path, Split(100, 1, 1, "pad", "kept"), rules)[0].minis
        rows = {name: mini.batch[name].unbind() for name in wanted}
        assert sorted(keys) == sorted(key for key in queue if not key.startswith("pad"))
        for at, key in enumerate(keys):
            for name in wanted:
                assert torch.equal(rows[name][at], queue[key][name]), (by, key, name)
        assert mini.temperature == pytest.approx(0.7, abs=1e-7)
