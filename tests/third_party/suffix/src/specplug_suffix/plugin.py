"""Manifest of suffix decoding. Torch-free."""

from collections.abc import Sequence

from specplug import AlgorithmSpec, Capabilities, DraftPlan, Facts, Refusal, hookimpl
from specplug_suffix.config import SuffixConfig

NAME = "suffix-decoding"
NEEDS = Capabilities(shapes=frozenset({"tree"}), runs_on=frozenset({"host"}), variable_depth=True)


def plan(config: SuffixConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan a tree of `num_draft_tokens` - 1 nodes, as deep as a match leaves room in the tries."""
    if facts.draft is not None:
        return Refusal(
            reason=f"{NAME} drafts from text and reads no draft model",
            try_instead="leaving --speculative-draft-model-path out",
        )
    longest = min(config.num_draft_tokens - 1, config.suffix_max_depth - 1)
    longest = longest if depth is None else max(0, min(longest, depth))
    return DraftPlan(needs=NEEDS, nodes=config.num_draft_tokens - 1 if longest else 0, depth=longest)


SPEC = AlgorithmSpec(
    name=NAME,
    api=(1, 0),
    summary="trees of what followed the same words in this request and, if asked to, in earlier answers",
    aliases=("arctic-suffix",),
    foreign_options={
        "suffix-decoding-max-tree-depth": "write --speculative-suffix-max-depth",
        "suffix-decoding-max-cached-requests": "write --speculative-suffix-cached-requests",
        "suffix-decoding-max-spec-factor": "write --speculative-suffix-factor",
        "suffix-decoding-min-token-prob": "write --speculative-suffix-min-probability",
    },
    capabilities=NEEDS,
    config_model=SuffixConfig,
    plan=plan,
    drafter="specplug_suffix.drafter:SuffixDrafter",
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer suffix decoding."""
    return (SPEC,)
