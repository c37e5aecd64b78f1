"""Settings: verl's own, by their own names (`actor.optim.lr`), with verl's own defaults."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollsift.pipeline.recipes import nearest
from rollsift.schemas.errors import UsageError, one_line

from .advantages import Advantages
from .share import Normalizer

# What of verl's configuration has an effect here; the first three stand under actor_rollout_ref.
PREFIX = "actor_rollout_ref."
OURS = ("actor.", "model.")
SINGLE = (
    "rollout.temperature", "rollout.log_prob_micro_batch_size_per_gpu",
    "rollout.log_prob_max_token_len_per_gpu", "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo", "algorithm.use_kl_in_reward",
    "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_correction.rollout_is_batch_normalize",
    "algorithm.rollout_correction.rollout_rs", "algorithm.rollout_correction.rollout_rs_threshold",
    "algorithm.rollout_correction.bypass_mode", "trainer.save_freq",
)  # fmt: skip
TESTED = ("fsdp", "fsdp2")
_SIMPLE = (type(None), bool, int, float, str)  # types of values, in the order they are tried in
# Loss modes that take statistics over the batch: rows that are not there would change them.
BY_BATCH = ("clip_cov", "kl_cov", "geo_mean")
_LEAST = {
    "actor.ppo_mini_batch_size": 1, "actor.ppo_micro_batch_size_per_gpu": 1, "actor.ppo_epochs": 1,
    "actor.ppo_max_token_len_per_gpu": 1, "actor.optim.lr": 0,
    "rollout.log_prob_micro_batch_size_per_gpu": 1, "rollout.log_prob_max_token_len_per_gpu": 1,
}  # fmt: skip
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
    if key == "model.path":
        raise UsageError("-s model.path: name the model with --model")
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
    """The value, read by the type that verl declares for it, else by that of its default."""
    from omegaconf import OmegaConf

    parent, _, name = path.rpartition(".")
    default = OmegaConf.select(tree, parent)[name]
    hint = _hints(tree, parent).get(name, typing.Any)
    kinds = typing.get_args(hint) or (hint,)
    try:
        if OmegaConf.is_config(default):
            return msgspec.json.decode(text, type=dict if OmegaConf.is_dict(default) else list)
        if set(kinds) <= set(_SIMPLE):
            return _simple(text, kinds)
        if default is None or text[:1] in ("[", "{"):
            return _json_or_text(text)
        kinds = (type(default),)
        return _simple(text, kinds)
    except msgspec.DecodeError:
        if OmegaConf.is_config(default):
            shown = "a JSON object" if OmegaConf.is_dict(default) else "a JSON list"
        else:
            names = [kind.__name__ for kind in _SIMPLE if kind in kinds]
            shown = " or ".join(names).replace("NoneType", "null")
        raise UsageError(f"-s {key}={text}: expected {shown}") from None


def _simple(text: str, kinds: Collection[Any]) -> Any:
    """The text as the first of the kinds that it fits; raises msgspec.ValidationError."""
    for kind in kinds:
        if kind is type(None) and text == "null":
            return None
    for kind in (kind for kind in _SIMPLE[1:] if kind in kinds):
        with suppress(msgspec.ValidationError):
            value = msgspec.convert(text, kind, strict=False)
            if not isinstance(value, float) or math.isfinite(value):
                return value
    raise msgspec.ValidationError


def _hints(tree: Any, path: str) -> dict[str, Any]:
    """The types that verl declares for the settings at a place, empty where it declares none."""
    found = _class(tree, path)
    return typing.get_type_hints(found) if found else {}


def _class(tree: Any, path: str) -> Any:
    from hydra.utils import get_class
    from omegaconf import OmegaConf

    node = OmegaConf.select(tree, path)
    if "_target_" in node:
        return get_class(node._target_)
    above, _, name = path.rpartition(".")
    hint = _hints(tree, above).get(name) if above else None
    return next((k for k in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(k)), None)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def refuse(tree: Any, advantages: Advantages, normalizer: Normalizer) -> None:
    """Raise UsageError for what would be silently wrong or has not been tested, and for values that
    verl refuses."""
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
    _refuse_small(tree)
    _let_verl_refuse(tree)


def _refuse_small(tree: Any) -> None:
    from omegaconf import OmegaConf

    for key, least in _LEAST.items():
        path = PREFIX + key
        value = OmegaConf.select(tree, path)
        if value is not None and value < least:
            raise UsageError(f"-s {key}={value}: expected {least} or more")
    if tree.temperature is not None and tree.temperature <= 0:
        raise UsageError(f"-s rollout.temperature={tree.temperature}: expected more than 0")


def _let_verl_refuse(tree: Any) -> None:
    """Raise UsageError for words and numbers that verl itself refuses, some of them late."""
    import torch
    from hydra.errors import HydraException
    from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.config import omega_conf_to_dataclass

    actor, rules = tree.actor_rollout_ref.actor, tree.algorithm.rollout_correction
    one, mode, kind = torch.zeros(1, 1), actor.policy_loss.loss_mode, actor.kl_loss_type
    correction = {
        name: rules[name]
        for name in (
            "rollout_is",
            "rollout_is_threshold",
            "rollout_rs",
            "rollout_rs_threshold",
        )
    }
    tried: list[tuple[str, Callable[[], Any]]] = [
        ("actor.*", lambda: omega_conf_to_dataclass(actor)),
        (f"actor.policy_loss.loss_mode={mode}", lambda: get_policy_loss_fn(mode)),
        (f"actor.kl_loss_type={kind}", lambda: kl_penalty(one, one, kind)),
        (
            "algorithm.rollout_correction.*",
            lambda: compute_rollout_correction_and_rejection_mask(one, one, one + 1, **correction),
        ),
    ]
    for what, trial in tried:
        try:
            trial()
        except (
            AssertionError,
            HydraException,
            NotImplementedError,
            TypeError,
            ValueError,
        ) as error:
            told = next((str(e) for e in (error.__cause__, error) if str(e or "")), "no such value")
            raise UsageError(f"verl refuses {what}: {one_line(told)}") from None
