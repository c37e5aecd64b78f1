"""The loop once for real: two arms from one start, GRPO on all answers and GFPO on the shortest.

Each arm is a process (arm.py): a small policy samples, capture writes it out of verl's own V1
trainer, `filter` keeps, `replay` updates and publishes, and the new weights sample again. Both have
the same prompts and seeds. README.md says what comes out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plot import Panel, drawing

ARM = Path(__file__).with_name("arm.py")
MARKER = ".made-by-loop"
# Capture is installed as a user of verl does it; the rest lets verl run on a CPU. One thread each,
# for there are two arms.
MODULES = "rollsift.pipeline.capture,rollsift.pipeline.replay.cpu"
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": MODULES, "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
# A figure's name, what it is called, how it is written, and what its panel is called.
FIGURES = (
    ("reward", "reward", "{:.3f}", "mean reward"),
    ("length", "length (tokens)", "{:.1f}", "mean length of the responses (tokens)"),
    ("clipped", "clipped", "{:.1%}", "share of the responses cut at the limit"),
    ("rows", "rows trained", "{:,}", ""),
    ("tokens", "tokens trained", "{:,}", "tokens trained on"),
    ("update_s", "update (s)", "{:.1f}", "seconds of an update"),
)
BASELINE = "GFPO"  # the arm that samples with the start, too: it is done first
Rows = list[dict[str, Any]]


def fresh(out: Path) -> None:
    """An empty folder; an old one goes only where this program made it."""
    if out.exists():
        if not (out / MARKER).is_file():
            sys.exit(f"{out}: is there, and not made by this program; choose another -o")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).touch()


def start(name: str, folder: Path, k: int, told: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start an arm in its folder. What verl and capture say goes into a file there."""
    folder.mkdir()
    sizes = {"rounds": told.rounds, "prompts": told.prompts, "samples": told.samples, "k": k}
    options = [f"--{key}={value}" for key, value in sizes.items()]
    options += ["--baseline"] if name == BASELINE else []
    environment = {**os.environ, **ENVIRONMENT, "ROLLSIFT_CAPTURE": str(folder / "captured")}
    for foreign in ("ROLLSIFT_RECIPE", "RANK"):  # of something else, say torchrun
        environment.pop(foreign, None)
    with (folder / "stderr.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(ARM), name, str(folder), *options],
            env=environment, stdout=sys.stderr.fileno(), stderr=log,
        )  # fmt: skip


def play(arms: dict[str, int], told: argparse.Namespace) -> dict[str, Rows]:
    """Play all arms side by side; -> figures by arm, the untrained start's too."""
    folders = {name: told.out / name.lower() for name in arms}
    running = {name: start(name, folders[name], k, told) for name, k in arms.items()}
    try:
        while None in (ends := [arm.poll() for arm in running.values()]) and not any(ends):
            time.sleep(0.1)
        failed = [name for name, arm in running.items() if arm.poll()]
    finally:
        for arm in running.values():
            arm.kill()
            arm.wait()
    if failed:
        log = folders[failed[0]] / "stderr.txt"
        sys.exit(f"{failed[0]} failed; the end of {log}:\n{log.read_text()[-3000:]}")
    found = {name: read(folder / "rounds.jsonl") for name, folder in folders.items()}
    return {**found, "start": read(folders[BASELINE] / "start.jsonl")}


def read(path: Path) -> Rows:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(arms: dict[str, Rows]) -> str:
    """Round by round, the arms side by side under each figure."""
    [count] = {len(rows) for rows in arms.values()}
    blocks = [["", *aligned([["round"], *([str(at)] for at in range(1, count + 1))])]]
    for name, title, form, _ in FIGURES:
        lines = [[arm, *(form.format(row[name]) for row in rows)]
                 for arm, rows in arms.items() if name in rows[0]]  # fmt: skip
        blocks.append([title, *aligned(list(zip(*lines, strict=True)))])
    wide = [max(map(len, block)) for block in blocks]
    return "\n".join(
        "   ".join(text.ljust(w) for text, w in zip(line, wide, strict=True)).rstrip()
        for line in zip(*blocks, strict=True)
    )


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells under each other, a rule under the first line."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def plots(arms: dict[str, Rows]) -> str:
    """A panel a figure over the rounds, a line an arm, as SVG."""
    panels = []
    for name, _, _, label in FIGURES:
        lines = {t: [row[name] for row in rows] for t, rows in arms.items() if name in rows[0]}
        if label:
            panels.append(Panel(label, lines))
    return drawing(panels, "round")


def main(args: Sequence[str] | None = None) -> None:
    """Play both arms; the table goes to stdout, figures and plot into the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/demo-loop"))
    for name, value in (("rounds", 8), ("prompts", 32), ("samples", 16), ("k", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    told = parser.parse_args(args)
    told.out = told.out.absolute()
    fresh(told.out)
    found = play({"GRPO": told.samples, "GFPO": told.k}, told)
    with (told.out / "loop.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for rows in found.values() for row in rows)
    meant = {
        "GRPO": f"trained on all {told.samples} answers to a prompt",
        "GFPO": f"on the {told.k} shortest of {told.samples}",
        "start": "not trained",
    }
    titles = {name: f"{name}: {what}" for name, what in meant.items()}
    drawn = plots({titles[name]: rows for name, rows in found.items()})
    (told.out / "loop.svg").write_text(drawn)
    print("; ".join(titles.values()), table(found), sep="\n\n")


if __name__ == "__main__":
    main()
