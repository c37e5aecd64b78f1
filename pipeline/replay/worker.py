"""The worker: verl's own `TrainingWorker`, without Ray, one in each process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollsift.schemas.errors import CheckError

from .dataset import Mini


class Worker:
    """verl's training worker over one model: log-probs of rows, and updates.

    `tree` is verl's configuration (see settings). A `reference` cannot be trained.
    """

    def __init__(self, tree: Any, reference: str | None = None) -> None:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss

        tree = deepcopy(tree).actor_rollout_ref
        if reference:
            tree.model.path, tree.model.lora_rank = reference, 0
        self.config = omega_conf_to_dataclass(tree.actor)
        model = omega_conf_to_dataclass(tree.model)
        engine, optim = self.config.engine, self.config.optim
        engine.use_dynamic_bsz = tree.actor.use_dynamic_bsz
        engine.max_token_len_per_gpu = tree.actor.ppo_max_token_len_per_gpu
        engine.micro_batch_size_per_gpu = tree.actor.ppo_micro_batch_size_per_gpu
        engine.infer_max_token_len_per_gpu = tree.rollout.log_prob_max_token_len_per_gpu
        engine.infer_micro_batch_size_per_gpu = tree.rollout.log_prob_micro_batch_size_per_gpu
        with redirect_stdout(sys.stderr):  # verl prints, and stdout is for metrics
            self.worker = TrainingWorker(
                TrainingWorkerConfig(
                    model_type="language_model",
                    model_config=model,
                    engine_config=engine,
                    optimizer_config=optim,
                    checkpoint_config=self.config.checkpoint,
                )
            )
            self.worker.reset()
        self.worker.set_loss_fn(partial(ppo_loss, config=self.config))
        self.lora = tree.model.lora_rank > 0
        self.entropy = self.config.calculate_entropy or self.config.entropy_coeff != 0

    @property
    def ranks(self) -> tuple[int, int]:
        """Data-parallel rank and size; those that share a sequence have the same rank."""
        engine = self.worker.engine
        return engine.get_data_parallel_rank(), engine.get_data_parallel_size()

    @property
    def vocabulary(self) -> int:
        """How many ids the model knows."""
        return int(self.worker.model_config.hf_config.get_text_config().vocab_size)

    def log_probs(self, mini: Mini, *, without_lora: bool = False) -> torch.Tensor:
        """Log-probs of the responses' tokens, nested [rows, tokens] float32."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import response_from_nested

        meta = {"compute_loss": False, "calculate_entropy": False, "no_lora_adapter": without_lora}
        data = _tensordict(mini, meta)
        with redirect_stdout(sys.stderr):
            output = self.worker.infer_batch(data)
        mask = mini.batch["response_mask"]
        found = None
        if output is not None:
            found = response_from_nested(tu.get(output, "log_probs"), mask).values().float()
        if (mesh := self.worker.engine.ulysses_device_mesh) is not None:
            # Of the ranks that share a sequence, the first alone holds the output.
            held = [found]
            torch.distributed.broadcast_object_list(held, group=mesh.get_group("sp"), group_src=0)
            found = held[0]
        return torch.nested.nested_tensor_from_jagged(found, mask.offsets())

    def train(self, mini: Mini, *, last: bool) -> dict[str, Any]:
        """One optimizer step; the learning rate's schedule steps on with the `last` of an update.
        -> verl's metrics, empty on ranks that hold no output."""
        from tensordict import NonTensorData
        from verl.utils import tensordict_utils as tu

        lengths = mini.batch["input_ids"].offsets().diff().tolist()
        meta = {
            "calculate_entropy": self.entropy,
            "global_batch_size": mini.global_batch_size,
            "update_lr_scheduler": last,
            "global_token_num": NonTensorData(self._of_all(lengths)),
        }
        data = _tensordict(mini, meta)
        with redirect_stdout(sys.stderr):
            output = self.worker.train_batch(data)
        return {} if output is None else dict(tu.get(output, "metrics"))

    def save(self, folder: Path) -> None:
        """Write verl's checkpoint: this rank's shards of model, optimizer and schedule."""
        with redirect_stdout(sys.stderr):
            self.worker.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """Read verl's checkpoint, written by as many processes; raises CheckError if it cannot."""
        try:
            with redirect_stdout(sys.stderr):
                self.worker.load_checkpoint(str(folder))
        except Exception as error:  # torn pickles and shapes of another model end in any of them
            first = (str(error).splitlines() or [""])[0]
            raise CheckError(
                f"{folder}: cannot be loaded ({type(error).__name__}: {first}); is it whole, and "
                "of this model? Go on from another with --resume and another -o"
            ) from None

    def publish(self, folder: Path) -> None:
        """Write all weights as Hugging Face safetensors, LoRA merged in, with what else the model's
        folder holds. Every rank gathers them, the first writes."""
        from huggingface_hub import save_torch_state_dict

        first = torch.distributed.get_rank() == 0
        # Inference engines look for the embedding, and for no head that is tied to it.
        config = self.worker.model_config.hf_config
        tied = getattr(self.worker.engine.module, "_tied_weights_keys", None) or ()
        left_out = set(tied) if config.get_text_config().tie_word_embeddings else set()
        weights = {}
        for name, value in self._parameters():
            if first and name not in left_out:
                weights[name] = value.detach().cpu().contiguous()
        if first:
            model = self.worker.model_config
            save_torch_state_dict(weights, folder)
            config.save_pretrained(folder)
            for part in (model.generation_config, model.tokenizer):
                if part is not None:
                    part.save_pretrained(folder)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters whole, by their names in the model's own files, LoRA merged in."""
        from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name

        engine = self.worker.engine
        if not self.lora:
            yield from engine.get_per_tensor_param()[0]
            return
        # verl's own way to merge gives bfloat16. What it merges into is the live base, which gets
        # its weights back at the end, so each tensor is copied while it lasts.
        with engine.eval_mode(), merged_lora_context(engine.module, backup_adapters=True):
            for name, value in normalize_peft_param_name(engine.module.state_dict()).items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                yield name, whole.detach().clone()

    def _of_all(self, lengths: list[int]) -> list[int]:
        group = self.worker.engine.get_data_parallel_group()
        found: list[list[int]] = [[]] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, lengths, group)
        return [length for part in found for length in part]


def _tensordict(mini: Mini, meta: dict[str, Any]) -> Any:
    from verl.utils import tensordict_utils as tu

    tensors, heat = dict(mini.batch), mini.temperature
    tensors.pop("rollout_log_probs", None)
    if isinstance(heat, torch.Tensor):
        tensors["temperature"] = heat
    else:
        meta = {**meta, "temperature": heat}
    return tu.get_tensordict(tensors, meta)
