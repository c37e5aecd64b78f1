"""verl's V1 trainer and its replay buffer, wrapped: all its modes inherit these methods."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

from .recorder import Recorder, executor

TRAIN = "train"  # the queue's partition of the rollouts that verl trains on


def wrap(module: Any, recorder: Recorder) -> None:
    """Wrap the methods in verl's `trainer_base`."""
    trainer, buffer = module.PPOTrainer, module.ReplayBuffer
    step_once, clear = trainer._step_once, buffer._clear_groups
    evict = buffer._evict_terminal_groups
    executor(trainer, recorder, recipes=True)

    def fetch(keys: Sequence[str], fields: Sequence[str]) -> Any:
        return module.tq.kv_batch_get(
            keys=list(keys), partition_id=TRAIN, select_fields=list(dict.fromkeys(fields))
        )

    @wraps(step_once)
    def _step_once(self: Any, metrics: Any, timing_raw: Any, sample_batch_size: int) -> Any:
        before = recorder.seconds
        if recorder.recipe and recorder.online is None:  # a trainer that writes no dumps
            recorder.begin(self, recipes=True)
        if recorder.online and not hasattr(self.replay_buffer, "_rollsift_sample"):
            choose_from(self)
        batch = step_once(self, metrics, timing_raw, sample_batch_size)
        recorder.mask = None
        with recorder.guarded(f"step {self.global_steps}"):
            recorder.trained(self, batch, fetch)
        timing_raw["capture"] = timing_raw.get("capture", 0.0) + recorder.seconds - before
        return batch

    def choose_from(self: Any) -> None:
        """Let the recipe choose from what this trainer's buffer, of whatever class, samples."""
        self.replay_buffer._rollsift_sample = sample = self.replay_buffer.sample

        @wraps(sample)
        def chosen(global_steps: int, partition_id: str, batch_size: int) -> Any:
            batch, metrics = sample(
                global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
            )
            if partition_id != TRAIN:
                return batch, metrics
            with recorder.timed():
                keys = recorder.choose(self, batch, fetch)
            if rest := sorted(set(batch.keys) - set(keys)):
                module.tq.kv_clear(keys=rest, partition_id=TRAIN)
            return batch.select_keys(keys), metrics

        self.replay_buffer.sample = chosen

    @wraps(evict)
    def _evict_terminal_groups(
        self: Any, global_steps: int, partition_id: str, eviction_reasons: Any
    ) -> Any:
        stale, filtered, failed, _ = eviction_reasons
        self._rollsift_why = {"stale": stale, "filter_groups": filtered, "failure": failed}
        try:
            return evict(self, global_steps, partition_id, eviction_reasons)
        finally:
            del self._rollsift_why

    @wraps(clear)
    def _clear_groups(self: Any, partition_id: str, uids: Any) -> Any:
        if partition_id == TRAIN:
            with recorder.guarded("evicted groups"):
                tags, left = self.partitions[partition_id], set(uids)
                for why, evicted in {**getattr(self, "_rollsift_why", {}), "surplus": uids}.items():
                    keys = [key for key in tags if key.split("_")[0] in left & set(evicted)]
                    left -= set(evicted)
                    if keys:
                        recorder.evict(keys, [tags[key] for key in keys], why, fetch)
        return clear(self, partition_id, uids)

    trainer._step_once, buffer._clear_groups = _step_once, _clear_groups
    buffer._evict_terminal_groups = _evict_terminal_groups
