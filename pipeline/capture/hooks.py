"""Hooks: verl's methods wrapped, on its base classes, when verl imports the modules they are in.

verl imports this one while it is itself being imported, so its trainers are not there yet.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from rollsift.schemas.errors import RollsiftError

from .background import say

if TYPE_CHECKING:
    from .recorder import Recorder

V1: Final = "verl.trainer.ppo.v1.trainer_base"
V0: Final = "verl.trainer.ppo.ray_trainer"
CORRECTION: Final = "verl.trainer.ppo.rollout_corr_helper"
# What is wrapped, and the arguments that it is known to have.
KNOWN: Final = {
    V1: {
        "PPOTrainer._init_dump_executor": "self",
        "PPOTrainer._shutdown_dump_executor": "self",
        "PPOTrainer._step_once": "self, metrics, timing_raw, sample_batch_size",
        "ReplayBuffer.sample": "self, global_steps, partition_id, batch_size",
        "ReplayBuffer._clear_groups": "self, partition_id, uids",
        "ReplayBuffer._evict_terminal_groups": "self, global_steps, partition_id, eviction_reasons",
    },
    V0: {
        "RayPPOTrainer._init_dump_executor": "self",
        "RayPPOTrainer._shutdown_dump_executor": "self",
        "RayPPOTrainer._log_rollout_data":
            "self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir",
    },
    CORRECTION: {
        "compute_rollout_correction_and_add_to_batch": "batch, rollout_corr_config",
    },
}  # fmt: skip


def install(folder: Path, recipe: str | None) -> None:
    """Capture into `folder` from when verl's trainers are imported, or at once where they are."""
    finder = Finder(folder, recipe)
    for name in KNOWN:
        if name in sys.modules:
            finder.patch(sys.modules[name])
    sys.meta_path.insert(0, finder)


class Finder(MetaPathFinder):
    """Lets the modules of verl's trainers be found as ever, and wraps what they have once they are
    run. All share one recorder."""

    def __init__(self, folder: Path, recipe: str | None) -> None:
        self.folder, self.recipe = folder, recipe
        self.recorder: Recorder | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one of these modules; None for all others."""
        if fullname not in KNOWN:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def patch(self, module: ModuleType) -> None:
        """Wrap what a module has; where it is not as known, say so and leave all of it alone.

        With a recipe that raises RollsiftError: verl would train on rows that were to be dropped.
        """
        if strange := _strange(module):
            if self.recipe and module.__name__ == V1:
                raise RollsiftError(strange)
            say(strange)
            return
        from . import v0, v1
        from .recorder import Recorder

        self.recorder = self.recorder or Recorder(self.folder, self.recipe)
        wrap = {V1: v1.wrap, V0: v0.wrap, CORRECTION: v0.wrap_correction}
        wrap[module.__name__](module, self.recorder)


def _strange(module: ModuleType) -> str:
    """What of a module is not as it is known; empty where all is."""
    for name, known in KNOWN[module.__name__].items():
        try:
            found = ", ".join(inspect.signature(attrgetter(name)(module)).parameters)
        except AttributeError:
            found = ""
        if found != known:
            import verl

            has = f"takes ({found})" if found else "is not there"
            return (
                f"verl {verl.__version__}: {name} {has}, expected ({known}): nothing is captured "
                "by it; verl 0.9.0 and 0.9.1 are known"
            )
    return ""
