"""Devices are chosen in order, what is missing is named, and torch_npu breaks nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rig
import torch

from rollsift.pipeline.replay import devices
from rollsift.pipeline.replay.devices import choose, process_group
from rollsift.schemas.errors import UsageError

ROLLSIFT = "from rollsift.jobs.main import main; main()"
OURS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "VERL_", "TORCH_DEVICE_BACKEND_AUTOLOAD")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which devices there are: whether torch_npu is installed, whether it finds an NPU, and
    whether torch finds a GPU."""
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    def say(*, package: bool, npu: bool = False, cuda: bool = False) -> None:
        plain = devices.find_spec
        monkeypatch.setattr(
            devices,
            "find_spec",
            lambda name: (package or None) if name == "torch_npu" else plain(name),
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        if npu:
            there = SimpleNamespace(is_available=lambda: True)
            stub: Any = SimpleNamespace(__version__="1", npu=there)
            monkeypatch.setitem(sys.modules, "torch_npu", stub)

    return say


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"package": True, "npu": True, "cuda": True}, "npu"),
        ({"package": True, "npu": True}, "npu"),
        ({"package": False, "cuda": True}, "cuda"),
        ({"package": False}, "cpu"),
    ],
)
def test_auto_takes_npu_then_cuda_then_cpu(
    installed: Callable[..., None], there: dict[str, bool], chosen: str
) -> None:
    """The first that is there, in this order."""
    installed(**there)
    assert choose("auto") == chosen


@pytest.mark.parametrize("wanted", ["npu", "cuda", "cpu"])
def test_a_device_that_is_named_is_taken(installed: Callable[..., None], wanted: str) -> None:
    """What else is there has no effect."""
    installed(package=True, npu=True, cuda=True)
    assert choose(wanted) == wanted


def test_no_gpu_is_told(installed: Callable[..., None]) -> None:
    """Where torch finds no GPU the message names its version and what to look at."""
    installed(package=False)
    with pytest.raises(UsageError, match=r"--device cuda: torch .* finds no GPU.*nvidia-smi"):
        choose("cuda")


def test_a_missing_torch_npu_is_told(installed: Callable[..., None]) -> None:
    """Without the package the message says which release to install."""
    installed(package=False)
    with pytest.raises(UsageError, match=r"torch_npu is not installed; .* for torch 2"):
        choose("npu")


@pytest.mark.parametrize("wanted", ["auto", "npu"])
def test_no_npu_is_told(installed: Callable[..., None], wanted: str) -> None:
    """A package that loads and finds no device is no reason to train on a CPU without a word."""
    installed(package=True, npu=True)
    sys.modules["torch_npu"].npu.is_available = lambda: False
    with pytest.raises(UsageError, match=r"torch_npu 1 finds no NPU.*ASCEND_RT_VISIBLE_DEVICES"):
        choose(wanted)


@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "RuntimeError", "OSError"])
def test_a_torch_npu_that_fails_to_load_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Whatever a release for another torch raises, its first line is told, and no more of it."""
    (tmp_path / "torch_npu.py").write_text(f"raise {error}('undefined symbol' + chr(10) + 'more')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UsageError, match=r"torch_npu cannot be loaded .*: undefined symbol; is CANN"
    ):
        choose("auto")


@pytest.mark.parametrize(("name", "ask"), [("torch", choose), ("verl", process_group)])
def test_a_missing_library_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, ask: Callable[[str], Any]
) -> None:
    """Without torch or verl the message names the extra that brings both."""
    plain = devices.find_spec
    monkeypatch.setattr(devices, "find_spec", lambda of: None if of == name else plain(of))
    with pytest.raises(UsageError, match=rf"needs {name}, .*pip install rollsift\[verl\]"):  # noqa: PT012
        asked = ask("cpu")
        asked.__enter__()


# torch_npu as it is: the real package, on a machine without CANN


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real torch-npu for this torch, which pip fetches from the configured
    index."""
    folder = tmp_path_factory.mktemp("torch_npu")
    version = torch.__version__.split("+")[0]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = ["--no-deps", "--no-compile", "--target", str(folder), f"torch-npu=={version}"]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"torch-npu {version} cannot be fetched from pip's index: {done.stderr}")
    return folder


def beside(package: Path, *command: str, cwd: Path | None = None) -> Any:
    """Run Python in a process of its own that finds a package torch_npu."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    env["PYTHONPATH"] = str(package)
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=env, cwd=cwd, timeout=250
    )


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a log of one step, `logs`, and its run, `run`."""
    folder = tmp_path_factory.mktemp("made")
    rows = rig.make_rows(steps=1, groups=2)
    rig.run(folder / "run", rig.write(folder / "logs", rows))
    return folder


def test_torch_npu_without_cann_breaks_torch(wheel: Path) -> None:
    """What the tests below guard against is so: in this environment `import torch` itself fails."""
    done = beside(wheel, "-c", "import torch")
    assert done.returncode
    assert "torch_npu" in done.stderr


@pytest.mark.parametrize("device", ["npu", "auto"])
def test_without_cann_the_missing_piece_is_named(wheel: Path, logs: Path, device: str) -> None:
    """Whoever installed torch_npu means to use it: its first error is told in one line, with what
    to do next, and nothing is trained on another device instead."""
    done = beside(wheel, "-c", ROLLSIFT, "replay", "run", "--model", "m", "-o", "out",
                  "--device", device, cwd=logs)  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "torch_npu cannot be loaded" in line
    assert ".so: cannot open shared object file" in line
    assert "set_env.sh" in line
    assert "--device cpu" in line
    assert not (logs / "out").exists()


def test_without_cann_all_else_works(wheel: Path, logs: Path) -> None:
    """Filtering, asking and help need no torch, whatever it would say."""
    for command in (
        ["--help"], ["replay", "--help"], ["filter", "logs", "-r", "gfpo-shortest", "-o", "again"],
        ["sql", "run", "SELECT count(*) AS n FROM kept", "-f", "json"],
    ):  # fmt: skip
        done = beside(wheel, "-c", ROLLSIFT, *command, cwd=logs)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"n": 4}]


def test_without_cann_a_cpu_can_train(wheel: Path, logs: Path, model: Path) -> None:
    """With --device cpu the package is not looked at, by verl's libraries neither."""
    done = beside(wheel, "-c", ROLLSIFT, "replay", "run", "--model", str(model), "-o", "cpu",
                  "--device", "cpu", "--workers", "0",
                  "-s", "model.enable_gradient_checkpointing=false", cwd=logs)  # fmt: skip
    assert done.returncode == 0, done.stderr
    [metrics] = [json.loads(line) for line in done.stdout.splitlines()]
    assert metrics["replay/rows"] == 4
    assert (logs / "cpu" / "global_step_1" / "actor").is_dir()


# A device that says it is an NPU

MOVES = """
import sys
from pathlib import Path
from rollsift.pipeline.replay.devices import choose
assert choose("auto") == "npu"
import torch, torch_npu
from rollsift.pipeline.replay.dataset import Replay, Rules
from rollsift.pipeline.replay.share import Split
rules = Rules(log_probs=("old_log_probs",), rejected=True)
item = Replay(Path(sys.argv[1]), Split(2, micro=3, normalizer="all"), rules)[0]
assert torch_npu.asked == []
for mini in (*item.minis, item.rejected):
    for value in (*mini.batch.values(), mini.session):
        there = value.to("npu")
        assert there.device.type == "npu"
        back = there.to("cpu")
        if value.is_nested:
            value, back = value.values(), back.values()
        assert torch.equal(value, back)
print(*sorted({str(dtype) for dtype in torch_npu.asked}))
"""


def test_items_are_made_on_the_cpu_and_moved_whole(logs: Path) -> None:
    """Against a stand-in for an NPU, not the hardware: an update's nested tensors are made without
    the device, which refuses to make them, go there and back unchanged, and none is float64."""
    done = beside(Path(__file__).with_name("stand_in"), "-c", MOVES, str(logs / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch.float32", "torch.int64"]
