"""The reference in the READMEs of jobs, schemas and pipeline/capture is what the code declares.

The parts between `<!-- name -->` and `<!-- end -->` are made: `python tests/test_docs.py` writes
them anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pyarrow as pa
import pytest

from rollsift.jobs.list_recipes import SHIPPED
from rollsift.jobs.main import COMMANDS, cli
from rollsift.pipeline import recipes
from rollsift.pipeline.score import FACTS
from rollsift.pipeline.verl_words import SECTIONS
from rollsift.schemas import captured, manifest
from rollsift.schemas.columns import VIEWS, Column
from rollsift.schemas.reasons import NOT_COUNTED, REASONS
from rollsift.schemas.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
READMES = [
    ROOT / "jobs" / "README.md",
    ROOT / "schemas" / "README.md",
    ROOT / "pipeline" / "capture" / "README.md",
]
MADE = re.compile(r"(?ms)^<!-- ([a-z ]+) -->\n(.*?)^<!-- end -->$")


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    names = head.split(", ")
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [names, ["---"] * len(names), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


def _commands() -> str:
    return "\n".join(_command(name) for name in COMMANDS)


def _context(name: str) -> tuple[click.Command, click.Context]:
    parent = click.Context(cli, info_name="rollsift")
    command = cli.get_command(parent, name)
    assert command is not None
    return command, click.Context(command, info_name=name, parent=parent)


def _command(name: str) -> str:
    command, context = _context(name)
    usage = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS]", "[options]")
    text = re.sub(r"\s+", " ", command.help or "").strip()
    example = (command.epilog or "").removeprefix("Example: ")
    rows = [
        (_code(", ".join(option.opts + option.secondary_opts) + _value(option)), _help(option))
        for option in command.params
        if isinstance(option, click.Option)
    ]
    parts = [f"### {name}\n", f"    rollsift {name} {usage}\n", f"{text}\n"]
    parts += [_table("option, meaning", rows)] if rows else []
    parts += [f"For example `{example}`\n"]
    return "\n".join(parts)


def _value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" {'|'.join(option.type.choices)}"
    return f" {option.metavar or option.type.name.upper()}"


def _help(option: click.Option) -> str:
    return (option.help or "") + (f"; default `{option.default}`" if option.show_default else "")


def _shipped() -> str:
    lines = [
        (_code(name), recipes.text_of(name, SHIPPED).splitlines()[0].removeprefix("# "))
        for name in recipes.names(SHIPPED)
    ]
    return _table("recipe, what it is for", lines)


def _keys() -> str:
    [_], known = msgspec.json.schema_components([Recipe])
    return _table("key, default, values, meaning", _keys_of(known, "Recipe", ""))


def _keys_of(known: dict[str, Any], name: str, prefix: str) -> Iterator[tuple[str, ...]]:
    for key, schema in known[name]["properties"].items():
        nested = [found for found in known if found in json.dumps(schema.get("$ref", ""))]
        if not nested:
            default = json.dumps(schema["default"]).strip('"')
            values = _values(schema, known)
            yield _code(prefix + key), _code(default), values, schema["description"]
        for inner in nested:
            yield from _keys_of(known, inner, f"{prefix}{key}.")


def _values(schema: dict[str, Any], known: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_values(each, known) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(_code, schema["enum"]))
    if "$ref" in schema:
        buckets = known[schema["$ref"].rpartition("/")[2]]["properties"]
        return f"one for each of {', '.join(map(_code, buckets))}"
    words = {"integer": "whole number", "number": "number", "string": "text", "null": "null"}
    least = f" ≥ {schema['minimum']}" if "minimum" in schema else ""
    return words[schema["type"]] + least


def _type(type_: pa.DataType) -> str:
    if pa.types.is_dictionary(type_):
        return "word"
    return {"string": "text", "double": "float64"}.get(str(type_), str(type_))


def _columns(columns: Iterable[Column]) -> str:
    return _table(
        "column, type, unit, null, meaning",
        [
            (_code(c.name), _type(c.type), c.unit or "", "yes" if c.null else "no", c.meaning)
            for c in columns
        ],
    )


def _captured() -> str:
    return _columns((*captured.LIGHT, *captured.TOKENS))


def _views() -> str:
    tables: dict[tuple[Column, ...], list[str]] = {}
    for view, columns in VIEWS.items():
        tables.setdefault(columns, []).append(view)
    return "\n".join(
        f"### {', '.join(views)}\n\n" + _columns(columns) for columns, views in tables.items()
    )


def _reasons() -> str:
    rows = [
        (_code(reason), "no" if reason in NOT_COUNTED else "yes", meaning)
        for reason, meaning in REASONS.items()
    ]
    return _table("reason, counts in its group, why the row is dropped", rows)


MAKERS: dict[str, Callable[[], str]] = {
    "commands": _commands,
    "shipped recipes": _shipped,
    "recipe keys": _keys,
    "views": _views,
    "reasons": _reasons,
    "captured columns": _captured,
}


def _fresh(text: str) -> str:
    return MADE.sub(lambda m: f"<!-- {m[1]} -->\n\n{MAKERS[m[1]]()}\n<!-- end -->", text)


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_the_made_parts_are_as_the_code_declares(path: Path) -> None:
    """Commands, recipe keys, columns and reasons in the READMEs equal what the code says; where
    they don't, `python tests/test_docs.py` writes them."""
    text = path.read_text("utf-8")
    assert text == _fresh(text)


def test_every_part_is_made_once() -> None:
    """No maker is forgotten, and no marker is left without one."""
    made = [match[1] for path in READMES for match in MADE.finditer(path.read_text("utf-8"))]
    assert sorted(made) == sorted(MAKERS)


def _words(path: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", path.read_text("utf-8")))


def test_every_option_of_every_command_is_told() -> None:
    """Each command has its heading in jobs/README.md, and below it every spelling of an option."""
    text = (ROOT / "jobs" / "README.md").read_text("utf-8")
    for name in COMMANDS:
        section = re.search(rf"(?ms)^### {name}$(.*?)(?=^#|\Z)", text)
        assert section, name
        for parameter in _context(name)[0].params:
            if isinstance(parameter, click.Option):
                for spelling in parameter.opts:
                    assert re.search(rf"{spelling}\b", section[1]), (name, spelling)
                assert parameter.help, (name, parameter.name)


def test_every_recipe_key_is_told() -> None:
    """Each key that a recipe can set, nested ones too, stands in jobs/README.md."""
    assert set(recipes.known_keys()) - {"difficulty"} <= _words(ROOT / "jobs" / "README.md")


def test_every_name_that_an_expression_may_use_is_told() -> None:
    """The facts beside the logged fields, and verl's keys, stand in jobs/README.md."""
    words = _words(ROOT / "jobs" / "README.md")
    assert set(FACTS) <= words
    assert {key for keys in SECTIONS.values() for key in keys} <= words


def test_every_column_of_every_view_is_told() -> None:
    """Each column stands in the table of its view in schemas/README.md, with its meaning."""
    text = (ROOT / "schemas" / "README.md").read_text("utf-8")
    for view, columns in VIEWS.items():
        section = re.search(rf"(?ms)^### (?:\w+, )*{view}(?:, \w+)*$(.*?)(?=^#|\Z)", text)
        assert section, view
        for column in columns:
            line = re.search(rf"(?m)^\| `{column.name}` \|.*$", section[1])
            assert line, (view, column.name)
            assert column.meaning.replace("|", r"\|") in line[0]


def test_the_reasons_stand_in_their_order() -> None:
    """schemas/README.md lists the reasons in order of precedence."""
    text = (ROOT / "schemas" / "README.md").read_text("utf-8")
    section = re.search(r"(?s)<!-- reasons -->(.*?)<!-- end -->", text)
    assert section
    assert re.findall(r"(?m)^\| `(\w+)` \|", section[1]) == list(REASONS)


def test_every_field_of_a_manifest_is_told() -> None:
    """Each field that is published stands in schemas/README.md, those of nested values too."""
    words = _words(ROOT / "schemas" / "README.md")
    for struct, prefix in (
        (manifest.Manifest, ""),
        (manifest.Source, "sources."),
        (manifest.Thresholds, "thresholds."),
        (manifest.Counts, "counts."),
        (manifest.Tables, "tables."),
    ):
        assert {prefix + name for name in struct.__struct_fields__} <= words


def rewrite() -> None:
    """Write the made parts anew."""
    for path in READMES:
        path.write_text(_fresh(path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    rewrite()
