"""A stand-in for torch_npu without an NPU: tensors of a device `npu` that lie in main memory.

It can copy to and from there and nothing else, and notes what it is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("npu")
__version__ = "0.stand-in"
npu: Any = torch.npu  # type: ignore[attr-defined]
asked: list[torch.dtype] = []  # the type of every tensor that was made on the device


class OnDevice(torch.Tensor):
    held: torch.Tensor


def made(size: Any, dtype: torch.dtype) -> Any:
    """A tensor on the device."""
    asked.append(dtype)
    found: Any = torch._C._acc.create_empty_tensor(size, dtype)
    found.__class__ = OnDevice
    found.held = torch.empty(size, dtype=dtype)
    return found


@torch.library.impl("aten::empty.memory_format", "PrivateUse1")
def empty(size: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
    """A tensor without numbers."""
    return made(size, dtype)


@torch.library.impl("aten::empty_strided", "PrivateUse1")
def empty_strided(size: Any, stride: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
    """A tensor without numbers; its strides are of no consequence."""
    return made(size, dtype)


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    """The way to the device and back."""
    here, there = (getattr(tensor, "held", tensor) for tensor in (source, target))
    there.copy_(here)
    return target
