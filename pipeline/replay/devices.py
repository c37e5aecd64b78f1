"""Devices: npu, cuda or cpu, and what verl needs to run there.

torch_npu is imported here only, and only where an NPU is asked for or the package is found: without
CANN it cannot be loaded, and as a backend that torch loads by itself it breaks `import torch`.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

from rollsift.schemas.errors import RollsiftError, UsageError

DEVICES: Final = ("auto", "npu", "cuda", "cpu")
_CPU = "rollsift.pipeline.replay.cpu"
_CANN = (
    "is CANN set up (source /usr/local/Ascend/ascend-toolkit/set_env.sh), and is torch_npu of the "
    "same release as torch? See pipeline/replay/README.md"
)


def choose(wanted: str) -> str:
    """The device to run on: the wanted one, for `auto` npu, cuda, cpu, in this order.

    To be called before torch is imported. Raises UsageError naming the missing piece.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if find_spec("torch") is None:
        raise UsageError("replay needs torch, which is not installed: pip install rollsift[verl]")
    import torch

    if wanted == "npu" or (wanted == "auto" and find_spec("torch_npu")):
        _load_npu(torch.__version__)
        return "npu"
    if "torch_npu" not in sys.modules and find_spec("torch_npu"):
        # transformers imports it wherever it is found, and without CANN that fails.
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
    if wanted in ("auto", "cuda") and torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise UsageError(
            f"--device cuda: torch {torch.__version__} finds no GPU; is it a CUDA build, and does "
            "nvidia-smi list one?"
        )
    return "cpu"


def _load_npu(version: str) -> None:
    if find_spec("torch_npu") is None:
        raise UsageError(
            f"--device npu: torch_npu is not installed; pip install the release for torch {version}"
        )
    try:
        import torch_npu
    except Exception as error:  # a release for another torch ends in any of them
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"torch_npu cannot be loaded beside torch {version}: {first}; {_CANN}, or go without "
            "by --device cpu or --device cuda"
        ) from None
    if not torch_npu.npu.is_available():
        raise UsageError(
            f"torch_npu {torch_npu.__version__} finds no NPU; does npu-smi info list one, is it in "
            f"ASCEND_RT_VISIBLE_DEVICES, and {_CANN}"
        )


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Set up verl for the device, and the process group that its workers run in: that of torchrun,
    or this process alone."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    if device == "cpu":  # verl knows no CPU, but takes platforms and engines by name
        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
        modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
        os.environ["VERL_USE_EXTERNAL_MODULES"] = ",".join({*modules, _CPU} - {""})
    if find_spec("verl") is None:
        raise UsageError("replay needs verl, which is not installed: pip install rollsift[verl]")
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}  # fmt: skip
        os.environ.update(alone)
    import verl  # its import sets filters of warnings anew
    from torch import distributed

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\w+ engine is not available", UserWarning)
        import verl.workers.engine  # noqa: F401
    if device == "cpu":
        distributed.init_process_group("gloo")
    else:
        from verl.utils.distributed import initialize_global_process_group

        initialize_global_process_group()
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def gathered(here: list[Any]) -> list[Any]:
    """The values of all ranks, in their order. To be called by all of them alike."""
    from torch import distributed

    found: list[list[Any]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(found, here)
    return [value for part in found for value in part]


def together(work: Callable[[], Any]) -> None:
    """Do a part of what every rank does; where it fails on one, it fails on all, so that no rank
    waits for one that is gone."""
    failed: Exception | None = None
    try:
        work()
    except Exception as error:  # told to the others first, then raised
        failed = error
    told = gathered([failed and (type(failed), str(failed))])
    if failed:
        raise failed
    for rank, other in enumerate(told):
        if other:
            kind = other[0] if issubclass(other[0], RollsiftError) else RollsiftError
            raise kind(f"rank {rank}: {other[1]}")
