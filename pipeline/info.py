"""Info: what a run is, in its run.json, which is written once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollsift.schemas.errors import InputError, UsageError


class RunInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """run.json: the recipe, what the readers were told, and the folder the logs lie under."""

    format: int
    recipe: dict[str, Any]
    reader: dict[str, dict[str, str]]
    log_root: str


def must_be_same(theirs: RunInfo, ours: RunInfo, path: Path) -> None:
    """Raise where a run was made of another recipe, by other readers or from other logs; UsageError
    names the first key that differs."""
    parts = [("recipe", theirs.recipe, ours.recipe), ("reader", theirs.reader, ours.reader)]
    for what, old, new in parts:
        old, new = _flat(old), _flat(new)
        for key in dict.fromkeys([*new, *old]):
            if old.get(key) != new.get(key):
                raise UsageError(
                    f"{path}: made with another {what}: {key} is {_shown(old.get(key))} there, "
                    f"{_shown(new.get(key))} here; use another folder or the same {what}"
                )
    if theirs.log_root != ours.log_root:
        raise InputError(
            f"{path}: made from the logs in {theirs.log_root}, not {ours.log_root}; "
            "use another folder for another training run"
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys as `difficulty.of`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{key}.{name}".rstrip("."): item for name, item in inner.items()}
    return flat


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()
