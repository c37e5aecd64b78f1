"""verl on a CPU for all tests in this process: it chooses its platform once, on import."""

from __future__ import annotations

import os

os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",
    VERL_USE_EXTERNAL_MODULES="rollsift.pipeline.replay.cpu",
)
