"""Replay: the loader against pyarrow and a loader by rows, an update on kept rows against all."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import logs
import pyarrow.parquet as pq
import torch
from measure import ROUNDS, compare, seconds

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.replay.dataset import Replay, Rules
from rollsift.pipeline.replay.devices import choose, process_group
from rollsift.pipeline.replay.share import Split
from rollsift.pipeline.sources import discover
from rollsift.schemas.recipe import resolve

FULL = os.environ.get("SIZE", "small") == "full"
NAMES = ["prompt_ids", "response_ids", "response_mask", "rollout_log_probs"]


def _run(source: Path, out: Path, k: int) -> Path:
    filter_logs(discover([source]), resolve({"k": k}), out)
    return out


def _each(data: Replay) -> Callable[[], object]:
    def job() -> None:
        for index in range(len(data)):
            data[index]

    return job


def loader(folder: Path) -> None:
    """All updates of a run, every row kept, as batches for verl."""
    paths = logs.captured(folder / "captured", 4, 256 if FULL else 64)
    run = _run(folder / "captured", folder / "all", logs.SAMPLES)
    data = Replay(run, Split(64), Rules(log_probs=("rollout_log_probs",)))

    def arrow() -> None:
        for path in paths:
            pq.read_table(path, columns=NAMES)

    def by_rows() -> None:
        for path in paths:
            rows = pq.read_table(path, columns=NAMES).to_pylist()
            for name in NAMES:
                parts = [torch.tensor(row[name]) for row in rows]
                torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    same = "tokens a second, prompt, response, mask and log-probs, all rows kept"
    compare("replay_loader", _each(data), arrow, -0.6, against="pyarrow.read_table", of=same)
    compare("replay_loader_vs_pylist", _each(data), by_rows, -10, against="to_pylist")


def _model(folder: Path) -> Path:
    """A Qwen2 of some two million random weights, so that arithmetic outweighs the bookkeeping."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def update(folder: Path) -> None:
    """An update on the 8 shortest of 16 against one on all 16, row by row so that nothing is
    padded: time against tokens."""
    logs.captured(folder / "short", 1, 4, words=512, longest=512, mean=5.5)
    with process_group(choose("cpu")):
        from rollsift.pipeline.replay.settings import settings
        from rollsift.pipeline.replay.update import Updater
        from rollsift.pipeline.replay.worker import Worker

        sets = ["actor.ppo_mini_batch_size=4", "actor.ppo_micro_batch_size_per_gpu=1",
                "model.enable_gradient_checkpointing=false"]  # fmt: skip
        tree = settings(_model(folder / "model"), sets, "cpu", 8)
        updater = Updater(tree, Worker(tree), None)
        rules = Rules(log_probs=("rollout_log_probs",))
        items = [
            Replay(_run(folder / "short", folder / f"short{k}", k), Split(4), rules)[0]
            for k in (logs.SAMPLES // 2, logs.SAMPLES)
        ]
        times = []
        for number in range(ROUNDS + 1):
            took = [seconds(lambda item=item: updater.update(item)) for item in items]
            times += [took[0] / took[1]] if number else []  # the first warms up
    kept, whole = (int(item.minis[0].batch["input_ids"].values().numel()) for item in items)
    time, tokens = statistics.median(times), kept / whole
    row = {"name": "update_time_by_tokens", "ratio": round(time / tokens, 3), "goal": 1.1,
           "met": abs(time / tokens - 1) <= 0.1, "time": round(time, 3),
           "tokens": round(tokens, 3), "against": "the same worker on all rows"}  # fmt: skip
    print(json.dumps(row), flush=True)


def bench(folder: Path) -> None:
    """All of them."""
    loader(folder)
    update(folder)
