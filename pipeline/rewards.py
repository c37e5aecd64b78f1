"""Rewards: a function of the user's, called as verl calls it, once a row.

The one place where code is run that is not rollsift's: a person named it on the command line.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.abc import ExecutionLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl

from rollsift.schemas.errors import BadRecord, InputError, UsageError, one_line

from .fields import Fields
from .groups import PADDING
from .readers import Chunk, records

_ROLES = ("uid", "data_source", "response", "ground_truth")


@dataclass(slots=True)
class Answers:
    """What a reward function said of a chunk: its results row by row, the places of these rows, and
    the rows on which it failed."""

    results: list[dict[str, Any]]
    places: list[tuple[int, int | None]]
    bad: list[BadRecord]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`: gives a number, or a
    dict with `score`, of which the rest are further fields. `name` is FILE.py:NAME or
    package.module:NAME, `digest` the SHA-256 of the file it stands in."""

    name: str
    digest: str
    call: Callable[..., Any]

    @property
    def file(self) -> str:
        """The file's name, or the module's."""
        return self.name.rpartition(":")[0]

    @classmethod
    def load(cls, text: str) -> RewardFunction:
        """Load what FILE.py:NAME or package.module:NAME names; raises UsageError."""
        where, _, name = text.rpartition(":")
        if not (where and name):
            raise UsageError(f"--reward-fn {text}: expected FILE.py:NAME or package.module:NAME")
        if where.endswith(".py") and not Path(where).is_file():
            raise UsageError(f"--reward-fn {text}: no such file")
        try:
            with redirect_stdout(sys.stderr):
                module, data = _file(Path(where)) if where.endswith(".py") else _module(where)
        except (Exception, SystemExit) as error:
            raise UsageError(f"--reward-fn {text}: loading it {_told(error)}") from None
        function = getattr(module, name, None)
        if not callable(function):
            raise UsageError(f"--reward-fn {text}: no function {name} in it")
        shown = f"{Path(where).name}:{name}" if where.endswith(".py") else text
        return cls(shown, hashlib.sha256(data).hexdigest(), function)

    def answers(self, chunk: Chunk, fields: Fields, file: str) -> Answers:
        """Call the function for each row, in their order, but not for verl's padding and not
        without a response. A row on which it fails is bad."""
        if "response" not in fields.columns:
            held = ", ".join(chunk.kinds)
            told = f"{file}: {self.name} needs the response's text; its fields: {held}"
            raise InputError(one_line(told))
        answers = Answers([], [], [])
        with redirect_stdout(sys.stderr):
            for (row, line), given in zip(
                chunk.places.iter_rows(), _given(chunk, fields), strict=True
            ):
                try:
                    answers.results.append(self._results(given))
                    answers.places.append((row, line))
                except (Exception, SystemExit) as error:
                    answers.bad.append(BadRecord(file, row, line, self.name, _told(error)))
        return answers

    def scored(
        self,
        chunk: Chunk,
        answers: Answers,
        file: str,
        fixed: Mapping[str, str],
        known: Mapping[str, str],
    ) -> Chunk:
        """The chunk with the reward under `name`, and each further result under `name.<key>`;
        `fixed` and `known` say what results hold, as in JSONL."""
        made = records.chunk(file, answers.results, answers.places, answers.bad, fixed, known)
        good = chunk.places["source_row"].is_in(made.places["source_row"].implode())
        columns = chunk.rows.filter(good).get_columns() + made.rows.get_columns()
        rows = pl.DataFrame({column.name: column for column in columns})
        return Chunk(made.places, rows, {**chunk.kinds, **made.kinds}, chunk.bad + made.bad)

    def _results(self, given: dict[str, Any] | None) -> dict[str, Any]:
        if given is None:
            return {self.name: None}
        returned = self.call(**given)
        if inspect.iscoroutine(returned):
            import asyncio  # takes time, and most functions are none of its

            returned = asyncio.run(returned)
        plain = records.plain(returned)
        results = plain if isinstance(plain, dict) else {"score": plain}
        score = results.pop("score", "")
        if not isinstance(score, bool | int | float | None):
            shown = repr(returned)[:60]
            raise _Unfit(f"returned {shown}, expected a number or a dict with a number as `score`")
        number = None if score is None else float(score)
        return {self.name: number} | {f"{self.name}.{key}": item for key, item in results.items()}


class _Unfit(Exception):
    """A result that is no reward."""


class _Bytes(ExecutionLoader):
    """Runs the very bytes that were hashed: no .pyc, which may be of another state of the file."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data = path, data

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.data)


def _file(path: Path) -> tuple[ModuleType, bytes]:
    data = path.read_bytes()
    name = f"rollsift_reward_{hashlib.sha256(data).hexdigest()}"
    loader = _Bytes(path, data)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # a loader was given
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    loader.exec_module(module)
    return module, data


def _module(name: str) -> tuple[ModuleType, bytes]:
    module = importlib.import_module(name)
    source = inspect.getsourcefile(module)
    if source is None:
        raise ImportError("no Python source, whose digest could be taken")
    return module, Path(source).read_bytes()


def _told(error: BaseException) -> str:
    """What was wrong: an unfit result, or what was raised, and where."""
    if isinstance(error, _Unfit):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    said = (str(error).splitlines() or [""])[0][:200]
    where = ""
    if frames and not isinstance(error, SyntaxError):  # which says it itself
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    return f"raised {type(error).__name__}: {said}{where}"


def _given(chunk: Chunk, fields: Fields) -> list[dict[str, Any] | None]:
    """The arguments of each row, None for rows that are not to be scored."""
    logged = {role: _logged(chunk, fields.columns.get(role)) for role in _ROLES}
    extra = _logged(chunk, "extra_info")
    given: list[dict[str, Any] | None] = []
    for uid, source, response, truth, info in zip(*logged.values(), extra, strict=True):
        if response is None or re.match(PADDING, str(uid)):
            given.append(None)
        else:
            given.append(
                {
                    "data_source": source,
                    "solution_str": response,
                    "ground_truth": truth,
                    "extra_info": info or {},
                }
            )
    return given


def _logged(chunk: Chunk, name: str | None) -> list[Any]:
    """A field as it was logged: lists and objects, which JSONL's reader gives as text, parsed."""
    if name is None or name not in chunk.rows.columns:
        return [None] * len(chunk.places)
    values = chunk.rows[name]
    if values.dtype != pl.String or chunk.kinds.get(name) not in ("nested", "mixed"):
        return values.to_list()
    return [None if value is None else json.loads(value) for value in values]
