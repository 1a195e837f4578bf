"""Manifest of NGRAM: what it offers, and which configurations work. Torch-free."""

from collections.abc import Mapping, Sequence
from typing import Any

from specplug import AlgorithmSpec, Capabilities, Defaults, DraftPlan, Facts, Problem, Refusal, UserError, hookimpl
from specplug_ngram import corpus
from specplug_ngram.config import NgramConfig

NAME = "ngram"
LEAST_BYTES = 64 << 10
"""Least memory of one history; the store refuses less."""


def plan(config: NgramConfig, facts: Facts, depth: int | None) -> DraftPlan | Refusal:
    """Plan `num_draft_tokens` - 1 nodes in a tree, or in a chain when the greatest breadth is 1."""
    if facts.draft is not None:
        return Refusal(
            reason="ngram drafts from the text of the request and reads no draft model",
            try_instead="leave out --speculative-draft-model-path",
        )
    narrow, wide = config.ngram_min_bfs_breadth, config.ngram_max_bfs_breadth
    if config.ngram_min_match > config.ngram_max_trie_depth:
        return Refusal(
            reason=f"ngram_min_match {config.ngram_min_match} is above ngram_max_trie_depth"
            f" {config.ngram_max_trie_depth}, so nothing could ever match",
            try_instead=f"--speculative-ngram-min-match 1 to {config.ngram_max_trie_depth},"
            f" or --speculative-ngram-max-trie-depth {config.ngram_min_match}",
        )
    if narrow > wide:
        return Refusal(
            reason=f"ngram_min_bfs_breadth {narrow} is above ngram_max_bfs_breadth {wide}",
            try_instead=f"--speculative-ngram-min-bfs-breadth 1 to {wide},"
            f" or --speculative-ngram-max-bfs-breadth {narrow}",
        )
    unfit = _memory(config, facts) or _corpus(config)
    if unfit is not None:
        return unfit
    nodes = config.nodes
    longest = nodes if depth is None else max(0, min(nodes, depth))
    if wide == 1 or longest == 0:
        nodes = longest
    if longest and config.ngram_min_gain > longest:
        return Refusal(
            reason=f"ngram_min_gain {config.ngram_min_gain:g} is above the {longest} drafts that a step can accept,"
            " so nothing would ever be proposed",
            try_instead=f"--speculative-ngram-min-gain 0 to {longest}",
        )
    tree = wide > 1 and nodes > 1
    if tree and "tree_verify" not in facts.features:
        return Refusal(
            reason=f"ngram_max_bfs_breadth {wide} drafts trees, and this host and target cannot verify trees",
            try_instead="--speculative-ngram-max-bfs-breadth 1 --speculative-ngram-min-bfs-breadth 1",
        )
    needs = Capabilities(
        shapes=frozenset({"tree" if tree else "chain"}), runs_on=frozenset({"host"}), variable_depth=True
    )
    return DraftPlan(needs=needs, nodes=nodes, depth=longest)


def _memory(config: NgramConfig, facts: Facts) -> Refusal | None:
    """Refuse a store that cannot hold the least history of every request."""
    requests = facts.limits.max_running_requests
    histories = requests * (2 if config.ngram_shared else 1) + (config.ngram_external_corpus_path is not None)
    # Where the texts end is kept apart: two copies, each of twice the longest suffix.
    needed = histories * LEAST_BYTES + requests * (256 + 16 * config.ngram_max_trie_depth) + 8192
    least = -(-needed // (1 << 20))
    if config.ngram_store_mb >= least:
        return None
    return Refusal(
        reason=f"ngram_store_mb {config.ngram_store_mb} is too little for {requests} requests at once",
        try_instead=f"--speculative-ngram-store-mb {least} or more, or a lower --max-running-requests",
    )


def _corpus(config: NgramConfig) -> Refusal | None:
    """Refuse a corpus without a share of the drafts, and the reverse."""
    path, budget = config.ngram_external_corpus_path, config.ngram_external_sam_budget
    if budget > config.nodes:
        return Refusal(
            reason=f"ngram_external_sam_budget {budget} is above the {config.nodes} drafts of a step",
            try_instead=f"--speculative-ngram-external-sam-budget 0 to {config.nodes},"
            f" or --speculative-num-draft-tokens {budget + 1}",
        )
    if path is not None and budget == 0 and config.nodes:
        return Refusal(
            reason="ngram_external_sam_budget 0 reserves no draft for the corpus, so it would never be used",
            try_instead=f"--speculative-ngram-external-sam-budget 1 to {config.nodes}",
        )
    if path is None and budget:
        return Refusal(
            reason=f"ngram_external_sam_budget {budget} reserves drafts for a corpus, and none is given",
            try_instead=f"{corpus.OPTION} FILE, or leave out --speculative-ngram-external-sam-budget",
        )
    return None


SPEC = AlgorithmSpec(
    name=NAME,
    api=(1, 0),
    summary="drafts what followed the same tokens earlier in the request; no draft model",
    instead={
        "prompt-lookup": "ngram",
        "standalone-ngram": "ngram (needs no draft model) or standalone (a smaller model drafts)",
    },
    foreign_options={
        "speculative-ngram-capacity": "it counts trie nodes, ours is a bound in MiB: write --speculative-ngram-store-mb"
        " (about 100 bytes a token)",
        "speculative-ngram-external-corpus-max-tokens": "write --speculative-ngram-store-mb, which bounds it too",
        "speculative-ngram-min-match-window-size": "write --speculative-ngram-min-match",
        "speculative-ngram-max-match-window-size": "write --speculative-ngram-max-trie-depth",
        "speculative-ngram-branch-length": "write --speculative-num-draft-tokens, which bounds a path too",
        "speculative-num-steps": "write --speculative-num-draft-tokens, which bounds a path too",
        "speculative-eagle-topk": "write --speculative-ngram-max-bfs-breadth",
        "prompt-lookup-num-tokens": "write --speculative-num-draft-tokens (its value and 1 more, for the root)",
        "max-matching-ngram-size": "write --speculative-ngram-max-trie-depth",
        "prompt-lookup-min": "write --speculative-ngram-min-match",
        "prompt-lookup-max": "write --speculative-ngram-max-trie-depth",
    },
    capabilities=Capabilities(shapes=frozenset({"chain", "tree"}), runs_on=frozenset({"host"}), variable_depth=True),
    config_model=NgramConfig,
    plan=plan,
    drafter="specplug_ngram.drafter:NgramDrafter",
)


@hookimpl
def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    """Offer NGRAM."""
    return (SPEC,)


@hookimpl
def specplug_defaults(algorithm: str, given: Mapping[str, Any], facts: Facts) -> Defaults | None:
    """Draft chains where trees cannot be verified, unless the user asked for a breadth."""
    if algorithm != NAME or "tree_verify" in facts.features or "ngram_max_bfs_breadth" in given:
        return None
    return Defaults(
        values={"ngram_max_bfs_breadth": 1},
        because="this host and target cannot verify trees, so drafts are chains",
    )


@hookimpl
def specplug_check(algorithm: str, config: Any, plan: DraftPlan, facts: Facts) -> Sequence[Problem]:
    """Object to a corpus that cannot be read, before weights load."""
    if algorithm != NAME or config.ngram_external_corpus_path is None:
        return ()
    try:
        for _ in corpus.documents(config.ngram_external_corpus_path):
            pass
        corpus.tokenizer_file(facts.target.path)
    except UserError as error:
        return (Problem(severity="error", field="ngram_external_corpus_path", message=str(error)),)
    return ()
