"""Correction: importance weights and rejection of stale tokens, by verl's own helper.

Weights correct the likelihood of a row, not the stale competition for rank in which it was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from .dataset import Mini
from .tensors import as_nested, dense

Values = np.ndarray[Any, Any]


def weights_of(minis: Sequence[Mini], by_sequence: bool) -> tuple[float, int]:
    """Sum and number of the weights: of the tokens that the policy wrote, or of the sequences, each
    with the mean of its tokens'; padding does not count."""
    total, count = 0.0, 0
    for mini in minis:
        real = len(mini.session) - mini.pads
        mask = dense(mini.batch["loss_mask"])[:real] > 0
        weights = dense(mini.batch["rollout_is_weights"])[:real].double() * mask
        if by_sequence:
            written = mask.sum(1)
            found = (weights.sum(1) / written.clamp(min=1))[written > 0]
        else:
            found = weights[mask]
        total, count = total + float(found.sum()), count + len(found)
    return total, count


def scaled(mini: Mini, by: float) -> Mini:
    """A mini-batch whose weights are divided by their mean."""
    weights = mini.batch["rollout_is_weights"]
    divided = torch.nested.nested_tensor_from_jagged(weights.values() / by, weights.offsets())
    return replace(mini, batch={**mini.batch, "rollout_is_weights": divided})


class Compared(NamedTuple):
    """What weights are computed from: log-probs of the response's tokens, and the policy's mask,
    each as values [tokens], in rows of `lengths`."""

    old: Values
    rollout: Values
    mask: Values
    lengths: Values


def compared(mini: Mini) -> Compared:
    """That of a mini-batch's rows, without padding."""
    offsets = mini.batch["response_mask"].offsets()[: len(mini.session) - mini.pads + 1]
    end = int(offsets[-1])
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    old, rollout, mask = (mini.batch[name].values()[:end].numpy() for name in names)
    return Compared(old, rollout, mask, offsets.diff().numpy())


def metrics(parts: Sequence[Compared], rules: Any) -> dict[str, float]:
    """verl's metrics of the weights and rejections of a whole update, given part by part."""
    old, rollout, mask, lengths = (
        torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True)
    )
    if not bool(mask.any()):
        return {}
    offsets = torch.cat([torch.zeros(1, dtype=lengths.dtype), lengths.cumsum(0)])
    rows = [dense(torch.nested.nested_tensor_from_jagged(v, offsets)) for v in (old, rollout, mask)]
    return dict(_by_verl(rows, rules)[2])


def correct(mini: Mini, rules: Any) -> Mini:
    """A mini-batch with `rollout_is_weights`, and with tokens rejected in `response_mask`, as
    `rules` (verl's `algorithm.rollout_correction`) say.

    As in verl's V1 trainer `loss_mask` stays as it was, and a session whose last output is rejected
    whole has no advantage.
    """
    batch = mini.batch
    mask = dense(batch["response_mask"])
    real = len(mask) - mini.pads
    if not bool(mask.any()):  # padding only: verl's helper refuses it
        ones = torch.ones_like(batch["old_log_probs"])
        return replace(mini, batch={**batch, "rollout_is_weights": ones})
    logs = [dense(batch[name])[:real] for name in ("old_log_probs", "rollout_log_probs")]
    weights, kept, _ = _by_verl([*logs, mask[:real]], rules)
    made: dict[str, torch.Tensor] = {}
    like = batch["response_mask"]
    if weights is not None:
        made["rollout_is_weights"] = as_nested(weights.batch["rollout_is_weights"], like, 1)
    if rules.rollout_rs is not None and "advantages" in batch:
        gone = ~kept.any(1) & mini.final[:real]
        lost = torch.isin(mini.session[:real], mini.session[:real][gone])
        advantages = dense(batch["advantages"])[:real] * ~lost.unsqueeze(1)
        made["response_mask"] = as_nested(kept, like, 0)
        made["advantages"] = as_nested(advantages, like, 0)
    return replace(mini, batch={**batch, **made})


def _by_verl(rows: Sequence[torch.Tensor], rules: Any) -> Any:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    return compute_rollout_correction_and_rejection_mask(
        *rows,
        rollout_is=rules.rollout_is, rollout_is_threshold=rules.rollout_is_threshold,
        rollout_rs=rules.rollout_rs, rollout_rs_threshold=rules.rollout_rs_threshold,
    )  # fmt: skip
