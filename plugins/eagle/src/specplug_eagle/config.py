"""Options of EAGLE and EAGLE-3. SGLang's names where the meaning is SGLang's. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specplug import SpecConfig

MOST_STEPS = 64
MOST_NODES = 256
TREE_NODES = 8
"""Default of `num_draft_tokens` for trees, as far as steps and branches can fill it."""


def candidates(steps: int, topk: int) -> int:
    """Return how many nodes a tree of `steps` expansions offers: `topk` at depth 1, `topk` of each of `topk` below.

    EAGLE-2 (arXiv 2406.16858, section 4.1) expands the `topk` likeliest nodes of a depth by their `topk` likeliest
    children each.
    """
    return topk + max(0, steps - 1) * topk * topk if steps else 0


def _items(value: object) -> object:
    """Accept a command line's "2,16,29"."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class EagleConfig(SpecConfig):
    """How far and how wide to draft."""

    algorithm: ClassVar[str] = "eagle"

    num_draft_tokens: int | None = Field(
        None,
        ge=1,
        le=MOST_NODES,
        description="nodes verified per step, the root counted; default num_steps + 1 for a chain, 8 for a tree",
    )
    num_steps: int = Field(
        3,
        ge=1,
        le=MOST_STEPS,
        description="longest drafted path; without it 5 for trees, for chains num_draft_tokens - 1, or 3",
    )
    eagle_topk: int = Field(
        1,
        ge=1,
        le=MOST_STEPS,
        description="branches per node, 1 drafts a chain; without it 4 for Llama targets, 1 for others",
    )
    draft_sampling: bool = Field(
        False, description="chains only: draw drafts at the request's temperature instead of taking the likeliest token"
    )
    eagle_token_map: str | None = Field(
        None,
        min_length=1,
        description="file of token ids (.pt, .json or .txt) that a head of the full vocabulary may draft (FR-Spec)",
    )

    @property
    def topk(self) -> int:
        """Branches per node."""
        return self.eagle_topk

    @property
    def tree(self) -> bool:
        """Whether trees are drafted."""
        return self.eagle_topk > 1

    @property
    def nodes(self) -> int:
        """Most drafts of a step, the root not counted."""
        most = candidates(self.num_steps, self.topk)
        if self.num_draft_tokens is not None:
            return min(most, self.num_draft_tokens - 1)
        return min(most, max(TREE_NODES - 1, self.num_steps)) if self.tree else most

    @property
    def steps(self) -> int:
        """Longest path of a step."""
        return min(self.num_steps, self.nodes)


class Eagle3Config(EagleConfig):
    """What EAGLE-3 adds: readings of the checkpoint that its files leave open."""

    algorithm: ClassVar[str] = "eagle3"

    eagle_aux_layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_items)] = Field(
        None,
        min_length=1,
        description="target layers whose inputs the head reads, in order: 0 the embeddings, n the last layer's output; "
        "instead of the checkpoint's",
    )
    eagle_aux_semantics: Literal["boundary", "output"] | None = Field(
        None,
        description="what the checkpoint's own layer ids mean: boundary, the input of that layer; output, its output",
    )
    eagle_norm_output: bool | None = Field(
        None, description="feed the normed (on) or the plain state (off) to the next step; instead of the checkpoint's"
    )
    eagle_norm_before_residual: bool | None = Field(
        None, description="normed (on) or plain state (off) in the residual; instead of the checkpoint's"
    )
