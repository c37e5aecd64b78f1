"""Small logs of every format, broken at random: in bytes, in JSON, in Arrow types, as packed.

All is made from a random.Random alone. pyarrow is imported in functions: the process that forks the
workers must not have its threads.
"""

from __future__ import annotations

import gzip
import json
import random
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

KINDS = ("jsonl", "gzip", "zstd", "parquet", "generation", "trl")
ROWS = 6
RECIPES: list[dict[str, Any]] = [
    {}, {"metric": "token_efficiency"}, {"metric": "length(response)"}, {"zero_variance": "drop"},
    {"exclude_where": "extra > 1"}, {"length": "bytes"}, {"correct": "reward > 0.5"},
    {"min_correct": 1}, {"difficulty": {"scope": "global"}}, {"exclude_where": "note = 'a'"},
]  # fmt: skip
REWARD = "def score(solution_str, **rest):\n    return len(solution_str)\n"
TEXTS = [
    "", "a", "1", "nan", "True", "\x1b]0;x\x07\r\u202e\x9b", "\0", "\ufeff", "é\U0001f600",
    "x" * 9999,
]  # fmt: skip
VALUES = [
    *map(json.dumps, TEXTS),
    *map(json.dumps, [None, True, 0, -1, 1 << 53, 1 << 64, -0.0, 1.5, [], {}, [1, 0], ["a"]]),
    "-0", "1e400", "-1e-400", "NaN", "-Infinity", "9" * 5000, "1" + "0" * 400, "01", "1.", "+1",
    "0x1", "'a'", "nul", '"a\nb"', '"\t"', r'"\ud800"', r'"\udc00\ud800"', r'"\ud83d\ude00"',
    r'"\u0000"', r'"\x"', '{"a":1,"a":2}', r'{"\ud800":1}', '[{"role":"a","content":"b"}]',
    "[" * 60 + "]" * 60, "[" * 70 + "]" * 70, "[" * 9999 + "]" * 9999, "[" * 99999,
    '{"a":' * 9999 + "1" + "}" * 9999,
]  # fmt: skip
NAMES = [
    "Score", "kept", "source_row", "correct", "extra", "extra_kept", "acc", "field:extra", "step",
    "response_ids", "response_mask", "response_length", "policy_version", "reward", "truncated",
    "finish_reason", "completion", "a\nb", '"', *TEXTS,
]  # fmt: skip
KEYS = [*map(json.dumps, NAMES), r'"\ud800"', r'"sc\u006fre"', "score", '"']
BYTES = [
    b"\n", b"\r\n", b"\0", b"\xff", b"\xed\xa0\x80",
    b'"', b"\\", b"{", b"}", b"\xef\xbb\xbf", b"PAR1",
]  # fmt: skip


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Bytes with one thing wrong, often near the end, where Parquet has its footer."""
    at = rng.choice([rng.randrange(len(data) + 1), max(0, len(data) - rng.randrange(1, 400))])
    end = min(len(data), at + rng.choice([1, 1, 2, 8, 100]))
    part = data[at:end]
    new = rng.choice(
        [
            bytes(byte ^ 1 << rng.randrange(8) for byte in part),
            rng.randbytes(len(part)),
            rng.choice(BYTES),
            rng.choice(BYTES) + part,
            part + part,
            b"",
            b"\0" * len(part),
            part + data,
        ]
    )
    return data[:at] if rng.random() < 0.1 else data[:at] + new + data[end:]


def lines(rng: random.Random, step: int, changes: int) -> bytes:
    """Records as json.dumps writes them, some of them changed in shape."""
    usual: list[dict[str, Any]] = [
        {
            "input": "q",
            "output": "x" * i,
            "gts": "4",
            "score": i / 2,
            "step": step,
            "uid": "ab"[i % 2],
        }
        | {"extra": i, "note": "abc"[i % 3]}
        for i in range(ROWS)
    ]
    records = [[[json.dumps(k), json.dumps(v)] for k, v in record.items()] for record in usual]
    for _ in range(changes):
        record = rng.choice(records)
        at = rng.randrange(len(record) or 1)
        what = rng.randrange(9)
        if not record:
            continue
        if what < 3:
            record[at][1] = rng.choice(VALUES)
        elif what == 3:
            value = rng.choice(VALUES)
            records = [
                [*r[:at], [r[at][0], value], *r[at + 1 :]] if at < len(r) else r for r in records
            ]
        elif what == 4:
            key = rng.choice(KEYS)
            records = [[*r, [key, rng.choice(VALUES)]] for r in records]
        elif what == 5:
            record[at][0] = rng.choice([*KEYS, record[0][0]])
        elif what == 6 and len(record) > 1:
            del record[at]
        elif what == 7:
            rng.shuffle(record)
        else:
            records.insert(rng.randrange(ROWS), [])
    texts = ["{" + ", ".join(f"{k}: {v}" for k, v in record) + "}" for record in records]
    if rng.random() < 0.1 * bool(changes):
        texts.insert(rng.randrange(ROWS), rng.choice([*VALUES, "", "\t", "//"]))
    return "".join(text + "\n" for text in texts).encode(errors="surrogatepass")


def packed(rng: random.Random, kind: str, data: bytes) -> bytes:
    """Compressed data, at times in several members or with one of another kind after it."""
    import pyarrow as pa

    def pack(part: bytes) -> bytes:
        zstd = (kind == "zstd") != (rng.random() < 0.03)
        return (
            bytes(pa.compress(part, "zstd", asbytes=True)) if zstd else gzip.compress(part, mtime=0)
        )

    cut = rng.choice([0, 0, rng.randrange(len(data) + 1)])
    return pack(data[:cut]) + pack(data[cut:]) if cut else pack(data)


def some_type(rng: random.Random, depth: int = 2) -> Any:
    """An Arrow type that Parquet can hold."""
    import pyarrow as pa

    flat = [
        pa.bool_(), pa.int8(), pa.uint64(), pa.int64(), pa.float16(), pa.float32(), pa.float64(),
        pa.decimal128(9, 2), pa.decimal256(50, 2), pa.string(), pa.large_string(), pa.string_view(),
        pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3), pa.date32(), pa.date64(),
        pa.time32("ms"), pa.time64("us"), pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.null(),
        pa.timestamp("ms", "Mars/Base"), pa.duration("us"), pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.int64()),
    ]  # fmt: skip
    if not depth or rng.random() < 0.6:
        return rng.choice([*flat, pa.uuid(), pa.json_(), pa.bool8()] if depth == 2 else flat)
    inner = some_type(rng, depth - 1)
    return rng.choice(
        [
            pa.list_(inner), pa.large_list(inner), pa.list_(inner, 2), pa.list_view(inner),
            pa.struct([("a", inner), ("b", pa.int64())]),
            pa.map_(pa.string(), inner),
        ]
    )  # fmt: skip


def some_value(rng: random.Random, type_: Any) -> Any:
    """A value for `pa.array` of such a type."""
    import pyarrow.types as is_

    type_ = getattr(type_, "storage_type", type_)  # of an extension
    inner = getattr(type_, "value_type", None)
    if rng.random() < 0.1 or is_.is_null(type_):
        return None
    if is_.is_dictionary(type_):
        return some_value(rng, inner)
    if is_.is_map(type_):
        return [(str(i), some_value(rng, type_.item_type)) for i in range(rng.randrange(3))]
    if is_.is_struct(type_):
        return {field.name: some_value(rng, field.type) for field in type_}
    if is_.is_nested(type_):
        size = type_.list_size if is_.is_fixed_size_list(type_) else rng.randrange(4)
        return [some_value(rng, inner) for _ in range(size)]
    if is_.is_boolean(type_):
        return rng.random() < 0.5
    if is_.is_floating(type_):
        return rng.choice([0.0, -0.0, 1.5, float("nan"), float("-inf")])
    if is_.is_decimal(type_):
        return Decimal(rng.choice(["0", "-1.25", "9999999.99"]))
    if "binary" in str(type_):
        return rng.randbytes(
            type_.byte_width if is_.is_fixed_size_binary(type_) else rng.randrange(4)
        )
    if "string" in str(type_):
        return rng.choice(TEXTS)
    return rng.choice([0, 1, 127, *([1 << 40, 1 << 62] if type_.bit_width == 64 else [])])


def table(rng: random.Random, kind: str, step: int, changes: int, tokens: bool) -> Any:
    """A log of a kind as a table, some columns of other types or with text that is none."""
    import pyarrow as pa

    texts = ["x" * i for i in range(ROWS)]
    scores = [i / 2 for i in range(ROWS)]
    columns: dict[str, Any] = {"step": [step] * ROWS, "extra": list(range(ROWS)), "note": texts}
    if kind == "parquet":
        columns |= {"uid": list("ababab"), "score": scores, "input": texts, "output": texts}
        if tokens:
            columns |= {"response_ids": [[1] * i for i in range(ROWS)]}
            columns |= {"response_mask": [[1] * i for i in range(ROWS)]}
    elif kind == "trl":
        columns |= {
            "prompt": ["q"] * ROWS,
            "completion": texts,
            "accuracy": scores,
            "advantage": scores,
        }
    else:
        columns |= {"responses": [["a", "bc", ""]] * ROWS, "data_source": ["s"] * ROWS}
        columns |= {"prompt": [[{"role": "user", "content": "q"}]] * ROWS}
        columns |= {"reward_model": [{"style": "rule", "ground_truth": "4"}] * ROWS}
    arrays: dict[str, Any] = {name: pa.array(values) for name, values in columns.items()}
    for _ in range(changes):
        name = rng.choice([*arrays, *NAMES])
        if rng.random() < 0.1:
            raw = [rng.choice([b"a", b"\xff", b"\xed\xa0\x80", None]) for _ in range(ROWS)]
            arrays[name] = pa.array(raw, pa.binary()).view(pa.string())
        elif rng.random() < 0.1:
            arrays.pop(name, None)
        else:
            type_ = some_type(rng)
            with suppress(pa.ArrowException):  # not every type can be nested
                arrays[name] = pa.array([some_value(rng, type_) for _ in range(ROWS)], type_)
    names = [rng.choice(list(arrays)) if rng.random() < 0.01 else name for name in arrays]
    return pa.table(list(arrays.values()), names) if arrays else pa.table({})


def write(rng: random.Random, kind: str, logs: Path) -> None:
    """A log of two steps; the first is often whole."""
    tokens = rng.random() < 0.5
    for step in (1, 2):
        changes = rng.choice([0, 0, 1, 3]) if step == 1 else rng.choice([0, 1, 1, 2, 4])
        if kind in KINDS[:3]:
            data, name = lines(rng, step, changes), f"{step}.jsonl"
            if rng.random() < 0.3:
                data = mutated(rng, data)
            data = data if kind == "jsonl" else packed(rng, kind, data)
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            log, sink = table(rng, kind, step, changes, tokens), pa.BufferOutputStream()
            sliced = "view" not in str(log.schema)  # pyarrow cannot slice these
            with suppress(pa.ArrowNotImplementedError):  # which long pages need, too
                pq.write_table(
                    log, sink, row_group_size=rng.choice([1, 4, ROWS]) if sliced else ROWS,
                    use_dictionary=rng.random() < 0.5,
                    compression=rng.choice(["none", "snappy", "zstd", "gzip"]),
                    store_schema=rng.random() < 0.8, data_page_version=rng.choice(["1.0", "2.0"]),
                )  # fmt: skip
            data = sink.getvalue().to_pybytes()
            name = f"completions_{step:05d}.parquet" if kind == "trl" else f"{step}.parquet"
        if kind != "jsonl" and rng.random() < (0.1 if step == 1 else 0.5):
            data = mutated(rng, data)
        (logs / name).write_bytes(data)
