"""Several processes by torchrun, against one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rig import DESCENT, make_rows, run, write
from safetensors.torch import load_file

from rollsift.pipeline.replay.trainer import Options, Telling, replay
from rollsift.schemas.errors import UsageError

SETS = (
    "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=2",
    *(f"actor.optim.{key}={value}" for key, value in DESCENT.items()),
)  # fmt: skip
BIN = Path(sys.executable).parent


def torchrun(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes that make one group."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", *command],
        capture_output=True, text=True, env=environment | {"OMP_NUM_THREADS": "1"}, timeout=240,
    )  # fmt: skip


def test_two_processes_equal_one(model: Path, tmp_path: Path) -> None:
    """Rows that two ranks cannot share evenly, over three updates, end within 1e-5 of one process,
    metrics are told once, and a checkpoint of two is no checkpoint of one."""
    rows = make_rows(groups=3, tools=True)
    made = run(tmp_path / "run", write(tmp_path / "logs", rows), k=3)
    one = Options(made, model, tmp_path / "one", SETS, publish=tmp_path / "p1", every=9, workers=0)
    told: list[dict[str, float]] = []
    assert replay(one, "cpu", Telling(metrics=told.append))
    sets = [word for item in SETS for word in ("-s", item)]
    two = torchrun(
        "--no-python", BIN / "rollsift", "replay", made, "--model", model, "-o", tmp_path / "two",
        *sets, "--publish", tmp_path / "p2", "--every", "9", "--device", "cpu", "--workers", "0",
    )  # fmt: skip
    assert two.returncode == 0, two.stderr
    first, second = (
        load_file(tmp_path / p / "global_step_3/model.safetensors") for p in ("p1", "p2")
    )
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-5)
    lines = [json.loads(line) for line in two.stdout.splitlines()]
    assert len(lines) == 3
    for ours, theirs in zip(told, lines, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("actor/grad_norm", "actor/pg_loss", "rollout_corr/rollout_is_mean"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name
    with pytest.raises(UsageError, match=r"written by 2 processes, this run has 1"):
        replay(Options(made, model, tmp_path / "two", SETS), "cpu", Telling())


def test_what_one_rank_finds_ends_all(model: Path, tmp_path: Path) -> None:
    """A torn file that only the second rank looks at before the first update is told, and no rank
    waits for one that is gone."""
    made = run(tmp_path / "run", write(tmp_path / "logs", make_rows()))
    log = tmp_path / "logs" / "2.parquet"
    log.write_bytes(log.read_bytes()[:-20])
    ended = torchrun(
        "--no-python", BIN / "rollsift", "replay", made, "--model", model, "-o", tmp_path / "out",
        "--device", "cpu", "--workers", "0",
    )  # fmt: skip
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert "2.parquet: cannot be read as Parquet" in ended.stderr
    assert "rank 1: " in ended.stderr
    assert "pipeline/replay" not in ended.stderr, "a traceback of ours"
    assert not (tmp_path / "out").exists()


SHARED = """
import sys
from pathlib import Path
from rollsift.pipeline.replay.devices import choose, gathered, process_group

choose("cpu")
import torch

with process_group("cpu"):
    from rollsift.pipeline.replay.dataset import Replay, Rules
    from rollsift.pipeline.replay.settings import settings
    from rollsift.pipeline.replay.share import Split
    from rollsift.pipeline.replay.worker import Worker

    run, model = map(Path, sys.argv[1:])
    sets = ["actor.fsdp_config.ulysses_sequence_parallel_size=2", "model.use_remove_padding=true",
            "actor.ulysses_sequence_parallel_size=2"]
    worker = Worker(settings(model, sets, "cpu", 1))
    assert worker.ranks == (0, 1), worker.ranks
    mini = Replay(run, Split(4), Rules(log_probs=("old_log_probs",)))[0].minis[0]
    found = gathered([worker.log_probs(mini).values()])
    assert len(found) == 2
    assert torch.equal(found[0], found[1])
    told = gathered([sorted(worker.train(mini, last=True))])
    assert "grad_norm" in told[0]
"""


def test_ranks_that_share_a_sequence_get_the_same_rows(model: Path, tmp_path: Path) -> None:
    """Under Ulysses both are data-parallel rank 0 of 1, and both know the log-probs, which verl
    gives to the first alone."""
    made = run(tmp_path / "run", write(tmp_path / "logs", make_rows(steps=1)))
    (tmp_path / "shared.py").write_text(SHARED)
    ended = torchrun(tmp_path / "shared.py", made, model)
    assert ended.returncode == 0, ended.stderr
