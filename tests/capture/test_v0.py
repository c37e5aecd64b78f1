"""verl's V0 trainers are captured where they log: padded batches, masks from before rejection."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import capture_rig as rig
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from capture_rig import Row

TRAINERS = [
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer",
    "verl.experimental.one_step_off_policy.ray_trainer.OneStepOffRayTrainer",
    "verl.experimental.separation.ray_trainer.SeparateRayPPOTrainer",
]


def trainer(kind: str = TRAINERS[0], **algorithm: Any) -> Any:
    """A trainer of verl's without its workers."""
    import importlib

    module, _, name = kind.rpartition(".")
    made = object.__new__(getattr(importlib.import_module(module), name))
    made.config, made.global_steps = rig.config(**algorithm), 3
    made.tokenizer = SimpleNamespace(batch_decode=lambda rows, **_: ["x"] * len(rows))
    made.processor = None
    made._init_dump_executor()
    return made


def padded(rows: list[Row], **more: Any) -> Any:
    """Rows as verl's V0 trainer holds them: prompts padded left, responses right, in its dtypes."""
    from verl import DataProto

    left, right = max(len(r.prompt) for r in rows), max(len(r.response) for r in rows)

    def fit(values: list[Any], dtype: torch.dtype, width: int, before: bool = False) -> Any:
        held = torch.zeros(len(rows), width, dtype=dtype)
        for at, row in enumerate(values):
            place = slice(width - len(row), width) if before else slice(0, len(row))
            held[at, place] = torch.as_tensor(row, dtype=dtype)
        return held

    ids = torch.int64
    rewards = [[0.0] * (len(r.response) - 1) + [r.reward] for r in rows]
    tensors = {
        "prompts": fit([r.prompt for r in rows], ids, left, before=True),
        "responses": fit([r.response for r in rows], ids, right),
        "attention_mask": torch.cat([
            fit([[1] * len(r.prompt) for r in rows], ids, left, before=True),
            fit([[1] * len(r.response) for r in rows], ids, right),
        ], 1),
        "response_mask": fit([r.mask for r in rows], ids, right),
        "rollout_log_probs": fit([r.log_probs for r in rows], torch.float32, right),
        "old_log_probs": fit([[v / 2 for v in r.log_probs] for r in rows], torch.float32, right),
        "advantages": fit([[float(r.session)] * len(r.response) for r in rows], torch.float32,
                          right),
        "token_level_scores": fit(rewards, torch.float32, right),
    }  # fmt: skip

    def objects(values: list[Any]) -> Any:
        held = np.empty(len(values), dtype=object)
        held[:] = values
        return held

    held = {
        "uid": objects([r.uid for r in rows]), "data_source": objects(["math"] * len(rows)),
        "reward_model": objects([{"ground_truth": r.truth} for r in rows]),
        "min_global_steps": objects([r.version[0] for r in rows]),
        "max_global_steps": objects([None for _ in rows]), **more,
    }  # fmt: skip
    return DataProto.from_dict(tensors=tensors, non_tensors=held)


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_padded_row_is_what_was_in_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """However verl balanced the rows, those of a group stand together, unpadded, in their order;
    verl's own dump is written as ever."""
    rows = rig.make_rows(tools=True)
    random.Random(5).shuffle(rows)
    recorder = rig.install(monkeypatch, tmp_path / "cap")
    made = trainer(kind)
    infos = {"acc": np.array([r.extra["acc"] for r in rows]), "odd": [1]}
    made._log_rollout_data(padded(rows), infos, {}, str(tmp_path / "dump"))
    made._shutdown_dump_executor()
    assert recorder.background.failed == 0
    assert len((tmp_path / "dump" / "3.jsonl").read_text().splitlines()) == len(rows)
    found = pq.read_table(tmp_path / "cap" / "3.parquet").to_pylist()
    order = list(dict.fromkeys(r.uid for r in rows))
    wanted = [r for uid in order for r in rows if r.uid == uid]
    count: dict[str, int] = {}
    for got, row in zip(found, wanted, strict=True):
        floats = np.array(row.log_probs, np.float32)
        session = count[row.uid] = count.get(row.uid, -1) + 1
        assert got == {
            "step": 3, "uid": row.uid, "session_id": session, "output_index": 0,
            "score": row.reward, "response_length": sum(row.mask),
            "truncated": len(row.response) == rig.LIMIT, "max_response_length": rig.LIMIT,
            "policy_version": row.version[0], "policy_version_max": None, "temperature": 0.7,
            "top_p": 0.9, "top_k": -1, "data_source": "math", "ground_truth": "42",
            "evicted_by": None, "mask_source": "before_rejection", "multimodal": False,
            "router_replay": False, "acc": row.extra["acc"], "prompt_ids": row.prompt,
            "response_ids": row.response, "response_mask": row.mask,
            "rollout_log_probs": floats.tolist(), "old_log_probs": (floats / 2).tolist(),
            "advantages": [float(row.session)] * len(row.response),
        }  # fmt: skip


RULES = {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.02_50"}


@pytest.mark.parametrize("copied", [True, False])
def test_the_true_mask_survives_rejection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """verl's own correction zeroes the mask of a rejected row: the copy from before is written, and
    the zeros apart; where the correction was another's, the mask is marked as from after it."""
    import verl.trainer.ppo.rollout_corr_helper as helper

    original = helper.compute_rollout_correction_and_add_to_batch
    rows = rig.make_rows(tools=True)
    rows[1].log_probs = [-30.0] * len(rows[1].response)
    rig.install(monkeypatch, tmp_path / "cap")
    made = trainer(rollout_correction=RULES)
    correct = helper.compute_rollout_correction_and_add_to_batch if copied else original
    batch, _ = correct(padded(rows), made.config.algorithm.rollout_correction)
    made._log_rollout_data(batch, {}, {}, str(tmp_path / "dump"))
    made._shutdown_dump_executor()
    found = pq.read_table(tmp_path / "cap" / "3.parquet").to_pylist()
    for got, row in zip(found, rows, strict=True):
        after = row.mask if row is not rows[1] else [0] * len(row.mask)
        assert got["response_mask"] == (row.mask if copied else after)
        assert got["response_length"] == sum(got["response_mask"])
        assert got.get("rejection_mask") == (after if copied else None)
        assert got["mask_source"] == ("before_rejection" if copied else "after_rejection")


def test_rows_with_images_are_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with inputs other than tokens is marked, and so are logged experts."""
    rows = rig.make_rows(groups=1)
    inputs = np.empty(len(rows), dtype=object)
    inputs[:] = [{}, {"pixel_values": torch.zeros(2)}, None, {}]
    rig.install(monkeypatch, tmp_path / "cap")
    made = trainer()
    batch = padded(rows, multi_modal_inputs=inputs)
    batch.batch["routed_experts"] = torch.zeros(len(rows), 3)
    made._log_rollout_data(batch, {}, {}, str(tmp_path / "dump"))
    made._shutdown_dump_executor()
    found = pq.read_table(tmp_path / "cap" / "3.parquet")
    assert found["multimodal"].to_pylist() == [False, True, False, False]
    assert found["router_replay"].to_pylist() == [True] * 4


def test_what_is_captured_stays_as_it_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that goes on to change its tensors does not change what is written later."""
    rows, batch = rig.make_rows(groups=1), None
    recorder = rig.install(monkeypatch, tmp_path / "cap")
    made, held = trainer(), []
    monkeypatch.setattr(recorder.background, "submit", lambda _, job: held.append(job))
    batch = padded(rows)
    made._log_rollout_data(batch, {}, {}, str(tmp_path / "dump"))
    for value in batch.batch.values():
        value.zero_()
    held[0]()
    found = pq.read_table(tmp_path / "cap" / "3.parquet")
    assert found["response_ids"].to_pylist() == [row.response for row in rows]
    made._shutdown_dump_executor()


def test_a_recipe_is_refused_by_v0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the V1 trainer has a place where a recipe can choose; V0 says so before it trains."""
    from rollsift.schemas.errors import RollsiftError

    rig.install(monkeypatch, tmp_path, "gfpo-shortest")
    with pytest.raises(RollsiftError, match="only verl's V1 trainer"):
        trainer()
