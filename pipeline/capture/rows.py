"""Rows: what verl holds of a batch, to a table of the columns in `schemas.captured`.

V1 hands over ragged fields, V0 padded ones: prompts on the left, responses on the right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from rollsift.schemas.captured import LIGHT, TOKENS

from .lists import any_of, lengths, objects, ragged, sums, unpadded, values
from .settings import Settings

# Token column -> verl's field. V1 keeps the true mask as loss_mask.
FIELDS = {
    "prompt_ids": "prompts",
    "response_ids": "responses",
    "response_mask": "loss_mask",
    "rejection_mask": "response_mask",
    "rollout_log_probs": "rollout_log_probs",
    "old_log_probs": "old_log_probs",
    "ref_log_prob": "ref_log_prob",
    "advantages": "advantages",
}
# Fields that rows have when they are sampled, and those that a step adds or changes.
SAMPLED = ("prompts", "responses", "loss_mask", "response_mask", "rollout_log_probs", "rm_scores",
           "data_source", "reward_model", "extra_fields")  # fmt: skip
TRAINED = ("response_mask", "old_log_probs", "ref_log_prob", "advantages")
# Parquet has its own dictionaries of words; Arrow's would differ between the parts of a step.
TYPES: dict[str, Any] = {
    c.name: c.type.value_type if isinstance(c.type, pa.DictionaryType) else c.type
    for c in (*LIGHT, *TOKENS)
}
TAKEN = "extra_"  # before the name of a reward component that is a column's, too


class Key(NamedTuple):
    """A row key of V1, `<uid>_<session>_<output>`."""

    uid: str
    session: int
    output: int


def key_of(text: str) -> Key:
    """Cut a row key; raises ValueError for a text that is none."""
    uid, session, output = text.rsplit("_", 2)
    return Key(uid, int(session), int(output))


def from_queue(
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    data: Any,
    evicted_by: str | None,
    step: int,
    settings: Settings,
) -> pa.Table:
    """Rows of V1's queue; `data` is what it holds for `keys`, in their order.

    What verl has no field of is null. Raises ValueError where prompts, responses or both masks are
    missing, or a field does not fit the responses.
    """
    count, cut = len(keys), [key_of(key) for key in keys]
    tokens = {name: ragged(data, field) for name, field in FIELDS.items()}
    true_mask = tokens["response_mask"] is not None or not settings.rejects
    if tokens["response_mask"] is None:
        tokens["response_mask"] = tokens["rejection_mask"]
    scores, media = ragged(data, "rm_scores"), settings.media
    extra = objects(data, "extra_fields", count)
    light = {
        "uid": [key.uid for key in cut],
        "session_id": [key.session for key in cut],
        "output_index": [key.output for key in cut],
        "score": None if scores is None else sums(scores),
        "policy_version": [tag.get("min_global_steps") for tag in tags],
        "policy_version_max": [tag.get("max_global_steps") for tag in tags],
        "data_source": [_text(held) for held in objects(data, "data_source", count)],
        "ground_truth": [_truth(held) for held in objects(data, "reward_model", count)],
        "evicted_by": [evicted_by] * count,
        "mask_source": [_source(true_mask)] * count,
        "multimodal": [media is None] * count,
        "router_replay": [settings.router_replay] * count,
    }
    if media:
        light["multimodal"] = any_of(tokens["prompt_ids"], media) | any_of(
            tokens["response_ids"], media
        )
    components = [(held or {}).get("reward_extra_info") or {} for held in extra]
    return _table(step, settings, light, components, tokens)


def from_padded(
    batch: Any, components: Mapping[str, Any], mask: Any, step: int, settings: Settings
) -> pa.Table:
    """Rows of a V0 `DataProto`, those of a group side by side.

    `components` are verl's `reward_extra_infos_dict`; `mask` [rows, width] is the response mask
    from before rejection, None where none was copied.
    """
    held, more = batch.batch, batch.non_tensor_batch
    uids = np.array([str(uid) for uid in more["uid"]])
    _, first, group = np.unique(uids, return_index=True, return_inverse=True)
    order = np.lexsort([np.arange(len(uids)), first[group]])
    begins = np.concatenate([[True], uids[order][1:] != uids[order][:-1]])
    places = np.arange(len(uids))
    session = places - np.maximum.accumulate(np.where(begins, places, 0))
    at, width = torch.from_numpy(order), held["prompts"].shape[1]
    there = held["attention_mask"].cpu()[at].bool()
    fields = {name: held.get(field, None) for name, field in FIELDS.items()}
    after = held["response_mask"]
    copied = mask is not None and mask.shape == after.shape and bool((mask >= after).all())
    fields["response_mask"], fields["rejection_mask"] = (mask, after) if copied else (after, None)
    tokens = {
        name: unpadded(
            field.cpu()[at], there[:, :width] if name == "prompt_ids" else there[:, width:]
        )
        for name, field in fields.items()
        if field is not None
    }

    def of(name: str) -> list[Any]:
        found = more.get(name)
        return [None if found is None else found[row] for row in order]

    light = {
        "uid": uids[order].tolist(),
        "session_id": session,
        "output_index": np.zeros(len(uids), np.int32),
        "score": held["token_level_scores"].cpu().double().sum(-1).numpy()[order],
        "policy_version": of("min_global_steps"),
        "policy_version_max": of("max_global_steps"),
        "data_source": [_text(value) for value in of("data_source")],
        "ground_truth": [_truth(value) for value in of("reward_model")],
        "evicted_by": None,
        "mask_source": [_source(copied or not settings.rejects)] * len(uids),
        "multimodal": [bool(value) for value in of("multi_modal_inputs")],
        "router_replay": [settings.router_replay or "routed_experts" in held] * len(uids),
    }
    fitting = {name: found for name, found in components.items() if len(found) == len(uids)}
    by_row = [{name: found[row] for name, found in fitting.items()} for row in order]
    return _table(step, settings, light, by_row, tokens)


def with_trained(
    table: pa.Table, keys: Sequence[str], chosen: Sequence[str], data: Any
) -> pa.Table:
    """Sampled rows with what the step made of those it trained on: the first rows of `table` are
    those of `keys`, and `data` has the `chosen` of them, in their order. The others' is null."""
    at = {key: place for place, key in enumerate(chosen)}
    rest = len(table) - len(keys)
    places = pa.array([*(at.get(key) for key in keys), *[None] * rest], pa.int64())
    trained = table["response_mask"].filter(places.is_valid()).combine_chunks()
    for name, field in FIELDS.items():
        found = ragged(data, field) if field in TRAINED else None
        if found is None or (name == "rejection_mask" and _equal(found, trained)):
            continue
        column: Any = found.cast(TYPES[name])
        table = table.set_column(table.column_names.index(name), name, column.take(places))
    return table


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """The parts of a step as one table; reward components that a part lacks are null in it, and
    text everywhere where they are text in one."""
    names = {name for table in tables for name in table.column_names} - {*TYPES}
    for name in names:
        types = {table.schema.field(name).type for table in tables if name in table.column_names}
        if len(types) > 1:
            tables = [_as_text(table, name) for table in tables]
    whole = pa.concat_tables(tables, promote_options="default")
    light, tokens = ([column.name for column in columns] for columns in (LIGHT, TOKENS))
    return whole.select([*light, *sorted(names), *tokens])


def _as_text(table: pa.Table, name: str) -> pa.Table:
    if name not in table.column_names:
        return table
    at = table.column_names.index(name)
    return table.set_column(at, name, table[name].cast(pa.string()))


def _table(
    step: int,
    settings: Settings,
    light: dict[str, Any],
    components: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, Any],
) -> pa.Table:
    for name in ("prompt_ids", "response_ids", "response_mask"):
        if tokens.get(name) is None:
            raise ValueError(f"verl's batch has no {FIELDS[name]}")
    count, sizes = len(tokens["prompt_ids"]), lengths(tokens["response_ids"])
    typed = {name: held.cast(TYPES[name]) for name, held in tokens.items() if held is not None}
    for name, held in typed.items():
        if name != "prompt_ids" and not np.array_equal(lengths(held), sizes):
            raise ValueError(f"verl's {FIELDS[name]} has not one value per token of a response")
    if "rejection_mask" in typed and _equal(typed["rejection_mask"], typed["response_mask"]):
        del typed["rejection_mask"]  # nothing was rejected
    limit = settings.max_response_length
    of_all = {
        "step": step, "max_response_length": limit, "temperature": settings.temperature,
        "top_p": settings.top_p, "top_k": settings.top_k,
    }  # fmt: skip
    columns: dict[str, Any] = {
        **{name: [value] * count for name, value in of_all.items()},
        **light,
        "response_length": sums(typed["response_mask"]).astype(np.int64),
        "truncated": sizes >= limit,
        **typed,
    }
    fields, arrays = [], []
    for column in (*LIGHT, *TOKENS):
        held, type_ = columns.get(column.name), TYPES[column.name]
        null: Any = pa.nulls(count, type_)
        arrays.append(null if held is None else pa.array(held, type_))
        fields.append(pa.field(column.name, type_, nullable=column.null))
    for name, held in _components(components).items():
        arrays.append(held)
        fields.append(pa.field(name, held.type))
    return joined([pa.Table.from_arrays(arrays, schema=pa.schema(fields))])


def _components(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Reward components by their names: numbers as float64 in every step, all else as text."""
    taken = {name.lower() for name in TYPES}
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        shown = str(name)
        while shown.lower() in taken:
            shown = TAKEN + shown
        taken.add(shown.lower())
        held = [_plain(row.get(name)) for row in rows]
        if all(value is None or isinstance(value, int | float) for value in held):
            held = [None if value is None else float(value) for value in held]
            found[shown] = pa.array(held, pa.float64())
        else:
            found[shown] = pa.array([_text(value) for value in held], pa.string())
    return found


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () else value


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    return json.dumps(value, default=str, ensure_ascii=False)


def _truth(reward_model: Any) -> str | None:
    return _text(reward_model.get("ground_truth")) if isinstance(reward_model, Mapping) else None


def _source(true_mask: bool) -> str:
    return "before_rejection" if true_mask else "after_rejection"


def _equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(values(one), values(other)))
