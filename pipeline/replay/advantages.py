"""Advantages: one number a row, over the kept rollouts of its group.

`verl` is what verl's V1 trainer computes (`compute_advantage_for_multi_trajectories` over
`compute_grpo_outcome_advantage`, 0.9.1); `paper` is GFPO's, equation 2 of arXiv 2508.09726.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch

from .plan import Ints, Update

Advantages = Literal["verl", "paper", "logged", "none"]
EPSILON = 1e-6


def advantages(update: Update, tokens: Ints, by: Advantages, scale: bool = True) -> torch.Tensor:
    """-> [n] float32. The last output of a session has its reward, and all its outputs share the
    advantage; without `scale` it is not divided by the standard deviation (Dr.GRPO). `tokens` [n]
    are those that the policy wrote.

    `verl` divides by the unbiased standard deviation + 1e-6, and a lone rollout keeps its raw
    reward; a session whose last output holds no token of the policy's has none. `paper` divides by
    the biased one without epsilon, and is 0 where that is 0.
    """
    dtype = torch.float32 if by == "verl" else torch.float64
    rewards = torch.from_numpy(update.reward).to(dtype) + 0.0  # -0 is 0, as a sum is in verl
    sessions, final = update.session.tolist(), update.final.tolist()
    found = []
    for low, high in pairwise(update.offsets.tolist()):
        # verl takes sessions in the order of their first rows, and sums of floats depend on it.
        last = dict.fromkeys(sessions[low:high], low)
        last |= {sessions[row]: row for row in range(low, high) if final[row]}
        held = list(last.values())
        scores = (_verl if by == "verl" else _paper)(rewards[held], scale)
        if by == "verl":  # which takes the advantage from the last output's first token
            scores = scores * torch.from_numpy(tokens[held] > 0)
        of_session = dict(zip(last, scores.tolist(), strict=True))
        found += [of_session[session] for session in sessions[low:high]]
    return torch.tensor(found, dtype=torch.float32)


def _verl(rewards: torch.Tensor, scale: bool) -> torch.Tensor:
    if len(rewards) == 1:
        return rewards / (1 + EPSILON) if scale else rewards
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + EPSILON) if scale else centred


def _paper(rewards: torch.Tensor, scale: bool) -> torch.Tensor:
    if bool((rewards == rewards[0]).all()):  # a sum that rounds would leave a rest
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / rewards.std(correction=0) if scale else centred


def singletons(update: Update) -> int:
    """How many groups have one rollout: with `verl` their advantage is the raw reward."""
    sessions = torch.from_numpy(update.final).to(torch.int64)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), sessions.cumsum(0)])[update.offsets]
    return int((ends.diff() == 1).sum())
