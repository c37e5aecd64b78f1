"""A step's rows become one file, whole or absent, that says what pins its tokens."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollsift.pipeline.capture import writer
from rollsift.schemas.captured import FORMAT, KEY, LIGHT, TOKENS, Captured
from rollsift.schemas.errors import RollsiftError

NOTE = Captured(FORMAT, "0", "0.9.1", "t", {}, {}, {"n": 4}, {})


def rows(groups: int, samples: int, length: int = 3) -> pa.Table:
    """Rows by hand, in the types that the contract declares."""
    count = groups * samples
    uids = [f"g{group}" for group in range(groups) for _ in range(samples)]
    lists = [[float(at), 0.5] + [0.0] * (length - 2) for at in range(count)]
    held: dict[str, Any] = {
        "step": [3] * count, "uid": uids, "session_id": list(range(samples)) * groups,
        "output_index": [0] * count, "score": [1.0] * count, "response_length": [length] * count,
        "truncated": [False] * count, "max_response_length": [9] * count,
        "temperature": [1.0] * count, "mask_source": ["before_rejection"] * count,
        "multimodal": [False] * count, "router_replay": [False] * count,
        "prompt_ids": [[at, 2] for at in range(count)],
        "response_ids": [[at] * length for at in range(count)],
        "response_mask": [[1] * length for _ in range(count)],
        "rollout_log_probs": lists,
    }  # fmt: skip
    columns = {c.name: pa.array(held.get(c.name, [None] * count), c.type)
               for c in (*LIGHT, *TOKENS)}  # fmt: skip
    return pa.table(columns)


def by_hand(values: list[list[float]], code: str) -> str:
    """The digest as `pipeline.captured` words it: of lengths and of values, hashed together."""
    sizes = hashlib.sha256(b"".join(struct.pack("<q", len(v)) for v in values)).digest()
    flat = hashlib.sha256(b"".join(struct.pack(f"<{code}", x) for v in values for x in v)).digest()
    return hashlib.sha256(sizes + flat).hexdigest()


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """Values are those of the table, light columns stand before tokens, and what verl had nothing
    of is no column."""
    table = rows(3, 4)
    path = writer.write(tmp_path, 3, table, NOTE)
    assert path == tmp_path / "3.parquet"
    found = pq.read_table(path)
    names = [column.name for column in LIGHT]
    assert found.column_names[: len(names)] == names
    assert "advantages" not in found.column_names
    for name in found.column_names:
        assert found[name].to_pylist() == table[name].to_pylist(), name


def test_no_group_is_cut_by_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups end where a prompt group does, and hold about as many tokens."""
    monkeypatch.setattr(writer, "ROW_GROUP", 20)  # tokens; a group has 12
    file = pq.ParquetFile(writer.write(tmp_path, 3, rows(7, 4), NOTE))
    held = [file.read_row_group(at)["uid"].to_pylist() for at in range(file.num_row_groups)]
    assert [len(uids) for uids in held] == [8, 8, 8, 4]
    assert [sorted(set(uids)) for uids in held] == [
        ["g0", "g1"],
        ["g2", "g3"],
        ["g4", "g5"],
        ["g6"],
    ]


def test_the_footer_pins_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its note has a digest of each token column for each row group, equal to one made by hand."""
    monkeypatch.setattr(writer, "ROW_GROUP", 1)
    path = writer.write(tmp_path, 3, rows(2, 2), NOTE)
    note = msgspec.json.decode(pq.read_metadata(path).metadata[KEY], type=Captured)
    assert note == msgspec.structs.replace(NOTE, tokens=note.tokens)
    assert set(note.tokens) == {
        "prompt_ids", "response_ids", "response_mask", "rollout_log_probs",
    }  # fmt: skip
    assert note.tokens["response_ids"] == [
        by_hand([[0] * 3, [1] * 3], "i"), by_hand([[2] * 3, [3] * 3], "i"),
    ]  # fmt: skip
    assert note.tokens["response_mask"][1] == by_hand([[1] * 3] * 2, "b")
    assert note.tokens["rollout_log_probs"][0] == by_hand([[0, 0.5, 0], [1, 0.5, 0]], "f")
    assert pq.read_metadata(path).row_group(0).column(0).is_stats_set


def test_a_step_that_is_there_gets_a_version(tmp_path: Path) -> None:
    """A resumed run that repeats a step writes beside what is there, and never over it."""
    first = writer.write(tmp_path, 3, rows(1, 2), NOTE).read_bytes()
    (tmp_path / "3.v4.parquet").write_bytes(b"another's")
    (tmp_path / "30.v9.parquet").write_bytes(b"another step's")
    assert writer.write(tmp_path, 3, rows(1, 3), NOTE).name == "3.v5.parquet"
    assert writer.write(tmp_path, 4, rows(1, 3), NOTE).name == "4.parquet"
    assert (tmp_path / "3.parquet").read_bytes() == first
    assert (tmp_path / "3.v4.parquet").read_bytes() == b"another's"


def test_a_name_taken_meanwhile_is_never_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two writers that want one name, one gets it and the other the next."""
    monkeypatch.setattr(writer, "_versions", lambda *_: iter(()))  # as another saw it before
    writer.write(tmp_path, 3, rows(1, 2), NOTE)
    assert writer.write(tmp_path, 3, rows(1, 2), NOTE).name == "3.v2.parquet"


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("point", ["write_parquet", "digest", "_link"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, nameless: bool
) -> None:
    """Wherever it fails, the error names the file and the folder is as it was."""

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, point, fails)
    if not nameless:
        _without_nameless_files(monkeypatch)
    with pytest.raises(RollsiftError, match=r"3\.parquet: cannot be written: .*No space left"):
        writer.write(tmp_path, 3, rows(1, 2), NOTE)
    assert not list(tmp_path.iterdir())


def _without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)


def test_where_files_need_names_they_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system such as NFS the file has a hidden name until it is whole."""
    seen: list[list[str]] = []
    real = writer.write_parquet

    def looks(path: Path, *rest: Any) -> None:
        real(path, *rest)
        seen.append([entry.name for entry in tmp_path.iterdir()])
        writer.sweep(tmp_path)  # another writer that starts now takes nothing that is locked

    monkeypatch.setattr(writer, "write_parquet", looks)
    _without_nameless_files(monkeypatch)
    path = writer.write(tmp_path, 3, rows(1, 2), NOTE)
    assert pq.read_table(path).num_rows == 2
    assert [name.startswith(".") for names in seen for name in names] == [True]
    assert [entry.name for entry in tmp_path.iterdir()] == ["3.parquet"]


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    """A hidden file that no process holds is taken away, and nothing else."""
    (tmp_path / f".abc{writer.BUILDING}").write_bytes(b"PAR1")
    (tmp_path / ".mine").write_bytes(b"")
    writer.sweep(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [".mine"]


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    """A file holds no time and no name of its own."""
    one, two = (writer.write(tmp_path, 3, rows(3, 4), NOTE) for _ in range(2))
    assert one.read_bytes() == two.read_bytes()
    assert json.loads(pq.read_metadata(one).metadata[KEY])["sampling"] == {"n": 4}


def test_a_flipped_bit_in_a_page_is_found(tmp_path: Path) -> None:
    """Pages have checksums: damaged tokens cannot be read for others."""
    path = writer.write(tmp_path, 3, rows(3, 4), NOTE)
    chunk = pq.read_metadata(path).row_group(0).column(LIGHT.index(LIGHT[-1]) + 1)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(path, page_checksum_verification=True)
