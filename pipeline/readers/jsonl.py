"""JSON Lines as verl writes them: one object a line, bare NaN and Infinity allowed.

Strict: bytes that are not UTF-8, a key twice in a record, a lone surrogate, or a record that is
cut is an error that names the line and the byte (from 0 in the decompressed file). No type is
guessed from a sample: a field's kind is what all its values are.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import polars as pl
import pyarrow as pa

from rollsift.schemas.errors import BadRecord

from . import Chunk, Chunks

BLOCK = 4 << 20  # bytes read at a time
CHUNK = 16 << 20  # bytes of records in a chunk
MAX_RECORD = 64 << 20  # bytes of one record: a response of millions of tokens
MAX_RATIO, RATIO_FROM = 500, 256 << 20  # rollouts compress 3 to 30 times; bombs 1,000 and more
MAX_DEPTH = 64
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"

_MAGIC: dict[bytes, Literal["gzip", "zstd"]] = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}
_KINDS = {bool: "bool", int: "int", float: "float", str: "string", list: "nested", dict: "nested"}
_DTYPES = {
    "null": pl.Null(), "bool": pl.Boolean(), "int": pl.Int64(), "float": pl.Float64(),
    "string": pl.String(), "nested": pl.String(), "mixed": pl.String(),
}  # fmt: skip


class _Unusable(Exception):
    """Why one record, or the rest of the file, cannot be read."""

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason)
        self.field = field


class Reader:
    """One JSONL file, plain, gzip or zstd. After `chunks` is exhausted, `digest` and `records` hold
    the SHA-256 of the file's bytes and the number of its records, bad ones too."""

    def __init__(self, path: Path, file: str) -> None:
        self.path, self.file = path, file
        self.records = 0
        self.digest = ""

    def chunks(self, kinds: Mapping[str, str], progress: Any = None) -> Chunks:
        """Read the file; `kinds` fixes what fields of earlier steps hold (`number` for any).

        A value of another kind makes its record bad. Never raises for content: what is wrong stands
        in the chunks' `bad`, a whole file as a record without a row.
        """
        rows: list[dict[str, Any]] = []
        places: list[tuple[int, int]] = []
        bad: list[BadRecord] = []
        held = 0
        with self.path.open("rb", buffering=0) as raw:
            hashing = _Hashing(raw, progress)
            try:
                for line, start, data, whole in _lines(hashing):
                    row = self.records
                    self.records += 1
                    try:
                        rows.append(_record(data, start))
                        places.append((row, line))
                    except _Unusable as error:
                        # Only a record without its line feed can have been cut.
                        at = row if whole else None
                        bad.append(BadRecord(self.file, at, line, error.field, str(error)))
                    held += len(data)
                    if held >= CHUNK:
                        yield self._chunk(rows, places, bad, kinds)
                        rows, places, bad, held = [], [], [], 0
            except (_Unusable, OSError) as error:
                bad.append(BadRecord(self.file, None, None, None, f"cannot be read: {error}"))
            hashing.drain()
            self.digest = hashing.sha256.hexdigest()
        yield self._chunk(rows, places, bad, kinds)

    def _chunk(
        self,
        rows: list[dict[str, Any]],
        places: list[tuple[int, int]],
        bad: list[BadRecord],
        kinds: Mapping[str, str],
    ) -> Chunk:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        wrong: dict[int, BadRecord] = {}
        for name, values in columns.items():
            for index, found in _misfits(values, kinds.get(name)):
                reason = f"found {found}, expected {kinds[name]} as in earlier steps"
                record, line = places[index]
                wrong.setdefault(index, BadRecord(self.file, record, line, name, reason))
        if wrong:
            good = [index for index in range(len(rows)) if index not in wrong]
            columns = {name: [values[i] for i in good] for name, values in columns.items()}
            places = [places[index] for index in good]
            bad = bad + list(wrong.values())
        found_kinds = {
            name: "mixed" if kinds.get(name) == "mixed" else kind_of(values)
            for name, values in columns.items()
        }
        data = [column(name, values, found_kinds[name]) for name, values in columns.items()]
        numbers = [
            pl.Series("source_row", [row for row, _ in places], pl.Int64),
            pl.Series("line", [line for _, line in places], pl.Int64),
        ]
        return Chunk(pl.DataFrame(numbers), pl.DataFrame(data), found_kinds, bad)


class _Hashing(io.RawIOBase):
    """Passes a file through, hashing what is read, so that one read serves digest and parse."""

    def __init__(self, raw: BinaryIO | io.FileIO, progress: Any) -> None:
        self.raw, self.progress = raw, progress
        self.sha256 = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self.raw.read(size) or b""
        self.sha256.update(data)
        self.count += len(data)
        if self.progress:
            self.progress(len(data))
        return data

    def drain(self) -> None:
        """Hash what the parser left unread, so that the digest is always the whole file's."""
        while self.read(BLOCK):
            pass


def _blocks(file: _Hashing) -> Iterator[bytes]:
    head = file.read(BLOCK)
    codec = _MAGIC.get(head[:2])
    if codec is None:
        while head:
            yield head
            head = file.read(BLOCK)
        return
    stream = pa.CompressedInputStream(pa.PythonFile(_Rejoined(head, file), mode="r"), codec)
    size = 0
    while block := stream.read(BLOCK):
        size += len(block)
        if size > RATIO_FROM and size > MAX_RATIO * file.count:
            raise _Unusable(
                f"unpacks to over {MAX_RATIO} times its size; unpack it yourself if you trust it"
            )
        yield block


class _Rejoined(io.RawIOBase):
    def __init__(self, head: bytes, file: _Hashing) -> None:
        self.head, self.file = head, file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self.head:
            return self.file.read(size)
        data, self.head = (self.head, b"") if size < 0 else (self.head[:size], self.head[size:])
        return data


def _lines(file: _Hashing) -> Iterator[tuple[int, int, bytes, bool]]:
    """Line from 1, byte offset, content, whether it had a line feed; blank lines left out."""
    line, offset, rest = 0, 0, b""
    for block in _blocks(file):
        pieces = (rest + block).split(b"\n")
        rest = pieces.pop()
        for piece in pieces:
            line += 1
            if len(piece) > MAX_RECORD:
                raise _too_long(line, len(piece))
            if piece.strip(b" \t\r") not in (b"", b"\xef\xbb\xbf"):
                yield line, offset, piece, True
            offset += len(piece) + 1
        if len(rest) > MAX_RECORD:
            raise _too_long(line + 1, len(rest))
    if rest.strip(b" \t\r"):
        yield line + 1, offset, rest, False


def _too_long(line: int, size: int) -> _Unusable:
    return _Unusable(f"line {line} has more than {MAX_RECORD >> 20} MiB; no record is that long")


def _record(data: bytes, start: int) -> dict[str, Any]:
    if start == 0 and data.startswith(b"\xef\xbb\xbf"):
        data, start = data[3:], 3
    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        at = start + error.start
        raise _Unusable(f"byte {at}: 0x{data[error.start]:02x} is not UTF-8") from None
    except json.JSONDecodeError as error:
        at = start + len(text[: error.pos].encode())
        raise _Unusable(f"byte {at}: not JSON ({error.msg}); the record may be cut") from None
    except RecursionError:
        raise _Unusable(f"byte {start}: {_TOO_DEEP}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _Unusable(f"byte {start}: not a number that can be read ({error})") from None
    if not isinstance(value, dict):
        raise _Unusable(f"byte {start}: found {_word(value)}, expected an object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise _Unusable(f"byte {start}: {_TOO_DEEP}")
    if b"\\ud" in data or b"\\uD" in data:
        _check_surrogates(value, start)
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [x for item in nested for x in (item.values() if isinstance(item, dict) else item)]
    return depth - 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # add returns None, which is false
        raise _Unusable(f"the key {twice!r} stands twice in the record", twice)
    return value


def _check_surrogates(value: dict[str, Any], start: int) -> None:
    for name, item in value.items():
        try:
            json.dumps([name, item], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _Unusable(
                f"byte {start}: half of a surrogate pair, which is no text", name
            ) from None


def _word(value: Any) -> str:
    words = {bool: "a bool", int: "a number", float: "a number", str: "text", list: "a list"}
    return "null" if value is None else words.get(type(value), "an object")


def kind_of(values: Sequence[Any]) -> str:
    """What a field holds: null, bool, int, float, string, nested (lists, objects) or mixed."""
    kinds = {_KINDS[found] for found in set(map(type, values)) if found is not type(None)}
    if kinds <= {"int", "float"} and kinds:
        # Integers that the column could not hold exactly are kept as JSON text.
        limit = 1 << 53 if "float" in kinds else 1 << 63
        exact = all(not isinstance(value, int) or -limit <= value < limit for value in values)
        return "mixed" if not exact else "float" if "float" in kinds else "int"
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "null"


def column(name: str, values: Sequence[Any], kind: str) -> pl.Series:
    """Values of a kind as a Polars column; nested and mixed ones as JSON text."""
    if kind in ("nested", "mixed"):
        values = [None if value is None else json_text(value) for value in values]
    elif kind == "float":
        values = [None if value is None else float(value) for value in values]
    return pl.Series(name, values, _DTYPES[kind], strict=True)


def json_text(value: Any) -> str:
    """JSON text of a parsed value, keys in their order; non-finite numbers as strings."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    except ValueError:
        return json_text(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


def _misfits(values: Sequence[Any], kind: str | None) -> Iterator[tuple[int, str]]:
    """The values that are not of the kind, by position, each with what it is."""
    allowed: dict[str, tuple[type, ...]] = {
        "bool": (bool,), "number": (int, float), "string": (str,), "nested": (list, dict),
    }  # fmt: skip
    if kind not in allowed:
        return
    types = {type(None), *allowed[kind]}
    if set(map(type, values)) <= types:
        return
    for index, value in enumerate(values):
        if type(value) not in types:
            yield index, _word(value)
