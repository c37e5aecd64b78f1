"""Settings: verl's own, by their own names (`actor.optim.lr`), with verl's own defaults."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollsift.pipeline.recipes import nearest
from rollsift.schemas.errors import UsageError

from .advantages import Advantages
from .share import Normalizer

# What of verl's configuration has an effect here; the first three stand under actor_rollout_ref.
PREFIX = "actor_rollout_ref."
OURS = ("actor.", "ref.", "model.")
SINGLE = (
    "rollout.temperature", "rollout.log_prob_micro_batch_size_per_gpu",
    "rollout.log_prob_max_token_len_per_gpu", "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo", "algorithm.use_kl_in_reward",
    "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_correction.rollout_is_batch_normalize",
    "algorithm.rollout_correction.rollout_rs", "algorithm.rollout_correction.rollout_rs_threshold",
    "algorithm.rollout_correction.bypass_mode", "trainer.save_freq",
    "trainer.max_actor_ckpt_to_keep",
)  # fmt: skip
TESTED = ("fsdp", "fsdp2")
# Loss modes that take statistics over the batch: rows that are not there would change them.
BY_BATCH = ("clip_cov", "kl_cov", "geo_mean")
_CPU: dict[str, Any] = {
    "actor.strategy": "fsdp2",
    "actor.use_torch_compile": False,
    "actor.fsdp_config.use_torch_compile": False,
    "actor.fsdp_config.mixed_precision": dict.fromkeys(
        ("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"
    ),
    "ref.fsdp_config.use_torch_compile": False,
    "model.use_remove_padding": False,
    "model.override_config": {"attn_implementation": "sdpa"},
}


def settings(model: Path, sets: Sequence[str], device: str, updates: int) -> Any:
    """verl's configuration (an OmegaConf tree) for an actor that trains `model` so many updates.

    The defaults are verl's, but for: GRPO, token importance weights up to 2, dynamic micro-batches
    where no size is named, and on a CPU fsdp2 in fp32 without compiling. Raises UsageError for a
    key that verl does not have or that has no effect here, and for a value of another type.
    """
    from omegaconf import OmegaConf, open_dict

    if not (model / "config.json").is_file():
        raise UsageError(f"{model}: no config.json there; name the folder of a Hugging Face model")
    tree = OmegaConf.load(_defaults())
    tree.actor_rollout_ref.model.path = str(model)
    tree.algorithm.adv_estimator = "grpo"
    tree.algorithm.rollout_correction.rollout_is = "token"
    tree.actor_rollout_ref.actor.optim.total_training_steps = updates
    with open_dict(tree.actor_rollout_ref):
        tree.actor_rollout_ref.model.load_tokenizer = (model / "tokenizer_config.json").exists()
        tree.actor_rollout_ref.actor.fsdp_config.mixed_precision = None
        for key, value in _CPU.items() if device == "cpu" else ():
            OmegaConf.update(tree, PREFIX + key, value)
        named = [_set(tree, item) for item in sets]
    actor, rollout = tree.actor_rollout_ref.actor, tree.actor_rollout_ref.rollout
    if not {"actor.use_dynamic_bsz", "actor.ppo_micro_batch_size_per_gpu"} & set(named):
        actor.use_dynamic_bsz = True
    if rollout.log_prob_micro_batch_size_per_gpu is None:
        rollout.log_prob_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    tree.temperature = rollout.temperature if "rollout.temperature" in named else None
    return tree


def _defaults() -> Path:
    import verl

    return Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"


def _set(tree: Any, item: str) -> str:
    """Apply one KEY=VALUE, its value read by the key's type; -> the key."""
    from omegaconf import OmegaConf

    key, found, text = item.partition("=")
    key = key.strip().removeprefix(PREFIX)
    if not found:
        raise UsageError(f"-s {item}: expected key=value")
    known = list(_keys(tree))
    if key not in known:
        raise UsageError(
            f"-s {key}: no setting of verl's that has an effect on replay{nearest(key, known)}"
        )
    path = PREFIX + key if key.startswith((*OURS, "rollout.")) else key
    OmegaConf.update(tree, path, _typed(tree, path, text.strip(), key))
    return key


def _keys(tree: Any) -> typing.Iterator[str]:
    for prefix in OURS:
        yield from _leaves(tree.actor_rollout_ref[prefix.rstrip(".")], prefix)
    yield from SINGLE


def _leaves(node: Any, prefix: str) -> typing.Iterator[str]:
    from omegaconf import DictConfig

    for key in node:
        inner = node._get_node(key)
        if isinstance(inner, DictConfig) and not inner._is_none() and len(inner):
            yield from _leaves(inner, f"{prefix}{key}.")
        if key != "_target_":
            yield f"{prefix}{key}"


def _typed(tree: Any, path: str, text: str, key: str) -> Any:
    from omegaconf import OmegaConf

    parent, _, name = path.rpartition(".")
    node = OmegaConf.select(tree, parent)
    hint = _hint(node, name)
    default = node[name]
    if hint is None and default is not None and not OmegaConf.is_config(default):
        hint = type(default)
    if hint in (int, float) and default is None:
        hint = hint | None
    try:
        if hint in (None, typing.Any) or OmegaConf.is_config(default) or text[:1] in ("[", "{"):
            return _json_or_text(text)
        return msgspec.convert(text, hint, strict=False)
    except (msgspec.ValidationError, TypeError):
        shown = getattr(hint, "__name__", str(hint))
        raise UsageError(f"-s {key}={text}: expected {shown}") from None


def _hint(node: Any, name: str) -> Any:
    """The type that verl declares for a setting, None where it declares none."""
    from hydra.utils import get_class

    if "_target_" not in node:
        return None
    hint = typing.get_type_hints(get_class(node._target_)).get(name)
    parts = typing.get_args(hint) or (hint,)
    simple = all(part in (int, float, bool, str, type(None)) for part in parts)
    return hint if simple else None


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def refuse(tree: Any, advantages: Advantages, normalizer: Normalizer) -> None:
    """Raise UsageError for what would be silently wrong, or has not been tested."""
    actor, algorithm = tree.actor_rollout_ref.actor, tree.algorithm
    mode, engine = actor.policy_loss.loss_mode, actor.fsdp_config
    override = tree.actor_rollout_ref.model.override_config
    attention = override.get("attn_implementation", "flash_attention_2")
    both = normalizer == "all"
    whys = [
        (
            advantages == "none",
            "--advantages none is for a trainer of your own: the actor update needs them",
        ),
        (
            actor.strategy not in TESTED,
            f"actor.strategy={actor.strategy} is not tested; use fsdp or fsdp2",
        ),
        (
            algorithm.adv_estimator != "grpo" and advantages != "logged",
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs --advantages logged: neither "
            "a critic nor another estimator is run here",
        ),
        (
            algorithm.use_kl_in_reward and advantages != "logged",
            "algorithm.use_kl_in_reward needs --advantages logged: rewards of single tokens are "
            "not computed here",
        ),
        (
            algorithm.rollout_correction.bypass_mode or mode == "bypass_mode",
            "bypass_mode: verl's V1 trainer ignores importance weights in it; use --old-log-probs "
            "logged",
        ),
        (
            max(actor.ulysses_sequence_parallel_size, engine.ulysses_sequence_parallel_size) > 1
            and not attention.startswith("flash_attention"),
            f"ulysses_sequence_parallel_size with {attention} attention: verl exchanges heads in "
            "flash attention only, elsewhere each rank would see its part of a sequence alone",
        ),
        (actor.shuffle, "actor.shuffle: mini-batches are whole groups in training order"),
        (actor.use_prefix_grouper, "actor.use_prefix_grouper is not tested"),
        (
            both and mode in BY_BATCH,
            f"--normalizer all: loss_mode={mode} takes statistics over the rows that are there; "
            "use --normalizer kept",
        ),
        (
            both
            and actor.loss_agg_mode == "seq-mean-token-sum-norm"
            and actor.loss_scale_factor is None,
            "--normalizer all: seq-mean-token-sum-norm needs actor.loss_scale_factor, for without "
            "it the width of the micro-batch is the divisor",
        ),
    ]
    for is_so, why in whys:
        if is_so:
            raise UsageError(f"refused: {why}")
