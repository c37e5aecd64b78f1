"""Updates out of files equal the kept rows, taken by hand from those the files were written of."""

from __future__ import annotations

import random
import re
import runpy
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import rig
import torch
from torch.nn.utils.rnn import pad_sequence

from rollsift.pipeline.captured import digest
from rollsift.pipeline.replay import tensors
from rollsift.pipeline.replay.dataset import Item, Mini, Replay, Rules
from rollsift.pipeline.replay.share import Split
from rollsift.pipeline.replay.tokens import Lists
from rollsift.schemas.captured import KEY, TOKENS
from rollsift.schemas.errors import InputError, UsageError

LOG_PROBS = {"rollout_log_probs": "rollout", "old_log_probs": "old", "ref_log_prob": "ref"}
EVERY = Split(groups=100)  # one mini-batch for all groups


def in_training_order(rows: Sequence[Any], k: int = 2) -> list[Any]:
    """The kept rows as they are trained on: groups by their first row, in each the k sessions with
    the fewest tokens of the policy's (of equal ones the first), rows as they stand in the log."""
    groups: dict[tuple[int, str], dict[int, list[Any]]] = {}
    for row in rows:
        groups.setdefault((row.step, row.uid), {}).setdefault(row.session, []).append(row)
    kept = []
    for sessions in groups.values():
        lengths = {key: sum(sum(row.mask) for row in held) for key, held in sessions.items()}
        best = sorted(sessions, key=lengths.__getitem__)[:k]
        kept += [r for r in rows if any(r is held for key in best for held in sessions[key])]
    return kept


def written(folder: Path, rows: Sequence[Any], **columns: Callable[[Any], Any] | None) -> Path:
    """A log that nobody captured, in verl's names, uids as its V1 trainer's row keys; `columns` say
    what a row has in them."""
    for step in sorted({row.step for row in rows}):
        held = rig.of_step(rows, step)
        given = {name: by and [by(row) for row in held] for name, by in columns.items()}
        keys = [f"{row.uid}_{row.session}_{row.output}" for row in held]
        rig.write(folder, held, note=False, session_id=None, output_index=None,
                  response_length=None, **{"uid": keys} | given)  # fmt: skip
    return folder


def data(folder: Path, logs: Path, split: Split = EVERY, *, version: int = 0, rank: int = 0,
         k: int = 2, where: str | None = None, **rules: Any) -> Replay:  # fmt: skip
    """The updates of a log's run that keeps the k shortest, `where` excluded."""
    run = rig.run(folder / "run", logs, k, exclude_where=where)
    return Replay(run, split, Rules(**rules), version=version, rank=rank)


def expected(rows: Sequence[Any], **more: Any) -> dict[str, torch.Tensor]:
    """The tensors of these rows, made by torch alone, with verl's own advantages."""
    batch = rig.batch(rows, rig.advantages(rows))
    return {key: batch[key] for key in tuple(batch.keys()) if key not in LOG_PROBS} | more


def logged(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The rows' log-probs."""
    return {
        name: rig.nest([getattr(row, short) for row in rows], torch.float32)
        for name, short in LOG_PROBS.items()
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal keys, types, offsets and bits."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].is_nested
        assert found[key].dtype == value.dtype, key
        assert found[key].offsets().tolist() == value.offsets().tolist(), key
        assert torch.equal(found[key].values(), value.values()), key


def ids(mini: Mini) -> list[list[int]]:
    """The responses of a mini-batch."""
    return [row.tolist() for row in mini.batch["responses"].unbind()]


@pytest.mark.parametrize("tools", [False, True])
def test_items_are_the_kept_rows(tmp_path: Path, tools: bool) -> None:
    """Each update of a captured log has its kept rows in training order, key by key, bit by bit;
    with tools some tokens are not the policy's."""
    rows = rig.make_rows(steps=3, groups=3, samples=4, tools=tools)
    found = data(tmp_path, rig.write(tmp_path / "logs", rows), log_probs=tuple(LOG_PROBS))
    assert len(found) == 3
    for index in range(3):
        kept = rig.shortest(rig.of_step(rows, index + 1))
        assert kept == in_training_order(rig.of_step(rows, index + 1))
        item = found[index]
        [mini] = item.minis
        assert (item.step, len(item.manifest)) == (index + 1, 64)
        same(mini.batch, expected(kept) | logged(kept))
        assert (mini.global_batch_size, mini.temperature, mini.pads) == (6, 1.0, 0)


def test_nothing_is_of_another_type_or_device(tmp_path: Path) -> None:
    """All that an item holds lies on the CPU, and no tensor is float64, which an NPU lacks."""
    rows = rig.make_rows(steps=1)
    heat = [0.5 + n / 4 for n in range(len(rows))]
    logs = rig.write(tmp_path / "logs", rows, temperature=heat)
    item = data(tmp_path, logs, Split(2, micro=3), log_probs=tuple(LOG_PROBS), rejected=True)[0]
    assert item.rejected is not None
    for mini in (*item.minis, item.rejected):
        assert isinstance(mini.temperature, torch.Tensor)
        parts = [*mini.batch.values(), mini.session, mini.final, mini.temperature]
        assert {part.device.type for part in parts} == {"cpu"}
        assert {part.dtype for part in parts} == {torch.int64, torch.float32, torch.bool}


def test_mini_batches_are_whole_groups_in_order(tmp_path: Path) -> None:
    """Five groups in mini-batches of two make three, the last of one; advantages are those of the
    whole group wherever it is cut."""
    rows = rig.make_rows(steps=1, groups=5)
    minis = data(tmp_path, rig.write(tmp_path / "logs", rows), Split(2))[0].minis
    kept = rig.shortest(rows)
    assert [mini.global_batch_size for mini in minis] == [4, 4, 2]
    for mini, part in zip(minis, (kept[:4], kept[4:8], kept[8:]), strict=True):
        same(mini.batch, expected(part))


def test_ranks_share_the_rows(tmp_path: Path) -> None:
    """What three ranks get of a mini-batch is together its rows, each once, padding aside; every
    rank divides by the same number of rows."""
    rows = rig.make_rows(steps=1, groups=4)
    logs = rig.write(tmp_path / "logs", rows)
    rig.run(tmp_path / "run", logs)
    found = []
    for rank in range(3):
        [mini] = Replay(tmp_path / "run", Split(4, ranks=3), rank=rank)[0].minis
        assert mini.global_batch_size == 8
        found += ids(mini)[: len(ids(mini)) - mini.pads]
    assert sorted(found) == sorted(row.response for row in rig.shortest(rows))


def test_padding_has_no_gradient(tmp_path: Path) -> None:
    """Padding rows are a token of prompt and one of response, whose masks and numbers are all 0;
    they stand last and in no count of rows."""
    rows = rig.make_rows(steps=1, groups=1)
    logs = rig.write(tmp_path / "logs", rows)
    item = data(tmp_path, logs, Split(1, micro=5), log_probs=tuple(LOG_PROBS))[0]
    [mini] = item.minis
    kept = rig.shortest(rows)
    assert (mini.pads, mini.global_batch_size, item.counts["rows"]) == (3, 2, 2)
    for key, value in mini.batch.items():
        held = [row.tolist() for row in value.unbind()]
        wanted = [row.tolist() for row in (expected(kept) | logged(kept))[key].unbind()]
        pad = {"input_ids": [0, 0], "position_ids": [0, 1]}.get(key, [0])
        assert held == [*wanted, pad, pad, pad], key
    assert mini.session.tolist() == [0, 1, -1, -1, -1]
    assert mini.final.all()


@pytest.mark.parametrize("micro", [1, 4])
def test_the_padded_layout_is_verls(tmp_path: Path, micro: int) -> None:
    """`tensors.padded` has prompts to the left and responses to the right, and verl's own way back
    from there gives the nested rows again."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    rows = rig.make_rows(steps=1, groups=3, tools=True)
    logs = rig.write(tmp_path / "logs", rows)
    split = Split(3, micro=micro)
    [mini] = data(tmp_path, logs, split, log_probs=("old_log_probs",))[0].minis
    found = tensors.padded(mini.batch)
    for key in ("responses", "response_mask", "loss_mask", "old_log_probs", "advantages"):
        wanted = pad_sequence(mini.batch[key].unbind(), batch_first=True)
        assert torch.equal(found[key], wanted), key
    prompts = mini.batch["prompts"].unbind()
    assert torch.equal(found["prompts"], pad_sequence(prompts, True, padding_side="left"))
    again = left_right_2_no_padding(tu.get_tensordict(dict(found)))
    for key in ("input_ids", "position_ids"):
        assert torch.equal(again[key].values(), mini.batch[key].values()), key
        assert torch.equal(again[key].offsets(), mini.batch[key].offsets()), key
    ones = [torch.ones_like(row) for row in mini.batch["responses"].unbind()]
    width = found["responses"].shape[1]
    assert torch.equal(found["attention_mask"][:, -width:], pad_sequence(ones, batch_first=True))


def test_rows_and_their_tensors_are_one_and_the_same_both_ways() -> None:
    """`dense` and `as_nested` undo each other, and rows beyond those given get the padding."""
    like = rig.nest([[1, 2, 3], [4], [5, 6]], torch.int64)
    rows = tensors.dense(like)
    assert rows.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert torch.equal(tensors.as_nested(rows, like, 7).values(), like.values())
    assert tensors.as_nested(rows[:2], like, 7).values().tolist() == [1, 2, 3, 4, 7, 7]
    assert tensors.dense(like, left=True).tolist() == [[1, 2, 3], [0, 0, 4], [0, 5, 6]]


def test_taken_rows_may_stand_in_any_order() -> None:
    """`take` and `joined` are what lists of Python give, empty rows among them."""
    draw = random.Random(0)
    rows = [[draw.randrange(9) for _ in range(draw.randrange(4))] for _ in range(20)]
    lists = as_lists(rows)
    order = draw.sample(range(20), 12)
    found = tensors.take(lists, torch.tensor(order).numpy(), 2)
    assert as_rows(found) == [*(rows[at] for at in order), [0], [0]]
    twice = tensors.joined(lists, as_lists(rows[::-1]))
    assert as_rows(twice) == [a + b for a, b in zip(rows, rows[::-1], strict=True)]
    assert as_rows(tensors.positions(lists)) == [list(range(len(row))) for row in rows]


def as_lists(rows: Sequence[Sequence[int]]) -> Lists:
    """Rows of numbers as values and offsets."""
    ends = [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
    flat = [value for row in rows for value in row]
    return Lists(torch.tensor(flat).numpy(), torch.tensor(ends).numpy())


def as_rows(lists: Lists) -> list[list[int]]:
    """Values and offsets as rows of numbers."""
    cuts = lists.offsets.tolist()
    return [lists.values[a:b].tolist() for a, b in pairwise(cuts)]


# Logs of other kinds


def test_a_log_need_not_be_captured(tmp_path: Path) -> None:
    """Plain Parquet in verl's names is replayed as it stands; without a mask every token of a
    response is the policy's."""
    rows = rig.make_rows(steps=2)
    logs = written(tmp_path / "logs", rows, response_mask=None, policy_version=None,
                   policy_version_max=None, multimodal=None, router_replay=None)  # fmt: skip
    found = data(tmp_path, logs, log_probs=("rollout_log_probs",))
    for index in range(2):
        kept = in_training_order(rig.of_step(rows, index + 1))
        wanted = expected(kept, rollout_log_probs=logged(kept)["rollout_log_probs"])
        same(found[index].minis[0].batch, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_log_may_be_shuffled(tmp_path: Path, seed: int) -> None:
    """verl's older trainer shuffles its rows: groups then stand in the order of their first row,
    rows inside as in the log, and have the same advantages as verl gives them in that order."""
    rows = rig.make_rows(steps=1, groups=4, samples=5, tools=True, seed=seed)
    random.Random(seed).shuffle(rows)
    logs = written(tmp_path / "logs", rows, uid=lambda row: row.uid)
    for row in rows:  # a log without row keys does not tell sessions: each row is one
        row.session = rows.index(row)
    [mini] = data(tmp_path, logs)[0].minis
    kept = in_training_order(rows)
    assert ids(mini) == [row.response for row in kept]
    same(mini.batch, expected(kept))


@pytest.mark.parametrize("order", ["by group", "shuffled", "last output first"])
def test_outputs_of_one_session_share_its_advantage(tmp_path: Path, order: str) -> None:
    """Sessions of several outputs are kept or dropped whole, and have what verl's V1 trainer
    computes for them, in whatever order their rows stand."""
    rows = rig.make_rows(steps=2, groups=3, samples=4, outputs=3, tools=True)
    if order == "shuffled":
        random.Random(1).shuffle(rows)
    if order == "last output first":
        rows.sort(key=lambda row: (row.step, row.uid, row.session, -row.output))
    found = data(tmp_path, written(tmp_path / "logs", rows), k=3)
    for index in range(2):
        kept = in_training_order(rig.of_step(rows, index + 1), k=3)
        assert len(kept) > 9
        [mini] = found[index].minis
        same(mini.batch, expected(kept))
        last = {(row.uid, row.session): max(r.output for r in kept
                if (r.uid, r.session) == (row.uid, row.session)) for row in kept}  # fmt: skip
        assert mini.final.tolist() == [r.output == last[r.uid, r.session] for r in kept]
        names: dict[int, tuple[str, int]] = {}
        for number, row in zip(mini.session.tolist(), kept, strict=True):
            assert names.setdefault(number, (row.uid, row.session)) == (row.uid, row.session)
        assert len(names) == len(last)


def test_captured_advantages_are_taken_as_they_are(tmp_path: Path) -> None:
    """With `logged` each token has the advantage in its row's column."""
    rows = rig.make_rows(steps=1, tools=True)
    logs = rig.write(tmp_path / "logs", rows)
    [mini] = data(tmp_path, logs, advantages="logged")[0].minis
    kept = rig.shortest(rows)
    given = rig.nest([[r.reward] * len(r.response) for r in kept], torch.float32)
    same(mini.batch, expected(kept, advantages=given))


def test_a_trainer_of_its_own_gets_no_advantages(tmp_path: Path) -> None:
    """With `none` there is no such key, and everything else."""
    rows = rig.make_rows(steps=1)
    logs = rig.write(tmp_path / "logs", rows)
    [mini] = data(tmp_path, logs, advantages="none")[0].minis
    wanted = expected(rig.shortest(rows))
    del wanted["advantages"]
    same(mini.batch, wanted)


# What is read


@pytest.mark.parametrize("note", [True, False])
def test_only_row_groups_of_kept_rows_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: bool
) -> None:
    """Of a file of a row group for each prompt, those of dropped prompts are not read, nor columns
    that nobody asked for."""
    rows = rig.make_rows(steps=1, groups=5, samples=3)
    path = rig.write(tmp_path / "logs", rows) / "1.parquet"
    table = pq.read_table(path)
    said = msgspec.json.decode(table.schema.metadata[KEY])
    said["tokens"] = {c.name: [digest(table[c.name].slice(at, 3)) for at in range(0, 15, 3)]
                      for c in TOKENS if c.name in table.column_names}  # fmt: skip
    metadata = {KEY: msgspec.json.encode(said)} if note else None
    pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=3)
    where = "uid IN ('u1g0', 'u1g3')"
    found = data(tmp_path, path.parent, where=where, log_probs=("old_log_probs",))
    decoded: list[tuple[list[int], list[str]]] = []
    plain = pq.ParquetFile.iter_batches

    def spy(self: Any, *args: Any, **told: Any) -> Any:
        if "columns" in told:  # else the footer is looked at, without a page
            decoded.append((told["row_groups"], told["columns"]))
        return plain(self, *args, **told)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    item = found[0]
    kept = [row for row in rig.shortest(rows) if row.uid not in ("u1g0", "u1g3")]
    assert ids(item.minis[0]) == [row.response for row in kept]
    assert [groups for groups, _ in decoded] == [[1], [2], [4]]
    names = {"prompt_ids", "response_ids", "response_mask", "old_log_probs"}
    assert all(set(columns) == names for _, columns in decoded)


@pytest.mark.parametrize("workers", [0, 2])
def test_items_come_through_a_loader_in_order(tmp_path: Path, workers: int) -> None:
    """torchdata's loader gives the same updates in the same order, read in this process or in two
    spawned ones, and from the middle on what stands there."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = rig.make_rows(steps=5, groups=2)
    found = data(tmp_path, rig.write(tmp_path / "logs", rows), Split(1))
    loader = StatefulDataLoader(
        found, batch_size=None, sampler=range(1, 5), num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )  # fmt: skip
    items: list[Item] = list(loader)
    assert [item.step for item in items] == [2, 3, 4, 5]
    for item in items:
        kept = rig.shortest(rig.of_step(rows, item.step))
        assert len(item.minis) == 2
        same(item.minis[0].batch, expected(kept[:2]))
        same(item.minis[1].batch, expected(kept[2:]))


def test_counts_and_metrics_are_of_the_whole_update(tmp_path: Path) -> None:
    """What is told of an update is verl's: scores of rollouts, lengths of what the policy wrote."""
    rows = rig.make_rows(steps=1, groups=3, tools=True)
    kept = rig.shortest(rows)
    item = data(tmp_path, rig.write(tmp_path / "logs", rows), Split(1, ranks=2))[0]
    assert item.counts == {"rows": 6, "groups": 3, "stale_groups": 0, "singletons": 0,
                           "lag_max": 0, "trimmed_groups": 0}  # fmt: skip
    lengths = [sum(row.mask) for row in kept]
    assert item.metrics["response_length/max"] == max(lengths)
    assert item.metrics["response_length/mean"] == pytest.approx(sum(lengths) / 6)
    assert item.metrics["prompt_length/min"] == min(len(row.prompt) for row in kept)
    scores = [row.reward for row in kept]
    assert item.metrics["critic/score/mean"] == pytest.approx(sum(scores) / 6)
    assert item.metrics["critic/score/max"] == max(scores)


def test_rejected_rows_come_along_where_they_are_wanted(tmp_path: Path) -> None:
    """For weights normalised over whole groups each rank gets its part of the rows that were not
    kept, with their log-probs and without those that hold no token; each comes once."""
    rows = rig.make_rows(steps=1, groups=3, tools=True)
    empty = rows[1]
    empty.response, empty.mask, empty.rollout, empty.old, empty.ref = [], [], [], [], []
    logs = rig.write(tmp_path / "logs", rows)
    run = rig.run(tmp_path / "run", logs, min_length=1)
    held = []
    for rank in range(2):
        rules = Rules(log_probs=("rollout_log_probs",), rejected=True)
        mini = Replay(run, Split(3, ranks=2, micro=2), rules, rank=rank)[0].rejected
        assert mini is not None
        assert len(ids(mini)) % 2 == 0
        real = len(ids(mini)) - mini.pads
        held += list(zip(ids(mini)[:real], mini.batch["rollout_log_probs"].unbind(), strict=False))
    kept = rig.shortest([row for row in rows if row is not empty])
    wanted = {tuple(r.response): r.rollout for r in rows if r not in kept and r is not empty}
    assert sorted(tuple(response) for response, _ in held) == sorted(wanted)
    for response, log_probs in held:
        assert torch.equal(log_probs, torch.tensor(wanted[tuple(response)]))


# Staleness and temperature


def groups_of(item: Item, rows: Sequence[Any]) -> list[str]:
    """Names of the groups in an item's only mini-batch."""
    uids = {tuple(row.response): row.uid for row in rows}
    return list(dict.fromkeys(uids[tuple(response)] for response in ids(item.minis[0])))


def test_groups_too_far_behind_are_left_out(tmp_path: Path) -> None:
    """A group is as old as its oldest row, kept or not; it goes whole, and is counted."""
    rows = rig.make_rows(steps=1, groups=3)
    for row in rows:
        row.version = 5
    kept = rig.shortest(rows)
    old = next(row for row in rows if row.uid == "u1g1" and row not in kept)
    old.version = 3
    logs = rig.write(tmp_path / "logs", rows)
    run = rig.run(tmp_path / "run", logs)

    def item(max_lag: int | None) -> Item:
        return Replay(run, EVERY, Rules(max_lag=max_lag), version=6)[0]

    assert groups_of(item(3), rows) == ["u1g0", "u1g1", "u1g2"]
    assert groups_of(item(None), rows) == ["u1g0", "u1g1", "u1g2"]
    left = item(2)
    assert groups_of(left, rows) == ["u1g0", "u1g2"]
    kept = [row for row in rig.shortest(rows) if row.uid != "u1g1"]
    same(left.minis[0].batch, expected(kept))
    assert (left.counts["stale_groups"], left.counts["lag_max"], left.counts["rows"]) == (1, 3, 4)
    nothing = item(0)
    assert nothing.minis == []
    assert (nothing.counts["stale_groups"], nothing.counts["rows"]) == (3, 0)


def test_the_learner_gets_older_with_every_update(tmp_path: Path) -> None:
    """The update at an index is made by the version before the first, and as many after it."""
    rows = rig.make_rows(steps=3)
    for row in rows:
        row.version = 0
    found = data(tmp_path, rig.write(tmp_path / "logs", rows), version=2, max_lag=3)
    assert [found[index].counts["lag_max"] for index in range(3)] == [2, 3, 4]
    assert [len(found[index].minis) for index in range(3)] == [1, 1, 0]


def test_a_version_that_was_not_logged(tmp_path: Path) -> None:
    """With a limit it is refused, unless step - 1 may be taken for it; without one it is no
    matter."""
    rows = rig.make_rows(steps=1)
    unknown = rig.shortest(rows)[2]
    unknown.version = None
    logs = rig.write(tmp_path / "logs", rows)
    run = rig.run(tmp_path / "run", logs)
    refused = Replay(run, EVERY, Rules(max_lag=1), version=1)
    first = rows.index(next(row for row in rig.shortest(rows) if row.uid == unknown.uid))
    told = rf"1\.parquet: no policy_version in the group of row {first}.*--assume-version"
    with pytest.raises(InputError, match=told):
        refused[0]
    assumed = Replay(run, EVERY, Rules(max_lag=1, assume_version=True), version=1)[0]
    assert (assumed.counts["lag_max"], assumed.counts["groups"]) == (1, 4)
    assert Replay(run, EVERY, Rules(), version=1)[0].counts["groups"] == 4


def test_each_row_keeps_the_temperature_it_was_sampled_at(tmp_path: Path) -> None:
    """Rows of several temperatures have each its own, padding has 1; of one they have a number."""
    rows = rig.make_rows(steps=1, groups=1)
    heat = [0.25, 0.5, 0.75, 1.25]
    logs = rig.write(tmp_path / "logs", rows, temperature=heat)
    [mini] = data(tmp_path, logs, Split(1, micro=3))[0].minis
    wanted = [heat[rows.index(row)] for row in rig.shortest(rows)]
    assert isinstance(mini.temperature, torch.Tensor)
    assert mini.temperature.tolist() == [*wanted, 1.0]
    assert mini.temperature.dtype == torch.float32


def test_a_temperature_that_was_not_logged_must_be_named(tmp_path: Path) -> None:
    """Log-probs depend on it: without a column it is taken from the setting, and from nowhere
    else."""
    rows = rig.make_rows(steps=1)
    run = rig.run(tmp_path / "run", written(tmp_path / "logs", rows, temperature=None))
    assert Replay(run, EVERY, Rules(temperature=0.7))[0].minis[0].temperature == pytest.approx(0.7)
    unnamed = Replay(run, EVERY)
    with pytest.raises(InputError, match=r"-s rollout\.temperature=1\.0"):
        unnamed[0]


def test_a_temperature_that_contradicts_the_log_is_told(tmp_path: Path) -> None:
    """What is named must be what was logged."""
    rows = rig.make_rows(steps=1)
    run = rig.run(tmp_path / "run", rig.write(tmp_path / "logs", rows))
    assert Replay(run, EVERY, Rules(temperature=1.0))[0].minis[0].temperature == 1.0
    other = Replay(run, EVERY, Rules(temperature=0.6))
    with pytest.raises(UsageError, match=r"rollout\.temperature=0\.6, but .* logged 1\.0"):
        other[0]


@pytest.mark.parametrize("heat", [0.0, -1.0, None])
def test_a_temperature_that_cannot_be_is_told(tmp_path: Path, heat: float | None) -> None:
    """At such a temperature nothing was sampled."""
    rows = rig.make_rows(steps=1)
    logs = written(tmp_path / "logs", rows, temperature=lambda row: heat)
    found = data(tmp_path, logs)
    with pytest.raises(InputError, match="temperature"):
        found[0]


def test_the_readme_s_loop_of_your_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the README shows for a trainer of one's own goes over all updates of a run."""
    readme = Path(__file__).parents[2] / "pipeline" / "replay" / "README.md"
    [code] = re.findall(r"(?ms)^```python\n(.*?)^```$", readme.read_text())
    (tmp_path / "own.py").write_text(code)
    rows = rig.make_rows()
    rig.run(tmp_path / "run", rig.write(tmp_path / "logs", rows))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("own.py")
    kept = rig.shortest(rows)
    for step, line in enumerate(capsys.readouterr().out.splitlines(), 1):
        here = rig.of_step(kept, step)
        width = max(len(r.prompt) for r in here) + max(len(r.response) for r in here)
        assert line == f"{step} torch.Size([{len(here)}, {width}]) torch.float32"
    assert step == 3
