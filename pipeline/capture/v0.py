"""verl's V0 trainer, wrapped; one_step_off and fully_async inherit its methods."""

from __future__ import annotations

from functools import wraps
from typing import Any

from .recorder import Recorder, executor


def wrap(module: Any, recorder: Recorder) -> None:
    """Wrap the methods in verl's `ray_trainer`."""
    trainer = module.RayPPOTrainer
    log = trainer._log_rollout_data
    executor(trainer, recorder, recipes=False)

    @wraps(log)
    def _log_rollout_data(
        self: Any, batch: Any, reward_extra_infos_dict: Any, timing_raw: Any, rollout_data_dir: str
    ) -> Any:
        before = recorder.seconds
        with recorder.guarded(f"step {self.global_steps}"):
            recorder.logged(self, batch, reward_extra_infos_dict)
        timing_raw["capture"] = recorder.seconds - before
        return log(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir)

    trainer._log_rollout_data = _log_rollout_data


def wrap_correction(module: Any, recorder: Recorder) -> None:
    """Wrap the function in verl's `rollout_corr_helper` that overwrites the response mask."""
    correct = module.compute_rollout_correction_and_add_to_batch

    @wraps(correct)
    def compute_rollout_correction_and_add_to_batch(batch: Any, rollout_corr_config: Any) -> Any:
        recorder.mask = batch.batch["response_mask"]  # verl puts another in its place
        return correct(batch, rollout_corr_config)

    module.compute_rollout_correction_and_add_to_batch = compute_rollout_correction_and_add_to_batch
