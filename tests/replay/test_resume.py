"""Checkpoints: stopped and gone on with, killed while written, handed to verl and taken from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig import (
    advantages,
    batch,
    hand_worker,
    make_rows,
    of_step,
    run,
    shortest,
    train,
    write,
)
from safetensors.torch import load_file

from rollsift.pipeline.replay import checkpoints
from rollsift.pipeline.replay.trainer import Options, Telling, replay
from rollsift.schemas.errors import CheckError, InputError, UsageError

STEPS = 4
SETS = (
    "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=2", "actor.optim.lr=0.01",
    "actor.optim.lr_warmup_steps=3", "model.enable_gradient_checkpointing=false",
)  # fmt: skip
NO_WEIGHTS = "algorithm.rollout_correction.rollout_is=null"
# The same, for verl's worker set up by hand.
OPTIM = {"optimizer": "AdamW", "lr": 0.01, "lr_warmup_steps": 3, "clip_grad": 1.0,
         "weight_decay": 0.01}  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run of four steps."""
    return run(tmp_path / "run", write(tmp_path / "logs", make_rows(steps=STEPS)))


def options(made: Path, model: Path, out: Path, *more: str, **told: Any) -> Options:
    """A replay in this process, log-probs as logged."""
    told = {"workers": 0, "old_log_probs": "logged", **told}
    return Options(run=made, model=model, out=out, sets=(*SETS, NO_WEIGHTS, *more), **told)


def stopping(after: int) -> tuple[Telling, list[dict[str, Any]]]:
    """Takes metrics, and sends this process SIGTERM while update `after` is told."""
    told: list[dict[str, Any]] = []

    def take(metrics: dict[str, Any]) -> None:
        told.append({k: v for k, v in metrics.items() if "perf/" not in k and "timing" not in k})
        if len(told) == after:
            os.kill(os.getpid(), signal.SIGTERM)

    return Telling(metrics=take), told


def none_is_told() -> Telling:
    """For replays that make no update."""
    return Telling(metrics=lambda told: pytest.fail(str(told)))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Published weights."""
    return load_file(folder / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    """Whether two published models are equal bit for bit."""
    a, b = weights(first), weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_and_resumed_at_every_update_it_ends_bitwise_the_same(
    made: Path, model: Path, tmp_path: Path, workers: int
) -> None:
    """SIGTERM after any update saves it; going on, under as many workers or others, gives the
    weights and metrics of one go."""
    whole, expected = stopping(0)
    one = options(made, model, tmp_path / "one", publish=tmp_path / "p", every=STEPS)
    assert replay(one, "cpu", whole)
    assert len({told["actor/lr"] for told in expected}) == 3
    for after in (2,) if workers else range(1, STEPS):
        out, pub = tmp_path / f"out{after}", tmp_path / f"pub{after}"
        two = options(made, model, out, publish=pub, every=STEPS)
        telling, first = stopping(after)
        assert replay(two, "cpu", telling) is False
        assert checkpoints.latest(out) == out / f"global_step_{after}"
        telling, rest = stopping(0)
        assert replay(replace(two, workers=workers), "cpu", telling)
        assert first + rest == expected
        assert same(pub / f"global_step_{STEPS}", tmp_path / "p" / f"global_step_{STEPS}")
        assert replay(two, "cpu", none_is_told())  # nothing is left to do


class Killed(BaseException):
    """Stands for a process that is gone: nothing after it runs."""


def test_killed_at_any_call_that_writes_the_newest_whole_checkpoint_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever call of a second checkpoint's writing the process ends, the tracker names a whole
    one, and going on ends with the same weights."""
    made = run(tmp_path / "run", write(tmp_path / "logs", make_rows(steps=2)))
    whole = options(made, model, tmp_path / "one", publish=tmp_path / "p", every=STEPS)
    assert replay(whole, "cpu", Telling())
    telling, _ = stopping(1)
    start = tmp_path / "start"
    assert replay(options(made, model, start), "cpu", telling) is False
    at, died = 0, True
    while died:
        out, pub = tmp_path / f"out{at}", tmp_path / f"pub{at}"
        shutil.copytree(start, out)
        told = options(made, model, out, publish=pub, every=STEPS)
        with monkeypatch.context() as patch:
            _die(patch, at)
            try:
                replay(told, "cpu", Telling())
                died = False
            except Killed:
                died = True
        newest = checkpoints.latest(out)
        assert newest is not None
        assert checkpoints.check_shards(newest, 1)
        assert newest.name == ("global_step_2" if not died or _tracked(out) == 2
                               else "global_step_1")  # fmt: skip
        assert replay(told, "cpu", Telling())
        assert same(pub / "global_step_2", tmp_path / "p" / "global_step_2")
        assert not list(out.glob(".*"))
        at += 1
    assert at > 15


def _tracked(out: Path) -> int:
    return int((out / checkpoints.TRACKER).read_text())


def _die(patch: pytest.MonkeyPatch, at: int) -> None:
    """Let the process end in place of the call with this number of those that change a disk."""
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at + 1:
                raise Killed
            return real(*args, **options)

        return call

    for name in ("put", "sync"):
        patch.setattr(checkpoints, name, dying(getattr(checkpoints, name)))
    patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
    patch.setattr(torch, "save", dying(torch.save))
    for name in ("rename", "mkdir"):
        patch.setattr(Path, name, dying(getattr(Path, name)))


def _trainer(kind: str, out: Path, worker: Any) -> Any:
    """verl's own PPO trainer without its cluster: what its checkpoint code touches, and a worker
    group that is one real worker."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    class OneWorker:
        def load_checkpoint(self, local_path: str, *_: Any, **options: Any) -> None:
            worker.load_checkpoint(local_path)

        def save_checkpoint(self, local_path: str, *_: Any, **options: Any) -> None:
            worker.save_checkpoint(local_path)

    trainer = object.__new__(PPOTrainerSync if kind == "V1" else RayPPOTrainer)
    trainer.config = OmegaConf.create(
        {
            "trainer": {
                "resume_mode": "auto", "default_local_dir": str(out), "default_hdfs_dir": None,
                "del_local_ckpt_after_load": False, "remove_previous_ckpt_in_save": False,
                "max_actor_ckpt_to_keep": None, "max_critic_ckpt_to_keep": None,
            },
            "actor_rollout_ref": {"actor": {"checkpoint": {"async_save": False}}},
        }
    )  # fmt: skip
    trainer.actor_rollout_wg, trainer.use_critic = OneWorker(), False
    trainer.trainer_mode, trainer.global_steps = "sync", 2
    trainer.checkpoint_callback = build_checkpoint_callback(trainer.config)
    trainer.train_dataloader = SimpleNamespace(
        state_dict=lambda: {}, load_state_dict=lambda state: None
    )
    return trainer


@pytest.mark.parametrize("kind", ["V0", "V1"])
def test_verls_own_ppo_code_resumes_from_our_checkpoint(
    made: Path, model: Path, tmp_path: Path, kind: str
) -> None:
    """Loaded by verl's trainer, weights, optimizer and schedule go on as ours do."""
    out, rows = tmp_path / "out", make_rows(steps=STEPS)
    telling, _ = stopping(2)
    assert replay(options(made, model, out), "cpu", telling) is False
    theirs = hand_worker(model, steps=STEPS, optim=OPTIM)
    trainer = _trainer(kind, out, theirs)
    trainer._load_checkpoint()
    assert trainer.global_steps == 2
    for step in (3, 4):
        kept = of_step(shortest(rows), step)
        train(theirs, batch(kept, advantages(kept)), 4)
    assert replay(options(made, model, out, publish=tmp_path / "p"), "cpu", Telling())
    published = weights(tmp_path / "p" / "global_step_4")
    assert _equal(theirs, published)


@pytest.mark.parametrize("kind", ["V0", "V1"])
def test_we_resume_from_a_checkpoint_of_verls_own_ppo_code(
    made: Path, model: Path, tmp_path: Path, kind: str
) -> None:
    """What verl's trainer saved at step 2 goes on at version 2 with all updates of the run."""
    out, rows = tmp_path / "out", make_rows(steps=STEPS)
    theirs = hand_worker(model, steps=STEPS, optim=OPTIM)
    for step in (1, 2):
        kept = of_step(shortest(rows), step)
        train(theirs, batch(kept, advantages(kept)), 4)
    _trainer(kind, out, theirs)._save_checkpoint()
    assert replay(options(made, model, out, publish=tmp_path / "p"), "cpu", Telling())
    for step in (1, 2, 3, 4):
        kept = of_step(shortest(rows), step)
        train(theirs, batch(kept, advantages(kept)), 4)
    assert checkpoints.latest(out) == out / "global_step_6"
    assert _equal(theirs, weights(tmp_path / "p" / "global_step_6"))


def _equal(worker: Any, published: dict[str, torch.Tensor]) -> bool:
    named = dict(worker.engine.module.named_parameters())
    full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in named.items()}
    assert set(full) == set(published)
    return all(torch.equal(full[name], published[name]) for name in full)


def test_another_run_or_a_changed_one_is_refused_with_both_identities(
    made: Path, model: Path, tmp_path: Path
) -> None:
    """Once the log and so the manifest of an update that was made is another, replay says both."""
    out = tmp_path / "out"
    telling, _ = stopping(2)
    assert replay(options(made, model, out), "cpu", telling) is False
    before = json.loads((out / "global_step_2" / checkpoints.STATE).read_text())["manifest"]
    other = run(tmp_path / "other", write(tmp_path / "logs2", make_rows(steps=STEPS, seed=9)))
    with pytest.raises(CheckError) as caught:
        replay(options(other, model, out), "cpu", none_is_told())
    ids = [json.loads(file.read_text())["id"] for file in sorted(other.glob("manifests/*"))]
    assert before in str(caught.value)
    assert ids[1] in str(caught.value)


def test_shards_of_another_number_of_processes_are_refused(
    made: Path, model: Path, tmp_path: Path
) -> None:
    """verl cannot cut its shards anew, so another world size is told with what to do."""
    out = tmp_path / "out"
    telling, _ = stopping(1)
    assert replay(options(made, model, out), "cpu", telling) is False
    with pytest.raises(UsageError, match=r"written by 1 processes, this run has 2.*--publish"):
        checkpoints.check_shards(out / "global_step_1", 2)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("actor/optim_world_size_1_rank_0.pt", "no optim_world_size_1_rank_0.pt"),
        ("actor/extra_state_world_size_1_rank_0.pt", "no extra_state_world_size_1_rank_0.pt"),
        ("actor", "no checkpoint of verl's FSDP worker"),
        (".", "is no checkpoint; remove it"),
    ],
)
def test_a_checkpoint_that_lacks_a_part_is_refused_before_any_update(
    made: Path, model: Path, tmp_path: Path, name: str, told: str
) -> None:
    """A missing file of a checkpoint is named."""
    out = tmp_path / "out"
    telling, _ = stopping(1)
    assert replay(options(made, model, out), "cpu", telling) is False
    gone = out / "global_step_1" / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(InputError, match=told):
        replay(options(made, model, out), "cpu", none_is_told())


def test_torn_shards_are_refused_before_any_update(made: Path, model: Path, tmp_path: Path) -> None:
    """A checkpoint file that was cut is an error that names it, and nothing is trained."""
    out = tmp_path / "out"
    telling, _ = stopping(1)
    assert replay(options(made, model, out), "cpu", telling) is False
    shard = out / "global_step_1" / "actor" / "model_world_size_1_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(CheckError, match=r"global_step_1.*cannot be loaded"):
        replay(options(made, model, out), "cpu", none_is_told())


def test_weights_of_another_run_are_not_published_over(
    made: Path, model: Path, tmp_path: Path
) -> None:
    """A folder with weights that were made from another run is refused before any update."""
    pub = tmp_path / "pub"
    assert replay(options(made, model, tmp_path / "a", publish=pub), "cpu", Telling())
    other = run(tmp_path / "other", write(tmp_path / "logs2", make_rows(steps=2, seed=9)))
    with pytest.raises(CheckError, match=r"another run.*choose another --publish"):
        replay(options(other, model, tmp_path / "b", publish=pub), "cpu", none_is_told())
