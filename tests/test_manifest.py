"""Manifests: the canonical form, and what is refused."""

from __future__ import annotations

import hashlib
import json

import pytest

from rollsift.schemas.errors import CheckError
from rollsift.schemas.manifest import (
    FORMAT,
    ROWS,
    Counts,
    Manifest,
    Source,
    Tables,
    Thresholds,
    as_file,
    decode,
    encode,
)

# Format 1, written by hand from the description in DESIGN's words; never from encode().
GOLDEN = (
    '{"counts":{"bad_records":0,"dropped":{"outranked":1},"kept":2,"rows":3},'
    '"field_types":{"é":"string"},"format":1,"group_rows":[3],"group_tokens":[12],'
    '"length_unit":"tokens","offsets":[0,2],"previous":null,'
    '"recipe":{"min_mean":"0.1"},"reward_field":"score","row":[0,2],"source":[0,0],'
    '"sources":[{"digest":"ab","file":"7.jsonl","rows":3}],"step":7,'
    '"thresholds":{"q25":"0.5","q50":"0.5","q75":"0.5","seen":1}}'
)
MANIFEST = Manifest(
    format=1,
    step=7,
    previous=None,
    recipe={"min_mean": "0.1"},
    sources=[Source("7.jsonl", 3, "ab")],
    length_unit="tokens",
    reward_field="score",
    field_types={"é": "string"},
    thresholds=Thresholds("0.5", "0.5", "0.5", 1),
    counts=Counts(3, 2, {"outranked": 1}, 0),
    source=[0, 0],
    row=[0, 2],
    offsets=[0, 2],
    group_rows=[3],
    group_tokens=[12],
)


DIGESTS = {"groups": "0f" * 32, "rollouts": "9a" * 32}
BAD_RECORDS = {"bad_records": "5c" * 32}


def published(value: str, digests: dict[str, str] = DIGESTS) -> bytes:
    """The file that holds a manifest value, its id computed here."""
    digest = hashlib.sha256(value.encode()).hexdigest()
    tables = ",".join(f'"{name}":"{digests[name]}"' for name in sorted(digests))
    return f'{{"id":"{digest}","manifest":{value},"tables":{{{tables}}}}}\n'.encode()


@pytest.mark.parametrize("digests", [DIGESTS, DIGESTS | BAD_RECORDS])
def test_the_golden_manifest_of_format_1_stays_readable(digests: dict[str, str]) -> None:
    """A manifest of format 1 reads as what it says, and is written again byte for byte."""
    assert FORMAT == 1
    id_, manifest, tables = decode(published(GOLDEN, digests), "7.json")
    assert (manifest, tables) == (MANIFEST, Tables(**digests))
    assert id_ == hashlib.sha256(GOLDEN.encode()).hexdigest()
    assert encode(MANIFEST) == (id_, GOLDEN.encode())
    assert as_file(encode(MANIFEST), Tables(**digests)) == published(GOLDEN, digests)
    head = decode(published(GOLDEN, digests), "7.json", rows=False)
    assert (head[0], head[2]) == (id_, tables)
    names = [name for name in MANIFEST.__struct_fields__ if name not in ROWS]
    assert all(getattr(head[1], name) == getattr(MANIFEST, name) for name in names)


def test_any_flipped_bit_is_caught() -> None:
    """A single flipped bit of a published manifest is refused, or makes another digest of a table,
    which then is not the table's."""
    data = published(GOLDEN)
    others = 0
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            try:
                _, manifest, tables = decode(bytes(flipped), "7.json")
            except CheckError as error:
                assert "7.json" in str(error)  # noqa: PT017  # some flips are harmless
            else:
                assert manifest == MANIFEST
                assert tables != Tables(**DIGESTS)
                others += 1
                assert place > data.index(b'"tables"')
    assert 0 < others < 2 * 64 * 8


@pytest.mark.parametrize(
    "tables",
    [
        "",
        ',"tables":{}',
        ',"tables":null',
        f',"tables":{{"groups":"{"0f" * 32}"}}',
        f',"tables":{{"bad_records":null,"groups":"{"0f" * 32}","rollouts":"{"9a" * 32}"}}',
        f',"tables":{{"groups":"{"0F" * 32}","rollouts":"{"9a" * 32}"}}',
        f',"tables":{{"groups":"{"0f" * 32}","other":"{"0f" * 32}","rollouts":"{"9a" * 32}"}}',
    ],
)
def test_digests_of_the_tables_must_be_there(tables: str) -> None:
    """A file without the digests of its tables, or with others than theirs, is refused by name."""
    digest = hashlib.sha256(GOLDEN.encode()).hexdigest()
    with pytest.raises(CheckError, match=r"7\.json"):
        decode(f'{{"id":"{digest}","manifest":{GOLDEN}{tables}}}\n'.encode(), "7.json")


@pytest.mark.parametrize("change", [{"format": 2}, {"surprise": 1}, {"row": "0"}])
def test_other_formats_and_fields_are_refused(change: dict[str, object]) -> None:
    """A manifest of another format, or with a field that this one has not, is refused by name."""
    value = json.dumps(json.loads(GOLDEN) | change, sort_keys=True, separators=(",", ":"))
    with pytest.raises(CheckError, match=r"7\.json"):
        decode(published(value), "7.json")


@pytest.mark.parametrize("data", [b"", b"\0" * 64, published(GOLDEN)[:-40], b"[]", b'{"id":"a"}'])
def test_what_is_not_whole_is_refused(data: bytes) -> None:
    """Empty, zero-filled and cut files are refused with their name."""
    with pytest.raises(CheckError, match=r"7\.json"):
        decode(data, "7.json")
