"""One update: log-probs and weights under the weights before it, then its mini-batches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .correction import compared, correct, metrics, scaled, weights_of
from .dataset import Item, Mini
from .devices import gathered
from .worker import Worker


class Updater:
    """Trains an actor on items. `tree` is verl's configuration; the `reference` of a KL loss is
    another worker, the actor without its LoRA, or not needed where its log-probs were logged."""

    def __init__(self, tree: Any, actor: Worker, reference: Worker | None) -> None:
        self.actor, self.reference = actor, reference
        self.rules, self.correction = (
            tree.actor_rollout_ref.actor,
            tree.algorithm.rollout_correction,
        )
        self.normalised = bool(
            self.correction.rollout_is and self.correction.rollout_is_batch_normalize
        )

    def update(self, item: Item) -> dict[str, Any]:
        """Train on all mini-batches, `ppo_epochs` times; the learning rate's schedule steps on with
        the last. -> metrics by verl's names, over all ranks."""
        timing: dict[str, float] = {}
        minis, parts = [], []
        for mini in item.minis:
            with _timed(timing, "old_log_prob"):
                mini = self._with(mini, "old_log_probs", self.actor)
            if self.rules.use_kl_loss:
                with _timed(timing, "ref"):
                    mini = self._with(mini, "ref_log_prob", self.reference or self.actor)
            if "rollout_log_probs" in mini.batch:
                parts.append(compared(mini))
                mini = correct(mini, self.correction)
            minis.append(mini)
        told = metrics(found, self.correction) if (found := gathered(parts)) else {}
        if self.normalised:
            minis, means = self._normalised(minis, item.rejected)
            told |= means
        outputs = []
        with _timed(timing, "update_actor"):
            for epoch in range(self.rules.ppo_epochs):
                for number, mini in enumerate(minis, 1):
                    last = epoch + 1 == self.rules.ppo_epochs and number == len(minis)
                    outputs.append(self.actor.train(mini, last=last))
        return {**told, **actor_metrics([out for out in outputs if out]), **_seconds(timing)}

    def _normalised(
        self, minis: list[Mini], rejected: Mini | None
    ) -> tuple[list[Mini], dict[str, float]]:
        """Weights divided by their mean over the whole sampled groups: over the kept rows alone
        they would be those of rollouts that the old policy wrote short."""
        others = []
        if rejected:
            known = self._with(rejected, "old_log_probs", self.actor)
            others = [correct(known, self.correction)]
        by_sequence = self.correction.rollout_is == "sequence"
        sums = gathered([weights_of(part, by_sequence) for part in (minis, others)])
        kept, rest = (
            [math.fsum(part[at] for part in sums[which::2]) for at in (0, 1)] for which in (0, 1)
        )
        mean = (kept[0] + rest[0]) / (kept[1] + rest[1])
        told = {
            "rollout_corr/rollout_is_mean_all": mean,
            "rollout_corr/rollout_is_mean_kept": kept[0] / max(1, kept[1]),
        }
        return [scaled(mini, mean) for mini in minis], told

    def _with(self, mini: Mini, name: str, worker: Worker) -> Mini:
        """The mini-batch with log-probs: as logged, else as the worker's model has them now."""
        if name in mini.batch:
            return mini
        without_lora = name == "ref_log_prob" and worker is self.actor
        found = worker.log_probs(mini, without_lora=without_lora)
        return replace(mini, batch={**mini.batch, name: found})


def actor_metrics(outputs: list[dict[str, Any]]) -> dict[str, float]:
    """What verl's worker returned for each mini-batch, reduced and named as verl's trainer does."""
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.py_functional import append_to_dict, rename_dict

    found: dict[str, Any] = {}
    for output in outputs:
        for key, value in output.items():
            if isinstance(value, list) and value:
                flat = isinstance(value[0], Metric)
                output[key] = (
                    Metric.aggregate_dp(value) if flat else [v for part in value for v in part]
                )
        append_to_dict(found, output)
    renamed = rename_dict(found, "actor/")
    if "actor/mfu" in renamed:
        renamed["perf/mfu/actor"] = renamed.pop("actor/mfu")
    return {key: float(value) for key, value in reduce_metrics(renamed).items()}


def _seconds(timing: dict[str, float]) -> dict[str, float]:
    return {f"timing_s/{name}": seconds for name, seconds in timing.items()}


@contextmanager
def _timed(timing: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    timing[name] = timing.get(name, 0.0) + time.perf_counter() - began
