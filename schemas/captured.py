"""Captured files: what a Parquet that capture wrote holds, a row per output of a rollout.

Light columns stand first, then reward components as columns of their own names, then the lists of
tokens, without those that verl had nothing of. A group is never cut by a row group.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
from msgspec import Struct

from .columns import Column

FORMAT = 1
KEY: Final = b"rollsift.capture"  # of the footer's metadata, whose value is `Captured` as JSON

_i64, _i32, _f64, _text, _bool = pa.int64(), pa.int32(), pa.float64(), pa.string(), pa.bool_()
_word = pa.dictionary(pa.int32(), pa.string())
_ids, _mask, _floats = pa.list_(pa.int32()), pa.list_(pa.int8()), pa.list_(pa.float32())

LIGHT: Final = (
    Column("step", _i64, "trainer step that sampled it", null=False),
    Column("uid", _text, "the prompt group", null=False),
    Column("session_id", _i32, "number of the rollout in its group", null=False),
    Column("output_index", _i32, "number of the output in its session", null=False),
    Column("score", _f64, "the reward; null where it was not given"),
    Column("response_length", _i64, "tokens that the policy wrote", "tokens", null=False),
    Column("truncated", _bool, "the response has max_response_length tokens", null=False),
    Column("max_response_length", _i32, "the limit", "tokens", null=False),
    Column("policy_version", _i64, "the oldest weights that wrote it", "trainer step"),
    Column("policy_version_max", _i64, "the newest weights that wrote it", "trainer step"),
    Column("temperature", _f64, "sampling temperature", null=False),
    Column("top_p", _f64, "nucleus sampling"),
    Column("top_k", _i64, "top-k sampling; -1 for none"),
    Column("data_source", _word, "the data set it came from"),
    Column("ground_truth", _text, "the answer the reward was given against"),
    Column("evicted_by", _word, "why verl took it out before training: stale, filter_groups, "
           "failure or surplus; null where it sampled it"),
    Column("mask_source", _word, "before_rejection, or after_rejection where verl had already "
           "overwritten the mask", null=False),
    Column("multimodal", _bool, "it has inputs other than tokens", null=False),
    Column("router_replay", _bool, "experts were logged for router replay", null=False),
)  # fmt: skip

TOKENS: Final = (
    Column("prompt_ids", _ids, "the prompt's tokens", null=False),
    Column("response_ids", _ids, "the response's tokens, those of tools too", null=False),
    Column("response_mask", _mask, "1 where the policy wrote the token", null=False),
    Column(
        "rejection_mask",
        _mask,
        "that mask after verl's rollout correction rejected tokens; null where it rejected none",
    ),
    Column("rollout_log_probs", _floats, "log-probs by the inference engine", "nat"),
    Column("old_log_probs", _floats, "log-probs by the actor before its update", "nat"),
    Column("ref_log_prob", _floats, "log-probs by the reference model", "nat"),
    Column("advantages", _floats, "advantages that verl trained on; null where it did not"),
)


class Captured(Struct, frozen=True, forbid_unknown_fields=True):
    """The footer's word on a captured file. `tokens` maps each token column to the digests of its
    row groups (see `pipeline.captured.digest`), so that the footer pins the tokens."""

    format: int
    rollsift: str
    verl: str
    trainer: str
    model: dict[str, Any]
    tokenizer: dict[str, Any]
    sampling: dict[str, Any]
    tokens: dict[str, list[str]]
