"""Every public column, declared once: SQL views, stored tables and docs derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

Home = Literal["rollouts", "groups", "text", "steps"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a view.

    `home` says where it is stored: the step's `rollouts` or `groups` table; `text`, which is in the
    rollouts table too unless the source is Parquet, where it stays in the source; `steps`,
    which is the same in all rows of a step and stands beside them once.
    """

    name: str
    type: pa.DataType
    meaning: str
    unit: str | None = None
    null: bool = True
    home: Home = "rollouts"


_i64, _i32, _f64, _text, _bool = pa.int64(), pa.int32(), pa.float64(), pa.string(), pa.bool_()
_word = pa.dictionary(pa.int32(), pa.string())

ROLLOUTS: Final = (
    Column("source_file", _word, "log file, relative to the log root", null=False, home="steps"),
    Column("source_row", _i64, "record in that file, counted from 0", "record", null=False),
    Column("step", _i64, "trainer step that sampled it", null=False),
    Column("group_id", _text, "the prompt group within the step; null for padding", home="groups"),
    Column("group_source", _word, "what the group was cut by: uid or prompt", home="groups"),
    Column("uid", _text, "the uid as logged", home="text"),
    Column("sample", _i32, "number of the rollout in its group: verl's session, else its place"),
    Column("prompt", _text, "the prompt's text", home="text"),
    Column("response", _text, "the response's text", home="text"),
    Column("ground_truth", _text, "the answer the reward was given against", home="text"),
    Column("reward", _f64, "the logged reward; null where missing or not finite"),
    Column("correct", _bool, "the recipe's `correct`; null where it cannot be said"),
    Column("response_length", _i64, "length of the response", "length_source"),
    Column(
        "length_source",
        _word,
        "tokens, logged, tokenizer, chars or bytes",
        null=False,
        home="steps",
    ),
    Column("truncated", _bool, "the response was cut at the length limit; null where not logged"),
    Column("finish_reason", _text, "why generation ended, as logged"),
    Column("policy_version", _i64, "the oldest weights that wrote it", "trainer step"),
    Column("data_source", _text, "the data set it came from, as logged", home="text"),
    Column("kept", _bool, "chosen for the actor update", null=False),
    Column("reason", _word, "why it was dropped; null where kept"),
    Column("metric", _f64, "the number it is ranked by in its group; lower ranks first"),
    Column("rank", _i32, "its place in the group, 1 first; null where it could not compete"),
    Column("k", _i32, "how many the group may keep", "rollouts", home="groups"),
    Column("bucket", _word, "very_hard, hard, medium, easy or warmup", home="groups"),
    Column("difficulty", _f64, "mean signal of the whole group", home="groups"),
    Column("group_size", _i32, "rollouts of the group that count", "rollouts", home="groups"),
)

GROUPS: Final = (
    Column("step", _i64, "trainer step that sampled it", null=False, home="groups"),
    Column("group_id", _text, "the prompt group within the step", null=False, home="groups"),
    Column("group_size", _i32, "rollouts that count", "rollouts", null=False, home="groups"),
    Column("kept_count", _i32, "rollouts kept", "rollouts", null=False, home="groups"),
    Column("mean_reward", _f64, "mean reward of those that count", home="groups"),
    Column("difficulty", _f64, "mean signal of those that count", home="groups"),
    Column("bucket", _word, "very_hard, hard, medium, easy or warmup", home="groups"),
    Column("k", _i32, "how many the group may keep", "rollouts", home="groups"),
)

STEPS: Final = (
    Column("step", _i64, "trainer step", null=False),
    Column("rows", _i64, "records read, padding and bad records too", "rows", null=False),
    Column("rollouts", _i64, "rollouts that count", "rollouts", null=False),
    Column("groups", _i64, "groups with a rollout that counts", "groups", null=False),
    Column("kept", _i64, "rows kept", "rows", null=False),
    Column("dropped", _i64, "rows dropped for a reason", "rows", null=False),
    Column("bad_records", _i64, "records that could not be read", null=False),
    Column("tokens_before", _i64, "total length of the rows that count", "length unit"),
    Column("tokens_after", _i64, "total length of the kept rows", "length unit"),
    Column("mean_length_before", _f64, "mean response length, all that count", "length unit"),
    Column("mean_length_after", _f64, "mean response length, kept", "length unit"),
    Column("clip_ratio_before", _f64, "share truncated among all that count", "0 to 1"),
    Column("clip_ratio_after", _f64, "share truncated among the kept", "0 to 1"),
)

BAD_RECORDS: Final = (
    Column("source_file", _text, "log file, relative to the log root", null=False),
    Column("source_row", _i64, "record in that file, from 0; null for a whole file"),
    Column("line", _i64, "physical line, from 1; null in Parquet and for a whole file"),
    Column("field", _text, "the field at fault"),
    Column("reason", _text, "what was found and what was expected", null=False),
)

VIEWS: Final = {
    "rollouts": ROLLOUTS,
    "kept": ROLLOUTS,
    "discarded": ROLLOUTS,
    "groups": GROUPS,
    "steps": STEPS,
    "bad_records": BAD_RECORDS,
}
