"""Options of Medusa. Torch-free."""

from pydantic import Field

from specplug import SpecConfig


class MedusaConfig(SpecConfig):
    """How much of the heads' guesses is verified."""

    num_draft_tokens: int = Field(16, ge=1, le=257, description="nodes verified per step, the root counted")
    medusa_top_k: int = Field(8, ge=1, le=64, description="most candidates of one head in the tree")
