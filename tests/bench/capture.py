"""Capture: a step until it is on the disk, against verl's own writers on the same batch: its JSONL
(text only) and `DataProto.save_to_disk` (all of it, padded, a pickle); and what the hooks take of a
step of ten seconds, without the fetch from the queue."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda",
                  VERL_USE_EXTERNAL_MODULES="rollsift.pipeline.replay.cpu")  # fmt: skip

import numpy as np
import pytest
import torch
from measure import ROUNDS, seconds

from rollsift.pipeline.capture.rows import FIELDS, SAMPLED, TRAINED

ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("SIZE", "small") == "full"
GROUPS, SAMPLES, TOKENS = (128, 8, 1500) if FULL else (64, 8, 1000)
STEP = 10.0  # seconds; half a million tokens are rarely sampled in fewer


def load(path: Path, name: str) -> Any:
    """A file of the tests as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Words:
    """The shipped tokenizer, as verl's dumps use one."""

    pad_token_id = 0
    eos_token_id = 1

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self.inner = Tokenizer.from_file(str(ROOT / "data" / "tokenizer.json"))
        self.vocab_size = self.inner.get_vocab_size()

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return self.inner.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)


def rows(rig: Any, vocabulary: int) -> list[Any]:
    """Rollouts of realistic lengths, ids by Zipf's law, log-probs as a policy's samples have."""
    draw = np.random.default_rng(0)
    made = []
    ids = np.arange(2, vocabulary)
    draw.shuffle(ids)  # short words are not the frequent ones
    for row in rig.make_rows(GROUPS, SAMPLES, length=3):
        size = int(draw.gamma(4, TOKENS / 4)) + 8
        row.response = ids[draw.zipf(1.2, size) % len(ids)].tolist()
        row.mask = [1] * size
        row.log_probs = (-draw.exponential(0.4, size) * draw.integers(0, 2, size)).tolist()
        made.append(row)
    return made


def near(batch: Any) -> None:
    """Put old log-probs near those of the inference engine, as a trainer's are."""
    import transfer_queue as tq

    data = tq.kv_batch_get(batch.keys, "train", ["rollout_log_probs"])
    values, offsets = data["rollout_log_probs"].values(), data["rollout_log_probs"].offsets()
    noise = torch.randn(len(values), generator=torch.Generator().manual_seed(0)) * 0.01
    data["old_log_probs"] = torch.nested.nested_tensor_from_jagged(values + noise, offsets)
    tq.kv_batch_put(batch.keys, "train", data.select("old_log_probs"))


def bench(folder: Path) -> None:
    """Write one batch in the three ways, round by round, and let a recipe judge it."""
    rig = load(ROOT / "tests" / "capture" / "rig.py", "capture_rig")
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(sys.stderr),  # verl prints, and stdout is for the rows
    ):
        recorder = rig.install(patch, folder / "cap", "gfpo-shortest k=4")
        made = rig.trainer(rig.buffer(), mini=1, n=SAMPLES)
        made.tokenizer = Words()
        rig.put(rows(rig, made.tokenizer.vocab_size))
        batch, _ = made.replay_buffer.sample(7, "train", GROUPS)
        made._compute_old_log_prob(batch, {})
        near(batch)
        made._compute_advantage(batch, {})
        measure(made, batch, recorder, folder)
        made._shutdown_dump_executor()


def measure(made: Any, batch: Any, recorder: Any, folder: Path) -> None:
    """Time the jobs, without the fetch, for what stands for the queue here is slower than it."""
    import transfer_queue as tq
    from verl import DataProto

    fields = [*FIELDS.values(), "rm_scores"]
    data = tq.kv_batch_get(batch.keys, "train", fields)
    whole = DataProto(batch=data.to_padded_tensor())
    tokens = int(data["responses"].offsets()[-1])
    held = {at: tq.kv_batch_get(sorted(batch.keys), "train", list(at)) for at in
            (SAMPLED, (*SAMPLED, *TRAINED))}  # fmt: skip
    inside: dict[str, list[float]] = {"trained": [], "choose": []}

    def capture() -> None:
        recorder._sampled = None
        inside["trained"].append(
            seconds(lambda: recorder.trained(made, batch, lambda _, names: held[tuple(names)]))
        )
        recorder.background.flush()

    def jsonl() -> None:
        made._log_rollout_data(batch, {}, str(folder / "jsonl"))
        for future in made._dump_futures:
            future.result()

    jobs = {"capture": capture, "jsonl": jsonl,
            "save_to_disk": lambda: whole.save_to_disk(folder / "saved")}  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(ROUNDS + 1):
        for name, job in jobs.items():
            times[name].append(seconds(job))
        inside["choose"].append(
            seconds(lambda: recorder.choose(made, batch, lambda _, names: held[tuple(names)]))
        )
    files = {"capture": "cap/7.parquet", "jsonl": "jsonl/7.jsonl", "save_to_disk": "saved"}
    sizes = {name: (folder / file).stat().st_size for name, file in files.items()}
    best = {name: round(min(found[1:]), 4) for name, found in {**times, **inside}.items()}
    for name in ("jsonl", "save_to_disk"):
        ratio = statistics.median(
            theirs / ours
            for ours, theirs in zip(times["capture"][1:], times[name][1:], strict=True)
        )
        tell(f"capture_vs_{name}", ratio, 1, tokens=tokens, rows=len(batch.keys),
             seconds=[best["capture"], best[name]],
             smaller=round(sizes[name] / sizes["capture"], 2))  # fmt: skip
    for name, job in (("capture_in_hook", "trained"), ("recipe_in_hook", "choose")):
        tell(name, best[job] / STEP, 0.01, seconds=best[job], of="a step of 10 s")


def tell(name: str, ratio: float, goal: float, **more: object) -> None:
    """One row, in the form of the other benchmarks'."""
    met = ratio >= goal if goal >= 1 else ratio <= goal
    row = {"name": name, "ratio": round(ratio, 4), "goal": goal, "met": met, **more}
    print(json.dumps(row), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        bench(Path(place))
