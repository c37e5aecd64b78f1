"""The recipe: what to keep. Flat keys, in the order in which they are applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from .errors import RecipeError

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]

BUCKETS = ("very_hard", "hard", "medium", "easy")


class KPerBucket(Struct, frozen=True, forbid_unknown_fields=True):
    """How many rollouts a group may keep, by its bucket of difficulty."""

    very_hard: Positive
    hard: Positive
    medium: Positive
    easy: Positive


class Difficulty(Struct, frozen=True, forbid_unknown_fields=True):
    """How hard a prompt is: the mean of a signal over its whole group, against all prompts'."""

    of: Annotated[str, Meta(description="the signal: a column or row expression")] = "reward"
    scope: Annotated[
        Literal["running", "global"],
        Meta(description="quartiles over all prompts up to this step, or over the whole run"),
    ] = "running"
    quantiles: Annotated[
        Literal["exact", "tdigest"],
        Meta(description="exact, or the paper's t-digest (needs the extra `tdigest`)"),
    ] = "exact"
    ties: Annotated[
        Literal["strict", "midrank"],
        Meta(description="d < quartile as in the paper, or by the middle of equal ranks"),
    ] = "strict"
    warmup: Annotated[
        Count, Meta(description="groups to see in earlier steps before buckets are used")
    ] = 0


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """One resolved recipe. Every key decides rows, so all of it is part of every manifest's id."""

    name: Annotated[str, Meta(description="its name")] = "unnamed"
    reward: Annotated[str, Meta(description="the logged field; auto: `score`, then `reward`")] = (
        "auto"
    )
    correct: Annotated[
        str, Meta(description="row expression; auto: the logged `acc`, else reward > 0")
    ] = "auto"
    length: Annotated[
        str, Meta(description="auto, tokens, chars, bytes, or a logged field's name")
    ] = "auto"
    max_lag: Annotated[
        Count | None, Meta(description="rows with step - policy_version above it are `stale`")
    ] = None
    exclude_where: Annotated[
        str | None, Meta(description="row expression; rows where it is true are `excluded`")
    ] = None
    min_length: Annotated[Count, Meta(description="shorter responses are `empty`")] = 1
    group_size: Annotated[Positive | None, Meta(description="what G should be")] = None
    incomplete: Annotated[
        Literal["keep", "drop", "error"],
        Meta(description="what to do with groups that have not group_size rollouts"),
    ] = "keep"
    zero_variance: Annotated[
        Literal["keep", "drop"], Meta(description="what to do with groups without any spread")
    ] = "keep"
    zero_variance_of: Annotated[
        str, Meta(description="column or row expression whose spread is judged")
    ] = "reward"
    min_mean: Annotated[
        float | None, Meta(description="lowest mean reward of a group that is kept")
    ] = None
    max_mean: Annotated[
        float | None, Meta(description="highest mean reward of a group that is kept")
    ] = None
    metric: Annotated[
        str,
        Meta(description="response_length, token_efficiency or a row expression; lower is first"),
    ] = "response_length"
    k: Annotated[
        Positive | KPerBucket, Meta(description="rollouts kept of a group; a number or by bucket")
    ] = 8
    min_correct: Annotated[Count, Meta(description="least number of correct ones kept")] = 0
    min_incorrect: Annotated[Count, Meta(description="least number of incorrect ones kept")] = 0
    no_signal: Annotated[
        Literal["keep", "drop"],
        Meta(description="what to do with groups whose kept rewards are all equal"),
    ] = "keep"
    difficulty: Annotated[Difficulty, Meta(description="how buckets are made")] = Difficulty()

    def k_of(self, bucket: str) -> int:
        """How many a group in `bucket` may keep; `warmup` counts as very_hard."""
        if isinstance(self.k, KPerBucket):
            return int(getattr(self.k, "very_hard" if bucket == "warmup" else bucket))
        return self.k


def resolve(values: dict[str, Any]) -> Recipe:
    """Make a recipe from plain values, texts read by each key's declared type.

    Raises RecipeError for a value of the wrong type and for keys that contradict each other.
    """
    try:
        recipe = msgspec.convert(values, Recipe, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        if not path:
            raise RecipeError(f"recipe: {what}") from None
        key = path.rstrip("`").replace("[...]", "")
        message = f"{key}: found {_found(values, key)}, expected {_expected(key)}"
        raise RecipeError(message) from None
    for key in ("min_mean", "max_mean"):
        bound = getattr(recipe, key)
        if bound is not None and not math.isfinite(bound):
            raise RecipeError(f"{key}: found {bound}, expected a finite number")
    smallest_k = min(recipe.k_of(bucket) for bucket in BUCKETS)
    guards = recipe.min_correct + recipe.min_incorrect
    if guards > smallest_k:
        raise RecipeError(
            f"min_correct + min_incorrect: their sum is {guards}, above k = {smallest_k}; "
            "lower one of them or raise k"
        )
    if None not in (recipe.min_mean, recipe.max_mean) and recipe.min_mean > recipe.max_mean:  # type: ignore[operator]  # neither is None here
        raise RecipeError(
            f"min_mean: {recipe.min_mean} is above max_mean {recipe.max_mean}: no group could pass"
        )
    if recipe.incomplete != "keep" and recipe.group_size is None:
        raise RecipeError(f"incomplete: {recipe.incomplete} needs group_size, which is not set")
    return recipe


def _found(values: Any, key: str) -> str:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else values
    return repr(values)


def _expected(key: str) -> str:
    """What may stand under a key, for a person."""
    type_: Any = msgspec.inspect.type_info(Recipe)
    for part in key.split("."):
        struct = next(t for t in _options(type_) if isinstance(t, msgspec.inspect.StructType))
        type_ = next(field.type for field in struct.fields if field.name == part)
    return " or ".join(map(_in_words, _options(type_)))


def _options(type_: Any) -> Sequence[Any]:
    type_ = getattr(type_, "type", type_)  # which stands beside its description
    return getattr(type_, "types", (type_,))


def _in_words(type_: Any) -> str:
    match type_:
        case msgspec.inspect.LiteralType():
            return " or ".join(map(str, type_.values))
        case msgspec.inspect.IntType():
            least, most = type_.ge, type_.le
            span = f"of {least} or more" if most is None else f"from {least} to {most}"
            return f"a whole number {span}"
        case msgspec.inspect.StructType():
            return f"the keys {', '.join(field.name for field in type_.fields)}"
        case msgspec.inspect.NoneType():
            return "null"
    return "a number" if isinstance(type_, msgspec.inspect.FloatType) else "text"


def plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON values, floats as `repr` strings (see the manifest's canonical form)."""

    def fix(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fix(item) for key, item in value.items()}
        return repr(value) if isinstance(value, float) else value

    return {key: fix(value) for key, value in msgspec.to_builtins(recipe).items()}
