"""Seeded synthetic logs: verl's JSONL, and light Parquet of a logged run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollsift.pipeline.captured import digest
from rollsift.schemas.captured import FORMAT, KEY, Captured

SAMPLES = 16
SIGNS = ["\n", "\n\n", "$x^2$", "\\frac{1}{2}", "\\boxed{7}", '"so"', "é", "答案", "→", "12", "0.5"]


def _words(rng: np.random.Generator) -> np.ndarray:
    """Words as they are frequent: short ones first, signs among them."""
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    made = sorted(("".join(rng.choice(letters, rng.integers(1, 11))) for _ in range(4000)), key=len)
    for place, sign in enumerate(SIGNS):
        made.insert(7 * place + 3, sign)
    return np.array(made, dtype=object)


def _uuids(rng: np.random.Generator, count: int) -> list[str]:
    made = [rng.bytes(16).hex() for _ in range(count)]
    return [f"{x[:8]}-{x[8:12]}-{x[12:16]}-{x[16:20]}-{x[20:]}" for x in made]


def jsonl(folder: Path, steps: int, prompts: int, seed: int = 0) -> list[Path]:
    """Step files as verl's V1 trainer writes them: about 4 kB a row, 16 rows a prompt."""
    rng = np.random.default_rng(seed)
    words = _words(rng)
    folder.mkdir()

    def text(count: int) -> str:
        return " ".join(words[rng.zipf(1.15, count) % len(words)])

    paths = []
    for step in range(1, steps + 1):
        lines = []
        for uid in _uuids(rng, prompts):
            prompt, truth = text(int(rng.integers(50, 150))), text(1)
            for sample in range(SAMPLES):
                count = int(np.clip(rng.lognormal(6.6, 0.5), 250, 1700))
                row = {
                    "input": prompt,
                    "output": text(count),
                    "gts": truth,
                    "score": float(rng.integers(0, 2)),
                    "step": step,
                    "uid": f"{uid}_{sample}_0",
                }
                lines.append(json.dumps(row, ensure_ascii=False))
        path = folder / f"{step}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def light(folder: Path, rows: int, files: int, shape: str, seed: int = 0) -> list[Path]:
    """Token-less Parquet in groups of 16, of 1 to 31 (`ragged`), or of 16 out of order."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    paths = []
    for step in range(1, files + 1):
        count = rows // files
        groups = count // SAMPLES
        sizes = rng.integers(1, 2 * SAMPLES, groups) if shape == "ragged" else [SAMPLES] * groups
        code = np.repeat(np.arange(groups), sizes)
        if shape == "shuffled":
            rng.shuffle(code)
        uids = pa.array(_uuids(rng, groups))
        table = pa.table(
            {
                "uid": uids.take(pa.array(code)),
                "step": np.full(len(code), step),
                "score": rng.integers(0, 2, len(code)).astype(float),
                "response_length": rng.lognormal(6.2, 0.7, len(code)).astype(np.int64) + 1,
            }
        )
        path = folder / f"{step}.parquet"
        pq.write_table(table, path)
        paths.append(path)
    return paths


def captured(
    folder: Path, steps: int, prompts: int, seed: int = 0, *, words: int = 150_000,
    longest: int = 8192, mean: float = 6.5,
) -> list[Path]:  # fmt: skip
    """Step files as capture writes them, of ragged tokens and log-probs: 16 rows a prompt, about
    900 tokens a response, digests and page checksums included."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    rows = prompts * SAMPLES

    def lists(lengths: np.ndarray, values: np.ndarray) -> pa.Array:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    paths = []
    for step in range(1, steps + 1):
        responses = np.clip(rng.lognormal(mean, 0.8, rows).astype(int), 10, longest)
        asked = np.repeat(rng.integers(50, 400, prompts), SAMPLES)
        count = responses.sum()
        ids = [rng.integers(0, words, n).astype(np.int32) for n in (asked.sum(), count)]
        tokens = {
            "prompt_ids": lists(asked, ids[0]),
            "response_ids": lists(responses, ids[1]),
            "response_mask": lists(responses, np.ones(count, np.int8)),
            "rollout_log_probs": lists(responses, -rng.exponential(0.5, count).astype(np.float32)),
        }
        light = {
            "step": pa.array([step] * rows),
            "uid": pa.array([f"{step}g{row // SAMPLES}" for row in range(rows)]),
            "score": pa.array(rng.integers(0, 2, rows).astype(float)),
            "response_length": pa.array(responses),
            "policy_version": pa.array([step - 1] * rows),
            "temperature": pa.array([1.0] * rows),
        }
        table, size = pa.table(light | tokens), 4 * SAMPLES
        parts = [table.slice(at, size) for at in range(0, rows, size)]
        noted = {name: [digest(part[name]) for part in parts] for name in tokens}
        note = Captured(FORMAT, "0", "0", "", {}, {}, {}, noted)
        schema = table.schema.with_metadata({KEY: msgspec.json.encode(note)})
        paths.append(folder / f"{step}.parquet")
        with pq.ParquetWriter(paths[-1], schema, write_page_checksum=True) as writer:
            for part in parts:
                writer.write_table(part.replace_schema_metadata(schema.metadata))
    return paths
