"""Options: each field becomes ``--speculative-<field>``, a key of the JSON config and a line of the docs. No torch."""

from pydantic import Field

from specplug import SpecConfig


class LookbackConfig(SpecConfig):
    """How far to look, and how much to draft. Fields of your own start with the algorithm's word."""

    num_draft_tokens: int = Field(8, ge=1, le=64, description="nodes verified per step, the root counted")
    lookback_words: int = Field(2, ge=1, le=16, description="tokens that have to be the same")
