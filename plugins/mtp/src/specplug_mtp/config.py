"""Options of builtin-mtp. SGLang's names where the meaning is SGLang's. Torch-free."""

from typing import Literal

from pydantic import Field

from specplug import SpecConfig

MOST_STEPS = 64


class BuiltinMtpConfig(SpecConfig):
    """How far to draft, and with which of the checkpoint's heads."""

    num_draft_tokens: int | None = Field(
        None, ge=1, le=MOST_STEPS + 1, description="nodes verified per step, the root counted; default num_steps + 1"
    )
    num_steps: int = Field(
        3,
        ge=1,
        le=MOST_STEPS,
        description="tokens drafted per step; follows num_draft_tokens where that alone is given",
    )
    eagle_topk: int = Field(1, ge=1, le=MOST_STEPS, description="1: MTP heads draft chains, nothing else is offered")
    draft_sampling: bool = Field(
        False, description="draw drafts at the request's temperature instead of taking the likeliest token"
    )
    mtp_multi_layer: bool = Field(
        False, description="one head for each step; off: the first head drafts every step. On where several are stored"
    )
    mtp_depth_input: Literal["auto", "chain", "target"] = Field(
        "auto",
        description="with mtp_multi_layer, the state that a later head reads: chain: the state of the head before it; "
        "target: the target's own; auto: what the family was trained with, which is chain for all that are run",
    )

    @property
    def nodes(self) -> int:
        """Most drafts of a step."""
        return self.num_steps if self.num_draft_tokens is None else min(self.num_steps, self.num_draft_tokens - 1)
