"""Options of NGRAM. SGLang's names where the meaning is SGLang's. Torch-free."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from specplug import SpecConfig

DEFAULT_DRAFT_TOKENS = 16


def _lower(value: object) -> object:
    """Accept SGLang's spelling BFS and PROB."""
    return value.strip().lower() if isinstance(value, str) else value


class NgramConfig(SpecConfig):
    """How far back to look, how much to propose, and what to remember."""

    num_draft_tokens: int | None = Field(
        DEFAULT_DRAFT_TOKENS, ge=1, le=512, description="nodes verified per step, the root counted (1 drafts nothing)"
    )
    ngram_min_match: int = Field(
        1, ge=1, le=256, description="fewest tokens at the end of the text that must have occurred before"
    )
    ngram_max_trie_depth: int = Field(
        18, ge=2, le=256, description="longest suffix told apart, in tokens; a longer match counts as this long"
    )
    ngram_min_bfs_breadth: int = Field(
        1, ge=1, le=32, description="most continuations per node after the longest matches"
    )
    ngram_max_bfs_breadth: int = Field(
        10, ge=1, le=32, description="most continuations per node after the shortest matches; 1 drafts chains"
    )
    ngram_match_type: Annotated[Literal["bfs", "prob"], BeforeValidator(_lower)] = Field(
        "bfs", description="which continuation first: bfs, the most recent; prob, the most frequent"
    )
    ngram_min_confidence: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="leave out drafts whose estimated acceptance is below this; 0 fills the node budget",
    )
    ngram_min_gain: float = Field(
        0.8,
        ge=0.0,
        le=511.0,
        description="propose nothing unless this many drafts are expected to be accepted; 0 proposes any match",
    )
    ngram_store_mb: int = Field(
        256,
        ge=1,
        le=1 << 20,
        description="bound on what is remembered, in MiB for the whole engine; the oldest text is forgotten first",
    )
    ngram_shared: bool = Field(
        False, description="draft from what all requests said, finished ones included; crosses request boundaries"
    )
    ngram_external_corpus_path: str | None = Field(
        None, min_length=1, description="JSONL file to draft from too, each line a JSON string"
    )
    ngram_external_sam_budget: int = Field(
        0, ge=0, le=511, description="drafts reserved for the corpus, at most num_draft_tokens - 1"
    )

    @property
    def nodes(self) -> int:
        """Most drafts of a step."""
        return (self.num_draft_tokens or DEFAULT_DRAFT_TOKENS) - 1
