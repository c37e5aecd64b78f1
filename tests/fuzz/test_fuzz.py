"""The fuzz itself: it runs, says what it tried, and keeps what it finds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# In place of an input's trial: an exception, a death, a hang, and what is as it should be.
FAULTS = """
def attempt(kind, seed, folder):
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "logs" / "1.jsonl").write_text(str(seed))
    return [lambda: 1 / 0, os.abort, lambda: time.sleep(60), lambda: "filtered"][seed]()

fuzz_readers.attempt, fuzz_readers.SECONDS = attempt, 2
"""


def _fuzz(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import os, sys, time, fuzz_readers\n{before}\nsys.exit(fuzz_readers.main())"
    return subprocess.run(
        [sys.executable, "-c", code, "--minutes", "3", *arguments],
        cwd=HERE, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def test_a_few_inputs_of_every_kind_are_no_finds(tmp_path: Path) -> None:
    """Every reader refuses in words or filters what it is given, and all inputs are counted."""
    done = _fuzz("--finds", str(tmp_path / "finds"), "--inputs", "3", "--seed", "4")
    assert not (tmp_path / "finds").exists(), done.stderr
    assert done.returncode == 0, done.stderr
    told = r"18 inputs: (\d+) refused, (\d+) skipped, (\d+) filtered .*, 0 finds\n"
    counted = re.fullmatch(told, done.stdout)
    assert counted, done.stdout
    assert sum(map(int, counted.groups())) == 18


def test_a_find_is_kept_with_its_input_and_how_to_make_it_again(tmp_path: Path) -> None:
    """A wrong exception, a worker that dies and one that hangs are each kept, exit status 4; the
    inputs after them are tried all the same."""
    arguments = ["--finds", str(tmp_path), "--kind", "zstd", "--inputs", "4"]
    done = _fuzz(*arguments, before=FAULTS)
    assert done.returncode == 4, done.stderr
    assert re.match("4 inputs: 0 refused, 0 skipped, 1 filtered .*, 3 finds", done.stdout)
    for seed, told in enumerate(["ZeroDivisionError", "exit code -6", "no answer within 2 s"]):
        kept = tmp_path / f"zstd-{seed}"
        assert (kept / "logs" / "1.jsonl").read_text() == str(seed)
        text = (kept / "find.txt").read_text()
        assert told in text
        assert text.startswith(f"--kind zstd --seed {seed} --inputs 1\n")
