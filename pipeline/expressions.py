"""Row expressions of recipes: DuckDB SQL over the columns of one row.

`parse` checks an expression before any data is read, `evaluate` gives its value for each row.

What is allowed is listed, all else is refused. The tree that is checked is DuckDB's own, and a
function counts as a row function where all its overloads are scalar and consistent. So a value
depends on its row alone: not on other rows, chance, the clock or the session.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl
from polars.selectors import by_dtype

from rollsift.schemas.errors import RecipeError

from .readers import constant

if TYPE_CHECKING:  # many a run needs no DuckDB, and importing it takes time
    from duckdb import DuckDBPyConnection

MAX_LENGTH = 10_000
MAX_DEPTH = 200  # tried: safe on a thread's stack of 256 kB

_TABLE = "the rows of a step"  # no bare name, so `rows.x` can only be field x of column rows
_LOCKED: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": False,
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "memory_limit": "4GB",
    "max_temp_directory_size": "0B",
    "preserve_insertion_order": True,
    "max_expression_depth": MAX_DEPTH,
}

_CLASSES = re.compile(
    "BETWEEN|CASE|CAST|COLUMN_REF|COMPARISON|CONJUNCTION|CONSTANT|FUNCTION|LAMBDA|OPERATOR|TYPE"
)
_OPERATORS = re.compile(
    "ARRAY_(CONSTRUCTOR|EXTRACT|SLICE)|STRUCT_EXTRACT|COMPARE_(NOT_)?IN"
    "|OPERATOR_(COALESCE|IS_NULL|IS_NOT_NULL|NOT|TRY)"
)
_TYPES = re.compile(
    "bool(ean)?|logical|u?(tiny|small|big|huge)int|u?integer|u?int(8|16|32|64|128)|int[124]?|short"
    "|signed|long|float[48]?|real|double|decimal|dec|numeric|(var|bp)?char|text|string|json|uuid"
    "|blob|bit|date|time|timestamp|datetime|interval|list|array|struct|row|map"
)
_RESULTS = re.compile(
    "null|boolean|u?(tiny|small|big|huge)int|u?integer|float|double|decimal|varchar"
)
_ARITHMETIC = re.compile(r"[-+%^]|\*\*?|//?")
_CLOCK = re.compile("current_(date|time|timestamp)|localtime(stamp)?")
# Consistent by DuckDB's word, but: age(t) reads the clock, collations follow the ICU library,
# hashes and plans follow DuckDB's version, and aggregate states are read as raw memory.
_UNSTABLE = re.compile(
    r"age|hash|version|(icu_)?collate_\w+|icu_\w+|json_(de)?serialize_\w+"
    r"|combine|finalize|to_aggregate_state|__\w+"
)
_LIST_AGGREGATE = re.compile("((list|array)_aggr(egate)?|aggregate)")

_ONE_ROW = "a row expression looks at one row only"
_SESSION = "depends on the clock or the session, not on the row"
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
_WRONG_CLASS = {
    "SUBQUERY": f"a subquery (= ANY is one, too) is refused; {_ONE_ROW}",
    "WINDOW": f"OVER opens a window; {_ONE_ROW}",
    "STAR": "* and COLUMNS() stand for many columns; name the one that is meant",
    "PARAMETER": "a parameter (? or $1) has no value here; write the value",
    "POSITIONAL_REFERENCE": "#1 is a place, not a name; name the column",
    "COLLATE": "COLLATE is refused; compare lower(...) or strip_accents(...)",
}
_WRONG_KIND = {
    "aggregate": f"is an aggregate; {_ONE_ROW}",
    "window": f"is a window function; {_ONE_ROW}",
    "VOLATILE": "can give another value at each call",
    "CONSISTENT_WITHIN_QUERY": _SESSION,
}
# Overloads for timestamps with a time zone depend on that of the session, which is always UTC.
_FUNCTIONS = """
    SELECT lower(function_name),
        list(DISTINCT CASE
            WHEN function_type <> 'scalar' THEN function_type
            WHEN stability = 'CONSISTENT_WITHIN_QUERY' AND
                list_has_any(parameter_types, ['TIMESTAMP WITH TIME ZONE', 'TIMESTAMPTZ_NS'])
            THEN 'CONSISTENT' ELSE stability END),
        coalesce(list([macro_definition] || parameters) FILTER (function_type = 'macro'), [])
    FROM duckdb_functions() WHERE function_type NOT IN ('table', 'table_macro', 'pragma')
    GROUP BY ALL
"""


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked row expression; `bare` is the name where it is one column and nothing else,
    `operands` are the columns that are numbers as they stand: this one, or x in x * 2."""

    text: str
    columns: frozenset[str]
    bare: str | None = None
    operands: frozenset[str] = frozenset()


class _Refused(ValueError):
    """What is wrong with an expression, for the person who wrote it."""


def parse(text: str, key: str) -> Expression:
    """Check the row expression that stands under `key` in a recipe."""
    if text == "reward":  # which needs no DuckDB
        return Expression(text, frozenset({text}), text, frozenset({text}))
    try:
        tree = _tree(text)
        columns = {_folded(name): name for name in sorted(_columns_read(tree), reverse=True)}
        for name in filter(_CLOCK.fullmatch, columns):
            raise _Refused(f"{name} {_SESSION}")
    except _Refused as problem:
        raise _error(key, text, problem) from None
    bare = _name(tree)
    names = {_folded(name) for name in (bare, *_operands(tree)) if name}
    operands = {column for name, column in columns.items() if name in names}  # no lambda's names
    return Expression(text, frozenset(columns.values()), bare, frozenset(operands))


def evaluate(expression: Expression, rows: pl.DataFrame, key: str) -> pl.Series:
    """The expression's value for each row, in the order of the rows."""
    import duckdb

    known = {_folded(name): name for name in rows.columns}
    if unknown := sorted(name for name in expression.columns if _folded(name) not in known):
        problem = f"there is no column {unknown[0]}{_nearest(unknown[0], known)}"
        raise _error(key, expression.text, problem)
    names = sorted(known[_folded(name)] for name in expression.columns)

    try:
        with _database().cursor() as cursor:  # no other cursor sees the table
            cursor.register(_TABLE, _handed_over(rows, names).to_arrow())
            values = cursor.sql(f'SELECT (\n{expression.text}\n) AS value FROM "{_TABLE}"')
            if not _RESULTS.fullmatch(values.types[0].id):
                raise _Refused(f"it gives {values.types[0]}, not a number, true or false")
            found: pl.DataFrame = values.pl()
            return found.get_column("value")
    except (duckdb.Error, _Refused) as problem:
        raise _error(key, expression.text, problem) from None


def _tree(text: str) -> dict[str, Any]:
    """DuckDB's own tree of one expression."""
    if len(text) > MAX_LENGTH:
        raise _Refused(f"it has {len(text):,} characters, more than {MAX_LENGTH:,}")
    if text.count("(") - text.count(")") > MAX_DEPTH:  # DuckDB's parser would take minutes
        raise _Refused("its brackets are not closed")
    if "\0" in text:
        raise _Refused("it holds a NUL character")
    # One expression reads the same in brackets and without. `x, y`, `x,` do not, and `x AS y`,
    # `x LIMIT 1`, `x; y`, `x) + (y` are errors one way or the other.
    bare, bracketed = (_statements(f"SELECT {sql}") for sql in (f"{text}\n", f"(\n{text}\n)"))
    if bare != bracketed:
        raise _Refused("it is not one expression")
    [tree] = bare[0]["node"]["select_list"]
    return dict(tree)


def _statements(sql: str) -> Any:
    import duckdb

    def placeless(node: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in node.items() if "location" not in name}

    try:
        with _database().cursor() as cursor:
            [[found]] = cursor.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
        answer = json.loads(found, object_hook=placeless)
    except RecursionError:
        raise _Refused(_TOO_DEEP) from None
    except duckdb.Error as problem:
        raise _Refused(problem) from None
    if answer["error"]:
        message = answer["error_message"]
        raise _Refused(_TOO_DEEP if "expression depth" in message else message)
    return answer["statements"]


def _columns_read(tree: Any, macros: frozenset[str] = frozenset()) -> frozenset[str]:
    """The columns that a tree reads; refuses what is not a row expression.

    `macros` are those whose definitions are being read.
    """
    columns = set()
    todo: list[tuple[Any, frozenset[str]]] = [(tree, frozenset())]
    while todo:  # no recursion: trees can be deep
        node, bound = todo.pop()
        children = node if isinstance(node, list) else []
        if isinstance(node, dict):
            _check_node(node, macros)
            children = list(node.values())
            if node.get("syntax_type") == "LAMBDA_KEYWORD":
                bound |= {_folded(name) for name in _columns_read(node["lhs"])}
                children = [node["expr"]]
            elif node.get("class") == "COLUMN_REF":
                name, *fields = node["column_names"]
                if _folded(name) not in bound:
                    columns.add(name)
                elif fields:  # which DuckDB takes for a column's, where there is one
                    raise _Refused(f"write {name}['{fields[0]}'] for {name}.{fields[0]}")
        todo += [(child, bound) for child in children]
    return frozenset(columns)


def _operands(tree: Any) -> Iterator[str]:
    """Names that stand beside a sign of arithmetic."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if node.get("is_operator") and _ARITHMETIC.fullmatch(node["function_name"]):
                yield from (_name(side["expression"]) or "" for side in node["arguments"])
            todo += node.values()
        elif isinstance(node, list):
            todo += node


def _name(node: dict[str, Any]) -> str | None:
    """The name of a column, where a node is one and nothing else."""
    names: list[str] = node["column_names"] if node["class"] == "COLUMN_REF" else []
    return names[0] if len(names) == 1 else None


def _check_node(node: dict[str, Any], macros: frozenset[str]) -> None:
    kind = node.get("class", "CONSTANT")
    operator = kind == "OPERATOR"
    if not (_OPERATORS.fullmatch(node["type"]) if operator else _CLASSES.fullmatch(kind)):
        raise _Refused(_WRONG_CLASS.get(kind, f"{node['type']} is refused; {_ONE_ROW}"))
    if kind == "TYPE" and not _TYPES.fullmatch(_owner(node) + node["type_name"].lower()):
        raise _Refused(f"a cast to {_owner(node)}{node['type_name']} is refused")
    if node.get("syntax_type") == "SINGLE_ARROW" and node["expr"]["class"] != "CONSTANT":
        raise _Refused("write `lambda x: x + 1` for a lambda, and (a -> 'path') in brackets")
    if kind == "FUNCTION":
        _check_function(node, macros)


def _check_function(node: dict[str, Any], macros: frozenset[str]) -> None:
    name = node["function_name"].lower()
    if owner := _owner(node):
        raise _Refused(f"write {name}({owner[:-1]}) for {owner}{name}()")
    if node["filter"] or node["distinct"] or node["order_bys"]["orders"]:
        raise _Refused(f"FILTER, DISTINCT and ORDER BY are for aggregates; {_ONE_ROW}")
    if name not in _functions():
        raise _Refused(f"there is no row function {name}(){_nearest(name, _functions())}")
    kinds, definitions = _functions()[name]
    for kind in filter(_WRONG_KIND.get, sorted(kinds)):
        raise _Refused(f"{name}() {_WRONG_KIND[kind]}")
    if _UNSTABLE.fullmatch(name):
        raise _Refused(f"{name}() may change with the clock, DuckDB or its libraries")
    if _LIST_AGGREGATE.fullmatch(name):
        _check_list_aggregate(node["arguments"])
    for definition, *parameters in [] if name in macros else definitions:
        try:
            read = _columns_read(_tree(definition), macros | {name})
        except _Refused as problem:
            raise _Refused(f"{name}() stands for {definition}: {problem}") from None
        if not read <= set(parameters):  # as current_timestamp is not
            raise _Refused(f"{name}() {_SESSION}")


def _check_list_aggregate(arguments: Sequence[dict[str, Any]]) -> None:
    for argument in arguments[1:2]:
        aggregate = argument["expression"].get("literal", {}).get("text", "")
        if aggregate.lower() in ("", "reservoir_quantile"):
            raise _Refused("name the list's aggregate in quotes; reservoir_quantile is random")


@cache
def _database() -> DuckDBPyConnection:
    import duckdb

    database = duckdb.connect(config=_LOCKED)
    database.execute("SET GLOBAL TimeZone = 'UTC'")  # not GLOBAL, cursors would not have it
    database.execute("SET GLOBAL lock_configuration = true")
    return database


@cache
def _functions() -> dict[str, tuple[list[str], list[list[str]]]]:
    """The kinds of each function's overloads, and the definitions of the macros among them."""
    with _database().cursor() as cursor:
        found = cursor.execute(_FUNCTIONS).fetchall()
    return {name: (kinds, definitions) for name, kinds, definitions in found}


def _handed_over(rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """The columns that DuckDB is to see, in types that it knows."""
    if not names:  # a constant has a value for each row, too
        return constant(True, rows.height, pl.Boolean).to_frame()
    return rows.select(names).cast({by_dtype(pl.Float16, pl.Int128, pl.UInt128): pl.Float64})


def _owner(node: dict[str, Any]) -> str:
    return "".join(f"{name}." for name in (node["catalog"], node["schema"]) if name)


def _folded(name: str) -> str:
    """As DuckDB compares names: without the case of ASCII letters."""
    return name.encode().lower().decode()


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(_folded(name), known)
    return f"; the nearest are {', '.join(near)}" if near else ""


def _error(key: str, text: str, problem: object) -> RecipeError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return RecipeError(f"{key}: {str(problem).partition(chr(10))[0]}, in {shown!r}")
