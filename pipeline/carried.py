"""Carried: what steps hand on to later ones, so that all of a run is read alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rollsift.schemas.manifest import Manifest

from .facts import Reading
from .fields import IDS, MASK, Fields, resolve
from .score import Rules

# Fields whose values may be of any kind, by role: they are shown as text.
_ANY = ("prompt", "ground_truth", "step", "policy_version", "truncated")
# Fields of copied logs that must be text.
_TEXT = ("input", "output", "uid", "completion", "response")


@dataclass(slots=True)
class Carried:
    """The reward's field, the unit of length, the kinds of fields (`number` for any; the first step
    in which a field is not null fixes it), and the content of logs in which a batch can stand
    twice, by the step that first held it."""

    reward: str | None = None
    unit: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, fingerprints: dict[str, int] | None = None) -> Carried:
        """What the step of a manifest hands on."""
        kinds = dict(manifest.field_types)
        return cls(manifest.reward_field, manifest.length_unit, kinds, fingerprints or {})

    def copy(self) -> Carried:
        """The same, to be changed apart."""
        return replace(self, kinds=dict(self.kinds), fingerprints=dict(self.fingerprints))

    def fields(self) -> Fields:
        """The roles of all fields seen so far."""
        return resolve(self.kinds, self.reward, None)

    def enforced(self, by: Rules, copied: bool) -> dict[str, str]:
        """The kinds that a later step's values must be of; text where a copied log's must be."""
        roles = self.fields()
        free = {roles.columns.get(role) for role in _ANY} | {self.reward}
        free |= {roles.find(name) for name in by.as_numbers | {"acc"}}
        free |= {MASK, IDS, "response_length", by.recipe.length}
        known = {name: kind for name, kind in self.kinds.items() if kind != "null"}
        fixed = known | {name: "any" for name in known if name in free}
        return fixed | dict.fromkeys(_TEXT, "text") if copied else fixed

    def after(self, kinds: Mapping[str, str], reading: Reading | None) -> Carried:
        """What a step hands on that was read by `reading` and whose fields hold `kinds`."""
        new = self.copy()
        if reading:
            new.reward, new.unit = reading.reward or None, reading.length.unit
        numbers = reading.as_numbers if reading else ()
        for name, kind in kinds.items():
            word = "number" if kind in ("int", "long", "float") or name in numbers else kind
            if new.kinds.get(name, "null") == "null":
                new.kinds[name] = word
        return new
