"""Fields of verl's in every form become lists, and parts of a step fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from capture_rig import trainer

from rollsift.pipeline.capture import rows as made_of
from rollsift.pipeline.capture.lists import ragged
from rollsift.pipeline.capture.settings import Settings, settings_of

NAMED = ["data.max_response_length=77", "actor_rollout_ref.rollout.name=vllm"]


@pytest.fixture
def settings() -> Settings:
    """Those of the rig's trainer."""
    return settings_of(trainer(None))


def data(count: int = 2, **fields: Any) -> dict[str, Any]:
    """What a queue has of some rows: prompts [2], responses [3] unless they are given."""
    ids = torch.arange(3 * count).reshape(count, 3)
    held = {"prompts": ids[:, :2], "responses": ids, "loss_mask": torch.ones_like(ids), **fields}
    return {name: value for name, value in held.items() if value is not None}


def table(settings: Settings, count: int = 2, **fields: Any) -> pa.Table:
    """The rows of one group."""
    keys = [f"u_{at}_0" for at in range(count)]
    return made_of.from_queue(keys, [{}] * count, data(count, **fields), None, 7, settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_field_has_many_forms(dtype: torch.dtype) -> None:
    """Jagged, dense, or a tensor a row, of any precision on the way: the lists are the same."""
    rows = [torch.tensor([0.5, -2.0], dtype=dtype), torch.tensor([1.0, 4.0], dtype=dtype)]
    forms = [torch.stack(rows), torch.nested.as_nested_tensor(rows, layout=torch.jagged), rows]
    for form in forms:
        found = ragged({"x": form}, "x")
        assert found.type == pa.list_(pa.float32())
        assert found.to_pylist() == [[0.5, -2.0], [1.0, 4.0]]
    uneven = ragged({"x": [torch.tensor([1]), torch.tensor([2, 3])]}, "x")
    assert uneven.to_pylist() == [[1], [2, 3]]
    assert ragged({}, "x") is None


def test_what_does_not_fit_is_refused(settings: Settings) -> None:
    """A field that is missing, or has not a value for each token of the responses, is named."""
    with pytest.raises(ValueError, match="no responses"):
        table(settings, responses=None)
    with pytest.raises(ValueError, match="no loss_mask"):
        table(settings, loss_mask=None)
    with pytest.raises(ValueError, match="rollout_log_probs has not one value per token"):
        table(settings, rollout_log_probs=torch.zeros(2, 2))


def test_a_mask_from_after_rejection_is_marked(settings: Settings) -> None:
    """Without loss_mask the other mask counts; where a correction rejects, that is marked."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    for rejects, word in ((False, "before_rejection"), (True, "after_rejection")):
        found = table(replace(settings, rejects=rejects), loss_mask=None, response_mask=mask)
        assert found["mask_source"].to_pylist() == [word] * 2
        assert found["response_length"].to_pylist() == [2, 0]


def test_parts_of_a_step_fit_together(settings: Settings) -> None:
    """Components that one part has are null in the other, and text where they are text in one."""
    one = table(settings, extra_fields=[{"reward_extra_info": {"a": 1, "b": 2}}, {}])
    two = table(settings, extra_fields=[{"reward_extra_info": {"a": "x", "c": None}}, None])
    found = made_of.joined([one, two])
    assert found["a"].to_pylist() == ["1", None, "x", None]
    assert found["b"].to_pylist() == [2.0, None, None, None]
    assert found.column_names[-8:] == list(made_of.FIELDS)


def test_rows_without_a_reward_say_so(settings: Settings) -> None:
    """Rows that no reward was computed for have a null score; a NaN stays what it is."""
    assert table(settings)["score"].to_pylist() == [None, None]
    scores = torch.tensor([[0.0, 0.0, float("nan")], [0.5, 0.0, 1.0]])
    found = table(settings, rm_scores=scores)["score"].to_pylist()
    assert found[0] != found[0]
    assert found[1] == 1.5


def test_verls_own_configuration_has_all_that_is_read() -> None:
    """Of its default configuration, every sampling setting but an unset one is found."""
    from hydra import compose, initialize_config_module

    made = trainer(None)
    with initialize_config_module("verl.trainer.config", version_base=None):
        made.config = compose("ppo_trainer", NAMED)
    found = settings_of(made)
    assert (found.max_response_length, found.temperature, found.top_k) == (77, 1.0, -1)
    assert (found.router_replay, found.rejects) == (False, False)
    unset = {name for name, value in found.note.sampling.items() if value is None}
    assert unset <= {"repetition_penalty"}


def test_what_a_trainer_samples_by_is_noted(settings: Settings) -> None:
    """The note names trainer, model, tokenizer and sampling; a configuration without a
    temperature is refused."""
    note = settings.note
    assert note.trainer == "verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync"
    assert note.model == {"path": "/models/tiny"}
    assert note.tokenizer["vocabulary"] == 99
    assert (note.sampling["temperature"], note.sampling["top_p"], note.sampling["n"]) == (
        0.7,
        0.9,
        4,
    )
    other = trainer(None)
    other.config.actor_rollout_ref.rollout.temperature = None
    with pytest.raises(ValueError, match="temperature"):
        settings_of(other)
