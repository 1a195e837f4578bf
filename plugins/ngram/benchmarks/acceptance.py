"""What the options are worth on recorded chats: replay each answer and count what would have been accepted.

    python plugins/ngram/benchmarks/acceptance.py CHATS.npz [--sample 150] [--set FIELD=VALUE ...]

No model runs, so the figures are exact for greedy answers and carry no timing noise. CHATS.npz holds
`tokens` [n], `offsets` [chats + 1] and `prompt_len` [chats]. `chats` are the recordings as they are;
`copies` are their answers given again as a reply, with one token in twenty changed. The speed-up is
estimated from --costs: what verifying that many tokens (the root counted) takes, in plain steps, straight
lines between.
"""

import argparse
import random
import statistics

import numpy as np

from specplug_ngram._store import Store
from specplug_ngram.config import NgramConfig

Stream = tuple[list[int], int]
"""Tokens, and how many of them are the prompt."""

COSTS = "1:1,2:1.6,3:1.7,4:1.4,8:1.6,16:2.0"
"""SmolLM2-135M, float32, two cores: narrow products are slow there, so that 2 tokens cost more than 4."""


def load(path: str, sample: int, rng: random.Random) -> list[Stream]:
    """Return `sample` chats of the recording."""
    data = np.load(path)
    tokens, offsets, prompts = data["tokens"], data["offsets"], data["prompt_len"]
    chosen = rng.sample(range(len(prompts)), min(sample, len(prompts)))
    return [(tokens[offsets[i] : offsets[i + 1]].tolist(), int(prompts[i])) for i in chosen]


def copies(chats: list[Stream], rng: random.Random) -> list[Stream]:
    """Return chats whose answer repeats the first one's answer with small edits."""
    made = []
    for tokens, prompt in chats:
        answer = []
        for token in tokens[prompt : prompt + 150]:
            edit = rng.random()
            if edit < 0.05 / 3:  # dropped
                continue
            answer.append(rng.choice(tokens) if edit < 0.05 * 2 / 3 else token)
            if 0.05 * 2 / 3 <= edit < 0.05:  # something put in
                answer.append(rng.choice(tokens))
        made.append((tokens[: prompt + 150] + answer, len(tokens[: prompt + 150])))
    return made


def make_store(config: NgramConfig) -> Store:
    """Return a store for one request at a time, as the drafter makes it."""
    return Store(
        slots=1,
        nodes=config.nodes,
        bytes=config.ngram_store_mb << 20,
        max_depth=config.ngram_max_trie_depth,
        min_match=config.ngram_min_match,
        min_breadth=config.ngram_min_bfs_breadth,
        max_breadth=config.ngram_max_bfs_breadth,
        by_count=config.ngram_match_type == "prob",
        min_confidence=config.ngram_min_confidence,
        min_gain=config.ngram_min_gain,
        shared=config.ngram_shared,
    )


def replay(stream: Stream, config: NgramConfig, store: Store) -> list[tuple[int, int]]:
    """Return (accepted, drafted) of each round of one answer."""
    tokens, at = stream
    drafts, parents = (np.zeros((2, config.nodes), dtype=np.int64) for _ in range(2))
    valid = np.zeros(2, dtype=np.int64)
    store.admit(0)
    store.insert([0], [tokens[: at + 1]])
    at += 1
    rounds = []
    while at < len(tokens):
        store.propose([0], [config.nodes], config.nodes, drafts, parents, valid)
        count = int(valid[0])
        found = zip(drafts[0, :count].tolist(), parents[0, :count].tolist(), strict=True)
        children = {(parent, token): node for node, (token, parent) in enumerate(found)}
        node, accepted = -1, 0
        while at + accepted < len(tokens) and (node, tokens[at + accepted]) in children:
            node = children[node, tokens[at + accepted]]
            accepted += 1
        store.insert([0], [tokens[at : at + accepted + 1]])
        at += accepted + 1
        rounds.append((accepted, count))
    store.release(0)
    return rounds


def main() -> None:
    """Print one line per kind of text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chats", help="recording, .npz")
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="options of NgramConfig")
    parser.add_argument("--costs", default=COSTS, help="TOKENS:STEPS,...")
    options = parser.parse_args()
    config = NgramConfig.model_validate(dict(pair.split("=", 1) for pair in options.set))
    widths, steps = zip(*(map(float, pair.split(":")) for pair in options.costs.split(",")), strict=True)
    cost = np.interp(range(config.nodes + 2), widths, steps)
    rng = random.Random(5)
    chats = load(options.chats, options.sample, rng)
    columns = "accepted/round", "accepted/node", "coverage", "speed-up", "worst 5 %", "worst 1 %"
    print(f"{'text':6}" + "".join(f"{column:>16}" for column in columns))
    for name, streams in (("chats", chats), ("copies", copies(chats, rng))):
        store = make_store(config)
        answers = [replay(stream, config, store) for stream in streams if len(stream[0]) > stream[1] + 8]
        rounds = [r for answer in answers for r in answer]
        speeds = sorted(sum(a + 1 for a, _ in answer) / sum(cost[d + 1] for _, d in answer) for answer in answers)
        accepted, drafted = (sum(column) for column in zip(*rounds, strict=True))
        figures = (
            accepted / len(rounds),
            accepted / max(1, drafted),
            sum(d > 0 for _, d in rounds) / len(rounds),
            statistics.median(speeds),
            speeds[len(speeds) // 20],
            speeds[len(speeds) // 100],
        )
        print(f"{name:6}" + "".join(f"{figure:16.2f}" for figure in figures))


if __name__ == "__main__":
    main()
