"""A V1 step, and without a recipe a V0 step, in a process of their own that calls nothing of
rollsift's: what is captured is so by the environment alone. With `real` as its argument over the
real TransferQueue. Prints verl's version, the folder, and how many rows V1 trained on."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# As a Ray actor of verl's starts: verl first, its trainers when they are needed.
import verl


def load(name: str, file: str) -> ModuleType:
    """A file beside this one, as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rig = load("capture_rig", "rig.py")


def queue(real: bool) -> None:
    """Start the real queue, or put one in memory in its place."""
    import transfer_queue as tq

    if real:
        import ray

        # Logical CPUs: with fewer the queue waits for its storage for ever.
        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
        tq.init()
        return
    held: Any = rig.Queue()
    for name in ("kv_batch_put", "kv_batch_get", "kv_list", "kv_clear"):
        setattr(tq, name, getattr(held, name))


def main() -> None:
    """The groups are those of the rig's seed 0, and a stale one of seed 9 over the real queue."""
    real = "real" in sys.argv
    queue(real)
    replay = rig.buffer("ReplayBufferAsync", threshold=4) if real else rig.buffer()
    trainer = rig.trainer(replay, mini=1)
    if real:
        rig.put(rig.make_rows(1, seed=9), step=1)
    rig.put(rig.make_rows())
    batch = rig.step(trainer, 3)
    trainer._shutdown_dump_executor()
    if "ROLLSIFT_RECIPE" not in os.environ:
        old = load("test_v0", "test_v0.py")
        trainer = old.trainer()
        trainer.global_steps = 8
        folder = os.environ["ROLLSIFT_CAPTURE"] + "-dump"
        trainer._log_rollout_data(old.padded(rig.make_rows(1, 2)), {}, {}, folder)
        trainer._shutdown_dump_executor()
    print(verl.__version__, os.environ["ROLLSIFT_CAPTURE"], len(batch.keys))


if __name__ == "__main__":
    main()
