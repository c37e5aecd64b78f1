"""Aids: what the user names to read a log by, a tokenizer and a reward function, each pinned by the
digest of its file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rollsift.schemas.errors import UsageError
from rollsift.schemas.manifest import Source

from .rewards import RewardFunction

OPTIONS = {"tokenizer": "--tokenizer", "reward_fn": "--reward-fn"}  # by which they are named
BATCH = 1 << 10  # texts given to the tokenizer at a time


class Tokenizer:
    """A tokenizer.json, or a folder that holds one; counts the tokens of texts."""

    def __init__(self, path: Path) -> None:
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            import tokenizers
        except ImportError:
            raise UsageError("--tokenizer: needs pip install 'rollsift[tokenizer]'") from None
        try:
            data = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except OSError as error:
            raise UsageError(f"--tokenizer {path}: cannot be read ({error.strerror})") from None
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(f"--tokenizer {path}: not a tokenizer.json ({error})") from None
        # What the file may say of both would give batches one length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = self.file = path.name
        self.digest = hashlib.sha256(data).hexdigest()

    def count(self, texts: pl.Series) -> pl.Series:
        """Tokens of each text, without the special ones that a template adds; null for null."""
        counts: list[int] = []
        known = texts.drop_nulls()
        for start in range(0, len(known), BATCH):
            batch = known[start : start + BATCH].to_list()
            encoded = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            counts += map(len, encoded)
        there = texts.is_not_null()
        return pl.Series(counts, dtype=pl.Int64).gather((there.cum_sum() - 1).set(~there, None))


@dataclass(frozen=True, slots=True)
class Aids:
    """What was named, if anything."""

    tokenizer: Tokenizer | None = None
    reward: RewardFunction | None = None

    @classmethod
    def named(cls, tokenizer: Path | None, reward_fn: str | None) -> Aids:
        """Load what the options name; raises UsageError where it cannot be used."""
        return cls(
            Tokenizer(tokenizer) if tokenizer else None,
            RewardFunction.load(reward_fn) if reward_fn else None,
        )

    @property
    def settings(self) -> dict[str, dict[str, str]]:
        """Option -> its name and digest, for run.json."""
        named = {"tokenizer": self.tokenizer, "reward_fn": self.reward}
        return {key: {"name": aid.name, "sha256": aid.digest} for key, aid in named.items() if aid}

    def must_be(self, theirs: Mapping[str, Mapping[str, str]], all_of_them: bool) -> None:
        """Raise UsageError where one is not the one that a run's settings have, or where one of
        these is missing though `all_of_them` are needed."""
        ours = self.settings
        for key in {**theirs, **ours}:
            if theirs.get(key) != ours.get(key) and (all_of_them or key in ours):
                wanted, given = theirs.get(key), ours.get(key)
                raise UsageError(
                    f"{OPTIONS.get(key, key)}: the run was filtered "
                    f"{f'with {_shown(wanted)}' if wanted else 'without'}; "
                    f"{f'this is {_shown(given)}' if given else 'name it again'}"
                )

    @property
    def pins(self) -> list[Source]:
        """The files of what was named, for the manifest."""
        return [Source(aid.file, 0, aid.digest) for aid in (self.tokenizer, self.reward) if aid]


def _shown(aid: Mapping[str, str]) -> str:
    """An aid of run.json: its name and digest."""
    return f"{aid.get('name')} (SHA-256 {aid.get('sha256')})"


NOTHING = Aids()
