"""Options of DFLASH and DSPARK. SGLang's names where the meaning is SGLang's. Torch-free."""

from pydantic import Field

from specplug import SpecConfig

MOST = 64
"""Largest block."""


class BlockConfig(SpecConfig):
    """What both algorithms take."""

    num_draft_tokens: int | None = Field(
        None, ge=1, le=MOST + 1, description="nodes verified per step, the root counted; default: the draft's block"
    )
    num_steps: int = Field(
        1, ge=1, le=MOST, description="1: one forward drafts the whole block, nothing else is offered"
    )
    eagle_topk: int = Field(1, ge=1, le=MOST, description="1: a block is one path, nothing else is offered")
    draft_sampling: bool = Field(
        False, description="draw drafts at the request's temperature instead of taking the likeliest token"
    )

    @property
    def block_size(self) -> int | None:
        """Tokens of the block that the user asked for; None: the draft's."""
        return None


class DFlashConfig(BlockConfig):
    """How much of the block to draft."""

    dflash_block_size: int | None = Field(
        None, ge=2, le=MOST, description="tokens of the draft's block to use, its first included; default: all of them"
    )

    @property
    def block_size(self) -> int | None:
        """See `BlockConfig`."""
        return self.dflash_block_size


class DSparkConfig(BlockConfig):
    """How much of the block to draft and to verify, and how."""

    draft_sampling: bool = Field(
        True, description="draw drafts at the request's temperature instead of taking the likeliest token"
    )
    dspark_block_size: int | None = Field(
        None, ge=1, le=MOST, description="slots of the draft's block to use; default: all of them"
    )
    dspark_confidence_threshold: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="verify no draft that the confidence head gives a smaller chance to be reached and accepted; "
        "0 verifies the whole block",
    )

    @property
    def block_size(self) -> int | None:
        """See `BlockConfig`."""
        return self.dspark_block_size
