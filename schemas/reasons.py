"""Why a row was dropped: one word each, in order of precedence; the first that fits wins."""

from __future__ import annotations

from typing import Final

REASONS: Final[dict[str, str]] = {
    "padding": "a synthetic row that verl's V1 trainer added so that the batch divides",
    "repeat": "its file holds the same rollouts as an earlier step's file",
    "no_reward": "the reward is missing, null, NaN or infinite",
    "no_response": "the response is null",
    "stale": "step - policy_version is above max_lag",
    "excluded": "exclude_where is true for it",
    "empty": "the response is shorter than min_length",
    "incomplete_group": "the group has not group_size rollouts",
    "zero_variance": "the group's zero_variance_of values are all equal (max - min <= 1e-6)",
    "mean_out_of_range": "the group's mean reward is outside min_mean to max_mean",
    "no_difficulty": "k differs by bucket and the group has no valid signal",
    "no_metric": "the metric is null or NaN",
    "outranked": "k rollouts of the group rank before it",
    "displaced": "a guard (min_correct, min_incorrect) gave its place to another",
    "no_signal": "the kept rewards of the group are all equal",
}

# Rows dropped for one of these do not count in the group's size or in its difficulty.
NOT_COUNTED: Final = ("padding", "repeat", "no_reward", "no_response", "stale")
