"""Errors a person sees, each with the exit status of the command line.

RollsiftError (1)      could not finish
├── UsageError (2)     a wrong option, recipe or SQL
│   └── RecipeError    a recipe key, value or expression
├── InputError (3)     unusable logs; nothing was published
└── CheckError (4)     a check found something wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESTORE = "restore it, or filter into another folder"  # what to do about a damaged file of a run


class RollsiftError(Exception):
    """Something could not be finished; the message says what to do next."""

    exit_status = 1

    def text(self) -> str:
        """The whole message for a person."""
        return str(self)


class UsageError(RollsiftError):
    """A wrong option, recipe or SQL."""

    exit_status = 2


class RecipeError(UsageError):
    """A recipe key, value or expression that cannot be used."""


class CheckError(RollsiftError):
    """A check failed: what is stored is not what it should be."""

    exit_status = 4


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One record, or one whole file, that cannot be used.

    `source_row` counts records of the file from 0, `line` counts its physical lines from 1;
    both are null where the whole file is unreadable, `line` also in Parquet.
    """

    source_file: str
    source_row: int | None
    line: int | None
    field: str | None
    reason: str

    def __str__(self) -> str:
        row = None if self.source_row is None else f"row {self.source_row}"
        place = f"line {self.line}" if self.line is not None else row
        field = None if self.field is None else f"field {self.field!r}"
        said = ", ".join(filter(None, [self.source_file, place, field])) + ": " + self.reason
        return one_line(said)


class InputError(RollsiftError):
    """Logs that cannot be used as they are; `bad` holds every bad record found."""

    exit_status = 3

    def __init__(self, message: str, bad: Sequence[BadRecord] = ()) -> None:
        super().__init__(message)
        self.bad = tuple(bad)

    def text(self, most: int = 20) -> str:
        """The message, then the bad records: one of every file first, at most `most` further."""
        if not self.bad:
            return str(self)
        firsts = {record.source_file: record for record in reversed(self.bad)}
        listed = [r for r in self.bad if firsts[r.source_file] is r]
        listed += [r for r in self.bad if firsts[r.source_file] is not r][:most]
        lines = [str(self)] if str(self) else []
        records, files = _counted(len(self.bad), "bad record"), _counted(len(firsts), "file")
        lines += [f"{records} in {files}; nothing was published"]
        lines += [f"  {record}" for record in self.bad if record in listed]
        if len(self.bad) > len(listed):
            lines.append(f"  and {len(self.bad) - len(listed)} more")
        lines.append("Mend the files, or leave these records out with --skip-bad")
        return "\n".join(lines)


def one_line(text: object) -> str:
    """What a log or a path gives, fit for a message: it begins no line of its own."""
    return str(text).replace("\n", r"\n")


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
