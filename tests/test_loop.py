"""The demo's loop, small: what it samples, captures, keeps, trains on and samples with again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

DATA = Path(__file__).parents[1] / "data"
ROUNDS, PROMPTS, SAMPLES, K = 2, 8, 4, 2  # the two shortest of some prompts differ in reward
SIZES = {"rounds": ROUNDS, "prompts": PROMPTS, "samples": SAMPLES, "k": K}


def loop(out: Path, **sizes: int) -> subprocess.CompletedProcess[str]:
    """The program, run."""
    options = [f"--{name}={value}" for name, value in sizes.items()]
    command = [sys.executable, str(DATA / "loop.py"), "-o", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a small loop and its table."""
    out = tmp_path_factory.mktemp("loop") / "out"
    done = loop(out, **SIZES)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.fixture(scope="module")
def sampler() -> Iterator[Any]:
    """The program that the loop samples with, on one thread as there: a log-prob's last digit
    decides a token."""
    import torch

    spec = importlib.util.spec_from_file_location("make", DATA / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = sys.modules["make"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)


def sampled(make: Any, weights: Path, step: int) -> list[dict[str, Any]]:
    """What weights sample in a step, sorted as capture sorts it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(DATA / "tokenizer.json")),
        pad_token=make.PAD, eos_token=make.EOS, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM.from_pretrained(weights)
    found = make.roll_out(model, words, 100 + step, PROMPTS, SAMPLES)
    return [
        {
            "uid": r.uid, "session_id": r.session, "score": r.score, "ground_truth":
            r.problem.answer, "prompt_ids": r.prompt_ids, "response_ids": r.response_ids,
            "rollout_log_probs": pytest.approx(r.log_probs, abs=1e-5),
        }
        for r in sorted(found, key=lambda r: (r.uid, r.session))
    ]  # fmt: skip


def captured(out: Path, arm: str, step: int) -> list[dict[str, Any]]:
    """The rows of a captured file."""
    file = out / arm / "captured" / f"{step}.parquet"
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def figures(out: Path, arm: str) -> list[dict[str, Any]]:
    """What the program wrote down of an arm's rounds."""
    lines = [json.loads(line) for line in (out / "loop.jsonl").read_text().splitlines()]
    return [line for line in lines if line["arm"].lower() == arm]


@pytest.mark.parametrize("arm", ["grpo", "gfpo"])
def test_a_round_is_sampled_by_the_weights_that_the_round_before_published(
    played: tuple[Path, str], sampler: Any, arm: str
) -> None:
    """What is captured is what the start samples in the first round and what the weights published
    by it, not the start, sample in the second, log-probs and versions included."""
    out, _ = played
    start, published = DATA / "model", out / arm / "published" / "global_step_1"
    for step, weights in ((1, start), (2, published)):
        rows = captured(out, arm, step)
        expected = sampled(sampler, weights, step)
        assert [{name: row[name] for name in expected[0]} for row in rows] == expected
        assert {row["policy_version"] for row in rows} == {step - 1}
        for row in rows:  # by the actor that verl asked, from whole sequences
            assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-4)
    with_start = sampled(sampler, start, 2)
    assert [row["response_ids"] for row in captured(out, arm, 2)] != [
        row["response_ids"] for row in with_start
    ]
    mean = sum(row["score"] for row in with_start) / len(with_start)
    assert figures(out, "start")[1]["reward"] == pytest.approx(mean)
    assert [line["replay"]["replay/lag_max"] for line in figures(out, arm)] == [0, 0]


def test_both_arms_begin_with_the_same_samples(played: tuple[Path, str]) -> None:
    """In the first round the arms differ in what they train on, not in what they sampled."""
    out, _ = played
    assert captured(out, "grpo", 1) == captured(out, "gfpo", 1)
    assert captured(out, "grpo", 2) != captured(out, "gfpo", 2)


@pytest.mark.parametrize(("arm", "k"), [("grpo", SAMPLES), ("gfpo", K)])
def test_an_arm_trains_on_the_shortest_of_a_plain_sort(
    played: tuple[Path, str], arm: str, k: int
) -> None:
    """The rows trained on are the k shortest of each captured group, and the figures are theirs."""
    out, table = played
    lines = figures(out, arm)
    assert len(lines) == ROUNDS
    for step, line in enumerate(lines, 1):
        rows = captured(out, arm, step)
        groups = defaultdict(list)
        for at, row in enumerate(rows):
            groups[row["uid"]].append((len(row["response_ids"]), at))
        kept = sorted(at for group in groups.values() for _, at in sorted(group)[:k])
        [path] = (out / arm / "run" / "manifests").glob(f"{step:06}.*")
        assert sorted(json.loads(path.read_text())["manifest"]["row"]) == kept
        tokens = sum(len(rows[at]["response_ids"]) for at in kept)
        told = line["replay"]
        assert (line["rows"], told["replay/rows"], line["tokens"]) == (len(kept), len(kept), tokens)
        assert told["response_length/mean"] * len(kept) == pytest.approx(tokens)
        mean = sum(row["score"] for row in rows) / len(rows)
        assert line["reward"] == pytest.approx(mean)
        [shown] = [text for text in table.splitlines() if text.split()[:1] == [str(step)]]
        assert f"{mean:.3f}" in shown.split()
        assert f"{tokens:,}" in shown.split()


def test_the_plot_has_a_line_an_arm_in_each_panel(played: tuple[Path, str]) -> None:
    """The drawing is whole SVG: a line an arm, and one for the start where nothing is trained."""
    from xml.etree import ElementTree

    drawn = ElementTree.fromstring((played[0] / "loop.svg").read_text())
    panels = [g for g in drawn if g.tag.endswith("g")]
    lines = [sum(part.tag.endswith("polyline") for part in panel) for panel in panels]
    assert lines == [3, 3, 3, 2, 2, 0]


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    """The program takes away its own old folder and no other."""
    (tmp_path / "mine.txt").touch()
    done = loop(tmp_path, **SIZES)
    assert done.returncode == 1
    assert "not made by this program" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
