"""Logs of tokens made up in memory, their run, and verl's own worker set up by hand.

What the worker is fed here is built from rows with verl's and torch's functions alone: the oracle
for what rollsift makes of the same rows out of files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.captured import digest
from rollsift.pipeline.sources import discover
from rollsift.schemas.captured import FORMAT, KEY, LIGHT, TOKENS
from rollsift.schemas.recipe import resolve

VOCABULARY = 64
# Plain descent, not clipped: Adam's first step and a clipped gradient hide the loss's scale.
DESCENT = {"optimizer": "SGD", "lr": 0.5, "clip_grad": 1e6, "weight_decay": 0.0}
SETS = (
    "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=2",
    "model.enable_gradient_checkpointing=false",
    *(f"actor.optim.{key}={value}" for key, value in DESCENT.items()),
)  # fmt: skip


@dataclass
class Row:
    """One row of a captured log."""

    step: int
    uid: str
    session: int
    output: int
    reward: float
    prompt: list[int]
    response: list[int]
    mask: list[int]
    rollout: list[float]
    old: list[float]
    ref: list[float]
    version: int | None


def make_rows(
    steps: int = 3,
    groups: int = 4,
    samples: int = 4,
    *,
    outputs: int = 1,
    tools: bool = False,
    seed: int = 0,
) -> list[Row]:
    """Rows whose group sizes, lengths and rewards differ; with `tools` some tokens are not the
    policy's, with `outputs` some sessions have so many."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        for group in range(groups):
            prompt = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(2, 6))]
            for session in range(samples):
                for output in range(outputs if session % 2 else 1):
                    length = draw.randint(3, 9)
                    mask = [1] * length
                    if tools and draw.random() < 0.7:
                        mask[1] = 0
                    logs = [[draw.uniform(-5, -3) for _ in range(length)] for _ in range(3)]
                    rows.append(
                        Row(step, f"u{step}g{group}", session, output, draw.random(), prompt,
                            [draw.randrange(3, VOCABULARY) for _ in range(length)], mask, *logs,
                            step - 1)
                    )  # fmt: skip
    return rows


def table(rows: Sequence[Row], **columns: Any) -> pa.Table:
    """Rows as capture writes them; `columns` take the place of its own, None takes one out."""
    found: dict[str, Any] = {
        "step": [r.step for r in rows],
        "uid": [r.uid for r in rows],
        "session_id": [r.session for r in rows],
        "output_index": [r.output for r in rows],
        "score": [r.reward for r in rows],
        "response_length": [sum(r.mask) for r in rows],
        "truncated": [False] * len(rows),
        "max_response_length": [9] * len(rows),
        "policy_version": [r.version for r in rows],
        "policy_version_max": [r.version for r in rows],
        "temperature": [1.0] * len(rows),
        "mask_source": ["before_rejection"] * len(rows),
        "multimodal": [False] * len(rows),
        "router_replay": [False] * len(rows),
        "prompt_ids": [r.prompt for r in rows],
        "response_ids": [r.response for r in rows],
        "response_mask": [r.mask for r in rows],
        "rollout_log_probs": [r.rollout for r in rows],
        "old_log_probs": [r.old for r in rows],
        "ref_log_prob": [r.ref for r in rows],
        "advantages": [[r.reward] * len(r.response) for r in rows],
    }
    found |= columns
    types = {column.name: column.type for column in (*LIGHT, *TOKENS)}
    arrays = {n: pa.array(v, types.get(n)) for n, v in found.items() if v is not None}
    return pa.table(arrays)


def write(
    folder: Path, rows: Sequence[Row], *, note: bool = True, keys: bool = False, **columns: Any
) -> Path:
    """A log of one Parquet file a step, uids as verl's row keys where `keys`; -> its folder."""
    import msgspec

    folder.mkdir(parents=True, exist_ok=True)
    for step in sorted({row.step for row in rows}):
        here = [row for row in rows if row.step == step]
        if keys:
            columns["uid"] = [f"{r.uid}_{r.session}_{r.output}" for r in here]
        held = table(here, **columns)
        if note:
            tokens = {c.name: [digest(held[c.name])] for c in TOKENS if c.name in held.column_names}
            said = {"format": FORMAT, "rollsift": "0", "verl": "0", "trainer": "", "model": {},
                    "tokenizer": {}, "sampling": {}, "tokens": tokens}  # fmt: skip
            held = held.replace_schema_metadata({KEY: msgspec.json.encode(said)})
        pq.write_table(held, folder / f"{step}.parquet", write_page_checksum=True)
    return folder


def run(folder: Path, logs: Path, k: int = 2, **recipe: Any) -> Path:
    """The run of a log that keeps the k shortest."""
    filter_logs(discover([logs]), resolve({"k": k, **recipe}), folder)
    return folder


def shortest(rows: Sequence[Row], k: int = 2) -> list[Row]:
    """The rows that `run` keeps, sorted by hand: of every group the sessions with the fewest
    tokens of the policy's, in the order in which they stand there."""
    kept = set()
    for key in {(r.step, r.uid) for r in rows}:
        group = [r for r in rows if (r.step, r.uid) == key]
        lengths: dict[int, int] = {}
        for row in group:
            lengths[row.session] = lengths.get(row.session, 0) + sum(row.mask)
        best = sorted(lengths, key=lambda session: (lengths[session], session))[:k]
        kept |= {(*key, session) for session in best}
    return [r for r in rows if (r.step, r.uid, r.session) in kept]


def make_model(folder: Path, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    """Save a Qwen2 of some thousand random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def advantages(
    rows: Sequence[Row], masks: Sequence[Any] | None = None, **options: Any
) -> list[torch.Tensor]:
    """Per row and token, by the functions of verl's V1 trainer, under the rows' masks or others."""
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    width = max(len(r.response) for r in rows)
    rewards, mask = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.int64)
    for at, row in enumerate(rows):
        rewards[at, len(row.response) - 1] = row.reward
        mask[at, : len(row.response)] = torch.as_tensor(masks[at] if masks else row.mask)
    data = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask},
        {"uid": np.array([r.uid for r in rows], dtype=object)},
    )
    keys = [f"{r.uid}_{r.session}_{r.output}" for r in rows]
    found: Any = compute_advantage_for_multi_trajectories(data, keys, "grpo", **options)
    found = found.batch["advantages"]
    return [found[at, : len(row.response)] for at, row in enumerate(rows)]


def nest(rows: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Lists or tensors as one jagged tensor."""
    parts = [torch.as_tensor(row).to(dtype) for row in rows]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def batch(rows: Sequence[Row], found: Sequence[torch.Tensor], **more: Any) -> Any:
    """Rows in memory as verl's V1 trainer hands them to its actor."""
    from verl.utils import tensordict_utils as tu

    prompts = [r.prompt for r in rows]
    responses = [r.response for r in rows]
    whole = [p + r for p, r in zip(prompts, responses, strict=True)]
    keys = {
        "prompts": nest(prompts, torch.int64),
        "responses": nest(responses, torch.int64),
        "input_ids": nest(whole, torch.int64),
        "position_ids": nest([range(len(ids)) for ids in whole], torch.int64),
        "response_mask": nest([r.mask for r in rows], torch.int64),
        "loss_mask": nest([r.mask for r in rows], torch.int64),
        "old_log_probs": nest([r.old for r in rows], torch.float32),
        "advantages": nest(list(found), torch.float32),
    } | more
    return tu.get_tensordict(keys)


def hand_worker(
    model: Path, *, micro: int = 2, steps: int = 3, optim: dict[str, Any] | None = None,
    **actor: Any,
) -> Any:  # fmt: skip
    """verl's training worker, set up from its own dataclasses and not from our settings."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    engine = FSDPEngineConfig(
        strategy="fsdp2", use_torch_compile=False, use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro, infer_micro_batch_size_per_gpu=micro,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )  # fmt: skip
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=micro,
        fsdp_config=engine, **actor,
        optim=FSDPOptimizerConfig(total_training_steps=steps, **(DESCENT | (optim or {}))),
    )  # fmt: skip
    loaded = HFModelConfig(
        path=str(model), load_tokenizer=False, use_remove_padding=False,
        enable_gradient_checkpointing=False, override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model", model_config=loaded, engine_config=config.engine,
            optimizer_config=config.optim, checkpoint_config=CheckpointConfig(),
        )
    )  # fmt: skip
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


def train(worker: Any, data: Any, size: int | None = None, **meta: Any) -> dict[str, Any]:
    """One call of verl's, as its trainer makes it for an update; -> verl's metrics."""
    from verl.utils import tensordict_utils as tu

    size = size or len(data)
    told = {"global_batch_size": size, "mini_batch_size": size, "epochs": 1, "seed": 42,
            "temperature": 1.0, "dataloader_kwargs": {"shuffle": False}} | meta  # fmt: skip
    tu.assign_non_tensor(data, **told)
    return dict(tu.get(worker.train_mini_batch(data), "metrics"))


def log_probs(worker: Any, data: Any) -> torch.Tensor:
    """Log-probs of the responses under the worker's weights, nested, by verl's own call."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    data = data.clone(recurse=False)
    tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False, temperature=1.0)
    output = worker.infer_batch(data)
    return response_from_nested(tu.get(output, "log_probs"), data["response_mask"])


def parameters(worker: Any) -> torch.Tensor:
    """All parameters of verl's worker, or of ours, in one vector."""
    from torch.distributed.tensor import DTensor

    engine = getattr(worker, "worker", worker).engine
    parts = [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().clone()
        for p in engine.module.parameters()
    ]
    return torch.cat(parts)


def of_step(rows: Sequence[Row], step: int) -> list[Row]:
    """The rows of one step."""
    return [row for row in rows if row.step == step]


def no_telling() -> Callable[..., None]:
    """Takes whatever is told."""
    return lambda *told: None
