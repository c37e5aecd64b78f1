"""Updates from files, against verl's own worker fed the same rows from memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import (
    SETS,
    Row,
    advantages,
    batch,
    hand_worker,
    log_probs,
    make_model,
    make_rows,
    nest,
    of_step,
    parameters,
    run,
    shortest,
    train,
    write,
)

from rollsift.pipeline.replay.dataset import Mini, Replay, Rules
from rollsift.pipeline.replay.settings import BY_BATCH, settings
from rollsift.pipeline.replay.share import Split
from rollsift.pipeline.replay.tensors import padded
from rollsift.pipeline.replay.update import Updater
from rollsift.pipeline.replay.worker import Worker

NO_WEIGHTS = "algorithm.rollout_correction.rollout_is=null"
LOGGED = Rules(log_probs=("old_log_probs",))


def updater(model: Path, *sets: str, reference: Path | None = None) -> Updater:
    """Our worker by verl's settings, for three updates."""
    tree = settings(model, (*SETS, *sets), "cpu", 3)
    return Updater(tree, Worker(tree), Worker(tree, str(reference)) if reference else None)


def minis(rows: list[Row], groups: int) -> list[list[Row]]:
    """The rows of each mini-batch of so many groups."""
    uids = list(dict.fromkeys(row.uid for row in rows))
    parts = [uids[at : at + groups] for at in range(0, len(uids), groups)]
    return [[row for row in rows if row.uid in part] for part in parts]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("old", ["logged", "recomputed"])
def test_updates_are_bitwise_those_of_the_same_rows_in_memory(
    model: Path, tmp_path: Path, tools: bool, old: str, optimizer: str
) -> None:
    """Three updates of two mini-batches leave verl's worker with the very same parameters."""
    rows = make_rows(tools=tools)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows))
    data = Replay(made, Split(2, micro=2), LOGGED if old == "logged" else Rules())
    ours = updater(model, NO_WEIGHTS, f"actor.optim.optimizer={optimizer}", "actor.optim.lr=0.01")
    theirs = hand_worker(model, optim={"optimizer": optimizer, "lr": 0.01})
    for step in (1, 2, 3):
        kept = of_step(shortest(rows), step)
        held = batch(kept, advantages(kept))
        if old == "recomputed":
            held["old_log_probs"] = log_probs(theirs, held)
        told = train(theirs, held, 4)
        metrics = ours.update(data[step - 1])
        assert torch.equal(parameters(ours.actor), parameters(theirs))
        assert metrics["actor/grad_norm"] == pytest.approx(sum(told["grad_norm"]) / 2)
    assert not torch.equal(parameters(ours.actor), parameters(hand_worker(model)))


def test_outputs_of_one_session_share_an_advantage_and_a_fate(model: Path, tmp_path: Path) -> None:
    """Sessions with several outputs are replayed as verl's V1 trainer trains on them."""
    rows = make_rows(outputs=3)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows, keys=True), k=3)
    data = Replay(made, Split(4), LOGGED)
    one = ("actor.ppo_micro_batch_size_per_gpu=1", "actor.ppo_mini_batch_size=4")
    ours, theirs = updater(model, NO_WEIGHTS, *one), hand_worker(model, micro=1)
    kept = shortest(rows, 3)
    assert any(row.output for row in kept)
    for step in (1, 2, 3):
        here = of_step(kept, step)
        train(theirs, batch(here, advantages(here)))
        ours.update(data[step - 1])
        assert torch.equal(parameters(ours.actor), parameters(theirs))


CORRECTIONS = {
    "token weights": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence weights": {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    "weights and rejection": {
        "rollout_is": "token", "rollout_is_threshold": 2.0,
        "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1",
    },
    "rejection of tokens": {
        "rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.7",
    },
}  # fmt: skip


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("rules", CORRECTIONS.values(), ids=CORRECTIONS)
def test_stale_rows_are_weighed_and_rejected_as_by_verls_trainer(
    model: Path, tmp_path: Path, rules: dict[str, Any], outputs: int
) -> None:
    """Importance weights, the mask after rejection and the advantages under it are those of
    verl's V1 trainer, whose loss_mask keeps the true tokens."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    rows = make_rows(outputs=outputs, tools=True, seed=3)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows, keys=True), k=3)
    names = ("old_log_probs", "rollout_log_probs")
    sets = [f"algorithm.rollout_correction.{key}={'null' if value is None else value}"
            for key, value in rules.items()]  # fmt: skip
    one = ("actor.ppo_micro_batch_size_per_gpu=1", "actor.ppo_mini_batch_size=4")
    ours, theirs = updater(model, *sets, *one), hand_worker(model, micro=1)
    data = Replay(made, Split(4), Rules(log_probs=names))
    rejected = 0
    for step in (1, 2, 3):
        kept = of_step(shortest(rows, 3), step)
        mask = nest([row.mask for row in kept], torch.int64)
        held = {
            "old_log_probs": nest([row.old for row in kept], torch.float32).to_padded_tensor(0),
            "rollout_log_probs": nest([r.rollout for r in kept], torch.float32).to_padded_tensor(0),
            "response_mask": mask.to_padded_tensor(0),
        }
        found, said = compute_rollout_correction_and_add_to_batch(DataProto.from_dict(held), rules)
        cut = [found.batch["response_mask"][at, : len(r.response)] for at, r in enumerate(kept)]
        more = {"response_mask": nest(cut, torch.int64)}
        if "rollout_is_weights" in found.batch:
            weights = found.batch["rollout_is_weights"]
            more["rollout_is_weights"] = nest(
                [weights[at, : len(row.response)] for at, row in enumerate(kept)], torch.float32
            )
        rejected += int(mask.values().sum() - more["response_mask"].values().sum())
        train(theirs, batch(kept, advantages(kept, cut), **more))
        told = ours.update(data[step - 1])
        assert torch.equal(parameters(ours.actor), parameters(theirs))
        assert said.items() <= told.items()
    assert bool(rejected) is bool(rules.get("rollout_rs"))


def test_nested_and_padded_layouts_give_the_same_update(model: Path, tmp_path: Path) -> None:
    """A mini-batch padded for people without verl's V1 layout trains to the same parameters."""
    from verl import DataProto
    from verl.workers.utils.padding import left_right_2_no_padding

    rows = make_rows(tools=True)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows))
    item = Replay(made, Split(4, micro=2), LOGGED)[0]
    held = DataProto.from_dict(padded(item.minis[0].batch)).to_tensordict()
    theirs, ours = hand_worker(model), updater(model, NO_WEIGHTS, "actor.ppo_mini_batch_size=4")
    train(theirs, left_right_2_no_padding(held))
    ours.update(item)
    assert torch.equal(parameters(ours.actor), parameters(theirs))


def test_the_learning_rate_steps_once_an_update_and_epochs_repeat_it(
    model: Path, tmp_path: Path
) -> None:
    """With a warm-up, several mini-batches and epochs, each update has the rate of verl's call."""
    rows = make_rows()
    made = run(tmp_path / "run", write(tmp_path / "logs", rows))
    ours = updater(model, NO_WEIGHTS, "actor.ppo_epochs=2", "actor.optim.lr_warmup_steps=2")
    theirs = hand_worker(model, optim={"lr_warmup_steps": 2})
    data, rates = Replay(made, Split(2, micro=2), LOGGED), []
    for step in (1, 2, 3):
        kept = of_step(shortest(rows), step)
        told = train(theirs, batch(kept, advantages(kept)), 4, epochs=2)
        metrics = ours.update(data[step - 1])
        assert torch.equal(parameters(ours.actor), parameters(theirs))
        assert [metrics["actor/lr"]] == told["lr"]
        rates.append(metrics["actor/lr"])
    assert len(set(rates)) > 1


@pytest.mark.parametrize("source", ["logged", "model"])
def test_a_kl_loss_takes_logged_log_probs_or_a_reference_model(
    model: Path, tmp_path: Path, source: str
) -> None:
    """Both give verl's update with the same ref_log_prob in the batch."""
    rows = make_rows()
    made = run(tmp_path / "run", write(tmp_path / "logs", rows))
    reference = make_model(tmp_path / "reference", seed=1)
    names = ("old_log_probs", *(["ref_log_prob"] if source == "logged" else []))
    said = (NO_WEIGHTS, "actor.use_kl_loss=true", "actor.kl_loss_coef=0.5")
    ours = updater(model, *said, reference=None if source == "logged" else reference)
    theirs = hand_worker(model, use_kl_loss=True, kl_loss_coef=0.5)
    data = Replay(made, Split(2, micro=2), Rules(log_probs=names))
    other = hand_worker(reference)
    for step in (1, 2):
        kept = of_step(shortest(rows), step)
        held = batch(kept, advantages(kept))
        held["ref_log_prob"] = nest([row.ref for row in kept], torch.float32)
        if source == "model":
            held["ref_log_prob"] = log_probs(other, held)
        told = train(theirs, held, 4)
        metrics = ours.update(data[step - 1])
        assert torch.equal(parameters(ours.actor), parameters(theirs))
        assert told["kl_loss"]
        assert metrics["actor/kl_loss"] > 0


def test_entropy_and_temperature_reach_the_loss(model: Path, tmp_path: Path) -> None:
    """The entropy bonus is computed where it has a weight, log-probs at the logged temperature."""
    rows = make_rows(steps=1)
    heat = [0.7] * len(rows)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows, temperature=heat))
    kept = shortest(rows)
    ours = updater(model, NO_WEIGHTS, "actor.entropy_coeff=0.5", "actor.ppo_mini_batch_size=4")
    theirs, without = hand_worker(model, entropy_coeff=0.5), hand_worker(model)
    ours.update(Replay(made, Split(4, micro=2), LOGGED)[0])
    for worker in (theirs, without):
        entropy = worker is theirs
        train(worker, batch(kept, advantages(kept)), temperature=0.7, calculate_entropy=entropy)
    assert torch.equal(parameters(ours.actor), parameters(theirs))
    assert not torch.equal(parameters(ours.actor), parameters(without))


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_padding_rows_add_nothing(model: Path, tmp_path: Path, agg: str) -> None:
    """Three rows in micro-batches of two, filled up, train as the three rows one by one."""
    rows = make_rows(groups=1, steps=1)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows), k=3)
    item = Replay(made, Split(1, micro=2), LOGGED)[0]
    assert item.minis[0].pads == 1
    ours = updater(model, NO_WEIGHTS, f"actor.loss_agg_mode={agg}")
    theirs = hand_worker(model, micro=1, loss_agg_mode=agg)
    ours.update(item)
    kept = shortest(rows, 3)
    train(theirs, batch(kept, advantages(kept)))
    torch.testing.assert_close(parameters(ours.actor), parameters(theirs), rtol=0, atol=1e-6)


def loss_modes() -> list[str]:
    """verl's, without those that --normalizer all refuses."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return sorted(set(POLICY_LOSS_REGISTRY) - set(BY_BATCH))


AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean",
                "seq-mean-token-sum-norm")  # fmt: skip


@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_all_rows_in_the_divisor_are_as_rejected_rows_masked_out(
    model: Path, tmp_path: Path, agg: str
) -> None:
    """For every loss mode that is not refused, `normalizer: all` is within 1e-6 of training on all
    rows with the rejected ones masked out of the loss and left in its divisor."""
    from verl.workers.config import PolicyLossConfig

    rows = make_rows(steps=1, seed=5)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows))
    kept = shortest(rows)
    chosen = [row in kept for row in rows]
    of_kept = iter(advantages(kept))
    per_row = [next(of_kept) if k else torch.zeros(len(r.response))
               for r, k in zip(rows, chosen, strict=True)]  # fmt: skip
    masks = [row.mask if k else [0] * len(row.mask) for row, k in zip(rows, chosen, strict=True)]
    start = parameters(hand_worker(model))
    tried = [mode for mode in loss_modes() if mode != "bypass_mode"]
    assert {"vanilla", "gspo", "sapo", "cispo"} <= set(tried)
    for mode in tried:
        extra = {"loss_scale_factor": 9} if agg.endswith("norm") else {}
        said = [f"actor.policy_loss.loss_mode={mode}", f"actor.loss_agg_mode={agg}"]
        said += ["actor.policy_loss.dro_beta=0.1"]
        said += [f"actor.{key}={value}" for key, value in extra.items()]
        ours = updater(model, NO_WEIGHTS, "actor.ppo_mini_batch_size=4", *said)
        theirs = hand_worker(
            model, loss_agg_mode=agg, **extra,
            policy_loss=PolicyLossConfig(loss_mode=mode, dro_beta=0.1),
        )  # fmt: skip
        ours.update(Replay(made, Split(4, micro=2, normalizer="all"), LOGGED)[0])
        train(theirs, batch(rows, per_row, response_mask=nest(masks, torch.int64)))
        moved = (parameters(theirs) - start).abs().max()
        difference = (parameters(ours.actor) - parameters(theirs)).abs().max()
        assert difference <= 1e-6 < moved, mode


def test_weights_are_normalised_over_the_whole_sampled_groups(model: Path, tmp_path: Path) -> None:
    """With batch_normalize weights are divided by their mean over kept and rejected tokens, which
    both are told, and not by that over the kept ones alone."""
    rows = make_rows(steps=1, seed=7)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows))
    rules = "algorithm.rollout_correction"
    said = (f"{rules}.rollout_is_batch_normalize=true", f"{rules}.rollout_is_threshold=1.5")
    ours = updater(model, *said, "actor.ppo_mini_batch_size=4")
    theirs = hand_worker(model)
    held = batch(rows, [torch.zeros(len(row.response)) for row in rows])
    now = log_probs(theirs, held)
    weights = [
        (new - torch.tensor(row.rollout)).exp().clamp(max=1.5)
        for new, row in zip(now.unbind(), rows, strict=True)
    ]
    kept = [row in shortest(rows) for row in rows]
    mean_all = torch.cat(weights).double().mean()
    of_kept = [w for w, k in zip(weights, kept, strict=True) if k]
    mean_kept = torch.cat(of_kept).double().mean()
    told = Rules(log_probs=("rollout_log_probs",), rejected=True)
    metrics = ours.update(Replay(made, Split(4, micro=2), told)[0])
    assert metrics["rollout_corr/rollout_is_mean_all"] == pytest.approx(float(mean_all), rel=1e-6)
    assert metrics["rollout_corr/rollout_is_mean_kept"] == pytest.approx(float(mean_kept), rel=1e-6)
    chosen = shortest(rows)
    old = [new for new, k in zip(now.unbind(), kept, strict=True) if k]
    scaled = nest([w / mean_all for w in of_kept], torch.float32)
    more = {"rollout_is_weights": scaled, "old_log_probs": nest(old, torch.float32)}
    train(theirs, batch(chosen, advantages(chosen), **more))
    torch.testing.assert_close(parameters(ours.actor), parameters(theirs), rtol=0, atol=1e-6)


def test_a_mini_batch_of_padding_alone_changes_nothing(model: Path, tmp_path: Path) -> None:
    """A rank whose share is padding weighs it with one and gets no gradient from it."""
    rows = make_rows(steps=1)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows))
    rules = Rules(log_probs=("old_log_probs", "rollout_log_probs"))
    item = Replay(made, Split(4, micro=2), rules)[0]
    mini = item.minis[0]
    empty = {key: torch.nested.nested_tensor_from_jagged(
        torch.zeros(4 if key in ("input_ids", "position_ids") else 2, dtype=value.dtype),
        torch.tensor([0, 2, 4] if key in ("input_ids", "position_ids") else [0, 1, 2]),
    ) for key, value in mini.batch.items()}  # fmt: skip
    nothing = Mini(empty, 8, 1.0, 2, torch.full((2,), -1), torch.ones(2, dtype=torch.bool))
    ours = updater(model, "actor.ppo_mini_batch_size=4", "actor.optim.weight_decay=0.0")
    before = parameters(ours.actor)
    metrics = ours.update(replace(item, minis=[nothing]))
    assert metrics["actor/grad_norm"] == 0
    assert torch.equal(parameters(ours.actor), before)
