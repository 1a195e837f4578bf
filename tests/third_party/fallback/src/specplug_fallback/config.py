"""Options of the combinator. Torch-free."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from specplug import SpecConfig


class Part(NamedTuple):
    """One of the algorithms."""

    name: str
    options: Mapping[str, Any]
    draft: bool
    """Whether the draft model is for it."""


class FallbackConfig(SpecConfig):
    """Which algorithms, in which order, and with which options."""

    fallback_first: str = Field("ngram", min_length=1, description="the algorithm that is asked first")
    fallback_then: str = Field(
        "standalone", min_length=1, description="the algorithm for rows without a draft of the first"
    )
    fallback_draft: Literal["first", "then", "both"] = Field(
        "then", description="which of them --speculative-draft-model-path is for"
    )
    fallback_first_options: Mapping[str, Any] = Field(
        default_factory=dict, description="options of the first, without the speculative prefix"
    )
    fallback_then_options: Mapping[str, Any] = Field(
        default_factory=dict, description="options of the other, without the speculative prefix"
    )

    def parts(self) -> tuple[Part, Part]:
        """Return both in the order in which they are asked; they share `num_draft_tokens`."""
        shared = {} if self.num_draft_tokens is None else {"num_draft_tokens": self.num_draft_tokens}
        return (
            Part(self.fallback_first, {**shared, **self.fallback_first_options}, self.fallback_draft != "then"),
            Part(self.fallback_then, {**shared, **self.fallback_then_options}, self.fallback_draft != "first"),
        )
