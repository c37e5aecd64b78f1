"""Capture is installed by the environment alone, and a verl that it does not know is left alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import capture_rig as rig
import numpy as np
import pyarrow.parquet as pq
import pytest
import verl

from rollsift.pipeline.capture import hooks
from rollsift.schemas.errors import RollsiftError

PROGRAM = Path(__file__).with_name("stock_run.py")
MODULES = "rollsift.pipeline.replay.cpu,rollsift.pipeline.capture"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process with these variables and none of capture's own beside them."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSIFT_")}
    return subprocess.run(
        [sys.executable, *command], env={**kept, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """verl 0.9.0, which comes before the installed one on the path."""
    place = str(tmp_path_factory.mktemp("verl"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
         "--disable-pip-version-check", "--target", place, "verl==0.9.0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no package index at hand for verl 0.9.0: {done.stderr.strip()[-200:]}")
    return place


@pytest.mark.parametrize("version", ["0.9.1", "0.9.0"])
def test_two_variables_install_it(
    tmp_path: Path, version: str, request: pytest.FixtureRequest
) -> None:
    """In a process that calls nothing of rollsift's, steps of V1 and of V0 are captured, and one
    line tells version, class and folder; on both versions of verl that are known."""
    more = {"PYTHONPATH": request.getfixturevalue("older")} if version == "0.9.0" else {}
    done = run(str(PROGRAM), VERL_USE_EXTERNAL_MODULES=MODULES, ROLLSIFT_CAPTURE=str(tmp_path),
               **more)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{version} {tmp_path} 12"
    told = [line for line in done.stderr.splitlines() if line.startswith("rollsift")]
    assert told[0] == (
        f"rollsift capture: verl {version}, verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync, to "
        f"{tmp_path}"
    )
    assert told[-1].startswith(f"rollsift capture: 2 steps in {tmp_path}, 0 failures")
    assert pq.read_metadata(tmp_path / "7.parquet").num_rows == 12
    assert pq.read_metadata(tmp_path / "8.parquet").num_rows == 2


def test_a_third_lets_verl_follow_a_recipe(tmp_path: Path, older: str) -> None:
    """With a recipe the same program trains on k rows of each of its 3 groups, on 0.9.0 too."""
    done = run(str(PROGRAM), VERL_USE_EXTERNAL_MODULES=MODULES, ROLLSIFT_CAPTURE=str(tmp_path),
               ROLLSIFT_RECIPE="gfpo-shortest k=2", PYTHONPATH=older)  # fmt: skip
    assert done.returncode == 0, done.stderr
    # 6 rows are trained on, filled up to 8, a multiple of what verl's workers ask for.
    assert done.stdout.splitlines()[-1] == f"0.9.0 {tmp_path} 8"
    assert "trained on what gfpo-shortest keeps" in done.stderr
    assert pq.read_metadata(tmp_path / "7.parquet").num_rows == 12


@pytest.mark.timeout(600)  # Ray starts in 10 to 60 s
def test_over_the_real_queue_it_is_the_same(tmp_path: Path) -> None:
    """Over verl's own TransferQueue on a local Ray: the captured rows, evicted ones too, have the
    tokens, log-probs and rewards that were put, and verl trains on what the recipe keeps."""
    done = run(str(PROGRAM), "real", VERL_USE_EXTERNAL_MODULES=MODULES,
               ROLLSIFT_CAPTURE=str(tmp_path), ROLLSIFT_RECIPE="gfpo-shortest k=2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{verl.__version__} {tmp_path} 8"
    rows = {row.key: row for row in rig.make_rows()} | {r.key: r for r in rig.make_rows(1, seed=9)}
    found = pq.read_table(tmp_path / "7.parquet").to_pylist()
    assert len(found) == len(rows)
    stale = rig.make_rows(1, seed=9)[0].uid
    for got in found:
        row = rows[f"{got['uid']}_{got['session_id']}_{got['output_index']}"]
        assert got["evicted_by"] == ("stale" if row.uid == stale else None)
        assert (got["prompt_ids"], got["response_ids"]) == (row.prompt, row.response)
        assert (got["response_mask"], got["score"]) == (row.mask, row.reward)
        assert got["rollout_log_probs"] == np.array(row.log_probs, np.float32).tolist()
    trained = [got for got in found if got["advantages"] is not None]
    assert {got["uid"]: 2 for got in trained} == dict.fromkeys({r["uid"] for r in trained}, 2)
    for uid in {got["uid"] for got in trained}:
        lengths = sorted(sum(row.mask) for row in rows.values() if row.uid == uid)
        assert sorted(r["response_length"] for r in trained if r["uid"] == uid) == lengths[:2]


def test_the_overrides_in_the_readme_reach_rays_actors() -> None:
    """What the README adds for a cluster is a part of verl's configuration that its main program
    merges into Ray's runtime environment."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    readme = (Path(hooks.__file__).parent / "README.md").read_text()
    overrides = re.findall(r"(?m)^ +(\+ray_kwargs\S+)", readme)
    assert len(overrides) == 2
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    merged: Any = OmegaConf.merge(get_ppo_ray_runtime_env(), config.ray_kwargs.ray_init.runtime_env)
    assert merged.env_vars.VERL_USE_EXTERNAL_MODULES == "rollsift.pipeline.capture"
    assert merged.env_vars.ROLLSIFT_CAPTURE == "/data/my-run/captured"


def test_without_a_folder_it_does_nothing() -> None:
    """Imported by verl in a run that is not to be captured, it changes and loads nothing."""
    program = (
        "import sys; before = list(sys.meta_path); import rollsift.pipeline.capture; "
        "print(sys.meta_path == before, *sys.modules)"
    )
    done = run("-c", program)
    same, *modules = done.stdout.split()
    assert same == "True"
    assert not {"torch", "verl", "polars", "rollsift.pipeline.capture.hooks"} & set(modules)


def test_a_recipe_needs_a_folder() -> None:
    """What a recipe drops would be lost: verl's import of the module fails, and says why."""
    done = run("-c", "import rollsift.pipeline.capture", ROLLSIFT_RECIPE="gfpo-shortest")
    assert done.returncode == 1
    assert "ROLLSIFT_RECIPE needs ROLLSIFT_CAPTURE" in done.stderr.splitlines()[-1]


def unknown(**methods: Any) -> Any:
    """A trainer_base of some other verl."""
    module: Any = ModuleType(hooks.V1)
    base = type("PPOTrainer", (), {
        "_init_dump_executor": lambda self: None, "_shutdown_dump_executor": lambda self: None,
        "_step_once": lambda self, metrics, timing_raw, sample_batch_size: None,
    } | methods)  # fmt: skip
    if methods.get("_step_once", base) is None:
        del base._step_once
    module.PPOTrainer, module.ReplayBuffer = base, type("ReplayBuffer", (), {})
    return module


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        (
            {"_step_once": lambda self, batch: None},
            "PPOTrainer._step_once takes (self, batch), expected "
            "(self, metrics, timing_raw, sample_batch_size): nothing is captured",
        ),
        ({"_step_once": None}, "PPOTrainer._step_once is not there"),
        ({}, "ReplayBuffer.sample is not there"),
    ],
)
def test_a_verl_that_does_not_fit_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], methods: dict[str, Any], told: str
) -> None:
    """One line names the method, and training goes on without capture; with a recipe it does not,
    for it would train on rows that were to be dropped."""
    module = unknown(**methods)
    before = dict(vars(module.PPOTrainer))
    hooks.Finder(tmp_path, None).patch(module)
    assert dict(vars(module.PPOTrainer)) == before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert told in lines[0]
    with pytest.raises(RollsiftError, match=r"0\.9\.0 and 0\.9\.1 are known"):
        hooks.Finder(tmp_path, "gfpo-shortest").patch(unknown(**methods))
