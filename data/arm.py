"""One arm of the loop: sample, capture, filter, replay, publish, and again with the new weights.

A process of its own, which loop.py starts with the environment that a user of capture sets. The
policy, the task and the sampler are make.py's; verl's V1 trainer is real, and what stands in for
its workers and its queue is that of the tests of capture.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import make
import torch
import transfer_queue as tq
from tensordict import TensorDict
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from rollsift.jobs.list_recipes import SHIPPED
from rollsift.pipeline import recipes
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.replay.devices import process_group
from rollsift.pipeline.replay.trainer import Options, Telling, replay
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run

HERE = Path(__file__).resolve().parent
START = HERE / "model"
FIRST_PROMPTS = 100  # steps whose prompts no shipped log holds
MINI_BATCHES = 4  # optimizer steps of an update
LEARNING_RATE = 1e-4  # the steadiest of 1e-4, 3e-4 and 1e-3 for the arm that trains on all
PATIENCE = 60.0  # seconds that capture's thread may take to write a step
FIGURES = """
    SELECT avg(reward) AS reward, avg(response_length) AS length, avg(truncated::INT) AS clipped,
    count(*) FILTER (kept) AS rows, sum(response_length) FILTER (kept)::BIGINT AS tokens
    FROM rollouts WHERE step = $step
"""


def load_rig() -> Any:
    """The stand-ins of the tests of capture, as a module."""
    path = HERE.parent / "tests" / "capture" / "rig.py"
    spec = importlib.util.spec_from_file_location("capture_rig", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["capture_rig"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rig = load_rig()


class Workers(rig.Actor):  # type: ignore[misc]  # loaded by path
    """verl's actor workers: the log-probs are those of the weights that sampled, and the update is
    left to replay."""

    model: Qwen2ForCausalLM

    @torch.no_grad()
    def compute_log_prob(self, batch: Any) -> Any:
        """Put log-probs and entropies of whole sequences into the queue, each where its token is
        foretold."""
        place = {"keys": batch.keys, "partition_id": batch.partition_id}
        rows = tq.kv_batch_get(**place, select_fields=["input_ids"])["input_ids"].unbind()
        found: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
        for part in make.cut(rows, make.BATCH):
            ids = torch.nn.utils.rnn.pad_sequence(part, True)
            logs = self.model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            taken = logs.gather(2, ids.roll(-1, 1)[..., None])[..., 0]
            entropy = -(logs.exp() * logs).sum(-1)
            for at, row in enumerate(part):
                found["log_probs"].append(taken[at, : len(row)])
                found["entropy"].append(entropy[at, : len(row)])
        fields = {
            name: torch.nested.as_nested_tensor(held, layout=torch.jagged)
            for name, held in found.items()
        }
        return tq.kv_batch_put(**place, fields=TensorDict(fields, batch_size=[len(rows)]))


class Arm:
    """One arm in its folder; `k` of `samples` answers to each of so many `prompts` are trained on.
    A round's prompts and seeds are those of every other arm."""

    def __init__(self, folder: Path, prompts: int, samples: int, k: int) -> None:
        self.prompts, self.samples = prompts, samples
        self.captured, self.run = Path(os.environ["ROLLSIFT_CAPTURE"]), folder / "run"
        self.out, self.published = folder / "checkpoints", folder / "published"
        self.recipe = recipes.load("gfpo-shortest", [f"k={k}"], SHIPPED)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(HERE / "tokenizer.json")),
            pad_token=make.PAD, eos_token=make.EOS, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        self.trainer = self._trainer()

    def _trainer(self) -> Any:
        """verl's synchronous V1 trainer over a queue in memory."""
        queue = rig.Queue()
        for name in ("kv_batch_put", "kv_batch_get", "kv_list", "kv_clear"):
            setattr(tq, name, getattr(queue, name))
        made = rig.trainer(rig.buffer(), step=1, mini=self.prompts, n=self.samples)
        made.tokenizer, made.actor_rollout_wg = self.tokenizer, Workers()
        made.config.data.max_response_length = make.MAX_RESPONSE
        actor = made.config.actor_rollout_ref
        actor.model.path = str(START)
        actor.rollout.update(temperature=1.0, top_p=1.0, response_length=make.MAX_RESPONSE)
        return made

    def sample(self, weights: Path, step: int) -> tuple[Qwen2ForCausalLM, list[make.Rollout]]:
        """A round's answers by weights that lie in a folder."""
        model = Qwen2ForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
        step += FIRST_PROMPTS
        return model, make.roll_out(model, self.tokenizer, step, self.prompts, self.samples)

    def play(self, step: int) -> dict[str, Any]:
        """A round: sample, capture, filter, replay; -> its figures."""
        began = time.perf_counter()
        weights = self.published / f"global_step_{step - 1}" if step > 1 else START
        model, rollouts = self.sample(weights, step)
        spent = {"sample_s": time.perf_counter() - began}
        self.capture(step, model, rollouts)
        filter_logs(discover([str(self.captured)]), self.recipe, self.run)
        metrics = self.update()
        spent["update_s"] = metrics["timing_s/old_log_prob"] + metrics["timing_s/update_actor"]
        answer = query(Run(self.run), FIGURES, {"step": step})
        names, [values] = [column[0] for column in answer.description], answer.fetchall()
        return {"round": step, **dict(zip(names, values, strict=True)), **spent, "replay": metrics}

    def untrained(self, step: int) -> dict[str, Any]:
        """What the start makes of a round's prompts: rounds differ in how hard theirs are."""
        _, rollouts = self.sample(START, step)
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        return {
            "arm": "start", "round": step, "reward": mean(r.score for r in rollouts),
            "length": mean(lengths), "clipped": mean(r.truncated for r in rollouts),
        }  # fmt: skip

    def capture(self, step: int, model: Qwen2ForCausalLM, rollouts: Sequence[make.Rollout]) -> None:
        """Let verl's V1 trainer make a step of what was sampled; wait until capture has it written,
        for a file is whole or not there."""
        self.trainer.actor_rollout_wg.model = model
        rig.put([
            rig.Row(
                r.uid, r.session, 0, r.score, r.prompt_ids, r.response_ids,
                [1] * len(r.response_ids), r.log_probs, (step - 1, step - 1), r.problem.answer,
                {"acc": r.score},
            )
            for r in rollouts
        ], step)  # fmt: skip
        rig.step(self.trainer, self.prompts)
        file, until = self.captured / f"{step}.parquet", time.monotonic() + PATIENCE
        while not file.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{file}: not captured; what capture said stands above")
            time.sleep(0.01)

    def update(self) -> dict[str, Any]:
        """Train on what the newest step keeps and publish; -> verl's metrics of the update."""
        sets = (
            f"actor.optim.lr={LEARNING_RATE}",
            f"actor.ppo_mini_batch_size={max(1, self.prompts // MINI_BATCHES)}",
            "model.enable_gradient_checkpointing=false",
        )
        told: list[dict[str, Any]] = []
        options = Options(self.run, START, self.out, sets, publish=self.published, workers=0)
        replay(options, "cpu", Telling(metrics=told.append))
        [metrics] = told
        return metrics


def main() -> None:
    """Play the rounds: for each a line for people on stdout, and one of figures into the file."""
    parser = argparse.ArgumentParser(description="one arm of the loop; loop.py starts it")
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--baseline", action="store_true", help="sample with the start, too")
    for size in ("rounds", "prompts", "samples", "k"):
        parser.add_argument(f"--{size}", type=int, required=True)
    told = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(make.SEED)
    began, steps = time.monotonic(), range(1, told.rounds + 1)
    arm = Arm(told.folder, told.prompts, told.samples, told.k)
    with process_group("cpu"), (told.folder / "rounds.jsonl").open("w") as file:
        for step in steps:
            figures = {"arm": told.name, **arm.play(step)}
            print(json.dumps(figures), file=file, flush=True)
            print(
                f"{time.monotonic() - began:4.0f} s  {told.name} round {step} of {told.rounds}: "
                f"reward {figures['reward']:.3f}, {figures['length']:.1f} tokens",
                flush=True,
            )
    if told.baseline:
        lines = [json.dumps(arm.untrained(step)) + "\n" for step in steps]
        (told.folder / "start.jsonl").write_text("".join(lines))
    arm.trainer._shutdown_dump_executor()


if __name__ == "__main__":
    main()
