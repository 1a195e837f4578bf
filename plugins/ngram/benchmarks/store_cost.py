"""What the store costs: microseconds per inserted token and per step, by length of the history and batch size.

    python plugins/ngram/benchmarks/store_cost.py [--match-type prob] [--shared]

Two kinds of text, seeded: `mixed` (tokens of a skewed vocabulary with copied passages) and `loop` (one token for ever,
where the text ends with as many known contexts as there can be). A step is what the engine asks for after a verify:
insert 4 tokens for every request, then look all of them up, in one call each. CPU time of this thread, so that a busy
machine disturbs less; medians of --repeats steps.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from specplug_ngram._store import Store
from specplug_ngram.config import NgramConfig

STEP = 4
VOCABULARY = 49152


def mixed(length: int, rng: random.Random) -> list[int]:
    """Tokens with a skewed distribution; a fifth of the passages copy earlier ones."""
    text: list[int] = []
    while len(text) < length:
        if len(text) > 200 and rng.random() < 0.2:
            start = rng.randrange(len(text) - 60)
            text += text[start : start + 60]
        else:
            text += [min(int(rng.paretovariate(0.7)), VOCABULARY) for _ in range(60)]
    return text[:length]


def loop(length: int, rng: random.Random) -> list[int]:
    """One token, repeated."""
    return [10] * length


def microseconds(run: Callable[[], object]) -> float:
    """Return the CPU time of `run`, in microseconds."""
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1e6


def measure(texts: list[list[int]], length: int, config: NgramConfig, shared: bool) -> tuple[float, ...]:
    """Insert `length` tokens of each text, then step through the rest; return the figures of one line."""
    batch, nodes = len(texts), config.nodes
    store = Store(
        slots=batch,
        nodes=nodes,
        bytes=8 << 30,  # nothing is forgotten
        max_depth=config.ngram_max_trie_depth,
        min_match=config.ngram_min_match,
        min_breadth=config.ngram_min_bfs_breadth,
        max_breadth=config.ngram_max_bfs_breadth,
        by_count=config.ngram_match_type == "prob",
        min_confidence=config.ngram_min_confidence,
        min_gain=config.ngram_min_gain,
        shared=shared,
    )
    tokens, parents = (np.zeros((batch + 1, nodes), dtype=np.int64) for _ in range(2))
    valid = np.zeros(batch + 1, dtype=np.int64)
    slots = list(range(batch))
    for slot in slots:
        store.admit(slot)
    prompts = [text[:length] for text in texts]
    insert = microseconds(lambda: store.insert(slots, prompts)) / (length * batch)
    steps, drafts = [], 0
    for at in range(length, len(texts[0]), STEP):
        new = [text[at : at + STEP] for text in texts]

        def step(new: list[list[int]] = new) -> None:
            store.insert(slots, new)
            store.propose(slots, [nodes] * batch, nodes, tokens, parents, valid)

        steps.append(microseconds(step))
        drafts += int(valid.sum())
    stats = store.stats()
    median = statistics.median(steps)
    return insert, median, median / batch, stats["bytes"] / stats["tokens"], drafts / len(steps) / batch


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1024,32768,131072", help="tokens of history, comma-separated")
    parser.add_argument("--batches", default="1,64", help="requests, comma-separated")
    parser.add_argument("--repeats", type=int, default=300, help="steps measured per row")
    parser.add_argument("--match-type", choices=["bfs", "prob"], default="bfs")
    parser.add_argument("--shared", action="store_true", help="keep a history of all requests too")
    options = parser.parse_args()
    config = NgramConfig(ngram_match_type=options.match_type)
    load = os.getloadavg()[0]
    print(f"load average {load:.2f}" + (" (above 0.5: figures are not reliable)" if load > 0.5 else ""))
    columns = "tokens", "batch", "insert us/token", "step us", "us/request", "bytes/token", "drafts"
    print(f"{'text':6}" + "".join(f"{column:>16}" for column in columns))
    for kind in (mixed, loop):
        for length in map(int, options.lengths.split(",")):
            for batch in map(int, options.batches.split(",")):
                texts = [kind(length + STEP * options.repeats, random.Random(seed)) for seed in range(batch)]
                figures = measure(texts, length, config, options.shared)
                counts = "".join(f"{count:16}" for count in (length, batch))
                print(f"{kind.__name__:6}{counts}" + "".join(f"{figure:16.2f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
