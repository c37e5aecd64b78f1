"""JSON Lines as verl writes them: one object a line, bare NaN and Infinity allowed.

Strict: bytes that are not UTF-8, a key twice in a record, a lone surrogate, or a record that is
cut is an error that names the line and the byte (from 0 in the decompressed file). No type is
guessed from a sample: a field's kind is what all its values are.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

import polars as pl
import pyarrow as pa

from rollsift.schemas.errors import BadRecord

from . import Chunk, Chunks, flat
from .records import chunk, word

BLOCK = 4 << 20  # bytes read at a time
CHUNK = 16 << 20  # bytes of records in a chunk
MAX_RECORD = 64 << 20  # bytes of one record: a response of millions of tokens
MAX_RATIO, RATIO_FROM = 500, 256 << 20  # rollouts compress 3 to 30 times; bombs 1,000 and more
MAX_DEPTH = 64
NUL_IN_NAME = "its name holds NUL, which no table can store; rename it"
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"

_MAGIC: dict[bytes, Literal["gzip", "zstd"]] = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}


class _Unusable(Exception):
    """Why one record, or the rest of the file, cannot be read."""

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason)
        # Half of a surrogate pair in a key is no text either: shown as it was written.
        self.field = field and field.encode(errors="backslashreplace").decode()


class Reader:
    """One JSONL file, plain, gzip or zstd. After `chunks` is exhausted, `digest` and `records` hold
    the SHA-256 of the file's bytes and the number of its records, bad ones too."""

    def __init__(self, path: Path, file: str) -> None:
        self.path, self.file = path, file
        self.records = 0
        self.digest = ""

    def chunks(
        self, fixed: Mapping[str, str], known: Mapping[str, str], progress: Any = None
    ) -> Chunks:
        """Read the file; `fixed` says what fields of earlier steps hold (`number` for any), and a
        value of another kind makes its record bad. `known` says what the fields of this file hold:
        all that is known when a chunk is read, it has columns of that kind for.

        Never raises for content: what is wrong stands in the chunks' `bad`, a whole file as a
        record without a row.
        """
        with self.path.open("rb", buffering=0) as raw, ThreadPoolExecutor(1) as hasher:
            hashing = _Hashing(raw, progress, hasher)
            try:
                for line, start, data in _pieces(hashing):
                    yield self._flat(data, line, fixed, known) or self._lines(
                        data, line, start, fixed, known
                    )
            except (_Unusable, OSError) as error:
                bad = BadRecord(self.file, None, None, None, f"cannot be read: {error}")
                yield chunk(self.file, [], [], [bad], fixed, known)
            hashing.drain()
        self.digest = hashing.sha256.hexdigest()

    def _flat(
        self, data: bytes, line: int, fixed: Mapping[str, str], known: Mapping[str, str]
    ) -> Chunk | None:
        read = flat.read(data, fixed, known) if len(data) <= MAX_RECORD else None
        if read is None:
            return None
        first, self.records = self.records, self.records + len(read[0])
        rows = pl.int_range(first, self.records, eager=True)
        return Chunk(pl.DataFrame({"source_row": rows, "line": rows - first + line + 1}), *read)

    def _lines(
        self,
        data: bytes,
        line: int,
        start: int,
        fixed: Mapping[str, str],
        known: Mapping[str, str],
    ) -> Chunk:
        rows: list[dict[str, Any]] = []
        places: list[tuple[int, int]] = []
        bad: list[BadRecord] = []
        for at, offset, text in _lines(data, line, start):
            row = self.records
            self.records += 1
            try:
                rows.append(_record(text, offset))
                places.append((row, at))
            except _Unusable as error:
                # Only a record without its line feed can have been cut.
                whole = row if data.endswith(b"\n") or _is_json(text) else None
                bad.append(BadRecord(self.file, whole, at, error.field, str(error)))
        return chunk(self.file, rows, places, bad, fixed, known)


def first(path: Path) -> dict[str, Any]:
    """The first record, empty where none can be read."""
    with path.open("rb", buffering=0) as raw, ThreadPoolExecutor(1) as hasher:
        try:
            for line, start, data in _pieces(_Hashing(raw, None, hasher)):
                for _, offset, text in _lines(data, line, start):
                    return _record(text, offset)
        except (_Unusable, OSError):
            pass
    return {}


class _Hashing(io.RawIOBase):
    """Passes a file through, hashing what is read, so that one read serves digest and parse."""

    def __init__(self, raw: BinaryIO | io.FileIO, progress: Any, hasher: Executor) -> None:
        self.raw, self.progress, self.hasher = raw, progress, hasher
        self.sha256 = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self.raw.read(size) or b""
        self.hasher.submit(self.sha256.update, data)
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


def _pieces(file: _Hashing) -> Iterator[tuple[int, int, bytes]]:
    """Whole lines, about CHUNK bytes at a time, last what has no line feed: the lines and bytes
    before them, and they themselves."""
    line, offset, held, size, tail = 0, 0, [], 0, 0
    failure: Exception | None = None
    blocks = _blocks(file)
    while True:
        try:
            block = next(blocks, b"")
        except (_Unusable, OSError) as error:  # what came before it still counts
            block, failure = b"", error
        cut = block.rfind(b"\n") + 1
        tail = len(block) - cut + (0 if cut else tail)
        held.append(block)
        size += len(block)
        if size - tail >= CHUNK or not block or tail > MAX_RECORD:
            data = b"".join(held)
            whole, rest = data[: size - tail], data[size - tail :]
            if whole:
                yield line, offset, whole
                line, offset = line + whole.count(b"\n"), offset + len(whole)
            if tail > MAX_RECORD:
                raise _too_long(line + 1)
            held, size = [rest], tail
        if failure:
            raise failure
        if not block:
            if held[0]:
                yield line, offset, held[0]
            return


def _lines(data: bytes, line: int, offset: int) -> Iterator[tuple[int, int, bytes]]:
    """Line from 1, byte offset and content of each line; blank lines left out."""
    for text in data.split(b"\n"):
        line += 1
        if len(text) > MAX_RECORD:
            raise _too_long(line)
        if text.strip(b" \t\r") not in (b"", b"\xef\xbb\xbf"):
            yield line, offset, text
        offset += len(text) + 1


def _too_long(line: int) -> _Unusable:
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
    except _Unusable as error:
        raise _Unusable(f"byte {start}: {error}", error.field) from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise _Unusable(f"byte {start}: an integer of more than {most:,} digits") from None
    if not isinstance(value, dict):
        raise _Unusable(f"byte {start}: found {word(value)}, expected an object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise _Unusable(f"byte {start}: {_TOO_DEEP}")
    if b"\\ud" in data or b"\\uD" in data:
        _check_surrogates(value, start)
    if b"\\u0000" in data and (name := next((name for name in value if "\0" in name), None)):
        raise _Unusable(f"byte {start}: {NUL_IN_NAME}", name)
    return value


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data.decode("utf-8-sig"), parse_int=len)
    except (ValueError, RecursionError):
        return False
    return True


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
