"""Score: rows to rollouts, and what each rollout is worth by the recipe's row expressions.

Adds to a rollout: `invalid` (why it does not count in its group, or null), `correct`, `excluded`,
`metric` (lower ranks first), `signal` (of difficulty) and `spread` (the value whose zero variance
is judged). Nothing here looks beyond one rollout.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache

import polars as pl

from rollsift.schemas.errors import InputError, RecipeError
from rollsift.schemas.reasons import REASONS
from rollsift.schemas.recipe import Recipe

from .aids import NOTHING, Aids
from .expressions import Expression, evaluate, parse
from .fields import Fields
from .readers import constant
from .values import numbers

# Names an expression can use besides logged fields -> the rollouts' own columns.
FACTS = {
    "step": "step",
    "source_row": "source_row",
    "uid": "uid",
    "sample": "sample",
    "reward": "reward",
    "response_length": "response_length",
    "policy_version": "policy_version",
    "truncated": "truncated",
    "finish_reason": "finish_reason",
    "correct": "correct",
}
REASON = pl.Enum(list(REASONS))
METRICS = ("response_length", "token_efficiency")


@dataclass(frozen=True, slots=True)
class Rules:
    """A recipe with its expressions parsed, and the aids to read logs by."""

    recipe: Recipe
    correct: Expression | None
    excluded: Expression | None
    metric: Expression | None
    signal: Expression
    spread: Expression
    aids: Aids = NOTHING

    @property
    def expressions(self) -> dict[str, Expression]:
        """Recipe key -> expression, for those that are set."""
        found = {
            "correct": self.correct,
            "exclude_where": self.excluded,
            "metric": self.metric,
            "difficulty.of": self.signal,
            "zero_variance_of": self.spread,
        }
        return {key: expression for key, expression in found.items() if expression}

    @property
    def named(self) -> frozenset[str]:
        """Names, in lower case, of the logged fields that the expressions read."""
        names = {name.lower() for e in self.expressions.values() for name in e.columns}
        return frozenset(names - set(FACTS))

    @property
    def as_numbers(self) -> frozenset[str]:
        """Names, in lower case, of fields that are used as a number just as they stand."""
        used = [e.operands for e in (self.metric, self.signal, self.spread) if e]
        return frozenset({name.lower() for names in used for name in names} - set(FACTS))

    @property
    def as_truths(self) -> frozenset[str]:
        """Names, in lower case, of fields that say what is true: `acc` where nothing else does."""
        bare = {e.bare for e in (self.correct, self.excluded) if e and e.bare}
        acc = {"acc"} if self.correct is None else set()
        return frozenset({name.lower() for name in bare} - set(FACTS)) | acc

    def check_names(self, fields: Fields) -> None:
        """Raise RecipeError for a name that an expression reads and no step's log has."""
        read = {name.lower() for e in self.expressions.values() for name in e.columns}
        unknown = sorted(name for name in read - set(FACTS) if fields.find(name) is None)
        if unknown:
            raise RecipeError(self._unknown(unknown[0], fields))

    def _unknown(self, name: str, fields: Fields) -> str:
        keys = [
            key
            for key, expression in self.expressions.items()
            if name in {column.lower() for column in expression.columns}
        ]
        known = sorted({*FACTS, *fields.columns, *fields.aliases, *fields.extras.values()})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        return f"{', '.join(keys)}: no field {name!r} in the logs; {hint}"


def rules(recipe: Recipe, aids: Aids = NOTHING) -> Rules:
    """Parse a recipe's expressions; raises RecipeError that names the key."""
    if aids.reward and recipe.reward != "auto":
        raise RecipeError(f"reward: {recipe.reward} has no effect beside --reward-fn; leave it out")

    def parsed(text: str | None, key: str) -> Expression | None:
        return parse(text, key) if text is not None else None

    return Rules(
        recipe,
        correct=None if recipe.correct == "auto" else parse(recipe.correct, "correct"),
        excluded=parsed(recipe.exclude_where, "exclude_where"),
        metric=None if recipe.metric in METRICS else parse(recipe.metric, "metric"),
        signal=parse(recipe.difficulty.of, "difficulty.of"),
        spread=parse(recipe.zero_variance_of, "zero_variance_of"),
        aids=aids,
    )


def rollouts(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per rollout, by its number. Outputs of one session are one rollout: length their sum,
    version their oldest, all else of the highest output; what makes one unusable makes all so."""
    number = rows["rollout"].to_numpy()
    if (number[1:] > number[:-1]).all():
        return rows
    length, version = pl.col("response_length"), pl.col("policy_version")
    whole = rows.group_by("rollout").agg(
        response_length=pl.when(length.is_not_null().all()).then(length.sum()),
        policy_version=pl.when(version.is_not_null().all()).then(version.min()),
        no_response=pl.col("no_response").any(),
        unscored=pl.col("reward").is_null().any(),
    )
    last = rows.sort("output", maintain_order=True).unique("rollout", keep="last")
    merged = last.drop("response_length", "policy_version", "no_response").join(whole, on="rollout")
    reward = pl.when(~pl.col("unscored")).then("reward").alias("reward")
    return merged.with_columns(reward).drop("unscored").sort("rollout")


def score(rollouts: pl.DataFrame, by: Rules) -> pl.DataFrame:
    """Add the scores. Raises RecipeError for an expression that cannot be evaluated, InputError
    where max_lag is set and a version is unknown."""
    frame = rollouts.with_columns(invalid=_invalid(rollouts, by))
    frame = frame.hstack([_correct(frame, by).alias("correct")])
    scores = {
        "excluded": _true(frame, by.excluded, "exclude_where"),
        "metric": _metric(frame, by),
        "signal": _number(frame, by.signal, "difficulty.of"),
        "spread": _number(frame, by.spread, "zero_variance_of"),
    }
    return frame.hstack(pl.DataFrame(scores))


def _invalid(frame: pl.DataFrame, by: Rules) -> pl.Expr:
    recipe = by.recipe
    # A reward function is not asked about what is not there: the reason is that it is not there.
    asked = ~pl.col("no_response") if by.aids.reward else True
    stale = pl.lit(False)
    if recipe.max_lag is not None:
        unknown = frame.filter(pl.col("policy_version").is_null() & ~pl.col("padding"))
        if len(unknown):
            raise InputError(
                f"step {unknown['step'][0]}, row {unknown['source_row'][0]}: no policy_version, "
                f"so max_lag = {recipe.max_lag} cannot be judged; log it or set max_lag=null"
            )
        stale = pl.col("step") - pl.col("policy_version") > recipe.max_lag
    return (
        pl.when("padding").then(reason("padding"))
        .when("repeat").then(reason("repeat"))
        .when(pl.col("reward").is_null() & asked).then(reason("no_reward"))
        .when("no_response").then(reason("no_response"))
        .when(stale).then(reason("stale"))
    )  # fmt: skip


@cache
def reason(word: str) -> pl.Expr:
    """A reason's word as a column's value."""
    return pl.lit(word, REASON)


def _inputs(frame: pl.DataFrame, expression: Expression) -> pl.DataFrame:
    columns = {"step": frame["step"]}  # a constant too has a value for every row
    for name in expression.columns:
        column = FACTS.get(name.lower(), f"field:{name.lower()}")
        known = column in frame.columns
        columns[name] = frame[column] if known else constant(None, len(frame), pl.Null)
        if columns[name].dtype == pl.Categorical:  # the uid: to an expression it is text
            columns[name] = columns[name].cast(pl.String)
    return pl.DataFrame(columns)


def _values(frame: pl.DataFrame, expression: Expression, key: str) -> pl.Series:
    inputs = _inputs(frame, expression)
    if expression.bare:
        return inputs[expression.bare]
    return evaluate(expression, inputs, key)


def _number(frame: pl.DataFrame, expression: Expression, key: str) -> pl.Series:
    return numbers(_values(frame, expression, key))[0]


def _true(frame: pl.DataFrame, expression: Expression | None, key: str) -> pl.Series:
    if expression is None:
        return constant(False, len(frame), pl.Boolean)
    return _truth(frame, expression, key).fill_null(False)


def _truth(frame: pl.DataFrame, expression: Expression, key: str) -> pl.Series:
    field = f"truth:{(expression.bare or '').lower()}"
    if field in frame.columns:
        return frame[field] != 0
    return _number(frame, expression, key) != 0  # NaN is true, too


def _correct(frame: pl.DataFrame, by: Rules) -> pl.Series:
    if by.correct:
        return _truth(frame, by.correct, "correct")
    rewarded = frame["reward"] > 0
    if "truth:acc" not in frame.columns:
        return rewarded
    acc = frame["truth:acc"]
    return (acc > 0).zip_with(acc.is_not_null() & acc.is_not_nan(), rewarded)


def _metric(frame: pl.DataFrame, by: Rules) -> pl.Series:
    """The number to rank by. token_efficiency is the paper's reward / length, negated because lower
    ranks first; an empty response divides by 1; -0.0 is 0.0."""
    if by.metric:
        values = _number(frame, by.metric, "metric")
    elif by.recipe.metric == "token_efficiency":
        values = -(frame["reward"] / frame["response_length"].clip(lower_bound=1))
    else:
        return frame["response_length"].cast(pl.Float64)
    return values.fill_nan(None).set(values == 0, 0.0)
