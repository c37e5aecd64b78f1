"""What the tests of capture share: verl's trainers over a queue in memory, as `capture_rig`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("capture_rig", Path(__file__).with_name("rig.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
rig = sys.modules["capture_rig"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rig)
