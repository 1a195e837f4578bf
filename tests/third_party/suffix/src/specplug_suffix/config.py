"""Options of suffix decoding. Torch-free."""

from pydantic import Field

from specplug import SpecConfig


class SuffixConfig(SpecConfig):
    """How much to remember, and how much to draft."""

    num_draft_tokens: int = Field(17, ge=1, le=257, description="nodes verified per step, the root counted")
    suffix_max_depth: int = Field(
        24, ge=2, le=64, description="longest run of tokens that is remembered, the drafted ones included"
    )
    suffix_factor: float = Field(1.0, gt=0.0, le=16.0, description="most drafts per token of the match")
    suffix_min_probability: float = Field(
        0.1, ge=0.0, le=1.0, description="a draft that followed less often than this is left out"
    )
    suffix_cached_requests: int = Field(
        0, ge=0, le=1_000_000, description="earlier requests whose answers are drafted from, oldest forgotten first"
    )
