"""What the tests of replay share: a tiny model, one process group, and `rig` as a module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_SPEC = importlib.util.spec_from_file_location("rig", Path(__file__).with_name("rig.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
rig = sys.modules["rig"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rig)


@pytest.fixture(scope="session", autouse=True)
def _group() -> Iterator[None]:
    from rollsift.pipeline.replay.devices import process_group

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one only waits for the first on models of this size
    with process_group("cpu"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen2 of some thousand random weights."""
    return rig.make_model(tmp_path_factory.mktemp("model"))
