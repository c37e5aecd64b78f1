"""Makes the rollouts in this folder: a small policy learns sums, its samples are logged three ways.

A Qwen2-architecture model of a few hundred thousand parameters learns to add two numbers, writing
out each column with its carry. Between eight rounds of sampling it goes on learning, so every step
is sampled by other weights. The same rollouts are then written by verl's own V1 writer, by verl's
own V0 writer and as token-level Parquet. README.md says what it needs and how to run it.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transfer_queue
from tensordict import TensorDict
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from verl import DataProto
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

SEED = 20
STEPS, PROMPTS, SAMPLES = 8, 32, 16
MIN_DIGITS, MAX_DIGITS = 2, 6
MAX_RESPONSE = 192  # tokens; a longer answer is cut off
BATCH_MULTIPLE = 48  # verl pads 512 rows to 528
FIRST_UPDATES, UPDATES, BATCH, OWN_SHARE = 480, 25, 64, 0.25
LEARNING_RATE = 3e-3
PAD, EOS = "<pad>", "<eos>"
T = TypeVar("T")
COLUMNS = pa.schema(
    [
        ("uid", pa.string()),
        ("step", pa.int64()),
        ("score", pa.float64()),
        ("policy_version", pa.int64()),
        ("truncated", pa.bool_()),
        ("data_source", pa.string()),
        ("gts", pa.string()),
        ("input", pa.string()),
        ("output", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.int8())),
        ("rollout_log_probs", pa.list_(pa.float32())),
    ]
)


# --- the task ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Two numbers to add."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The question as the policy sees it."""
        return f"Add {self.left} and {self.right}.\n"

    @property
    def answer(self) -> str:
        """The right total."""
        return str(self.left + self.right)


def draw_problem(rng: random.Random, digits: int) -> Problem:
    """One number of exactly so many digits and one of at most so many, in either order."""
    long = rng.randrange(10 ** (digits - 1), 10**digits)
    short = rng.randrange(10 ** (rng.randint(max(1, digits - 2), digits) - 1), 10**digits)
    return Problem(*rng.sample((long, short), 2))


def working(problem: Problem, slip: random.Random | None = None) -> tuple[list[str], str]:
    """The columns from the right with their carries, and the total; `slip` makes one sum wrong."""
    left, right = str(problem.left)[::-1], str(problem.right)[::-1]
    width = max(len(left), len(right))
    wrong = slip.randrange(width) if slip else -1
    carry, lines, total = 0, [], ""
    for column in range(width):
        a, b = (int(side[column]) if column < len(side) else 0 for side in (left, right))
        value = a + b + carry + (1 if column == wrong else 0)
        lines.append(f"{a}+{b}+{carry}={value}\n")
        carry, total = value // 10, str(value % 10) + total
    return lines, (str(carry) if carry else "") + total


def solution(problem: Problem, rng: random.Random) -> str:
    """A worked answer: some stop at once, some check, some check again and again, some ramble."""
    slips = rng.random() < 0.12
    lines, total = working(problem, rng if slips else None)
    right_lines, answer = working(problem)
    text = [*lines, f"so {total}\n"]
    checks = 1 if slips else 0
    if slips or rng.random() < 0.35:
        checks += 0 if slips else 1
        while checks < 6 and rng.random() < 0.35:
            checks += 1
    elif rng.random() < 0.3:
        text.append("quick check, " + " ".join(line.strip()[-1] for line in lines) + " fine\n")
    for turn in range(checks):
        if rng.random() < 0.4:
            text.append(rng.choice(("wait, let me be sure\n", "hmm, once more from the right\n")))
        text += ["check\n", *right_lines]
        text.append("that was wrong\n" if slips and turn == 0 else "the same again\n")
    return "".join(text) + f"answer {answer}"


def score(output: str, truth: str) -> float:
    """1.0 where the last line states the right answer, else 0.0."""
    found = re.search(r"answer (\d+)\s*$", output)
    return 1.0 if found and found[1] == truth else 0.0


# --- the policy ----------------------------------------------------------------------------------


def build_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """A byte-pair vocabulary of single digits and signs, and whole words."""
    problems = [
        draw_problem(rng, digits)
        for digits in range(MIN_DIGITS, MAX_DIGITS + 1)
        for _ in range(300)
    ]
    texts = [text for problem in problems for text in (problem.prompt, solution(problem, rng))]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[^A-Za-z]"), "isolated")
    inner.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(vocab_size=128, special_tokens=[PAD, EOS], show_progress=False)
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """An untrained policy of some 300 k parameters."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


Lesson = tuple[list[int], list[int]]  # prompt and response, as token ids


class Learner:
    """Next-token training on responses: fresh worked answers, and own samples that were right."""

    def __init__(
        self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random
    ) -> None:
        self.model, self.tokenizer, self.rng = model, tokenizer, rng
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.updates = 0

    def lesson(self) -> Lesson:
        """A fresh problem with its worked answer."""
        problem = draw_problem(self.rng, self.rng.randint(MIN_DIGITS, MAX_DIGITS))
        worked = self.tokenizer.encode(solution(problem, self.rng))
        response = [*worked, self.tokenizer.eos_token_id]
        return self.tokenizer.encode(problem.prompt), response[:MAX_RESPONSE]

    def learn(self, updates: int, own: Sequence[Lesson] = ()) -> float:
        """So many updates on batches of similar length; gives the last loss."""
        wanted = updates * BATCH
        lessons = list(own)[: int(wanted * OWN_SHARE)]
        lessons += [self.lesson() for _ in range(wanted - len(lessons))]
        loss = 0.0
        for chunk in cut(self.rng.sample(lessons, wanted), 8 * BATCH):
            chunk.sort(key=lambda lesson: len(lesson[0]) + len(lesson[1]))
            batches = cut(chunk, BATCH)
            self.rng.shuffle(batches)
            for batch in batches:
                loss = self.update(batch)
        return loss

    def update(self, lessons: Sequence[Lesson]) -> float:
        """One optimizer step on one padded batch; prompt and padding carry no loss."""
        rows = [torch.tensor(prompt + response) for prompt, response in lessons]
        labels = [torch.tensor([-100] * len(prompt) + response) for prompt, response in lessons]
        ids = torch.nn.utils.rnn.pad_sequence(rows, True, self.tokenizer.pad_token_id)
        wanted = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        logits = self.model.train()(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten()
        )
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, self.updates / 100)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())


def cut(items: Sequence[T], size: int) -> list[list[T]]:
    """Consecutive pieces of so many items."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


# --- sampling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """One sampled answer, with all that any of the three logs tells of it."""

    uid: str
    session: int
    problem: Problem
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    input: str
    output: str
    score: float
    truncated: bool


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM, prompts: Sequence[list[int]], pad: int, eos: int, seed: int
) -> list[tuple[list[int], list[float]]]:
    """One response a prompt at temperature 1, and the float32 log-prob of each of its tokens."""
    draw = torch.Generator().manual_seed(seed)
    flipped = [torch.tensor(prompt[::-1]) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(flipped, True, pad).flip(1)  # padded on the left
    mask = (ids != pad).long()
    results: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    active, cache = torch.arange(len(prompts)), None
    for _ in range(MAX_RESPONSE):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model.eval()(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        log_probs = out.logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(log_probs.exp(), 1, generator=draw)
        taken = log_probs.gather(1, token)
        for row, t, p in zip(
            active.tolist(), token[:, 0].tolist(), taken[:, 0].tolist(), strict=True
        ):
            results[row][0].append(t)
            results[row][1].append(p)
        going = (token[:, 0] != eos).nonzero()[:, 0]
        if not len(going):
            break
        cache = out.past_key_values
        if len(going) < len(active):
            cache.batch_select_indices(going)
        active, ids = active[going], token[going]
        mask = torch.nn.functional.pad(mask[going], (0, 1), value=1)
    return results


def roll_out(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    step: int,
    count: int = PROMPTS,
    samples: int = SAMPLES,
) -> list[Rollout]:
    """All rollouts of one step in group order: new prompts of every difficulty, G answers each."""
    rng = random.Random(f"{SEED} step {step}")
    digits = [MIN_DIGITS + i % (MAX_DIGITS - MIN_DIGITS + 1) for i in range(count)]
    problems = [draw_problem(rng, long) for long in rng.sample(digits, count)]
    uids = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in problems]
    plan = [(g, session) for g in range(count) for session in range(samples)]
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    answers = sample(model, [prompts[g] for g, _ in plan], pad, eos, SEED + step)
    rollouts = []
    for (g, session), (ids, log_probs) in zip(plan, answers, strict=True):
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in (prompts[g], ids)]
        reward, truncated = score(texts[1], problems[g].answer), ids[-1] != eos
        rollouts.append(
            Rollout(
                uids[g], session, problems[g], prompts[g], ids, log_probs, *texts, reward, truncated
            )
        )
    return rollouts


@torch.no_grad()
def largest_difference(model: Qwen2ForCausalLM, rollouts: Sequence[Rollout]) -> float:
    """How far the recorded log-probs lie from those of a plain forward pass."""
    worst = 0.0
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        first = len(rollout.prompt_ids)
        logits = model.eval()(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
        plain = logits.log_softmax(-1).gather(1, ids[0, first:, None])[:, 0]
        worst = max(worst, float((plain - torch.tensor(rollout.log_probs)).abs().max()))
    return worst


# --- the three logs ------------------------------------------------------------------------------


class Queue:
    """The two client functions of TransferQueue that verl's V1 writer calls, over a dictionary."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, object]] = {}

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: TensorDict, tags: object = None
    ) -> None:
        for key, row in zip(keys, fields, strict=True):
            self.rows[key] = {name: row[name] for name in list(row.keys())}

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: list[str] | None = None
    ) -> TensorDict:
        names = select_fields or list(self.rows[keys[0]])
        return list_of_dict_to_tensordict(
            [{name: self.rows[key][name] for name in names} for key in keys]
        )


def bare(trainer: type, tokenizer: PreTrainedTokenizerFast, step: int) -> object:
    """A verl trainer with only what its rollout writer needs."""
    made = object.__new__(trainer)
    made.tokenizer, made.global_steps = tokenizer, step
    made._init_dump_executor()
    return made


def last_token_scores(rollout: Rollout) -> torch.Tensor:
    """The score on the last token of the response, zeros before it, as verl places it."""
    return torch.tensor([0.0] * (len(rollout.response_ids) - 1) + [rollout.score])


def write_v1(
    rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerFast, step: int, folder: Path
) -> None:
    """verl's V1 writer, after verl's own padding to a whole number of mini-batches."""
    rng = random.Random(f"{SEED} padding {step}")
    queue, keys = Queue(), [f"{r.uid}_{r.session}_0" for r in rollouts]
    fields = [
        {
            "uid": r.uid,
            "session_id": r.session,
            "prompts": torch.tensor(r.prompt_ids),
            "responses": torch.tensor(r.response_ids),
            "rm_scores": last_token_scores(r),
            "rollout_log_probs": torch.tensor(r.log_probs),
            "reward_model": {"style": "rule", "ground_truth": r.problem.answer},
            "data_source": "sums",
        }
        for r in rollouts
    ]
    tags = [{"seq_len": len(r.prompt_ids) + len(r.response_ids)} for r in rollouts]
    calls = {"kv_batch_put": queue.kv_batch_put, "kv_batch_get": queue.kv_batch_get}
    seeded = {"uuid4": lambda: uuid.UUID(int=rng.getrandbits(128), version=4)}
    with mock.patch.multiple(transfer_queue, **calls), mock.patch.multiple(uuid, **seeded):
        queue.kv_batch_put(keys, "train", list_of_dict_to_tensordict(fields))
        batch = transfer_queue.KVBatchMeta(keys=keys, tags=tags, partition_id="train")
        batch = padding_utils.upsample_batch_to_divisible_size(
            batch, BATCH_MULTIPLE, tokenizer.eos_token_id
        )
        trainer = bare(PPOTrainerSync, tokenizer, step)
        trainer._log_rollout_data(batch, {}, str(folder))
        trainer._shutdown_dump_executor()


def write_v0(
    rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerFast, step: int, folder: Path
) -> None:
    """verl's V0 writer, with the rows out of order as its batch balancing leaves them."""
    rows = random.Random(f"{SEED} order {step}").sample(rollouts, len(rollouts))
    pad = torch.nn.utils.rnn.pad_sequence
    prompts = [torch.tensor(r.prompt_ids[::-1]) for r in rows]
    tensors = {
        "prompts": pad(prompts, True, tokenizer.pad_token_id).flip(1),
        "responses": pad(
            [torch.tensor(r.response_ids) for r in rows], True, tokenizer.pad_token_id
        ),
        "token_level_scores": pad([last_token_scores(r) for r in rows], True),
    }
    truths = [{"style": "rule", "ground_truth": r.problem.answer} for r in rows]
    batch = DataProto.from_dict(tensors, {"reward_model": np.array(truths, dtype=object)})
    trainer = bare(RayPPOTrainer, tokenizer, step)
    trainer._log_rollout_data(batch, {"acc": np.array([r.score for r in rows])}, {}, str(folder))
    trainer._shutdown_dump_executor()


def write_tokens(rollouts: Sequence[Rollout], step: int, folder: Path) -> None:
    """Token-level Parquet: light columns first, whole groups in every row group."""
    columns = {
        "uid": [r.uid for r in rollouts],
        "step": [step] * len(rollouts),
        "score": [r.score for r in rollouts],
        "policy_version": [step - 1] * len(rollouts),
        "truncated": [r.truncated for r in rollouts],
        "data_source": ["sums"] * len(rollouts),
        "gts": [r.problem.answer for r in rollouts],
        "input": [r.input for r in rollouts],
        "output": [r.output for r in rollouts],
        "prompt_ids": [r.prompt_ids for r in rollouts],
        "response_ids": [r.response_ids for r in rollouts],
        "response_mask": [[1] * len(r.response_ids) for r in rollouts],
        "rollout_log_probs": [r.log_probs for r in rollouts],
    }
    folder.mkdir(exist_ok=True)
    pq.write_table(
        pa.table(columns, schema=COLUMNS),
        folder / f"{step}.parquet",
        row_group_size=16 * SAMPLES,
        compression="zstd",
        write_page_checksum=True,
    )


# --- all together --------------------------------------------------------------------------------


def figures(step: int, rollouts: Sequence[Rollout]) -> str:
    """One line of the table in the README."""
    lengths = [len(r.response_ids) for r in rollouts]
    sums = [sum(r.score for r in group) for group in cut(rollouts, SAMPLES)]
    cells = [
        f"{np.mean([r.score for r in rollouts]):.3f}",
        f"{np.mean(lengths):.1f}",
        min(lengths),
        max(lengths),
        f"{np.mean([r.truncated for r in rollouts]):.1%}",
        sum(total == SAMPLES for total in sums),
        sum(total == 0 for total in sums),
    ]
    return "| " + " | ".join(map(str, [step, *cells])) + " |"


def main() -> None:
    """Train, sample and write, step by step; print the table of README.md."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "-o", "--out", type=Path, default=here, help="where to write (default: here)"
    )
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = build_tokenizer(rng)
    learner = Learner(build_model(tokenizer), tokenizer, rng)
    own: list[Lesson] = []
    lines, began = [], time.monotonic()
    for step in range(1, STEPS + 1):
        loss = learner.learn(UPDATES if own else FIRST_UPDATES, own)
        rollouts = roll_out(learner.model, tokenizer, step)
        assert largest_difference(learner.model, rollouts[::SAMPLES]) < 1e-4
        own = [(r.prompt_ids, r.response_ids) for r in rollouts if r.score]
        write_v1(rollouts, tokenizer, step, out / "verl_v1")
        write_v0(rollouts, tokenizer, step, out / "verl_v0")
        write_tokens(rollouts, step, out / "tokens")
        lines.append(figures(step, rollouts))
        print(f"{time.monotonic() - began:.0f} s, loss {loss:.3f}: {lines[-1]}", flush=True)
    learner.model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
