"""verl's V1 trainer is captured: its own code runs, and the oracle is what was put in its queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import capture_rig as rig
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from capture_rig import Row

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.store import Run
from rollsift.schemas.recipe import resolve

RS = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "seq_mean_k1",
      "rollout_rs_threshold": "0.02_50"}  # fmt: skip


def train(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: Sequence[Row], **named: Any
) -> list[dict[str, Any]]:
    """One real step over these rows; -> what was captured of it."""
    recorder = rig.install(monkeypatch, folder)
    trainer = rig.trainer(rig.buffer(), **named)
    rig.put(rows)
    rig.step(trainer, len({row.uid for row in rows}))
    trainer._shutdown_dump_executor()
    assert recorder.background.failed == 0
    return pq.read_table(folder / "7.parquet").to_pylist()


def expected(row: Row) -> dict[str, Any]:
    """What a captured row must say of one that was put into the queue, by hand."""
    floats = np.array(row.log_probs, np.float32).tolist()
    whole = torch.tensor(row.prompt + row.response)
    # verl's worker predicts a token from the place before it.
    old = rig.old_log_probs(whole)[len(row.prompt) - 1 : -1].tolist()
    return {
        "step": 7, "uid": row.uid, "session_id": row.session, "output_index": row.output,
        "score": row.reward, "response_length": sum(row.mask),
        "truncated": len(row.response) == rig.LIMIT, "max_response_length": rig.LIMIT,
        "policy_version": row.version[0], "policy_version_max": row.version[1],
        "temperature": 0.7, "top_p": 0.9, "top_k": -1, "data_source": "math",
        "ground_truth": "42", "evicted_by": None, "mask_source": "before_rejection",
        "multimodal": False, "router_replay": False, "acc": row.extra["acc"],
        "pred": row.extra["pred"], "extra_score": 0.5, "prompt_ids": row.prompt,
        "response_ids": row.response, "response_mask": row.mask, "rollout_log_probs": floats,
        "old_log_probs": old,
    }  # fmt: skip


@pytest.mark.parametrize("shape", ["ragged", "equal", "tools", "outputs"])
def test_a_row_is_what_was_put_into_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Every column equals what the agent loop, the actor and the configuration gave, with rows of
    any length and of one, with tool tokens, and with several outputs in a session."""
    rows = rig.make_rows(
        tools=shape == "tools",
        outputs=2 if shape == "outputs" else 1,
        length=5 if shape == "equal" else None,
    )
    found = train(monkeypatch, tmp_path / "new" / "folder", rows, mini=1)
    rows.sort(key=lambda row: (row.uid, row.session, row.output))
    assert len(found) == len(rows)
    for got, row in zip(found, rows, strict=True):
        wanted = expected(row)
        assert {name: got[name] for name in wanted} == wanted
        assert set(got) == {*wanted, "advantages"}


def test_advantages_are_those_that_verl_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They equal GRPO by hand over the sessions' rewards, 0 on tokens that tools wrote."""
    rows = rig.make_rows(tools=True)
    for got in train(monkeypatch, tmp_path, rows):
        rewards = torch.tensor([row.reward for row in rows if row.uid == got["uid"]])
        wanted = (got["score"] - rewards.mean()) / (rewards.std() + 1e-6)
        by_token = wanted * torch.tensor(got["response_mask"])
        torch.testing.assert_close(torch.tensor(got["advantages"]), by_token)


def test_padding_rows_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl fills a batch of 10 rows up to 16; the file has the 10."""
    rows = rig.make_rows(groups=2, samples=5)
    found = train(monkeypatch, tmp_path, rows, mini=2)
    assert sorted(f"{r['uid']}_{r['session_id']}_0" for r in found) == sorted(r.key for r in rows)


def test_groups_stand_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl balances rows over ranks; in the file each group's are side by side, in order."""
    found = train(monkeypatch, tmp_path, rig.make_rows(groups=6, seed=3))
    keys = [(row["uid"], row["session_id"]) for row in found]
    assert keys == sorted(keys)


def test_the_true_mask_survives_rejection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where verl's correction rejects a sequence it zeroes response_mask: what the policy wrote
    still counts, and the zeros stand apart."""
    rows = rig.make_rows(tools=True)
    rows[2].log_probs = [-9.0] * len(rows[2].response)
    by_key = {row.key: row for row in rows}
    found = train(monkeypatch, tmp_path, rows, rollout_correction=RS)
    for got in found:
        row = by_key[f"{got['uid']}_{got['session_id']}_0"]
        assert got["response_mask"] == row.mask
        assert got["response_length"] == sum(row.mask)
        assert got["mask_source"] == "before_rejection"
    assert [f"{g['uid']}_{g['session_id']}_0" for g in found if not any(g["rejection_mask"])] == [
        rows[2].key
    ]


def test_a_filter_reads_what_was_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest sessions are kept whole, several outputs of one counting as one rollout; the
    oracle sorts the rows that were put."""
    rows = rig.make_rows(groups=5, samples=6, outputs=3, tools=True)
    train(monkeypatch, tmp_path / "logs", rows)
    filter_logs(discover([tmp_path / "logs"]), resolve({"k": 2}), tmp_path / "run")
    step = Run(tmp_path / "run").steps()[7]
    assert step.manifest.length_unit == "tokens"
    rows.sort(key=lambda row: (row.uid, row.session, row.output))
    kept = [rows[at].key for at in step.manifest.row]
    wanted = []
    for uid in dict.fromkeys(row.uid for row in rows):
        lengths: dict[int, int] = {}
        for row in rows:
            if row.uid == uid:
                lengths[row.session] = lengths.get(row.session, 0) + sum(row.mask)
        best = sorted(lengths, key=lambda session: (lengths[session], session))[:2]
        wanted += [row.key for row in rows if row.uid == uid and row.session in best]
    assert kept == wanted


def test_a_filter_needs_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are counted when rows are captured: with every byte of the token columns lost, a
    filter says the same."""
    train(monkeypatch, tmp_path, rig.make_rows(groups=4, tools=True))
    kept = []
    for name in ("before", "after"):
        filter_logs(discover([tmp_path]), resolve({"k": 2}), tmp_path / "runs" / name)
        kept.append(Run(tmp_path / "runs" / name).steps()[7].manifest.row)
        path = tmp_path / "7.parquet"
        data, group = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0)
        for column in map(group.column, range(group.num_columns)):
            if ".list." in column.path_in_schema:
                begin = column.dictionary_page_offset or column.data_page_offset
                data[begin : begin + column.total_compressed_size] = bytes(
                    column.total_compressed_size
                )
        path.write_bytes(data)
    assert len(kept[0]) == 8
    assert kept[0] == kept[1]


def test_rewards_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Components are numbers as float64 and text as it is; a row without one has null, and ground
    truths that are no text are JSON."""
    rows = rig.make_rows(groups=1)
    given: list[dict[str, Any]] = [
        {"a": True, "b": None, "Uid": 1},
        {"a": 2, "c": [1, "x"]},
        {},
        {"a": np.float32(0.5), "c": "x"},
    ]
    truths: list[Any] = ["t", None, ["x", 1], {"y": 2}]
    for row, extra, truth in zip(rows, given, truths, strict=True):
        row.extra, row.truth = extra, truth
    found = train(monkeypatch, tmp_path, rows, mini=1)
    assert [row["a"] for row in found] == [1.0, 2.0, None, 0.5]
    assert [row["c"] for row in found] == [None, '[1, "x"]', None, "x"]
    assert [row["extra_Uid"] for row in found] == [1.0, None, None, None]
    assert [row["ground_truth"] for row in found] == ["t", None, '["x", 1]', '{"y": 2}']


def test_rows_with_images_are_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a processor has a token for images, the rows that hold it are multimodal; where it
    tells none, all are."""
    rows = rig.make_rows(groups=1)
    for row in rows:
        row.response = [8] * len(row.response)
        row.prompt = [5 if row is rows[1] else 4, 9]
    rig.install(monkeypatch, tmp_path)
    for step, token in ((7, 5), (8, None)):
        trainer = rig.trainer(rig.buffer(), step=step, mini=1)
        trainer.processor = type("Processor", (), {"image_token_id": token})()
        rig.put(rows)
        rig.step(trainer, 1)
        trainer._shutdown_dump_executor()
    held = [pq.read_table(tmp_path / f"{n}.parquet")["multimodal"].to_pylist() for n in (7, 8)]
    assert held == [[False, True, False, False], [True] * 4]


def test_one_step_of_several_updates_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parameter_sync_step 2 verl's `step` updates twice; the file has both, in their order."""
    recorder = rig.install(monkeypatch, tmp_path)
    trainer = rig.trainer(rig.buffer())
    trainer.parameter_sync_step, trainer.prepare_step = 2, dict
    trainer.config.data.train_batch_size = 4
    first, second = rig.make_rows(groups=2, seed=1), rig.make_rows(groups=2, seed=2)
    rig.put(first, step=6)  # the older groups are sampled first
    rig.put(second)
    trainer.step({}, {})
    trainer._shutdown_dump_executor()
    assert [path.name for path in tmp_path.iterdir()] == ["7.parquet"]
    found = pq.read_table(tmp_path / "7.parquet")["uid"].to_pylist()
    wanted = [sorted(row.uid for row in rows) for rows in (first, second)]
    assert found == wanted[0] + wanted[1]
    assert recorder.background.failed == 0


def test_validation_is_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that leave the queue's other partition belong to no step."""
    rig.install(monkeypatch, tmp_path)
    trainer, rows = rig.trainer(rig.buffer()), rig.make_rows()
    rig.put(rows, partition="val")
    trainer.replay_buffer._sync_metadata_from_transfer_queue()
    trainer.replay_buffer._clear_groups("val", {row.uid for row in rows})
    rig.put(rows)
    rig.step(trainer, 3)
    trainer._shutdown_dump_executor()
    assert pq.read_metadata(tmp_path / "7.parquet").num_rows == len(rows)


def test_groups_that_verl_filters_out_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DAPO's filter works as before: groups of equal rewards are evicted and in the file, marked,
    with the surplus, and with what a step makes of trained rows null in them."""
    rows = rig.make_rows(groups=5, seed=4)
    uids = list(dict.fromkeys(row.uid for row in rows))
    for row in rows:
        row.reward = 1.0 if row.uid in uids[:2] else float(row.session)
    rig.install(monkeypatch, tmp_path)
    replay = rig.buffer(refill_fn=lambda _: None, filter_groups_metric="reward",
                        train_batch_size=2, gen_batch_size=1)  # fmt: skip
    trainer = rig.trainer(replay, mini=2)
    rig.put(rows)
    batch = rig.step(trainer, 2)
    trainer._shutdown_dump_executor()
    trained = {key.rsplit("_", 2)[0] for key in batch.keys}
    found = pq.read_table(tmp_path / "7.parquet").to_pylist()
    assert len(found) == len(rows)
    for got in found:
        surplus = got["uid"] not in trained
        why = "filter_groups" if got["uid"] in uids[:2] else "surplus" if surplus else None
        assert got["evicted_by"] == why
        assert (got["advantages"] is None) == (got["old_log_probs"] is None) == (why is not None)
        row = next(r for r in rows if (r.uid, r.session) == (got["uid"], got["session_id"]))
        assert (got["response_ids"], got["score"]) == (row.response, row.reward)
    filter_logs(discover([tmp_path]), resolve({"k": 2, "exclude_where": "evicted_by IS NOT NULL"}),
                tmp_path / "run")  # fmt: skip
    counts = Run(tmp_path / "run").steps()[7].manifest.counts
    assert counts.dropped == {"excluded": 12, "outranked": 4}


def test_stale_and_failed_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous sampling drops groups that are too old or lack a session; they are in the file
    of the step in which they went, marked."""
    old, torn, good = (rig.make_rows(groups=1, seed=seed, step=9) for seed in (1, 2, 3))
    rig.install(monkeypatch, tmp_path)
    trainer = rig.trainer(
        rig.buffer("ReplayBufferAsync", threshold=4, refill_fn=lambda _: None), step=9, mini=1
    )
    rig.put(old, step=1)
    rig.put(torn[:3], step=9, status="failure")
    rig.put(good, step=9)
    rig.step(trainer, 1)
    trainer._shutdown_dump_executor()
    found = pq.read_table(tmp_path / "9.parquet").to_pylist()
    assert {(row["uid"], row["evicted_by"]) for row in found} == {
        (old[0].uid, "stale"), (torn[0].uid, "failure"), (good[0].uid, None),
    }  # fmt: skip
    assert [row["uid"] for row in found].count(torn[0].uid) == 3


def test_a_repeated_step_is_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run resumed from a checkpoint before step 7 writes 7.v2.parquet, which a filter reads."""
    first, second = rig.make_rows(seed=1), rig.make_rows(seed=2)
    rig.install(monkeypatch, tmp_path)
    for rows in (first, second):
        trainer = rig.trainer(rig.buffer())
        rig.put(rows)
        rig.step(trainer, 3)
        trainer._shutdown_dump_executor()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.parquet", "7.v2.parquet"]
    assert [source.file for source in discover([tmp_path]).sources] == ["7.v2.parquet"]
    found = pq.read_table(tmp_path / "7.v2.parquet")["uid"].to_pylist()
    assert found == sorted(row.uid for row in second)
