"""The whole way round: verl's V1 trainer trains on what a recipe keeps, and what capture wrote of
the same steps, filtered and replayed, trains another worker to the very same parameters."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import rig
import torch

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.replay.dataset import Replay, Rules
from rollsift.pipeline.replay.settings import settings
from rollsift.pipeline.replay.share import Split
from rollsift.pipeline.replay.update import Updater
from rollsift.pipeline.replay.worker import Worker
from rollsift.pipeline.sources import discover
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve

_SPEC = importlib.util.spec_from_file_location(
    "capture_rig", Path(__file__).parents[1] / "capture" / "rig.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
trainers = sys.modules["capture_rig"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(trainers)

FIELDS = ["prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask"]
TRAINED = [*FIELDS, "old_log_probs", "advantages", "rollout_is_weights"]


class Actor(trainers.Actor):
    """verl's worker group, of one real worker."""

    _dispatch_info = {"actor": [0]}  # noqa: RUF012  # as verl's worker group has it

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self.worker = worker

    def compute_log_prob(self, batch: Any) -> Any:
        """Log-probs of whole sequences under the worker's weights, into the queue."""
        import transfer_queue as tq
        from tensordict import TensorDict

        output = self.worker.infer_batch(self._fetch(batch, FIELDS))
        from verl.utils import tensordict_utils as tu

        found = {name: tu.get(output, name) for name in ("log_probs", "entropy")}
        made = TensorDict(found, batch_size=[len(batch)])
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=made)

    def update_actor(self, batch: Any) -> Any:
        """Train on the batch, with what verl's trainer says of it."""
        self.batches.append(list(batch.keys))
        self.worker.train_mini_batch(self._fetch(batch, TRAINED))
        return {"metrics": {"mfu": [0.0]}}

    def _fetch(self, batch: Any, fields: list[str]) -> Any:
        import transfer_queue as tq
        from verl.utils import tensordict_utils as tu

        data = tq.kv_batch_get(batch.keys, batch.partition_id, fields)
        tu.assign_non_tensor(data, **batch.extra_info)
        return data


@pytest.mark.parametrize("outputs", [1, 2])
def test_replay_of_captured_steps_is_bitwise_verls_own_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: int
) -> None:
    """Two steps: sampled rows in verl's queue, its own log-probs, weights, advantages and update on
    the kept rows; beside it capture's files, `filter` and `replay` from the same start."""
    model = rig.make_model(tmp_path / "model", vocabulary=trainers.VOCABULARY)
    k = 3 if outputs > 1 else 2
    logs = tmp_path / "logs"
    trainers.install(monkeypatch, logs, f"gfpo-shortest k={k}")
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None,
                  "rollout_rs_threshold": None, "bypass_mode": False}  # fmt: skip
    theirs = rig.hand_worker(model, micro=1, steps=2)
    made = trainers.trainer(trainers.buffer(), mini=3, n=k, rollout_correction=correction)
    made.actor_rollout_wg = Actor(theirs)
    trained = []
    for step in (7, 8):
        rows = trainers.make_rows(tools=True, seed=step, step=step, outputs=outputs)
        rows.sort(key=lambda row: (row.uid, row.session, row.output))
        trainers.put(rows, step)
        if outputs > 1:  # verl's divisor is mini-batch x n, ours the rows: k sessions have more
            kept = sum(len(_shortest(rows, uid, k)) for uid in {row.uid for row in rows})
            made.config.actor_rollout_ref.rollout.n = 1
            made.config.actor_rollout_ref.actor.ppo_mini_batch_size = kept
        trainers.step(made, 3)
        trained.append(made.actor_rollout_wg.batches[-1])
    made._shutdown_dump_executor()
    run = tmp_path / "run"
    filter_logs(discover([logs]), resolve({"name": "gfpo-shortest", "k": k}), run)
    assert [step.manifest.counts.kept for step in Run(run).steps().values()] == [
        len(keys) for keys in trained
    ]
    sets = (*rig.SETS, "actor.ppo_mini_batch_size=3", "actor.ppo_micro_batch_size_per_gpu=1")
    tree = settings(model, sets, "cpu", 2)
    ours = Updater(tree, Worker(tree), None)
    start = rig.parameters(ours.actor)
    data = Replay(run, Split(3), Rules(log_probs=("rollout_log_probs",)))
    for index in range(2):
        ours.update(data[index])
    assert torch.equal(rig.parameters(ours.actor), rig.parameters(theirs))
    assert not torch.equal(rig.parameters(ours.actor), start)


def _shortest(rows: list[Any], uid: str, k: int) -> list[Any]:
    """The rows of the group's k shortest sessions, by a plain sort."""
    lengths: dict[int, int] = {}
    for row in rows:
        if row.uid == uid:
            lengths[row.session] = lengths.get(row.session, 0) + sum(row.mask)
    kept = sorted(lengths, key=lambda session: (lengths[session], session))[:k]
    return [row for row in rows if row.uid == uid and row.session in kept]
