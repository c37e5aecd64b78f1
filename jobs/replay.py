"""rollsift replay: the kept rollouts into verl's actor update."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from rollsift.pipeline.replay.devices import DEVICES, choose, process_group

from .output import as_json, note, progress

INTERRUPTED = 130
FOLDER = click.Path(path_type=Path)


@click.command(
    "replay",
    epilog="Example: rollsift replay run --model Qwen3-1.7B -s actor.optim.lr=1e-6 -o ckpt",
)
@click.argument("run", metavar="RUN", type=FOLDER)
@click.option(
    "--model", required=True, type=FOLDER, help="folder of the Hugging Face model to train"
)
@click.option(
    "-o", "--out", required=True, type=FOLDER,
    help="where checkpoints go, in the layout of verl's PPO trainer; goes on from the newest there",
)  # fmt: skip
@click.option(
    "-s", "--set", "sets", multiple=True, metavar="KEY=VALUE",
    help="a setting of verl's by its own name: actor.*, model.*, rollout.temperature, "
    "algorithm.rollout_correction.*, trainer.save_freq",
)  # fmt: skip
@click.option(
    "--advantages", type=click.Choice(["verl", "paper", "logged", "none"]), default="verl",
    show_default=True, help="over the kept rollouts of a group: as verl's V1 trainer, as the GFPO "
    "paper, or as captured; none is for a loader of your own",
)  # fmt: skip
@click.option(
    "--normalizer", type=click.Choice(["kept", "all"]), default="kept", show_default=True,
    help="what the loss is divided by: the kept rows, or all of their groups",
)  # fmt: skip
@click.option(
    "--odd", type=click.Choice(["pad", "error", "trim"]), default="pad", show_default=True,
    help="where rows don't divide: add rows without a gradient, stop, or leave out whole groups",
)  # fmt: skip
@click.option(
    "--old-log-probs", type=click.Choice(["recompute", "logged"]), default="recompute",
    show_default=True, help="those before an update: by its weights, or as captured",
)  # fmt: skip
@click.option("--max-lag", type=click.IntRange(0), metavar="N",
              help="leave out groups whose weights are more than N updates behind")  # fmt: skip
@click.option("--assume-version", is_flag=True,
              help="take step - 1 for policy versions that were not logged")  # fmt: skip
@click.option(
    "--reference", type=FOLDER, metavar="PATH",
    help="the reference model of a KL loss, where its log-probs were not logged",
)  # fmt: skip
@click.option(
    "--resume", type=FOLDER, metavar="PATH",
    help="a checkpoint folder global_step_N to go on from, verl's or rollsift's",
)  # fmt: skip
@click.option("--publish", type=FOLDER, metavar="DIR",
              help="write the weights there as Hugging Face safetensors")  # fmt: skip
@click.option("--every", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="publish after every N updates, and after the last")  # fmt: skip
@click.option("--logs", type=FOLDER, metavar="DIR", help="where the logs lie now")
@click.option("--device", type=click.Choice(list(DEVICES)), default="auto", show_default=True,
              help="auto takes npu, cuda, cpu, in this order")  # fmt: skip
@click.option("--workers", type=click.IntRange(0), default=1, show_default=True, metavar="N",
              help="processes that read ahead; 0 reads in this one")  # fmt: skip
def command(device: str, run: Path, **told: Any) -> int:
    """Train a model on the kept rollouts of RUN with verl's own actor update, a step an update.

    Alone, or by torchrun --no-python --nproc-per-node N rollsift replay ...; metrics come as JSON
    lines on stdout, by verl's names. SIGTERM saves and ends.
    """
    found = choose(device)
    from rollsift.pipeline.replay.trainer import Options, Telling, replay

    first = os.environ.get("RANK", "0") == "0"
    with process_group(found):
        telling = Telling()
        if first:
            telling = Telling(lambda metrics: click.echo(as_json(metrics)), note, _Bars())
        options = Options(run=run, **told)
        return 0 if replay(options, found, telling) else INTERRUPTED


class _Bars:
    """A bar on stderr for each thing that is done, made once its length is known."""

    def __init__(self) -> None:
        self.bars: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.bars:
            self.bars[what] = progress(total, what)
        bar = self.bars[what]
        bar.update(done - bar.pos)
        if done == total:
            bar.render_finish()
