"""The store against an exhaustive search: what it knows, what it proposes, and what it forgets."""

import heapq
import itertools
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug_ngram._store import CORPUS, LEAST_BYTES, OWN, SHARED, Store

OPTIONS: dict[str, Any] = dict(
    slots=1,
    nodes=15,
    bytes=1 << 20,
    max_depth=18,
    min_match=1,
    min_breadth=1,
    max_breadth=10,
    by_count=False,
    min_confidence=0.1,
    min_gain=0.6,
)
QUICK = settings(derandomize=True, max_examples=100, deadline=None)


class Oracle:
    """The tokens that are remembered, each with the context it came after, in the order in which they came."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.came: list[tuple[tuple[int, ...], int]] = []
        self.after: dict[int, int] = {}  # what came at which place, and where the same text went on

    def extend(self, text: list[int], tokens: Sequence[int]) -> None:
        """Append `tokens` to `text`, all of them before any other text goes on."""
        for i, token in enumerate(tokens):
            if i:
                self.after[len(self.came) - 1] = len(self.came)
            self.came.append((tuple(text[-self.max_depth :]), token))
            text.append(token)

    def followers(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """What followed `context`, the most recent first, with counts."""
        counts: dict[int, int] = {}
        for before, token in self.came:
            if context and before[-len(context) :] == tuple(context):
                counts[token] = counts.pop(token, 0) + 1
        return list(reversed(counts.items()))

    def occurrences(self) -> dict[tuple[int, ...], frozenset[int]]:
        """Every context that occurred, and where."""
        found: dict[tuple[int, ...], set[int]] = {}
        for at, (before, _) in enumerate(self.came):
            for length in range(1, len(before) + 1):
                found.setdefault(before[-length:], set()).add(at)
        return {context: frozenset(places) for context, places in found.items()}

    def anchors(self, text: Sequence[int]) -> list[tuple[int, int]]:
        """Length and occurrences of the suffixes that occurred, longest first, one for each set of occurrences."""
        found: dict[frozenset[int], int] = {}
        for length in range(1, min(self.max_depth, len(text)) + 1):
            places = frozenset(
                i for i, (before, _) in enumerate(self.came) if before[-length:] == tuple(text[-length:])
            )
            if places:
                found[places] = length
        return sorted(((length, len(places)) for places, length in found.items()), reverse=True)

    def expand(self, text: Sequence[int], depth: int, **o: Any) -> tuple[list[int], list[int]]:
        """The draft tree after `text`, which was appended in one piece, by the rules of the README."""
        narrowing = (o["max_breadth"] - o["min_breadth"]) / max(1, self.max_depth - 1)
        heap: list[tuple[float, int, int, int, int, tuple[int, ...], int | None, float]] = []
        serial = 0
        places = self.occurrences()

        def novelty(context: tuple[int, ...], kinds: int) -> float:
            return 3.0 / len(context) ** 1.3 * kinds

        def offer(context: tuple[int, ...], place: int | None, p: float, level: int, up: int, wide: float) -> None:
            nonlocal serial
            seen = self.followers(context) if place is None else [(self.came[place][1], 1)]
            total = sum(count for _, count in seen)
            share = p / (total + novelty(context, len(seen)))
            rest = share * total
            if o["by_count"]:
                seen = sorted(seen[:32], key=lambda pair: -pair[1])
            for rank, (token, count) in enumerate(seen[: int(wide)]):
                estimate = share * count if o["by_count"] else rest * (0.6 if rank < len(seen) - 1 else 1)
                rest -= estimate
                if estimate < o["min_confidence"]:
                    break
                heapq.heappush(heap, (-estimate, level, serial, token, up, context, place, wide))
                serial += 1

        def only(context: tuple[int, ...]) -> int | None:
            return next(iter(places[context])) if len(places[context]) == 1 else None

        novel = 1.0
        for length, count in self.anchors(text):
            if length < o["min_match"]:
                break
            context = tuple(text[-length:])
            wide = o["min_breadth"] + max(0, self.max_depth - 1 - length) * narrowing
            offer(context, only(context), novel, 1, -1, wide)
            weight = novelty(context, len(self.followers(context)))
            novel *= weight / (weight + count)
            if o["max_breadth"] == 1 or novel < o["min_confidence"]:
                break
        nodes: list[tuple[int, int]] = []
        gain = 0.0
        while heap and len(nodes) < o["nodes"] and depth:
            cost, level, _, token, up, context, place, wide = heapq.heappop(heap)
            if (token, up) in nodes:
                continue
            nodes.append((token, up))
            gain -= cost
            if level < depth:
                context = (*context, token)[-self.max_depth :]
                place = None if place is None else self.after.get(place)
                if place is None:
                    while context and context not in places:
                        context = context[1:]
                    place = only(context) if context else None
                if context:
                    offer(context, place, -cost, level + 1, len(nodes) - 1, max(1.0, wide - narrowing))
        if gain < o["min_gain"]:
            nodes = []
        return [token for token, _ in nodes], [up for _, up in nodes]


def propose(store: Store, slots: Sequence[int], nodes: int, depth: int, rows: int) -> list[tuple[list[int], list[int]]]:
    """Drafts of `slots`, and -7 everywhere else."""
    tokens, parents = (np.full((rows, nodes), -7, dtype=np.int64) for _ in range(2))
    valid = np.zeros(rows, dtype=np.int64)
    store.propose(slots, [nodes] * len(slots), depth, tokens, parents, valid)
    for row in range(rows):
        assert row in slots or set(tokens[row]) <= {-7}
    return [(tokens[s, : valid[s]].tolist(), parents[s, : valid[s]].tolist()) for s in slots]


def check(store: Store, oracle: Oracle, texts: dict[int, list[int]], source: int = OWN, most: int = 10**9) -> None:
    """Compare all that a history knows with `oracle`, once that has forgotten what the history has."""
    slot = next(iter(texts))
    stats = store.held(slot, source)
    oracle.came = oracle.came[len(oracle.came) - stats["tokens"] :]
    occurrences = oracle.occurrences()
    for context in list(occurrences)[:most]:
        assert store.followers(slot, context, source) == oracle.followers(context), context
    for other, text in texts.items():
        assert store.anchors(other, source) == oracle.anchors(text)
    classes = set(occurrences.values())
    assert stats["nodes"] == len(classes)
    kinds = [len({oracle.came[i][1] for i in places}) for places in classes]
    assert stats["entries"] == sum(n for n in kinds if n > 1)


@QUICK
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(2, 8))
def test_equals_exhaustive_search_after_every_token(text: list[int], max_depth: int) -> None:
    store, oracle, said = Store(**OPTIONS | {"max_depth": max_depth}), Oracle(max_depth), list[int]()
    store.admit(0)
    for token in text:
        store.insert([0], [[token]])
        oracle.extend(said, [token])
        check(store, oracle, {0: said})


@pytest.mark.parametrize("by_count", [False, True])
@pytest.mark.parametrize("longest", [60, 600])  # within a block of the store, and across blocks
def test_proposals_follow_the_rules(longest: int, by_count: bool) -> None:
    rng = random.Random(longest)
    drafts = 0
    for _ in range(24000 // longest):
        vocabulary = rng.choice([2, 4, 9, longest // 3])
        text = [rng.randrange(vocabulary) for _ in range(rng.randrange(longest))]
        text += text[len(text) // 3 : len(text) // 2]
        max_depth, nodes, depth = rng.randint(2, 8), rng.randint(1, 24), rng.randrange(12)
        options = OPTIONS | dict(max_depth=max_depth, by_count=by_count, nodes=nodes)
        options |= dict(min_breadth=1, max_breadth=rng.randint(1, 6), min_match=rng.randint(1, 2))
        options |= dict(min_confidence=rng.choice([0.0, 0.1, 0.3]), min_gain=rng.choice([0.0, 0.6]))
        store, oracle, said = Store(**options), Oracle(max_depth), list[int]()
        store.admit(0)
        store.insert([0], [text])
        oracle.extend(said, text)
        [found] = propose(store, [0], nodes, depth, 2)
        assert found == oracle.expand(said, depth, **options), (options, depth, text)
        drafts += len(found[0])
    assert drafts > 100


def test_a_passage_is_followed_wherever_it_lies() -> None:
    """A match that occurred once is followed through its text, whatever followed its last tokens since."""
    passage = list(range(1000, 1020))
    since = [token for pair in itertools.pairwise(passage[3:]) for token in (*pair, 7)]
    options = OPTIONS | dict(max_depth=2, max_breadth=1, min_confidence=0.0)
    for ahead in range(200, 300):  # a block of the store holds 254 tokens
        store = Store(**options)
        store.admit(0)
        store.insert([0], [[*range(ahead), *passage, *since, *passage[:2]]])
        assert propose(store, [0], 15, 15, 2)[0][0] == passage[2:17], ahead


@pytest.mark.parametrize("vocabulary", [1, 2, 30])
def test_equals_exhaustive_search_on_a_long_text(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    text = [rng.randrange(vocabulary) for _ in range(400)]
    text += text[100:200]  # a long copy
    store, oracle, said = Store(**OPTIONS | {"max_depth": 6}), Oracle(6), list[int]()
    store.admit(0)
    store.insert([0], [text])
    oracle.extend(said, text)
    check(store, oracle, {0: said})


def least(slots: int, shared: bool, max_depth: int) -> int:
    """Bytes of the smallest store."""
    with pytest.raises(ValueError, match="at least") as caught:
        Store(**OPTIONS | dict(slots=slots, shared=shared, max_depth=max_depth, bytes=1))
    return int(str(caught.value).rsplit(" ", 1)[1])


@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 20), st.sampled_from([1, 2, 5, 40, 5000]), st.booleans())
def test_memory_stays_within_the_bound_and_the_oldest_is_forgotten_first(
    seed: int, max_depth: int, vocabulary: int, shared: bool
) -> None:
    rng = random.Random(seed)
    slots, source = (3, SHARED) if shared else (1, OWN)
    bound = least(slots, shared, max_depth) + rng.randrange(20_000)
    store = Store(**OPTIONS | dict(slots=slots, shared=shared, max_depth=max_depth, bytes=bound))
    oracle, texts = Oracle(max_depth), {slot: list[int]() for slot in range(slots)}
    for slot in texts:
        store.admit(slot)
    while store.held(0, source)["forgotten"] < 700:
        slot = rng.randrange(slots)
        text = texts[slot]
        if len(text) > 60 and rng.random() < 0.3:
            start = rng.randrange(len(text) - 40)
            new = text[start : start + rng.randrange(40)]
        else:
            new = [rng.randrange(vocabulary) for _ in range(rng.randrange(12))]
        store.insert([slot], [new])
        oracle.extend(text, new)
        assert store.stats()["bytes"] <= bound
        if shared and rng.random() < 0.02:  # another request takes the slot; what was said stays
            assert store.release(slot) == (len(text), text[-max_depth:])
            store.admit(slot)
            texts[slot] = []
    held = store.held(0, source)
    assert held["tokens"] + held["forgotten"] == len(oracle.came)
    assert held["bytes"] > LEAST_BYTES * (slots if shared else 1) - 16_384  # the memory is used
    check(store, oracle, texts, source, most=300)


def test_a_history_of_its_own_ends_with_the_request() -> None:
    store = Store(**OPTIONS | dict(slots=2))
    empty = store.stats()
    store.admit(0)
    store.admit(1)
    store.insert([1, 0], [[7, 8, 9] * 50, [1, 2, 3]])
    assert store.stats()["tokens"] == 153
    assert store.release(1) == (150, ([7, 8, 9] * 6))
    assert store.followers(0, [7]) == []
    assert store.release(0)[0] == 3
    assert store.release(0) == (0, [])
    assert store.stats() == empty


def test_known_tokens_are_context_only_to_the_shared_history() -> None:
    store = Store(**OPTIONS | dict(slots=2, shared=True))
    store.admit(0)
    store.insert([0], [[1, 2, 3]])
    store.release(0)
    store.admit(1, known=3)
    store.insert([1], [[1, 2]])
    store.insert([1], [[3, 4]])
    assert store.held(1, OWN)["tokens"] == 4
    assert store.held(1, SHARED)["tokens"] == 4
    assert store.followers(1, [2], SHARED) == [(3, 1)]
    assert store.followers(1, [2, 3], SHARED) == [(4, 1)]


def test_own_text_comes_before_what_others_said() -> None:
    store = Store(**OPTIONS | dict(slots=2, shared=True, min_confidence=0.0, min_gain=0.0))
    store.admit(0)
    store.admit(1)
    store.insert([0, 1], [[1, 2, 7] * 3, [1, 2, 8, 1, 2]])
    [(tokens, parents)] = propose(store, [1], 15, 1, 3)
    assert (tokens[:2], parents[:2]) == ([8, 7], [-1, -1])


def test_the_corpus_is_searched_within_its_share_and_never_forgotten() -> None:
    options = dict(corpus_nodes=4, min_confidence=0.0, min_gain=0.0, bytes=1 << 20)
    store = Store(**OPTIONS | options)
    assert store.add_document(list(range(100, 130)))
    store.admit(0)
    store.insert([0], [[105, 106]])
    assert propose(store, [0], 15, 15, 2) == [([107, 108, 109, 110], [-1, 0, 1, 2])]
    assert store.held(0, CORPUS)["tokens"] == 30
    store.insert([0], [[3, 105, 106]])  # now its own text says 3; what both say is one node
    [(tokens, parents)] = propose(store, [0], 15, 15, 2)
    assert {(t, p) for t, p in zip(tokens, parents, strict=True) if p == -1} == {(107, -1), (3, -1)}
    assert sum(100 <= t < 130 and t not in (105, 106) for t in tokens) == 4
    rng = random.Random(0)
    store.insert([0], [[rng.randrange(50) for _ in range(20_000)]])
    assert store.stats()["forgotten"] > 5000
    assert store.stats()["bytes"] <= 1 << 20
    store.insert([0], [[105, 106]])
    assert propose(store, [0], 15, 15, 2)[0][0][:4] == [107, 108, 109, 110]


def test_own_text_gets_what_the_corpus_leaves() -> None:
    store = Store(**OPTIONS | dict(corpus_nodes=14, min_confidence=0.0, min_gain=0.0))
    store.add_document([500, 501])
    store.admit(0)
    store.insert([0], [[*range(30), 3, 4]])
    assert propose(store, [0], 15, 15, 2)[0][0] == list(range(5, 20))


def test_the_corpus_ends_where_documents_end_and_the_memory_does() -> None:
    store = Store(**OPTIONS | dict(corpus_nodes=4, bytes=200_000))
    assert store.add_document([1, 2])
    assert store.add_document([3, 4])
    assert not store.add_document(list(range(100_000)))
    assert store.stats()["bytes"] <= 200_000
    store.admit(0)
    with pytest.raises(RuntimeError, match="no corpus"):
        store.add_document([1])


@pytest.mark.parametrize("shared", [False, True])
def test_threads_do_not_disturb_each_other(shared: bool) -> None:
    slots, steps = 4, 400
    rng = random.Random(4)
    texts = [[rng.randrange(6) for _ in range(4 * steps)] for _ in range(slots)]
    store = Store(**OPTIONS | dict(slots=slots, shared=shared, bytes=LEAST_BYTES * (2 * slots + 1)))
    errors: list[BaseException] = []

    def work(mine: Sequence[int]) -> None:
        try:
            for slot in mine:
                store.admit(slot)
            for step in range(0, 4 * steps, 4):
                store.insert(mine, [texts[slot][step : step + 4] for slot in mine])
                for tokens, parents in propose(store, mine, 15, 15, slots + 1):
                    assert all(-1 <= parent < node for node, parent in enumerate(parents))
                    assert set(tokens) <= set(range(6))
                assert store.stats()["bytes"] <= LEAST_BYTES * (2 * slots + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in ([0, 2], [3, 1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    alone = Store(**OPTIONS | dict(slots=slots, bytes=LEAST_BYTES * (2 * slots + 1)))
    for slot in range(slots):
        alone.admit(slot)
        alone.insert([slot], [texts[slot]])
    if not shared:
        every = range(slots)
        assert propose(store, every, 15, 15, slots + 1) == propose(alone, every, 15, 15, slots + 1)
