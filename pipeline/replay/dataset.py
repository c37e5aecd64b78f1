"""The dataset: an item is an update, cut into this rank's part of its mini-batches.

For torchdata's `StatefulDataLoader(dataset, batch_size=None, sampler=range(start, len(dataset)),
multiprocessing_context="spawn")`. Any item can be made by itself, so a position is all the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollsift.schemas.errors import InputError, UsageError

from . import tensors
from .advantages import Advantages, advantages, singletons
from .plan import Ints, Plan, Update
from .share import Share, Split, shares
from .tokens import IDS, Lists, light, read

NAMES = ("prompt_ids", "response_ids", "response_mask")


@dataclass(frozen=True, slots=True)
class Rules:
    """What an update is made of: how its advantages are computed (`scale` by the standard
    deviation), which logged log-probs it brings along, and how far behind the learner a group may
    be. `assume_version` takes step - 1 for versions that were not logged. `rejected` brings along
    the rows of the groups that were not kept, for weights that are normalised over all. Ids from
    `vocabulary` on are refused."""

    advantages: Advantages = "verl"
    scale: bool = True
    log_probs: tuple[str, ...] = ()
    temperature: float | None = None
    max_lag: int | None = None
    assume_version: bool = False
    rejected: bool = False
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class Mini:
    """A rank's part of a mini-batch: nested CPU tensors by verl's keys, the last `pads` rows
    neutral; `global_batch_size` is what the loss is divided by, `temperature` one for all rows or
    [rows] float32. `session` and `final` [rows] are the plan's, -1 and true in padding."""

    batch: dict[str, torch.Tensor]
    global_batch_size: int
    temperature: float | torch.Tensor
    pads: int
    session: torch.Tensor
    final: torch.Tensor


@dataclass(frozen=True, slots=True)
class Item:
    """An update of one rank. `counts` are integers for people: rows, groups, stale_groups,
    singletons, trimmed_groups, lag_max; `metrics` floats of the whole update by verl's names.
    `rejected` are this rank's rows that were not kept, where they are wanted."""

    step: int
    manifest: str
    minis: list[Mini]
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    rejected: Mini | None = None


class Replay(torch.utils.data.Dataset[Item]):  # type: ignore[misc]  # torch is not there
    """A run's updates. `version` is the learner's before the first update; the update at `index`
    is made by version + index.

    An item needs memory for the kept rows of its update, and reads only their row groups.
    """

    def __init__(
        self,
        run: Path,
        split: Split,
        rules: Rules | None = None,
        *,
        logs: Path | None = None,
        rank: int = 0,
        version: int = 0,
    ) -> None:
        self.plan = Plan(run, logs)
        self.split, self.rules, self.rank, self.version = split, rules or Rules(), rank, version

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Item:
        """An update; raises InputError or CheckError where what is logged cannot be used."""
        whole = self.plan.update(index)
        lag = self._lag(whole, self.version + index)
        update = whole.without(self._stale(whole, lag))
        counts = {
            "rows": len(update),
            "groups": len(update.offsets) - 1,
            "stale_groups": len(whole.offsets) - len(update.offsets),
            "singletons": singletons(update),
            "lag_max": int(lag.max(initial=0)),
        }
        if not len(update):
            return Item(whole.step, whole.manifest, [], counts)
        item = self._item(update, counts)
        return (
            replace(item, rejected=self._rejected(index, update)) if self.rules.rejected else item
        )

    def _item(self, update: Update, counts: dict[str, int]) -> Item:
        rules = self.rules
        names = [*NAMES, *rules.log_probs]
        if rules.advantages == "logged":
            names.append("advantages")
        lists = self._read(update.path, update.rows, names)
        mask = lists["response_mask"]
        tokens = np.add.reduceat(mask.values, mask.offsets[:-1])
        lengths = lists["prompt_ids"].lengths + lists["response_ids"].lengths
        found = shares(update, lengths, tokens, self.split)
        counts["trimmed_groups"] = found.trimmed
        if rules.advantages in ("verl", "paper"):
            per_row = advantages(update, tokens, rules.advantages, rules.scale).numpy()
            by_token = np.repeat(per_row, mask.lengths) * mask.values.astype(np.float32)
            lists["advantages"] = Lists(by_token, mask.offsets)
        heat = self._temperatures(update.path, update.rows)
        minis = [
            _mini(update.session, update.final, lists, mini[self.rank], heat)
            for mini in found.minis
        ]
        return Item(update.step, update.manifest, minis, counts, _metrics(update, lists, tokens))

    def _rejected(self, index: int, update: Update) -> Mini | None:
        rows = self.plan.rejected(index, update)
        ranks, micro = self.split.ranks, self.split.micro
        if not len(rows):
            return None
        lists = self._read(update.path, rows, (*NAMES, "rollout_log_probs"))
        mine = np.arange(self.rank, len(rows), ranks)
        places = -(-len(rows) // (ranks * micro)) * micro
        share = Share(mine, places - len(mine), 0, len(rows))
        alone = np.arange(len(rows), dtype=np.int64)
        return _mini(alone, alone >= 0, lists, share, self._temperatures(update.path, rows))

    def _read(self, path: Path, rows: Ints, names: Sequence[str]) -> dict[str, Lists]:
        found = read(path, rows, names)
        most = self.rules.vocabulary
        for name in IDS:
            values = found[name].values
            if most is not None and ((values < 0) | (values >= most)).any():
                worst = values.min() if values.min() < 0 else values.max()
                raise InputError(
                    f"{path}: {name} holds id {worst}, the model's vocabulary has {most}; is it "
                    "the model that these rollouts were sampled for?"
                )
        return found

    def _lag(self, update: Update, learner: int) -> Ints:
        """[g] how many updates a group's oldest weights are behind the learner's; 0 where not
        logged."""
        unknown = update.version < 0
        version = np.where(unknown, update.step - 1 if self.rules.assume_version else learner,
                           update.version)  # fmt: skip
        if unknown.any() and self.rules.max_lag is not None and not self.rules.assume_version:
            raise InputError(
                f"{update.path}: no policy_version in the group of row "
                f"{update.rows[update.offsets[unknown.argmax()]]}, so --max-lag cannot be judged; "
                "--assume-version takes step - 1, which holds where the trainer was synchronous"
            )
        return learner - version

    def _stale(self, update: Update, lag: Ints) -> Any:
        """[g] whether a group is too old."""
        return lag > (np.inf if self.rules.max_lag is None else self.rules.max_lag)

    def _temperatures(self, path: Path, rows: Ints) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[rows] the sampling temperature of each row: as logged, else the one that was named."""
        named = self.rules.temperature
        column: Any = light(path, rows, "temperature")
        if column is None:
            if named is None:
                raise InputError(
                    f"{path}: no column temperature, and log-probs depend on it; name the "
                    "one that was sampled with: -s rollout.temperature=1.0"
                )
            return np.full(len(rows), named, np.float32)
        logged = np.array(column.to_pylist(), np.float64)  # null is NaN
        odd = ~(np.isfinite(logged) & (logged > 0))
        if odd.any():
            raise InputError(
                f"{path}, row {rows[odd.argmax()]}: temperature {logged[odd.argmax()]}; log-probs "
                "at that temperature cannot be computed"
            )
        if named is not None and (logged != named).any():
            other = logged[logged != named][0]
            raise UsageError(f"rollout.temperature={named}, but {path} logged {other}")
        return logged.astype(np.float32)


def _mini(
    session: Ints,
    final: np.ndarray[Any, np.dtype[np.bool_]],
    lists: Mapping[str, Lists],
    share: Share,
    heat: np.ndarray[Any, np.dtype[np.float32]],
) -> Mini:
    rows, pads = share.rows, share.pads
    held = {name: tensors.take(found, rows, pads) for name, found in lists.items()}
    prompts, responses, mask = (held.pop(name) for name in NAMES)
    whole = tensors.joined(prompts, responses)
    divided_by = mask.values.copy()
    if share.ballast:
        divided_by[mask.offsets[len(rows)]] = share.ballast
    batch = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": whole,
        "position_ids": tensors.positions(whole),
        "response_mask": mask,
        "loss_mask": Lists(divided_by, mask.offsets),
        **held,
    }
    one = bool((heat == heat[0]).all())
    ones = np.ones(pads, np.float32)
    return Mini(
        batch={key: tensors.nested(found) for key, found in batch.items()},
        global_batch_size=share.global_batch_size,
        temperature=float(heat[0]) if one else torch.from_numpy(np.concatenate([heat[rows], ones])),
        pads=pads,
        session=torch.from_numpy(np.concatenate([session[rows], np.full(pads, -1)])),
        final=torch.from_numpy(np.concatenate([final[rows], np.ones(pads, np.bool_)])),
    )


def _metrics(update: Update, lists: Mapping[str, Lists], tokens: Ints) -> dict[str, float]:
    """What verl's trainer tells of a batch, over the whole update."""
    measured = {
        "critic/score": update.reward[update.final],
        "response_length": tokens,
        "prompt_length": lists["prompt_ids"].lengths,
    }
    if "advantages" in lists:
        valid = lists["response_mask"].values > 0
        measured["critic/advantages"] = lists["advantages"].values[valid]
    return {
        f"{name}/{word}": float(getattr(values, word)())
        for name, values in measured.items()
        for word in ("mean", "max", "min")
        if len(values)
    }
