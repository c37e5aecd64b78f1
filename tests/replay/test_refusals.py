"""What cannot be replayed is refused by name before the first update, with its exit status."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rig

from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.replay import preflight
from rollsift.pipeline.replay.dataset import Replay, Rules
from rollsift.pipeline.replay.plan import Plan
from rollsift.pipeline.replay.settings import refuse, settings
from rollsift.pipeline.replay.share import Split
from rollsift.pipeline.replay.tokens import light, read
from rollsift.pipeline.replay.trainer import Options, Telling, replay
from rollsift.pipeline.sources import discover
from rollsift.schemas.captured import KEY, TOKENS
from rollsift.schemas.errors import CheckError, InputError, RollsiftError, UsageError
from rollsift.schemas.recipe import resolve

FLIPS = 3  # bits flipped in each part of a file
IDS = ("prompt_ids", "response_ids", "response_mask")
ALL = (*IDS, "rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages")
USAGE, INPUT, CHECK = 2, 3, 4  # exit statuses of the command line
ROWS = rig.make_rows(steps=2, groups=2, samples=3)


@pytest.fixture(scope="module", autouse=True)
def _parsed_once() -> Iterator[None]:
    """verl's configuration is long, and each settings() would parse it."""
    from omegaconf import OmegaConf

    with pytest.MonkeyPatch.context() as patch:
        parse = OmegaConf.load
        once = cache(lambda path: OmegaConf.to_container(parse(path), resolve=False))
        patch.setattr(OmegaConf, "load", lambda path: OmegaConf.create(once(path)))
        yield


class Made(NamedTuple):
    """A log, its run, and where checkpoints would go."""

    logs: Path
    run: Path
    out: Path


def make(folder: Path, rows: list[Any] = ROWS, **columns: Any) -> Made:
    """A log and the run that keeps the two shortest of each group."""
    logs = rig.write(folder / "logs", rows, **columns)
    return Made(logs, rig.run(folder / "run", logs), folder / "out")


def check(made: Made, names: tuple[str, ...] = IDS, *, recomputed: bool = True) -> None:
    """All of a run, looked at as before the first update."""
    preflight.check(looked_at(made.run, names), recomputed=recomputed)


def looked_at(run: Path, names: tuple[str, ...] = IDS, logs: Path | None = None) -> Replay:
    """The dataset that a replay looks at, which reads these columns."""
    logged = tuple(name for name in names if name.endswith(("log_probs", "log_prob")))
    by: Any = "logged" if "advantages" in names else "verl"
    rules = Rules(by, log_probs=logged, vocabulary=rig.VOCABULARY)
    return Replay(run, Split(4), rules, logs=logs)


def refused(made: Made, model: Path, *sets: str, **options: Any) -> RollsiftError:
    """What a whole replay raises; nothing is told or written before."""
    told: list[Any] = []
    wanted = Options(made.run, model, made.out, (*rig.SETS, *sets), workers=0, **options)
    with pytest.raises(RollsiftError) as caught:
        replay(wanted, "cpu", Telling(metrics=told.append))
    assert not told
    assert not made.out.exists()
    assert "\n" not in str(caught.value)
    return caught.value


def edited(path: Path, edit: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    """Write a Parquet file anew, with the footer's note as it was."""
    table = pq.read_table(path)
    note = table.schema.metadata
    pq.write_table(edit(table).replace_schema_metadata(note), path, **options)


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """A table with another column in the place of one."""
    at = table.column_names.index(name)
    return table.set_column(at, name, pa.array(values, table.schema.field(name).type))


# Rows, and logs as a whole


@pytest.mark.parametrize("name", ["multimodal", "images", "multi_modal_inputs"])
def test_rows_with_more_than_tokens_are_refused(tmp_path: Path, model: Path, name: str) -> None:
    """One kept row that has images, however the log says it, ends a replay before its first update,
    though it stands in the last step; its row is named."""
    kept = rig.of_step(ROWS, 2).index(rig.shortest(rig.of_step(ROWS, 2))[1])
    count = len(rig.of_step(ROWS, 2))
    held: Any = {
        "multimodal": [row == kept for row in range(count)],
        "images": [["a.png"] if row == kept else [] for row in range(count)],
        "multi_modal_inputs": [{"a": 1} if row == kept else None for row in range(count)],
    }[name]
    logs = rig.write(tmp_path / "logs", rig.of_step(ROWS, 1))
    rig.write(logs, rig.of_step(ROWS, 2), **{name: held})
    made = Made(logs, rig.run(tmp_path / "run", logs), tmp_path / "out")
    error = refused(made, model)
    assert error.exit_status == INPUT
    assert f"2.parquet, row {kept}: {name}: has inputs other than tokens" in str(error)


def test_rejected_rows_with_images_are_no_hindrance(tmp_path: Path) -> None:
    """Only kept rows must have tokens alone."""
    best = rig.shortest(rig.of_step(ROWS, 1))
    flags = [row not in best for row in rig.of_step(ROWS, 1)]
    check(make(tmp_path, rig.of_step(ROWS, 1), multimodal=flags))


def test_router_replay_needs_recomputed_log_probs(tmp_path: Path, model: Path) -> None:
    """Rows sampled for router replay are refused with logged log-probs, and pass with those that
    are computed anew."""
    made = make(tmp_path, rig.of_step(ROWS, 1), router_replay=[True] * 6)
    error = refused(made, model, old_log_probs="logged")
    assert error.exit_status == INPUT
    assert "router_replay" in str(error)
    assert "--old-log-probs recompute" in str(error)
    check(made)


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize("id_", [-1, rig.VOCABULARY, 2**31 - 1])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, name: str, id_: int) -> None:
    """An id that the model doesn't know is named with the size of its vocabulary."""
    row = rig.make_rows(steps=1, groups=1, samples=1)[0]
    if name == "prompt_ids":
        row.prompt = [id_, 3]
    else:
        row.response = [id_] * len(row.response)
    made = make(tmp_path, [row])
    with pytest.raises(InputError, match=rf"{name} holds id {id_}, .* vocabulary has 64"):
        check(made)


def test_the_largest_id_of_the_vocabulary_passes(tmp_path: Path) -> None:
    """Ids 0 and one below the size of the vocabulary are known to the model."""
    row = rig.make_rows(steps=1, groups=1, samples=1)[0]
    row.prompt, row.response[0] = [0], rig.VOCABULARY - 1
    check(make(tmp_path, [row]))


def jsonl(folder: Path, **more: Any) -> Made:
    """A run over a log of text."""
    (logs := folder / "logs").mkdir()
    rows = [{"uid": "a", "step": 1, "score": n, "input": "q", "output": "a" * n} | more
            for n in (1, 2, 3)]  # fmt: skip
    (logs / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    filter_logs(discover([logs]), resolve({"k": 2}), folder / "run")
    return Made(logs, folder / "run", folder / "out")


@pytest.mark.parametrize("more", [{}, {"prompt_ids": [1], "response_ids": [2]}])
def test_logs_of_text_are_refused(tmp_path: Path, model: Path, more: dict[str, Any]) -> None:
    """verl's own dumps have no tokens: a run over JSONL is refused with what to do instead, even
    where somebody added ids."""
    error = refused(jsonl(tmp_path, **more), model)
    assert error.exit_status == INPUT
    assert "1.jsonl: only Parquet with prompt_ids and response_ids can be replayed" in str(error)
    assert "capture" in str(error)


@pytest.mark.parametrize("name", ["response_ids", "rollout_log_probs"])
def test_a_missing_column_is_named(tmp_path: Path, name: str) -> None:
    """A column that replay needs and a log does not have is named with its file."""
    made = make(tmp_path, note=False, **{name: None})
    with pytest.raises(InputError, match=rf"1\.parquet: no column {name}"):
        check(made, (*IDS, "rollout_log_probs"))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("rollout_log_probs", "importance weights need them"),
        ("old_log_probs", "--old-log-probs recompute"),
        ("ref_log_prob", "--reference PATH"),
        ("advantages", "choose --advantages verl or paper"),
    ],
)
def test_log_probs_that_were_not_logged(
    tmp_path: Path, model: Path, column: str, words: str
) -> None:
    """What settings ask for and the log does not have is a usage error that says what to do."""
    options: dict[str, Any] = {
        "old_log_probs": {"old_log_probs": "logged"}, "advantages": {"advantages": "logged"},
    }.get(column, {})  # fmt: skip
    sets = ["actor.use_kl_loss=true"] if column == "ref_log_prob" else []
    error = refused(make(tmp_path, **{column: None}), model, *sets, **options)
    assert error.exit_status == USAGE
    assert f"no column {column}" in str(error)
    assert words in str(error)


def test_no_log_probs_are_needed_without_importance_weights(tmp_path: Path, model: Path) -> None:
    """What the refusal of missing log-probs advises works: the setting is then null."""
    tree = settings(model, ["algorithm.rollout_correction.rollout_is=null"], "cpu", 1)
    assert tree.algorithm.rollout_correction.rollout_is is None
    check(make(tmp_path, rollout_log_probs=None))


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("response_mask", [[1, 2, 1]], "other values than 0 and 1"),
        ("response_mask", [[1, 1]], "has 2 values for 3 of response_ids"),
        ("response_mask", [[1, None, 1]], "a null among its numbers"),
        ("prompt_ids", [[]], "prompt_ids is empty"),
        ("rollout_log_probs", [[-1.0, float("nan"), -1.0]], "NaN or infinity"),
        ("rollout_log_probs", [[-1.0, float("-inf"), -1.0]], "NaN or infinity"),
        ("rollout_log_probs", [[-1.0, -1.0]], "has 2 values for 3 of response_ids"),
        ("rollout_log_probs", [None], "is null, expected a list"),
        ("prompt_ids", pa.array([[1.5]]), "holds double, expected int64"),
        ("prompt_ids", pa.array([["a"]]), "holds string, expected int64"),
        ("prompt_ids", pa.array([7]), "holds int64, expected lists"),
        ("prompt_ids", pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64())), "expected lists"),
        ("prompt_ids", pa.array([[[1]]]), "expected int64"),
    ],
)
def test_lists_that_do_not_fit(tmp_path: Path, column: str, values: Any, words: str) -> None:
    """Lists of another length, type or with values that cannot be are refused with their column."""
    row = rig.make_rows(steps=1, groups=1, samples=1)[0]
    row.response, row.mask, row.rollout = [5, 6, 7], [1, 1, 1], [-1.0] * 3
    path = tmp_path / "1.parquet"
    table = rig.table([row])
    types = {held.name: held.type for held in TOKENS}
    array = values if isinstance(values, pa.Array) else pa.array(values, types[column])
    pq.write_table(table.set_column(table.column_names.index(column), column, array), path)
    with pytest.raises(InputError, match=words) as caught:
        read(path, np.array([0]), (*IDS, "rollout_log_probs"))
    assert column in str(caught.value)
    assert "1.parquet" in str(caught.value)


# Files that are not what they were


def test_a_missing_log_is_named(tmp_path: Path, model: Path) -> None:
    """A log that went away is unusable input, and the message says how to name where it lies."""
    made = make(tmp_path)
    (made.logs / "2.parquet").unlink()
    error = refused(made, model)
    assert error.exit_status == INPUT
    assert "2.parquet: no such file" in str(error)
    assert "--logs" in str(error)


def test_a_moved_log_is_found_where_it_is_said_to_be(tmp_path: Path) -> None:
    """`--logs` names the folder in which the logs lie now, whatever signs its name has."""
    made = make(tmp_path)
    made.logs.rename(moved := tmp_path / "moved [1]*")
    preflight.check(looked_at(made.run, logs=moved), recomputed=True)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_torn_log_is_refused(tmp_path: Path, part: float) -> None:
    """A file cut anywhere is not read in part."""
    made = make(tmp_path)
    path = made.logs / "2.parquet"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CheckError, match=r"2\.parquet: cannot be read as Parquet"):
        check(made)


def regions(path: Path) -> list[tuple[str, int, int]]:
    """The parts of a Parquet file: each column's pages, the footer and what stands around it."""
    data, metadata = path.read_bytes(), pq.read_metadata(path)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    found = [("head", 0, 4), ("footer", footer, len(data) - 8), ("tail", len(data) - 8, len(data))]
    for at in range(metadata.num_columns):
        column = metadata.row_group(0).column(at)
        start = column.dictionary_page_offset or column.data_page_offset
        name = column.path_in_schema.split(".")[0]
        found.append((name, start, start + column.total_compressed_size))
    return found


def test_a_flipped_bit_is_refused_or_not_read(tmp_path: Path) -> None:
    """One flipped bit anywhere in a captured file is told as such by a refusal, or stands where
    nothing is read: all that replay takes of the file is then what it was."""
    made = make(tmp_path, rig.of_step(ROWS, 1))
    path, rows = made.logs / "1.parquet", Plan(made.run).update(0).rows
    lights = ("temperature", "multimodal", "router_replay", "output_index")

    def taken() -> list[Any]:
        arrays = [array for lists in read(path, rows, ALL).values() for array in lists]
        columns: Any = [light(path, rows, name) for name in lights]
        return arrays + [column.to_numpy() for column in columns]

    before, data, draw = taken(), path.read_bytes(), random.Random(0)
    for name, low, high in regions(path):
        # The last byte of a column is one of its values; others may be of no consequence.
        for at in [high - 1, *(draw.randrange(low, high) for _ in range(FLIPS))]:
            flipped = bytearray(data)
            flipped[at] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            try:
                check(made, ALL, recomputed=False)
                after = taken()
            except (CheckError, InputError):
                continue
            assert all(map(np.array_equal, before, after)), name
            assert at < high - 1 or name not in {*ALL, *lights, "footer", "tail"}, name


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "rollout_log_probs"])
def test_other_tokens_under_an_old_note_are_told(tmp_path: Path, name: str) -> None:
    """A file written anew with one other value and the footer's note as it was is no captured file,
    even where it is filtered in that state and every page checksum fits: the digest tells."""
    logs = rig.write(tmp_path / "logs", rig.of_step(ROWS, 1))

    def change(table: pa.Table) -> pa.Table:
        lists = table[name].to_pylist()
        for row in lists:
            row[0] = row[0] - 1
        return with_column(table, name, lists)

    edited(logs / "1.parquet", change, write_page_checksum=True)
    made = Made(logs, rig.run(tmp_path / "run", logs), tmp_path / "out")
    with pytest.raises(CheckError, match=rf"{name} of row group 0 is not what was captured"):
        check(made, ALL)


def test_tokens_may_not_move_between_rows(tmp_path: Path) -> None:
    """The digest pins where one list ends and the next begins, not the values alone."""
    rows = rig.of_step(ROWS, 1)
    logs = rig.write(tmp_path / "logs", rows)

    def change(table: pa.Table) -> pa.Table:
        lists = table["prompt_ids"].to_pylist()
        lists[0], lists[1] = [*lists[0], lists[1][0]], lists[1][1:]
        return with_column(table, "prompt_ids", lists)

    edited(logs / "1.parquet", change)
    made = Made(logs, rig.run(tmp_path / "run", logs), tmp_path / "out")
    with pytest.raises(CheckError, match="prompt_ids of row group 0 is not what was captured"):
        check(made)


def test_other_row_groups_under_an_old_note_are_told(tmp_path: Path) -> None:
    """A file cut anew into row groups has not the digests that its note speaks of."""
    logs = rig.write(tmp_path / "logs", rig.of_step(ROWS, 1))
    edited(logs / "1.parquet", lambda table: table, row_group_size=2)
    made = Made(logs, rig.run(tmp_path / "run", logs), tmp_path / "out")
    with pytest.raises(CheckError, match="1 digests of prompt_ids for 3 row groups"):
        check(made)


def test_a_note_of_another_format_is_told(tmp_path: Path) -> None:
    """A captured file of a later format is not guessed at."""
    made = make(tmp_path, rig.of_step(ROWS, 1))
    path = made.logs / "1.parquet"
    table = pq.read_table(path)
    note = json.loads(table.schema.metadata[KEY]) | {"format": 2}
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps(note).encode()}), path)
    with pytest.raises(CheckError, match="captured in format 2; this rollsift reads format 1"):
        check(made)


@pytest.mark.parametrize("note", [True, False])
def test_a_log_that_changed_after_the_filter_is_told(tmp_path: Path, note: bool) -> None:
    """A log written anew since it was filtered is refused, captured or not, naming the step."""
    made = make(tmp_path, note=note)
    rows = rig.of_step(ROWS, 2)
    rig.write(made.logs, [*rows[1:], rows[0]], note=note)
    with pytest.raises(CheckError, match=r"2\.parquet: not the log that was filtered.* step 2 "):
        check(made)


def test_a_file_that_lost_rows_is_told(tmp_path: Path) -> None:
    """A kept row that its file does not have is no index error."""
    path = rig.write(tmp_path, rig.of_step(ROWS, 1)) / "1.parquet"
    with pytest.raises(CheckError, match="row 6 is kept, but it holds 6 rows"):
        read(path, np.array([0, 6]), IDS)


# The run's own files


@pytest.mark.parametrize("edit", ["row", "id", "cut", "empty", "previous"])
def test_an_edited_manifest_is_told(tmp_path: Path, model: Path, edit: str) -> None:
    """A manifest that says something else than what was published is refused, whether its id still
    fits or not."""
    made = make(tmp_path)
    path = made.run / "manifests" / "000002.v1.json"
    text = path.read_text()
    value = json.loads(text)
    if edit == "row":
        value["manifest"]["row"][0] += 1
    elif edit == "id":
        value["id"] = "0" * 64
    path.write_text({"cut": text[:-20], "empty": ""}.get(edit, dumped(value)))
    if edit == "previous":  # a whole manifest, but that of another run
        other = make(tmp_path / "other", rig.make_rows(steps=2, groups=2, samples=3, seed=1))
        path.write_bytes((other.run / "manifests" / path.name).read_bytes())
    error = refused(made, model)
    assert error.exit_status == CHECK
    assert "000002.v1.json" in str(error)


def dumped(value: Any) -> str:
    """Canonical JSON, as manifests are written."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def test_a_step_that_went_away_is_told(tmp_path: Path, model: Path) -> None:
    """A manifest in the middle that is gone is no shorter run."""
    made = make(tmp_path, rig.make_rows(steps=3, groups=2, samples=3))
    (made.run / "manifests" / "000002.v1.json").unlink()
    error = refused(made, model)
    assert error.exit_status == CHECK
    assert "000003.v1.json: it does not follow step 1" in str(error)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "reward"])
def test_a_damaged_table_is_told(tmp_path: Path, damage: str) -> None:
    """Rewards and versions come from the run's table, which is then the one that was published."""
    made = make(tmp_path)
    path = made.run / "rollouts" / "000002.v1.parquet"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "gone":
        path.unlink()
    else:
        rewards = [0.5] * pq.read_metadata(path).num_rows
        edited(path, lambda table: with_column(table, "reward", rewards))
    with pytest.raises(CheckError, match=r"000002\.v1\.parquet: not the table that was published"):
        check(made)


def test_a_folder_that_is_no_run_is_a_usage_error(tmp_path: Path, model: Path) -> None:
    """Where there is no run the message names the command that makes one."""
    error = refused(Made(tmp_path, tmp_path / "nothing", tmp_path / "out"), model)
    assert error.exit_status == USAGE
    assert "rollsift filter" in str(error)


# Settings

REFUSED: list[tuple[list[str], dict[str, str], str]] = [
    (["actor.strategy=megatron"], {}, "megatron is not tested; use fsdp or fsdp2"),
    (["algorithm.adv_estimator=gae"], {}, "adv_estimator=gae needs --advantages logged"),
    (["algorithm.use_kl_in_reward=true"], {}, "use_kl_in_reward needs --advantages logged"),
    (["algorithm.rollout_correction.bypass_mode=true"], {}, "bypass_mode"),
    (["actor.policy_loss.loss_mode=bypass_mode"], {}, "bypass_mode"),
    (["actor.shuffle=true"], {}, "actor.shuffle"),
    (["actor.use_prefix_grouper=true"], {}, "actor.use_prefix_grouper is not tested"),
    (["actor.ulysses_sequence_parallel_size=2"], {}, "ulysses_sequence_parallel_size with sdpa"),
    (["actor.fsdp_config.ulysses_sequence_parallel_size=2"], {}, "ulysses_sequence_parallel_size"),
    ([], {"advantages": "none"}, "--advantages none is for a trainer of your own"),
    (["actor.policy_loss.loss_mode=clip_cov"], {"normalizer": "all"}, "loss_mode=clip_cov"),
    (["actor.policy_loss.loss_mode=kl_cov"], {"normalizer": "all"}, "loss_mode=kl_cov"),
    (["actor.policy_loss.loss_mode=geo_mean"], {"normalizer": "all"}, "loss_mode=geo_mean"),
    (["actor.loss_agg_mode=seq-mean-token-sum-norm"], {"normalizer": "all"}, "loss_scale_factor"),
    # what verl itself refuses, some of it only when it trains
    (["actor.loss_agg_mode=mean"], {}, "Invalid loss_agg_mode: mean"),
    (["actor.policy_loss.loss_mode=ppo"], {}, "Unsupported loss mode: ppo"),
    (["actor.kl_loss_type=kl3"], {}, "actor.kl_loss_type=kl3"),
    (["actor.use_dynamic_bsz=false"], {}, "ppo_micro_batch_size_per_gpu"),
    (["algorithm.rollout_correction.rollout_is=tokens"], {}, "Invalid rollout_is: tokens"),
    (["algorithm.rollout_correction.rollout_is_threshold=x"], {}, "rollout_correction"),
    (["algorithm.rollout_correction.rollout_rs=token_k1"], {}, "rollout_rs_threshold"),
    (["actor.ppo_mini_batch_size=0"], {}, "ppo_mini_batch_size=0: expected 1 or more"),
    (["actor.ppo_epochs=0"], {}, "actor.ppo_epochs=0: expected 1 or more"),
    (["actor.ppo_micro_batch_size_per_gpu=-1"], {}, "expected 1 or more"),
    (["actor.optim.lr=-1e-6"], {}, "actor.optim.lr=-1e-06: expected 0 or more"),
    (["rollout.temperature=0"], {}, "rollout.temperature=0.0: expected more than 0"),
]


@pytest.mark.parametrize(("sets", "options", "words"), REFUSED)
def test_settings_that_would_be_silently_wrong_are_refused(
    model: Path, sets: list[str], options: dict[str, str], words: str
) -> None:
    """Each setting that has another meaning here, or none, is a usage error that names it."""
    tree = settings(model, sets, "cpu", 1)
    told: Any = {"advantages": "verl", "normalizer": "kept"} | options
    with pytest.raises(UsageError) as caught:
        refuse(tree, **told)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == USAGE


@pytest.mark.parametrize(
    ("sets", "advantages", "normalizer"),
    [
        ([], "verl", "kept"),
        ([], "paper", "all"),
        (["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"], "logged", "kept"),
        (["actor.policy_loss.loss_mode=geo_mean"], "verl", "kept"),
        (["actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_scale_factor=8"], "verl",
         "all"),
        (["actor.use_dynamic_bsz=false", "actor.ppo_micro_batch_size_per_gpu=2"], "verl", "kept"),
        (["algorithm.rollout_correction.rollout_rs=token_k1",
          "algorithm.rollout_correction.rollout_rs_threshold=0.5_2"], "verl", "kept"),
        (["algorithm.rollout_correction.rollout_is_threshold=0.5_5"], "verl", "kept"),
    ],
)  # fmt: skip
def test_settings_that_mean_what_they_say_pass(
    model: Path, sets: list[str], advantages: Any, normalizer: Any
) -> None:
    """What a refusal advises, and what verl takes, is not refused."""
    refuse(settings(model, sets, "cpu", 1), advantages, normalizer)


def test_refused_settings_end_a_replay_before_its_model_is_loaded(
    tmp_path: Path, model: Path
) -> None:
    """The trainer asks, too: nothing is written or told."""
    error = refused(make(tmp_path), model, "actor.shuffle=true")
    assert error.exit_status == USAGE
    assert "actor.shuffle" in str(error)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("actor.optim.learning_rate", "actor.optim."),
        ("actor.lr", "actor.optim.lr"),
        ("actor.ppo_mini_batchsize", "actor.ppo_mini_batch_size"),
        ("rollout.temprature", "rollout.temperature"),
        ("algorithm.rollout_correction.rollout_iss", "algorithm.rollout_correction.rollout_is"),
        ("trainer.savefreq", "trainer.save_freq"),
    ],
)
def test_an_unknown_setting_names_the_nearest(model: Path, key: str, near: str) -> None:
    """A key that verl doesn't have, or that has no effect on replay, is told with its neighbour."""
    with pytest.raises(UsageError, match=f"-s {key}: no setting .*did you mean {near}"):
        settings(model, [f"{key}=1"], "cpu", 1)


@pytest.mark.parametrize("key", ["trainer.nnodes", "rollout.n", "data.train_batch_size", "critic"])
def test_settings_without_an_effect_are_told(model: Path, key: str) -> None:
    """verl's settings for what is not done here are no silent words."""
    with pytest.raises(UsageError, match=f"-s {key}: no setting of verl's that has an effect"):
        settings(model, [f"{key}=1"], "cpu", 1)


def test_the_model_is_named_by_its_option(model: Path) -> None:
    """verl's key for the model's folder would train another one than --model says."""
    with pytest.raises(UsageError, match="--model"):
        settings(model, ["actor_rollout_ref.model.path=/elsewhere"], "cpu", 1)


READ: list[tuple[str, str, Any]] = [
    ("actor.optim.lr", "1e-6", 1e-6),
    ("actor.optim.lr", "1", 1.0),
    ("actor.ppo_epochs", "2", 2),
    ("actor.use_kl_loss", "true", True),
    ("actor.use_kl_loss", "False", False),
    ("actor.loss_scale_factor", "null", None),
    ("actor.loss_scale_factor", "8", 8),
    ("actor.strategy", "fsdp", "fsdp"),
    ("actor.optim.betas", "[0.9, 0.95]", [0.9, 0.95]),
    ("rollout.temperature", "1", 1.0),
    ("algorithm.rollout_correction.rollout_is", "null", None),
    ("algorithm.rollout_correction.rollout_is", "sequence", "sequence"),
    ("algorithm.rollout_correction.rollout_is_threshold", "3", 3.0),
    ("algorithm.rollout_correction.rollout_is_threshold", "0.5_5", "0.5_5"),
    ("algorithm.rollout_correction.rollout_rs_threshold", "null", None),
    ("algorithm.norm_adv_by_std_in_grpo", "false", False),
    ("model.lora_rank", "8", 8),
    ("model.target_modules", "all-linear", "all-linear"),
    ("model.target_modules", '["q_proj"]', ["q_proj"]),
    ("model.override_config", '{"attn_implementation": "eager"}',
     {"attn_implementation": "eager"}),
    ("trainer.save_freq", "5", 5),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), READ)
def test_values_are_read_by_their_type(model: Path, key: str, text: str, value: Any) -> None:
    """A value is what verl's type for its key makes of the text."""
    found = setting(settings(model, [f"{key}={text}"], "cpu", 1), key)
    assert (found, type(found)) == (value, type(value))


def test_a_key_may_have_verls_prefix(model: Path) -> None:
    """What verl's own command line takes is taken, and of two values of a key the last counts."""
    sets = ["actor.optim.lr=1", " actor_rollout_ref.actor.optim.lr = 2e-6"]
    assert setting(settings(model, sets, "cpu", 1), "actor.optim.lr") == 2e-6


def setting(tree: Any, key: str) -> Any:
    """A setting out of verl's configuration."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(tree)
    short = key.startswith(("algorithm.", "trainer."))
    for part in (key if short else f"actor_rollout_ref.{key}").split("."):
        found = found[part]
    return found


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("actor.optim.lr=fast", "float"), ("actor.optim.lr=null", "float"),
        ("actor.optim.lr=nan", "float"), ("actor.optim.lr=[1]", "float"),
        ("actor.ppo_epochs=1.5", "int"), ("actor.ppo_epochs=true", "int"),
        ("actor.use_kl_loss=yes", "bool"), ("actor.loss_scale_factor=x", "null or int"),
        ("actor.optim=5", "a JSON object"), ("actor.optim.betas=0.9", "a JSON list"),
        ("model.override_config=eager", "a JSON object"), ("trainer.save_freq=x", "int"),
        ("rollout.temperature=warm", "float"), ("actor.optim.lr", "key=value"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_told(model: Path, item: str, expected: str) -> None:
    """A value that its key cannot take is refused with the type that it can."""
    with pytest.raises(UsageError, match=f"expected {expected}$") as caught:
        settings(model, [item], "cpu", 1)
    assert item in str(caught.value)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    """A model is the folder of a Hugging Face model, and where it is not the message says so."""
    with pytest.raises(UsageError, match=r"no config\.json there"):
        settings(tmp_path, [], "cpu", 1)
