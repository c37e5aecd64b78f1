"""A CPU platform for verl, by its own plug-in point; importing it registers the name `cpu`.

`torch.cpu` has no memory to ask about, so that part of a device's interface says 0 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    return None


_module = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
    **dict.fromkeys(
        ["memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"],
        _zero,
    ),
    **dict.fromkeys(["empty_cache", "ipc_collect", "reset_peak_memory_stats"], _nothing),
    mem_get_info=lambda *_, **__: (0, 0),
    get_device_name=lambda *_, **__: "CPU",
    manual_seed=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)
_module.is_available = lambda: False  # asks for an accelerator


@PlatformRegistry.register(platform="cpu")
class _PlatformCPU(PlatformBase):  # type: ignore[misc]  # verl has no types here
    """verl's view of a machine without an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never found by itself, only by VERL_PLATFORM=cpu

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None: ...

    def synchronize(self, device_index: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: int) -> dict[str, int]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...
