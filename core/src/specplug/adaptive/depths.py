"""What an adaptive run may choose from: settled with the run, before any weight loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from specplug.adaptive.config import OPTION, AdaptiveFile, Measured, read_adaptive
from specplug.adaptive.cost import CostPolicy
from specplug.adaptive.ema import EmaPolicy
from specplug.adaptive.policy import Forced, Policy
from specplug.adaptive.tiers import DEFAULTS, Tier, all_candidates, as_json
from specplug.errors import UserError

if TYPE_CHECKING:
    from specplug.options import EngineOptions

SWITCH = "--speculative-adaptive"
Name = Literal["ema", "cost"]


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. Made by `adaptive_request`."""

    policy: Name
    file: AdaptiveFile | None = None

    @property
    def tiers(self) -> tuple[Tier, ...] | None:
        """Tiers with their candidates; None: every depth that the algorithm offers, whatever the batch size.

        Where costs were measured beforehand, a policy that goes by cost may choose every depth that was measured.
        """
        if self.file is not None:
            measured = {depth for _, depth in self.measured.draft} if self.policy == "cost" else set()
            return tuple(
                dataclasses.replace(tier, candidates=tuple(sorted(measured | set(tier.candidates))))
                for tier in self.file.tiers
            )
        return DEFAULTS if self.policy == "ema" else None

    @property
    def measured(self) -> Measured:
        """What is known of costs and acceptance beforehand."""
        return self.file.measured if self.file else Measured()


@dataclass(frozen=True, slots=True)
class Depths:
    """The depths of a run, and the policy that chooses among them. Set by `plan_run`."""

    policy: Name
    nodes: Mapping[int, int]
    """Depth -> most drafts of a row, of that depth's plan; 0 -> 0."""
    tiers: tuple[Tier, ...]
    start: int
    measured: Measured = field(default_factory=Measured)

    def lines(self) -> list[str]:
        """Return it in words."""
        offered = ", ".join(
            f"{depth}" if depth == nodes else f"{depth} ({nodes} drafts)" for depth, nodes in sorted(self.nodes.items())
        )
        tiers = "; ".join(f"batch {tier.least} and more: {', '.join(map(str, tier.candidates))}" for tier in self.tiers)
        return [f"adaptive: policy {self.policy}, depths {offered}, from {self.start}; {tiers}"]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return {
            "policy": self.policy,
            "drafts_by_depth": {str(depth): nodes for depth, nodes in sorted(self.nodes.items())},
            "start": self.start,
            "tiers": as_json(self.tiers),
        }


def adaptive_request(options: EngineOptions) -> Request | None:
    """Read the adaptive options; None where they are off. Raises UserError for a file that cannot be used."""
    path = options.speculative_adaptive_config
    if options.speculative_adaptive:
        return Request(options.speculative_adaptive_policy or "ema", read_adaptive(path) if path else None)
    for option, value in ((OPTION, path), (f"{SWITCH}-policy", options.speculative_adaptive_policy)):
        if value is not None:
            raise UserError(f"{option} {value} has no effect without {SWITCH}: add it, or leave {option} out")
    return None


def checked_start(request: Request, typed: object) -> None:
    """Raise UserError where the depth that the user typed to begin with is no candidate."""
    if request.tiers is None or not isinstance(typed, int):
        return
    found = all_candidates(request.tiers)
    if typed not in found:
        raise UserError(
            f"--speculative-num-steps {typed} is no candidate of {SWITCH} ({', '.join(map(str, found))}): "
            f"give one of them, leave it out, or give candidates with {OPTION}"
        )


def policy_of(depths: Depths | None, plain: int, padded: Sequence[int]) -> Policy:
    """Return the policy of a run; one without `depths` drafts as deep as its plan says, `plain`.

    `padded`: batch sizes that there are, ascending, the last one all slots.
    """
    if depths is None:
        return Forced([plain])
    if depths.policy == "ema":
        return EmaPolicy(depths.tiers, padded, depths.start)
    return CostPolicy(depths.nodes, depths.tiers, padded, depths.start, depths.measured)
