"""Options of FROZEN_KV_MTP. SGLang's names where the meaning is SGLang's. Torch-free."""

from typing import Literal

from pydantic import Field

from specplug import SpecConfig

MOST_STEPS = 64


class FrozenConfig(SpecConfig):
    """How far to draft, and how."""

    num_draft_tokens: int | None = Field(
        None, ge=1, le=MOST_STEPS + 1, description="nodes verified per step, the root counted; default num_steps + 1"
    )
    num_steps: int = Field(
        4,
        ge=1,
        le=MOST_STEPS,
        description="tokens drafted per step; follows num_draft_tokens where that alone is given",
    )
    eagle_topk: int = Field(
        1, ge=1, le=MOST_STEPS, description="1: an assistant drafts chains, nothing else is offered"
    )
    draft_sampling: bool = Field(
        False, description="draw drafts at the request's temperature instead of taking the likeliest token"
    )
    frozen_position: Literal["committed", "root"] = Field(
        "committed",
        description="where an assistant's query stands: at the last committed token, or at the root behind it",
    )

    @property
    def nodes(self) -> int:
        """Most drafts of a step."""
        return self.num_steps if self.num_draft_tokens is None else min(self.num_steps, self.num_draft_tokens - 1)
