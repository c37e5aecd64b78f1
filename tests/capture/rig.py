"""verl's own trainers over a queue in memory: what rollouts bring is made up, what is done with
them is verl's code. The rows put into the queue are kept: they are the oracle."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

VOCABULARY, LIMIT = 99, 12


@dataclass
class Row:
    """One output as an agent loop gives it."""

    uid: str
    session: int
    output: int
    reward: float
    prompt: list[int]
    response: list[int]
    mask: list[int]
    log_probs: list[float]
    version: tuple[int, int] = (0, 0)
    truth: Any = "42"
    extra: dict[str, Any] = field(default_factory=lambda: {"acc": 1.0})
    put: dict[str, Any] = field(default_factory=dict)  # what the queue holds of it, when put

    @property
    def key(self) -> str:
        """verl's row key."""
        return f"{self.uid}_{self.session}_{self.output}"


def make_rows(
    groups: int = 3,
    samples: int = 4,
    *,
    outputs: int = 1,
    tools: bool = False,
    seed: int = 0,
    step: int = 7,
    length: int | None = None,
) -> list[Row]:
    """Rows whose lengths and rewards differ; with `tools` some tokens are not the policy's, with
    `outputs` every other session has so many; prompts and responses may have one `length`."""
    draw = random.Random(seed)
    rows = []
    for _ in range(groups):
        uid = str(uuid.UUID(int=draw.getrandbits(128)))
        prompt = [draw.randrange(2, VOCABULARY) for _ in range(length or draw.randint(3, 6))]
        for session in range(samples):
            for output in range(outputs if session % 2 else 1):
                size = length or draw.randint(2, LIMIT)
                mask = [int(not tools or at % 3 != 1) for at in range(size)]
                logs = [draw.uniform(-2, -0.1) for _ in range(size)]
                extra = {"acc": float(session % 2), "pred": f"p{session}", "score": 0.5}
                rows.append(
                    Row(uid, session, output, float(draw.randint(0, 3)), prompt,
                        [draw.randrange(2, VOCABULARY) for _ in range(size)], mask, logs,
                        (step - 2, step - 1), extra=extra)
                )  # fmt: skip
    return rows


class Queue:
    """The part of the TransferQueue's interface that verl's V1 trainer uses, in memory."""

    def __init__(self) -> None:
        self.fields: dict[str, dict[str, dict[str, Any]]] = {}
        self.tags: dict[str, dict[str, dict[str, Any]]] = {}

    def kv_batch_put(
        self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None
    ) -> Any:
        """Add fields and tags to rows; -> what names them."""
        from transfer_queue import KVBatchMeta

        rows = _by_row(fields, len(keys))
        for at, key in enumerate(keys):
            row = self.fields.setdefault(partition_id, {}).setdefault(key, {})
            tag = self.tags.setdefault(partition_id, {}).setdefault(key, {})
            row.update(rows[at])
            tag.update(tags[at] if tags is not None else {})
        return KVBatchMeta(
            keys=list(keys),
            tags=[self.tags[partition_id][key] for key in keys],
            partition_id=partition_id,
        )

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any = None) -> Any:
        """Rows in the order of their keys; a field that a row lacks is left out, as verl's is."""
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        rows = [self.fields[partition_id][key] for key in keys]
        found: dict[str, Any] = {}
        for name in rows[0]:
            wanted = select_fields is None or name in select_fields
            if not wanted or any(name not in row for row in rows):
                continue
            values = [row[name] for row in rows]
            if not isinstance(values[0], torch.Tensor):
                found[name] = NonTensorStack.from_list([NonTensorData(v) for v in values])
            else:
                found[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return TensorDict(found, batch_size=[len(keys)])

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Keys and tags by partition."""
        return {p: dict(tags) for p, tags in self.tags.items() if partition_id in (None, p)}

    def kv_clear(self, keys: Any, partition_id: str) -> None:
        """Forget rows."""
        for key in keys:
            self.fields.get(partition_id, {}).pop(key, None)
            self.tags.get(partition_id, {}).pop(key, None)


def _by_row(fields: Any, count: int) -> list[dict[str, Any]]:
    from tensordict import NonTensorStack

    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in list(fields.keys()) if fields is not None else ():
        value = fields.get(name)
        if isinstance(value, torch.Tensor):
            values = [part.clone() for part in value.unbind()]
        elif isinstance(value, NonTensorStack):
            values = [value[at].data for at in range(count)]
        else:
            values = [value.data] * count
        for row, held in zip(found, values, strict=True):
            row[name] = held
    return found


def put(
    rows: Sequence[Row], step: int = 7, partition: str = "train", status: str = "finished"
) -> None:
    """Put rows into the queue as verl's agent loops do."""
    import transfer_queue as tq
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    uids = list(dict.fromkeys(row.uid for row in rows))
    tags = [{"is_prompt": True, "status": status, "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id=partition, tags=tags)
    fields, tags = [], []
    for row in rows:
        output = AgentLoopOutput(
            prompt_ids=row.prompt, response_ids=row.response, response_mask=row.mask,
            response_logprobs=row.log_probs, reward_score=row.reward, num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": row.version[0], "max_global_steps": row.version[1],
                          "turn_scores": [], "tool_rewards": [], "reward_extra_info": row.extra},
        )  # fmt: skip
        made = output.as_dict()
        made |= {
            "data_source": "math", "reward_model": {"ground_truth": row.truth, "style": "rule"},
            "raw_prompt": [{"role": "user", "content": "q"}], "index": 0, "uid": row.uid,
            "session_id": row.session, "global_steps": step,
            "loss_mask": made["response_mask"],
            "input_ids": torch.cat([made["prompts"], made["responses"]]),
            "position_ids": torch.arange(len(row.prompt) + len(row.response)),
            "multi_modal_inputs": {},
        }  # fmt: skip
        fields.append(made)
        tags.append({
            "status": "success", "prompt_len": len(row.prompt), "response_len": len(row.response),
            "seq_len": len(row.prompt) + len(row.response), "global_steps": step,
            "min_global_steps": row.version[0], "max_global_steps": row.version[1],
        })  # fmt: skip
    tq.kv_batch_put(
        keys=[row.key for row in rows], partition_id=partition,
        fields=list_of_dict_to_tensordict(fields), tags=tags,
    )  # fmt: skip


def buffer(kind: str = "ReplayBuffer", **named: Any) -> Any:
    """A replay buffer of verl's."""
    from verl.trainer.ppo.v1 import replay_buffer

    return getattr(replay_buffer, kind)(
        trainer_mode="sync", trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=named.pop("threshold", 8), max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}), poll_interval=0.01, **named,
    )  # fmt: skip


class Actor:
    """The workers: log-probs that are a function of the tokens, and no update."""

    _dispatch_info = {"actor": [0, 1]}  # noqa: RUF012  # as verl's worker group has it

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def compute_log_prob(self, batch: Any) -> Any:
        """Put log-probs of whole sequences into the queue."""
        import transfer_queue as tq

        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id,
                               select_fields=["input_ids"])  # fmt: skip
        parts = [old_log_probs(ids) for ids in data["input_ids"].unbind()]
        logs = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        from tensordict import TensorDict

        made = TensorDict({"log_probs": logs, "entropy": -logs}, batch_size=[len(batch)])
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=made)

    def update_actor(self, batch: Any) -> Any:
        """Note what there is to train on."""
        self.batches.append(list(batch.keys))
        return {"metrics": {"mfu": [0.0], "grad_norm": [1.0]}}


def old_log_probs(ids: torch.Tensor) -> torch.Tensor:
    """What the made-up actor says of a whole sequence."""
    return -(ids.float() % 7 + 1) / 8


def trainer(replay: Any, *, step: int = 7, mini: int = 3, n: int = 4, **algorithm: Any) -> Any:
    """verl's synchronous V1 trainer, its workers made up."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    made = object.__new__(PPOTrainerSync)
    made.config = config(mini, n, **algorithm)
    made.global_steps, made.replay_buffer, made.actor_rollout_wg = step, replay, Actor()
    made.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1, vocab_size=VOCABULARY)
    made.processor = None
    made.use_reference_policy = made.use_critic = False
    made.parameter_sync_step, made.local_trigger_step = 1, 0
    made.curr_step_profile = False
    made.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    made._init_dump_executor()
    return made


def config(mini: int = 3, n: int = 4, **algorithm: Any) -> Any:
    """The parts of verl's configuration that these trainers read."""
    return OmegaConf.create({
        "algorithm": {
            "use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0,
            "norm_adv_by_std_in_grpo": True, "rollout_correction": None, **algorithm,
        },
        "data": {"max_response_length": LIMIT, "train_batch_size": 3},
        "trainer": {"critic_warmup": 0, "rollout_data_dir": None},
        "actor_rollout_ref": {
            "model": {"path": "/models/tiny"},
            "rollout": {
                "n": n, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "response_length": LIMIT,
                "calculate_log_probs": True,
            },
            "actor": {
                "ppo_mini_batch_size": mini, "calculate_entropy": False, "entropy_coeff": 0.0,
                "ppo_epochs": 1, "data_loader_seed": 1, "shuffle": False,
                "loss_agg_mode": "token-mean", "loss_scale_factor": None,
            },
        },
    })  # fmt: skip


def step(made: Any, groups: int) -> Any:
    """One step of a trainer, as verl's `fit` does it; the queue is cleared behind it."""
    import transfer_queue as tq

    batch = made._step_once({}, {}, groups)
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    made.global_steps += 1
    return batch


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, recipe: str | None = None) -> Any:
    """Capture into a folder, with a queue in memory, until the test is over; -> the recorder."""
    import importlib
    import sys

    import transfer_queue as tq

    from rollsift.pipeline.capture import hooks

    queue = Queue()
    for name in ("kv_batch_put", "kv_batch_get", "kv_list", "kv_clear"):
        monkeypatch.setattr(tq, name, getattr(queue, name))
    for module, held in hooks.KNOWN.items():
        for path in held:
            owner, _, name = f"{module}.{path}".rpartition(".")
            home: Any = importlib.import_module(module)
            home = getattr(home, owner.removeprefix(f"{module}.")) if owner != module else home
            monkeypatch.setattr(home, name, getattr(home, name))  # to be put back
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    hooks.install(folder, recipe)
    [finder] = [found for found in sys.meta_path if isinstance(found, hooks.Finder)]
    return finder.recorder
