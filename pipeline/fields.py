"""What the logged fields mean: names of verl's and other logs to the columns of the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollsift.schemas.columns import ROLLOUTS
from rollsift.schemas.errors import InputError, one_line

# For each column of the contract the field names that carry it; the first one present counts.
LOGGED_AS: Final[dict[str, tuple[str, ...]]] = {
    "step": ("step",),
    "uid": ("uid",),
    "prompt": ("input", "prompt"),
    "response": ("output", "completion", "response"),
    "ground_truth": ("gts", "ground_truth"),
    "truncated": ("truncated",),
    "finish_reason": ("finish_reason",),
    "policy_version": ("policy_version",),
    "data_source": ("data_source",),
}
REWARDS: Final = ("score", "reward")
# Token columns of verl: read for lengths, and for replay; in SQL under these names.
MASK, IDS, PROMPT_IDS = "response_mask", "response_ids", "prompt_ids"
# Columns of captured files only: the rollout in its group, and the output in that.
SESSION, OUTPUT = "session_id", "output_index"


@dataclass(frozen=True, slots=True)
class Length:
    """How a response is measured: the run's unit, `length_source`, and the fields read for it."""

    unit: str
    source: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a log, by role. `columns` maps a column of the contract to the logged field it
    is read from; `extras` maps each other field to its name in the views; `results` are those of
    the extras that a reward function gave."""

    columns: Mapping[str, str]
    extras: Mapping[str, str]
    results: Sequence[str] = ()

    @property
    def aliases(self) -> dict[str, str]:
        """Logged name -> column, where they differ: names that SQL accepts beside the columns'."""
        return {field: column for column, field in self.columns.items() if field != column}

    def find(self, name: str) -> str | None:
        """The logged field that `name` means in an expression, case ignored; None if none does."""
        known = {shown.lower(): field for field, shown in self.extras.items()}
        known |= {field.lower(): field for field in self.columns.values()}
        known |= {column.lower(): field for column, field in self.columns.items()}
        return known.get(name.lower())


def resolve(kinds: Mapping[str, str], reward: str | None, length: Length | None) -> Fields:
    """Give every logged field its role; `reward` and `length` say what the run reads them from."""
    columns: dict[str, str] = {}
    for column, candidates in LOGGED_AS.items():
        if field := next((name for name in candidates if name in kinds), None):
            columns[column] = field
    if reward in REWARDS and reward in kinds:
        columns["reward"] = reward
    if length and length.source == "logged" and length.fields == ("response_length",):
        columns["response_length"] = "response_length"
    consumed = set(columns.values())
    taken = {column.name for column in ROLLOUTS} | {field.lower() for field in consumed}
    # A reward function's name has a colon, and its results stand under it.
    prefix = f"{reward}." if reward and ":" in reward else "\0"
    results = [name for name in kinds if name.startswith(prefix)]
    logged = [name for name in kinds if name not in consumed and name not in results]
    shown = _shown({name: name.removeprefix(prefix) for name in results}, taken)
    return Fields(columns, shown | _shown({name: name for name in logged}, taken), results)


def _shown(extras: Mapping[str, str], taken: set[str]) -> dict[str, str]:
    """Names in the views: as given, but `extra_<name>` where a name is taken, case ignored.

    SQL does not see case, so of `acc` and `Acc` one gives way: the one that is not all lower case.
    """
    shown: dict[str, str] = {}
    for name in sorted(extras, key=lambda name: (name != name.lower(), name)):
        label = extras[name]
        while not label or label.lower() in taken:
            label = f"extra_{label}"
        taken.add(label.lower())
        shown[name] = label
    return shown


def reward_field(kinds: Mapping[str, str], wanted: str, file: str) -> str:
    """The field that holds the reward: the wanted one, or for `auto` score, then reward.

    Raises InputError that lists the fields which could be named instead.
    """
    candidates = REWARDS if wanted == "auto" else (wanted,)
    if field := next((name for name in candidates if name in kinds), None):
        return field
    numeric = could_be_reward(kinds)
    could = f"-s reward=NAME could be one of {', '.join(numeric)}" if numeric else "none is numeric"
    told = f"{file}: no reward field; looked for {' and '.join(candidates)}. Of its fields, {could}"
    raise InputError(one_line(f"{told}; --reward-fn FILE.py:NAME scores the responses"))


def could_be_reward(kinds: Mapping[str, str]) -> list[str]:
    """The fields of numbers that mean nothing else."""
    roles = {name for names in LOGGED_AS.values() for name in names}
    numeric = ("bool", "int", "long", "float", "number")
    return [name for name, kind in kinds.items() if kind in numeric and name not in roles]


def length_of(
    kinds: Mapping[str, str], wanted: str, tokenizer: bool, file: str, captured: bool = False
) -> Length:
    """What the response's length is read from, by `length` of the recipe.

    Tokens that the policy wrote (the mask's sum, which a `captured` file has counted), else
    response ids, else a logged count, else a tokenizer's count, else characters. Raises InputError
    where the wanted unit is not to be had.
    """
    if wanted in ("auto", "tokens"):
        if captured:
            return Length("tokens", "logged", ("response_length",))
        if MASK in kinds:
            return Length("tokens", "tokens", tuple(name for name in (MASK, IDS) if name in kinds))
        if IDS in kinds:
            return Length("tokens", "tokens", (IDS,))
        if "response_length" in kinds:
            return Length("tokens", "logged", ("response_length",))
    text = next((name for name in LOGGED_AS["response"] if name in kinds), None)
    if wanted in ("auto", "tokens") and tokenizer and text:
        return Length("tokens", "tokenizer", (text,))
    if wanted in ("auto", "chars", "bytes") and text:
        unit = "bytes" if wanted == "bytes" else "chars"
        return Length(unit, unit, (text,))
    if wanted not in ("auto", "tokens", "chars", "bytes") and wanted in kinds:
        return Length(wanted, "logged", (wanted,))
    fields = ", ".join(kinds) or "none"
    if wanted == "tokens" and text:
        told = "length=tokens, but it has text only; name --tokenizer or use length=chars"
    else:
        told = f"no field to read length={wanted} from; its fields: {fields}"
    raise InputError(one_line(f"{file}: {told}"))


def format_of(kinds: Mapping[str, str], reader: str, row_keys: bool) -> str:
    """The name of a log's format, for people; nothing is decided by it."""
    if reader == "generation":
        return "verl generation Parquet"
    if reader == "jsonl":
        versions = {True: "verl V1 JSONL", False: "JSONL with uid"}
        return versions[row_keys] if "uid" in kinds else "verl V0 JSONL"
    if IDS in kinds:
        return "token-level Parquet"
    return "TRL completions" if "completion" in kinds else "Parquet"
