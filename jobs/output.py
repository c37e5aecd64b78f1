"""Results on stdout, in every format, and text made fit for a terminal."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from rollsift.schemas.errors import one_line

if TYPE_CHECKING:
    from rollsift.pipeline.sql import Answer

FORMATS = ("table", "json", "jsonl", "csv", "parquet")
WIDEST = 60  # characters of a cell in a table
# C0 and C1 controls but tab and line feed, DEL, and marks that turn the direction of writing.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\u061c\u2028\u2029]"
)


def format_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`-f/--format`, the same everywhere."""
    return click.option(
        "-f",
        "--format",
        "format_",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="json is one array of objects",
    )(command)


def progress(length: int, label: str) -> Any:
    """A bar on stderr for `length` bytes; nothing where stderr is no terminal."""
    show: Any = click.progressbar  # its overloads lack `hidden`
    return show(length=length, label=label, file=sys.stderr, hidden=not sys.stderr.isatty())


def printable(text: str) -> str:
    """Text with control characters shown as escapes, so that no log can steer a terminal."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def say(text: str) -> None:
    """Tell a person on stderr; the work goes on where nobody listens there any more."""
    try:
        click.echo(printable(text), err=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def note(text: str) -> None:
    """A remark for a person, on stderr."""
    say(one_line(f"note: {text}"))


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under names in aligned columns, numbers to the right; long cells are cut."""
    heads = [_cell(name) for name in names]
    shown = [[_cell(value) for value in row] for row in rows]
    numeric = [
        all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(names))
    ]
    widths = [max(map(len, [head, *(row[i] for row in shown)])) for i, head in enumerate(heads)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, shown)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    text = printable(str(value).replace("\n", "⏎").replace("\t", " "))
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def plain(value: Any) -> Any:
    """A value as JSON can hold it: NaN and infinities are null, nested values stay nested."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def as_json(value: Any) -> str:
    """One JSON value on one line."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)


def write(result: Answer, format_: str) -> None:
    """Print a query's result. Values of JSON type are nested in json and jsonl."""
    if format_ == "parquet":
        _parquet(result)
        return
    columns = result.description
    nested = [str(column[1]) == "JSON" and format_ in ("json", "jsonl") for column in columns]

    def rows() -> Iterator[Sequence[Any]]:
        while batch := result.fetchmany(1000):
            for row in batch:
                yield [
                    json.loads(value) if is_json and value is not None else value
                    for value, is_json in zip(row, nested, strict=True)
                ]

    write_rows([column[0] for column in columns], rows(), format_)


def write_rows(names: Sequence[str], rows: Iterable[Sequence[Any]], format_: str) -> None:
    """Print rows under names as table, json, jsonl or csv."""
    if format_ == "table":
        click.echo(table(names, list(rows)))
    elif format_ == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    elif format_ == "parquet":
        _rows_as_parquet(names, rows)
    else:
        _objects(names, rows, array=format_ == "json")


def _rows_as_parquet(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    import polars as pl

    cells = [[None if value is None else str(value) for value in row] for row in rows]
    frame = pl.DataFrame(cells, dict.fromkeys(names, pl.String), orient="row")
    frame.write_parquet(_binary_stdout())


def _binary_stdout() -> Any:
    if sys.stdout.isatty():
        raise click.UsageError("parquet is binary: send it to a file, like > result.parquet")
    return sys.stdout.buffer


def _objects(names: Sequence[str], rows: Iterable[Sequence[Any]], array: bool) -> None:
    between = ",\n " if array else "\n"
    sys.stdout.write("[" if array else "")
    first = True
    for row in rows:
        value = as_json(dict(zip(names, row, strict=True)))
        sys.stdout.write(value if first else between + value)
        first = False
    sys.stdout.write("]\n" if array else "" if first else "\n")


def _parquet(result: Answer) -> None:
    import pyarrow.parquet as pq

    with warnings.catch_warnings():  # of a copy, which a result for stdout can afford
        warnings.simplefilter("ignore", UserWarning)
        table = result.read_all()
    pq.write_table(table, _binary_stdout(), compression="zstd")
