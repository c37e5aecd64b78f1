"""verl's own words to a recipe: `algorithm.filter_sample` and `algorithm.filter_groups`, of a verl
YAML or of a file of Hydra overrides.

filter_sample is GFPO as ported to verl (verl's pull request 3479), filter_groups is DAPO's dynamic
sampling as verl 0.9 has it. Everything outside the two sections is verl's own and not looked at.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rollsift.schemas.errors import RecipeError
from rollsift.schemas.recipe import BUCKETS

SECTIONS = {
    "filter_sample": (
        "enable", "metric", "retain_count", "adaptive", *(f"{name}_count" for name in BUCKETS),
    ),
    "filter_groups": ("enable", "metric", "max_num_gen_batches", "max_inflight_gen_batches"),
}  # fmt: skip
METRICS = {"response length": "response_length", "token efficiency": "token_efficiency"}
COUNTS = {"very_hard": 8, "hard": 8, "medium": 6, "easy": 4}  # the port's defaults
RETAIN = 8
REWARDS = ("reward", "score", "seq_reward", "seq_final_reward")
WHOLE = 1_000_000  # a k above any group keeps all of it
_OVERRIDE = re.compile(r"(~|\+{0,2})(algorithm\.filter[\w.]*)=(.*)")
_NULLS = ("", "null", "none", "~")


def overrides(text: str) -> dict[str, Any]:
    """The overrides of the filter sections in `text`, dotted key -> value; empty if there are none.

    A line may also be one of a shell script or of the list that Hydra saves: `- key=value`.
    """
    found: dict[str, Any] = {}
    for line in text.splitlines():
        bare = re.sub(r"\s#.*", "", line).strip().removesuffix("\\").strip().removeprefix("- ")
        if not (match := _OVERRIDE.fullmatch(_unquoted(bare))):
            continue
        sign, key, value = match.groups()
        if sign == "~":
            raise RecipeError(f"~{key}: takes a key out; leave out the lines that set it")
        if key in found:
            raise RecipeError(f"{key}: given twice")
        found[key] = _unquoted(value)
    return found


def speaks(values: Mapping[str, Any]) -> bool:
    """Whether plain values are a verl config, not a recipe."""
    return any(key == "algorithm" or key.startswith("algorithm.") for key in values)


def understand(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A verl config's values to those of a recipe, and what a person should know about it.

    Raises RecipeError for what is not known in the two sections, and where neither is enabled.
    """
    sections = _sections(values)
    notes: list[str] = []
    recipe: dict[str, Any] = {}
    for name, read in (("filter_groups", _groups), ("filter_sample", _sample)):
        if name in sections:
            section = _Section(f"algorithm.{name}", sections[name], notes)
            if section.flag("enable"):
                recipe |= read(section)
            else:
                section.note("enable", "is not true, so the section does nothing")
    if not recipe:
        raise RecipeError(
            "algorithm: neither filter_sample nor filter_groups is enabled here; "
            "set enable: true in the one that is meant"
        )
    meant = ", ".join(f"{key}={value}" for key, value in _flat(recipe))
    return recipe, [*notes, f"verl's words are understood as {meant}"]


class _Section:
    """One section's values, read by type; every error and note names the whole key."""

    def __init__(self, name: str, values: Mapping[str, Any], notes: list[str]) -> None:
        self.name, self.values, self.notes = name, values, notes

    def note(self, key: str, text: str) -> None:
        self.notes.append(f"{self.name}.{key}: {text}")

    def unused(self, why: str, *keys: str) -> None:
        for key in keys:
            if key in self.values:
                self.note(key, f"has no effect {why}")

    def wrong(self, key: str, expected: str) -> RecipeError:
        return RecipeError(f"{self.name}.{key}: found {self.values[key]!r}, expected {expected}")

    def flag(self, key: str) -> bool:
        word = str(self.values.get(key, "false")).lower()
        if word not in ("true", "false"):
            raise self.wrong(key, "true or false")
        return word == "true"

    def count(self, key: str, default: int) -> int:
        word = str(self.values.get(key, default))
        if not re.fullmatch("0*[1-9][0-9]{0,8}", word):
            raise self.wrong(key, "a whole number, 1 or more")
        return int(word)


def _sample(section: _Section) -> dict[str, Any]:
    word = str(section.values.get("metric", "response length"))
    if word not in METRICS:
        raise section.wrong("metric", " or ".join(f'"{known}"' for known in METRICS))
    k: int | dict[str, int] = section.count("retain_count", RETAIN)
    by_bucket = {name: section.count(f"{name}_count", default) for name, default in COUNTS.items()}
    if not section.flag("adaptive"):
        section.unused("without adaptive", *(f"{name}_count" for name in COUNTS))
        return {"metric": METRICS[word], "k": k}
    section.unused("with adaptive", "retain_count")
    section.note(
        "adaptive",
        "quartiles over all prompts of the run so far, exact where the port has a t-digest (which "
        "it asks for percentiles of 0.25 to 0.75 in 100, so that nearly every prompt was easy)",
    )
    how = {"scope": "running", "quantiles": "exact", "ties": "strict"}
    return {"metric": METRICS[word], "k": by_bucket, "difficulty": how}


def _groups(section: _Section) -> dict[str, Any]:
    metric = str(section.values.get("metric", "null"))
    if metric.lower() in _NULLS:
        raise RecipeError(f"{section.name}.metric: not set; verl needs it, as in metric: reward")
    if not re.fullmatch(r"[A-Za-z_]\w*", metric):
        known = ", ".join(["acc", *REWARDS])
        raise section.wrong("metric", f"one of {known}, or the name of a logged field")
    if metric == "seq_final_reward":
        section.note("metric", "the log has the reward before a KL penalty, so that is judged")
    bounds = ("max_num_gen_batches", "max_inflight_gen_batches")
    section.unused("here: it bounds sampling, and a log is already sampled", *bounds)
    of = "reward" if metric in REWARDS else metric
    return {"zero_variance": "drop", "zero_variance_of": of, "k": WHOLE}


def _sections(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of the filter sections; refuses keys that they don't have."""
    found: dict[str, dict[str, Any]] = {}
    for path, value in _flat(values):
        top, _, rest = path.partition(".")
        name, _, key = rest.partition(".")
        if top != "algorithm" or not name.startswith("filter"):
            continue
        if name not in SECTIONS:
            raise _unknown(f"algorithm.{name}", [f"algorithm.{known}" for known in SECTIONS])
        if not key:
            if str(value).lower() in _NULLS:
                continue
            raise RecipeError(f"{path}: found {value!r}, expected its keys, as in {path}.enable")
        if key == "_target_":  # Hydra's, the class that holds the section
            continue
        if key not in SECTIONS[name]:
            raise _unknown(path, [f"algorithm.{name}.{known}" for known in SECTIONS[name]])
        if key in found.setdefault(name, {}):
            raise RecipeError(f"{path}: given twice")
        found[name][key] = value
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _unknown(path: str, known: list[str]) -> RecipeError:
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.0)
    return RecipeError(f"{path}: verl has no such key; did you mean {close[0]}?")


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
