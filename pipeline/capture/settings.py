"""Settings: what holds for all rows that a trainer samples, read off its configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollsift.schemas.captured import FORMAT, Captured

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))
SAMPLING = (
    "name", "n", "temperature", "top_p", "top_k", "do_sample", "repetition_penalty",
    "prompt_length", "response_length", "calculate_log_probs",
)  # fmt: skip
MEDIA = ("image", "video", "audio")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one trainer. `media` are the ids of tokens that stand for other inputs than text: empty
    for a model of text, None where a processor does not tell them. `rejects` says that verl's
    correction overwrites the mask."""

    note: Captured
    max_response_length: int
    temperature: float
    top_p: float | None
    top_k: int | None
    router_replay: bool
    rejects: bool
    media: frozenset[int] | None


def settings_of(trainer: Any) -> Settings:
    """Read a trainer of verl's, V0 or V1; raises ValueError where its configuration lacks the
    temperature or the limit of a response."""
    from omegaconf import OmegaConf

    def read(path: str, default: Any = None) -> Any:
        found = OmegaConf.select(trainer.config, path)
        return default if found is None else found

    sampling = {name: read(f"{ROLLOUT}.{name}") for name in SAMPLING}
    temperature = sampling["temperature"]
    limit = read(f"{ROLLOUT}.response_length", read("data.max_response_length"))
    if temperature is None or limit is None:
        raise ValueError(f"{ROLLOUT}.temperature or data.max_response_length is not set")
    engine = read(f"{ACTOR}.strategy", "fsdp")
    mode = read(f"{ACTOR}.{engine}.router_replay.mode", "disabled")
    return Settings(
        note=_note(trainer, read, sampling),
        max_response_length=int(limit),
        temperature=float(temperature),
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        router_replay=bool(read(f"{ROLLOUT}.enable_rollout_routing_replay")) or mode != "disabled",
        rejects=bool(read("algorithm.rollout_correction.rollout_rs")),
        media=_media(getattr(trainer, "processor", None)),
    )


def _note(trainer: Any, read: Callable[..., Any], sampling: dict[str, Any]) -> Captured:
    import verl

    model = str(read(f"{MODEL}.path", ""))
    tokenizer = str(read(f"{MODEL}.tokenizer_path", model))
    words: Any = getattr(trainer, "tokenizer", None)
    return Captured(
        format=FORMAT,
        rollsift=version("rollsift"),
        verl=verl.__version__,
        trainer=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
        model={"path": model, **_digest(model, "config.json")},
        tokenizer={
            "path": tokenizer,
            "class": type(words).__name__,
            "vocabulary": getattr(words, "vocab_size", None),
            **_digest(tokenizer, "tokenizer.json"),
        },
        sampling=sampling,
        tokens={},
    )


def _digest(folder: str, name: str) -> dict[str, str]:
    """The SHA-256 of a file that tells which model it is, where the model lies in a folder."""
    path = Path(folder) / name
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else {}


def _media(processor: Any) -> frozenset[int] | None:
    if processor is None:
        return frozenset()
    from verl.utils.tokenizer import get_processor_token_id

    found = {get_processor_token_id(processor, word) for word in MEDIA} - {None}
    return frozenset(found) or None
