"""`rollsift replay` as a user runs it, and the weights that it publishes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rig import DESCENT, batch, hand_worker, log_probs, make_rows, parameters, run, write
from safetensors.torch import load_file

from rollsift.pipeline.replay.dataset import Replay
from rollsift.pipeline.replay.settings import settings
from rollsift.pipeline.replay.share import Split
from rollsift.pipeline.replay.trainer import Options, Telling, replay
from rollsift.pipeline.replay.worker import Worker

SETS = (
    "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=2",
    *(f"actor.optim.{key}={value}" for key, value in DESCENT.items()),
)  # fmt: skip
ROLLSIFT = Path(sys.executable).with_name("rollsift")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run of three steps."""
    return run(tmp_path / "run", write(tmp_path / "logs", make_rows(tools=True)))


def command(made: Path, model: Path, out: Path, *more: str | Path) -> subprocess.Popen[str]:
    """The command with the settings above, as a process of its own."""
    told = [word for item in SETS for word in ("-s", item)]
    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    return subprocess.Popen(
        [ROLLSIFT, "replay", made, "--model", model, "-o", out, "--device", "cpu",
         "--workers", "0", *told, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_killed_and_terminated_it_goes_on_to_the_same_weights(
    made: Path, model: Path, tmp_path: Path
) -> None:
    """SIGKILL after the first update, SIGTERM after the second, then the rest: the published model
    is that of one go; metrics alone are on stdout, as JSON lines; 130 says that it was ended."""
    out, pub = tmp_path / "out", tmp_path / "pub"
    freq = ("-s", "trainer.save_freq=1", "--publish", pub, "--every", "9")
    killed = command(made, model, out, *freq)
    tracker = out / "latest_checkpointed_iteration.txt"
    while not tracker.exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    first = int(tracker.read_text())
    ended = command(made, model, out, *freq)
    assert ended.stdout is not None
    line = json.loads(ended.stdout.readline())
    ended.send_signal(signal.SIGTERM)
    rest, stderr = ended.communicate(timeout=120)
    assert line["training/global_step"] == first + 1
    assert ended.returncode == (130 if first + 1 + len(rest.splitlines()) < 3 else 0), stderr
    last = command(made, model, out, *freq)
    stdout, stderr = last.communicate(timeout=120)
    assert last.returncode == 0, stderr
    assert all("actor/grad_norm" in json.loads(line) for line in stdout.splitlines())
    assert int(tracker.read_text()) == 3
    whole = Options(made, model, tmp_path / "one", SETS, publish=tmp_path / "p", every=9, workers=0)
    assert replay(whole, "cpu", Telling())
    name = "global_step_3/model.safetensors"
    one, three = load_file(tmp_path / "p" / name), load_file(pub / name)
    assert one.keys() == three.keys()
    assert all(torch.equal(one[key], three[key]) for key in one)


def test_bad_input_is_told_in_one_line_before_torch_trains(model: Path, tmp_path: Path) -> None:
    """A run over text ends with exit status 3, and says to capture."""
    logs = tmp_path / "logs"
    logs.mkdir()
    row = {"input": "q", "output": "a", "score": 1.0, "step": 1, "uid": "u"}
    (logs / "1.jsonl").write_text(json.dumps(row) + "\n")
    ended = command(run(tmp_path / "run", logs), model, tmp_path / "out")
    stdout, stderr = ended.communicate(timeout=120)
    assert ended.returncode == 3, stderr
    assert stdout == ""
    assert "can be replayed" in stderr
    assert "capture" in stderr
    assert "Traceback" not in stderr


def test_published_weights_are_a_hugging_face_model(
    made: Path, model: Path, tmp_path: Path
) -> None:
    """transformers loads what was published, the head tied to the embedding, and it says what the
    trained worker says; a published model can be trained on."""
    from transformers import AutoModelForCausalLM

    out, pub = tmp_path / "out", tmp_path / "pub"
    options = Options(made, model, out, SETS, publish=pub, every=2, workers=0)
    assert replay(options, "cpu", Telling())
    assert sorted(path.name for path in pub.iterdir()) == [
        "global_step_2", "global_step_3", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(pub / "global_step_3")
    names = set(load_file(pub / "global_step_3" / "model.safetensors"))
    assert "lm_head.weight" not in names
    assert names == set(load_file(model / "model.safetensors"))
    worker = Worker(settings(pub / "global_step_3", SETS, "cpu", 3))
    mini = Replay(made, Split(4, micro=2))[0].minis[0]
    found = worker.log_probs(mini).unbind()
    for at, row in enumerate(mini.batch["input_ids"].unbind()):
        logs = loaded(row.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        plain = logs.gather(1, row[1:, None])[-len(found[at]) :, 0]
        torch.testing.assert_close(found[at], plain, rtol=0, atol=1e-5)
    assert not torch.equal(parameters(worker), parameters(Worker(settings(model, (), "cpu", 3))))


def test_lora_trains_merges_and_is_its_own_reference(
    made: Path, model: Path, tmp_path: Path
) -> None:
    """With LoRA the published weights are those of the base with the adapter in it, and log-probs
    without it are the base's, so a KL loss needs no other model."""
    lora = (*SETS, "model.lora_rank=4", "model.lora_alpha=8", "actor.use_kl_loss=true",
            "actor.ppo_mini_batch_size=4")  # fmt: skip
    pub = tmp_path / "pub"
    told: list[dict[str, float]] = []
    options = Options(made, model, tmp_path / "out", lora, publish=pub, every=9, workers=0)
    assert replay(options, "cpu", Telling(metrics=told.append))
    assert told[0]["actor/kl_loss"] == 0
    assert told[2]["actor/kl_loss"] > 0
    base, merged = (load_file(f / "model.safetensors") for f in (model, pub / "global_step_3"))
    assert base.keys() == merged.keys()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed
    assert not any("norm" in name or "embed" in name for name in changed)
    adapted = Worker(settings(model, lora, "cpu", 3))
    adapted.load(tmp_path / "out" / "global_step_3" / "actor")
    mini = Replay(made, Split(4, micro=2))[0].minis[0]
    whole = Worker(settings(pub / "global_step_3", SETS, "cpu", 3))
    found = adapted.log_probs(mini).values()
    torch.testing.assert_close(found, whole.log_probs(mini).values(), rtol=0, atol=1e-5)
    plain = hand_worker(model)
    rows = [row for row in make_rows(tools=True) if row.step == 1]
    held = batch(rows, [torch.zeros(len(row.response)) for row in rows])
    by_row = {tuple(row.response): logs for row, logs in
              zip(rows, log_probs(plain, held).unbind(), strict=True)}  # fmt: skip
    without = adapted.log_probs(mini, without_lora=True).unbind()
    for response, logs in zip(mini.batch["responses"].unbind(), without, strict=True):
        torch.testing.assert_close(logs, by_row[tuple(response.tolist())], rtol=0, atol=1e-5)
