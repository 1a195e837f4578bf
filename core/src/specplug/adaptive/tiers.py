"""Batch sizes of one kind: which depths are candidates there, and how the EMA policy moves between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier. The numbers' names and defaults are those of SGLang's adaptive configuration."""

    least: int
    """Smallest padded batch size that belongs to it."""
    candidates: tuple[int, ...]
    """Depths, ascending; 0 is not to draft."""
    ema_alpha: float = 0.2
    """Weight of a new observation."""
    warmup_batches: int = 10
    """Observations before the first change."""
    update_interval: int = 5
    """Observations between two looks at whether to change."""
    up_hysteresis: float = 0.0
    """Added to the mean accepted length that a deeper candidate needs."""
    down_hysteresis: float = -0.25
    """Added to the mean accepted length at which a shallower candidate is enough."""
    ceiling_coeff: float = 0.0
    """Unless 0: no more depth than the mean accepted length times this, but for a move up."""

    def with_candidates(self, depths: Collection[int]) -> Tier:
        """Return it with candidates among `depths`: for each the deepest that is no deeper, else the shallowest.

        0 stays 0, and what is above stays above.
        """
        drafting = [depth for depth in depths if depth > 0]
        found = {
            max((each for each in drafting if each <= one), default=min(drafting)) for one in self.candidates if one
        }
        return dataclasses.replace(self, candidates=tuple(sorted(found | {0} & set(self.candidates))))


SETTINGS = tuple(field.name for field in dataclasses.fields(Tier) if field.name not in ("least", "candidates"))
"""Fields that a configuration file may give for all tiers or for one."""

DEFAULTS = (
    Tier(1, (1, 3, 5, 7)),
    Tier(8, (0, 1, 3), down_hysteresis=0.0),
    Tier(32, (0, 1), down_hysteresis=0.0),
    Tier(64, (0,), down_hysteresis=0.0),
)
"""SGLang's tiers: the more requests share a forward, the less a rejected draft is for free."""


def one_tier(candidates: Sequence[int]) -> tuple[Tier, ...]:
    """Return a single tier for all batch sizes."""
    return (Tier(1, tuple(sorted(candidates))),)


def tier_at(tiers: Sequence[Tier], padded: int) -> int:
    """Return the index of the tier of a padded batch size: the last that begins at or below it, else the first."""
    return max((at for at, tier in enumerate(tiers) if tier.least <= padded), default=0)


def all_candidates(tiers: Sequence[Tier]) -> list[int]:
    """Return every tier's candidates, ascending."""
    return sorted({depth for tier in tiers for depth in tier.candidates})


def ladder(deepest: int) -> list[int]:
    """Return candidates from 0 to `deepest`: all of them up to 4, further apart above."""
    found = [*range(min(deepest, 4) + 1)]
    while found[-1] < deepest:
        step = max(1, found[-1] // 3)
        found.append(min(found[-1] + step, deepest))
    return found


def as_json(tiers: Sequence[Tier]) -> dict[str, Mapping[str, Any]]:
    """Return the tiers as a configuration file holds them."""
    found: dict[str, Mapping[str, Any]] = {}
    for tier in tiers:
        own = {name: getattr(tier, name) for name in SETTINGS}
        found[str(tier.least)] = {"candidate_steps": list(tier.candidates), **own}
    return found
