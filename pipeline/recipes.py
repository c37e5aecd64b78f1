"""Recipes: YAML files and `-s key=value`, every value read by its key's declared type."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rollsift.schemas.errors import RecipeError
from rollsift.schemas.recipe import Difficulty, KPerBucket, Recipe, resolve

from . import verl_words

NESTED: dict[str, type[msgspec.Struct]] = {"k": KPerBucket, "difficulty": Difficulty}
_NULLS = ("", "null", "Null", "NULL", "~")


def load(
    name: str,
    sets: Sequence[str],
    shipped: Traversable,
    notify: Callable[[str], None] = lambda _: None,
) -> Recipe:
    """The recipe that `name` means (a shipped one's name, or a file), with `sets` applied.

    The file may be verl's: `notify` then takes what was understood. Raises RecipeError naming the
    key, what was found and the nearest known key.
    """
    text, origin = _find(name, shipped)
    values = verl_words.overrides(text) or _plain(text, origin)
    if verl_words.speaks(values):
        values, notes = verl_words.understand(values)
        for note in notes:
            notify(note)
    values = {"name": Path(origin).stem} | values
    for item in sets:
        key, found, value = item.partition("=")
        if not found:
            raise RecipeError(f"-s {item}: expected key=value")
        _set(values, key.strip(), value)
    _check_keys(values)
    return resolve(_without_nulls(values))


def names(shipped: Traversable) -> list[str]:
    """The shipped recipes."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in shipped.iterdir()
        if entry.name.endswith(".yaml")
    )


def text_of(name: str, shipped: Traversable) -> str:
    """The YAML text of a shipped recipe."""
    return _find(name, shipped)[0]


def _find(name: str, shipped: Traversable) -> tuple[str, str]:
    if name in names(shipped):
        return (shipped / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml"
    try:
        return Path(name).read_text(encoding="utf-8"), name
    except FileNotFoundError:
        near = nearest(name, names(shipped)) or f"; shipped are {', '.join(names(shipped))}"
        raise RecipeError(f"{name}: neither a shipped recipe nor a file{near}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{name}: cannot be read: {error}") from None


class _Loader(yaml.SafeLoader):
    """Reads every scalar as the text it is: types come from the keys, not from YAML's guesses."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise RecipeError(f"line {key_node.start_mark.line + 1}: a key must be one word")
        if key in values:
            raise RecipeError(f"{key}: given twice (line {key_node.start_mark.line + 1})")
        values[key] = loader.construct_object(value_node, deep=True)
    return values


_Loader.yaml_implicit_resolvers = {}
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def _plain(text: str, origin: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader that makes only text
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{origin}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{origin}: expected keys and values, like `k: 8`")
    return values


def _set(values: dict[str, Any], key: str, value: str) -> None:
    outer, _, inner = key.partition(".")
    if not inner:
        values[key] = value
        return
    if outer not in NESTED:
        raise _unknown(key)
    old = values.get(outer)
    values[outer] = (old if isinstance(old, dict) else {}) | {inner: value}


def _check_keys(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if key not in Recipe.__struct_fields__:
            raise _unknown(key)
        if key in NESTED and isinstance(value, dict):
            known = NESTED[key].__struct_fields__
            for inner in value:
                if inner not in known:
                    raise _unknown(f"{key}.{inner}")
            if key == "k" and (missing := [name for name in known if name not in value]):
                raise RecipeError(f"k: by bucket it needs all four; not set: {', '.join(missing)}")
        elif isinstance(value, dict | list):
            raise RecipeError(f"{key}: found {type(value).__name__}, expected one value")


def known_keys() -> list[str]:
    """Every key of a recipe, nested ones as `difficulty.of`."""
    nested = [f"{outer}.{inner}" for outer, t in NESTED.items() for inner in t.__struct_fields__]
    return [*Recipe.__struct_fields__, *nested]


def _unknown(key: str) -> RecipeError:
    near = nearest(key, known_keys()) or f"; known are {', '.join(known_keys())}"
    return RecipeError(f"{key}: no such recipe key{near}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Words that name the known one most like `word`; empty where none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Null means unset where a key may be unset; elsewhere it stays for the type check."""
    nullable = {field.name for field in msgspec.structs.fields(Recipe) if field.default is None}
    return {
        key: None if key in nullable and value in _NULLS else value for key, value in values.items()
    }
