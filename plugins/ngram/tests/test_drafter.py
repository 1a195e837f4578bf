"""Drafts: what is proposed, in which order, within which bounds, and for whom."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug import Facts, HostProposal, HostRow, Limits, Proposal, RequestView, SamplingParams
from specplug_ngram import drafter
from specplug_ngram._store import SHARED
from specplug_ngram.config import NgramConfig
from specplug_ngram.drafter import NgramDrafter
from specplug_ngram.plugin import plan

SLOTS = 4
FACTS = Facts(
    target=Facts.empty().target,
    features=frozenset({"tree_verify", "rollback"}),
    limits=Limits(max_running_requests=SLOTS),
)
LOOSE = dict(ngram_min_confidence=0, ngram_min_gain=0)  # propose whatever matches


class Bench:
    """A drafter with a real `HostProposal`, called as the engine calls it."""

    def __init__(self, **fields: Any) -> None:
        config = NgramConfig(**fields)
        self.plan = plan(config, FACTS, None)
        self.drafter = NgramDrafter(config, self.plan, SimpleNamespace(slots=SLOTS, facts=FACTS))
        self.drafter.load(SimpleNamespace())
        device = Proposal(SLOTS, self.plan.nodes, 1000, rule="coupled", dense=False, device=torch.device("cpu"))
        self.out = HostProposal(device)
        self.seen = [0] * SLOTS

    def admit(self, slot: int, tokens: Sequence[int] = (), request: str = "") -> None:
        self.seen[slot] = 0
        self.drafter.on_admit(RequestView(slot, request or f"r{slot}", tokens, SamplingParams(), None))

    def ingest(self, new: dict[int, list[int]]) -> None:
        for slot, tokens in new.items():
            self.seen[slot] += len(tokens)
        rows = [HostRow(slot, tokens, self.seen[slot], 0) for slot, tokens in new.items()]
        self.drafter.ingest(SimpleNamespace(host=SimpleNamespace(rows=rows), depth=0))

    def propose(self, limits: dict[int, int], depth: int | None = None) -> dict[int, list[tuple[int, ...]]]:
        """Return each slot's drafts as paths from the root, in the order of the nodes."""
        self.out.num_valid[:] = 0
        rows = [HostRow(slot, (), self.seen[slot], limit) for slot, limit in limits.items()]
        wanted = self.plan.depth if depth is None else depth
        self.drafter.propose(SimpleNamespace(host=SimpleNamespace(rows=rows), depth=wanted), self.out)
        paths = {}
        for slot in range(SLOTS):
            count = int(self.out.num_valid[slot])
            paths[slot] = to_paths(self.out.tokens[slot, :count].tolist(), self.out.parents[slot, :count].tolist())
        return paths

    def ask(self, text: list[int], limit: int = 100, depth: int | None = None) -> list[tuple[int, ...]]:
        self.drafter.on_release(0, "finished")
        self.admit(0)
        self.ingest({0: text})
        return self.propose({0: limit}, depth)[0]


def to_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Paths from the root; fails unless parents come before children and siblings are distinct."""
    paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


# SGLang's golden vectors (reference: depth 12, breadth 1 to 8, 8 nodes), root and padding left out.
GOLDEN = dict(
    ngram_max_trie_depth=12, ngram_max_bfs_breadth=8, num_draft_tokens=8, ngram_min_confidence=0, ngram_min_gain=0
)
CORPUS = [*range(1, 11), 998, 1, 2, 3, 44, 55, 66, 77, 88, 99, 100, 997]


@pytest.mark.parametrize("match_type", ["bfs", "prob"])
def test_golden_single_continuation_is_a_chain(match_type: str) -> None:
    bench = Bench(**GOLDEN, ngram_match_type=match_type)
    want = [44, 55, 66, 77, 88, 99, 100]
    assert bench.ask([*CORPUS, 3, 44], limit=6) == [tuple(want[1 : n + 1]) for n in range(1, 7)]


@pytest.mark.parametrize("match_type", ["bfs", "prob"])
def test_golden_no_match_declines(match_type: str) -> None:
    assert Bench(**GOLDEN, ngram_match_type=match_type).ask([*CORPUS, 3, 6, 999]) == []


def test_golden_equal_frequencies_share_the_budget() -> None:
    paths = Bench(**GOLDEN, ngram_match_type="prob").ask([*CORPUS, 1, 2, 3])
    assert paths[:6] == [(44,), (4,), (44, 55), (4, 5), (44, 55, 66), (4, 5, 6)]
    assert paths[6:] == [(44, 55, 66, 77)]  # a tie: SGLang takes the smaller id, we the more recent


def test_default_follows_the_longest_match_in_a_chain() -> None:
    phrase = list(range(100, 140))
    paths = Bench().ask([*phrase, 1, 2, 107, 3, *phrase[:18]])
    assert paths == [tuple(phrase[18 : 18 + n]) for n in range(1, 16)]


def test_weak_match_proposes_nothing_by_default_and_something_on_request() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 3]  # one token seen once before
    assert Bench().ask(text) == []
    assert Bench(**LOOSE).ask(text)[0] == (4,)
    assert len(Bench(**LOOSE).ask(text, limit=5)) == 5


def test_min_gain_drops_a_proposal_that_promises_too_little() -> None:
    text = [*range(1, 60), 99, 10, 11, 12]
    whole = Bench(ngram_min_gain=0).ask(text)
    assert Bench(ngram_min_gain=1).ask(text) == whole != []
    assert Bench(ngram_min_gain=6).ask(text) == []


def test_confidence_bounds_how_far_a_match_is_trusted() -> None:
    text = [*range(1, 60), 99, 10, 11, 12]
    lengths = [len(Bench(ngram_min_confidence=c, ngram_min_gain=0).ask(text)) for c in (0.0, 0.2, 0.5, 1.0)]
    assert lengths[0] == 15
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[1] > lengths[2] > lengths[3] == 0


def test_a_repetition_is_continued_past_the_end_of_the_text() -> None:
    assert Bench().ask([1, 2, 3] * 8)[-1] == (1, 2, 3) * 5


def test_recent_and_frequent_disagree() -> None:
    text = [1, 2, 7, 9, 1, 2, 7, 9, 1, 2, 7, 9, 1, 2, 8, 9, 1, 2]
    assert Bench(ngram_match_type="bfs", **LOOSE).ask(text)[0] == (8,)
    assert Bench(ngram_match_type="PROB", **LOOSE).ask(text)[0] == (7,)


def test_shorter_matches_add_branches_and_equal_continuations_merge() -> None:
    text = [5, 1, 2, 7, 3, 2, 8, 3, 2, 8, 5, 1, 2]  # 5 1 2 -> 7; 2 -> 8, 8, 7
    paths = Bench(ngram_match_type="prob", **LOOSE).ask(text, depth=1)
    assert paths == [(7,), (8,)]  # the longer match first, though 8 is the more frequent after 2


def test_a_chain_by_frequency_takes_the_most_frequent() -> None:
    text = [1, 2, 7, 9, 1, 2, 7, 9, 1, 2, 7, 9, 1, 2, 8, 9, 1, 2]
    for match_type, token in (("prob", 7), ("bfs", 8)):
        assert Bench(ngram_match_type=match_type, ngram_max_bfs_breadth=1, **LOOSE).ask(text)[0] == (token,)


def test_a_shorter_match_counts_for_what_a_longer_one_leaves_open() -> None:
    phrase = list(range(100, 110))
    text = [*phrase, 7, *[109, 8] * 5, *phrase]  # after the phrase 7, after its last token mostly 8
    ordered = Bench(ngram_match_type="prob", **LOOSE).ask(text, depth=1)
    assert ordered == [(7,), (8,)]
    assert Bench(ngram_match_type="prob").ask(text, depth=1) == [(7,)]


@pytest.mark.parametrize("breadth", [1, 2, 3])
def test_breadth_bounds_children(breadth: int) -> None:
    text = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    fixed = dict(ngram_min_bfs_breadth=breadth, ngram_max_bfs_breadth=breadth)
    paths = Bench(**fixed, **LOOSE).ask(text)
    assert [path for path in paths if len(path) == 1] == [(5,), (4,), (3,)][:breadth]
    if breadth == 1:
        assert [len(p) for p in paths] == list(range(1, len(paths) + 1))


@pytest.mark.parametrize(("matched", "children"), [(1, 7), (2, 5), (3, 3), (4, 1)])
def test_longer_matches_are_narrower(matched: int, children: int) -> None:
    """Depth 5, breadth 1 to 9: steps of 2, so a match of 1 token has 7 children and one of 4 has 1."""
    context = list(range(100, 100 + matched))
    # Every shorter suffix is only ever part of the context, so that there is one anchor.
    text = [token for following in range(10) for token in (*context, following)] + context
    bench = Bench(ngram_max_trie_depth=5, ngram_max_bfs_breadth=9, num_draft_tokens=31, **LOOSE)
    assert len(bench.ask(text, depth=1)) == children


@pytest.mark.parametrize("match_type", ["bfs", "prob"])
def test_random_texts_give_well_formed_trees_within_limit_and_depth(match_type: str) -> None:
    rng = random.Random(3)
    for round_ in range(150):
        config = dict(
            num_draft_tokens=rng.randint(2, 24),
            ngram_min_match=rng.randint(1, 3),
            ngram_max_trie_depth=rng.randint(3, 9),
            ngram_max_bfs_breadth=rng.randint(1, 6),
            ngram_min_confidence=rng.choice([0, 0.1, 0.3]),
            ngram_min_gain=rng.choice([0, 0.6]),
            ngram_match_type=match_type,
        )
        bench = Bench(**config)
        text = [rng.randrange(rng.choice([2, 4, 9])) for _ in range(rng.randint(1, 80))]
        limit, depth = rng.randint(0, 30), rng.randint(1, 10)
        paths = bench.ask(text, limit, depth)
        assert len(paths) <= min(limit, config["num_draft_tokens"] - 1), round_
        assert all(len(path) <= depth for path in paths)
        assert all(path[-1] in text for path in paths)
        if "chain" in bench.plan.needs.shapes:
            assert [len(path) for path in paths] == list(range(1, len(paths) + 1))


def test_min_match_needs_that_many_tokens() -> None:
    text = [1, 2, 3, 4, 9, 9, 2, 3]
    assert Bench(ngram_min_match=2).ask(text)[0] == (4,)
    assert Bench(ngram_min_match=3, **LOOSE).ask(text) == []


def test_limit_zero_and_depth_zero_decline() -> None:
    text = [1, 2, 3, 4, 1, 2, 3]
    bench = Bench()
    assert bench.ask(text)
    assert bench.ask(text, limit=0) == []
    assert bench.ask(text, depth=0) == []


def test_no_text_declines() -> None:
    bench = Bench(**LOOSE)
    assert bench.ask([]) == []
    assert bench.ask([7]) == []


def test_a_slot_used_again_knows_nothing_of_the_last_request() -> None:
    bench = Bench(**LOOSE)
    secret = [500, 501, 502, 503]
    assert bench.ask([*secret, *secret[:2]])
    bench.drafter.on_release(0, "finished")
    assert bench.ask([1, 2, 3, 500, 501]) == []  # the same ending, but never seen by this request


def test_requests_do_not_see_each_other() -> None:
    bench = Bench(**LOOSE)
    bench.admit(0)
    bench.admit(2)
    bench.ingest({0: [500, 501, 502, 500, 501], 2: [1, 2, 3, 1, 2]})
    paths = bench.propose({0: 3, 2: 3})
    assert paths[0][0] == (502,)
    assert paths[2][0] == (3,)
    assert not {t for path in paths[2] for t in path} & {500, 501, 502}
    assert paths[1] == paths[3] == []


def test_row_order_chunks_and_skipped_proposals_do_not_matter() -> None:
    rng = random.Random(11)
    texts = {slot: [rng.randrange(5) for _ in range(60)] for slot in range(SLOTS)}
    whole, pieces = Bench(), Bench()
    for bench in (whole, pieces):
        for slot in texts:
            bench.admit(slot)
    whole.ingest(texts)
    for i in range(0, 60, 4):
        pieces.ingest({slot: texts[slot][i : i + 4] for slot in reversed(texts)})
    expected = whole.propose(dict.fromkeys(texts, 9))
    assert pieces.propose(dict.fromkeys(reversed(texts), 9)) == expected
    assert any(expected.values())


def test_preempted_request_drafts_as_if_it_had_stayed() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    bench = Bench()
    before = bench.ask(text)
    bench.drafter.on_release(0, "preempted")
    assert bench.ask(text) == before != []


def test_shared_store_drafts_from_live_and_finished_requests() -> None:
    bench = Bench(**LOOSE, ngram_shared=True)
    bench.admit(0)
    bench.admit(2)
    bench.ingest({0: [500, 501, 502, 503], 2: [1, 500, 501]})
    assert bench.propose({0: 3, 2: 3})[2] == [(502,), (502, 503)]
    bench.drafter.on_release(0, "finished")
    bench.admit(0)
    bench.ingest({0: [9, 500, 501]})
    assert bench.propose({0: 3})[0][0] == (502,)


@pytest.mark.parametrize(("reason", "counted"), [("preempted", 5), ("finished", 9), ("aborted", 9), ("failed", 9)])
def test_shared_store_counts_a_preempted_text_once(reason: str, counted: int) -> None:
    bench = Bench(**LOOSE, ngram_shared=True)
    bench.admit(0, request="a")
    bench.admit(1, request="a")  # another choice of the same request
    bench.ingest({0: [1, 2, 3, 4]})
    bench.drafter.on_release(1, reason)
    bench.drafter.on_release(0, reason)
    bench.admit(3, [1, 2, 3, 4, 5], request="a")
    bench.ingest({3: [1, 2, 3, 4, 5]})
    held = bench.drafter._store.held(3, SHARED)
    assert held["tokens"] == counted
    assert bench.drafter._store.held(3)["tokens"] == 5


def test_texts_of_requests_that_never_come_back_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "_PREEMPTED", 3)
    bench = Bench(ngram_shared=True)
    for i in range(9):
        bench.admit(0, request=f"r{i}")
        bench.ingest({0: [i]})
        bench.drafter.on_release(0, "preempted")
        assert len(bench.drafter._preempted) <= 3
    assert list(bench.drafter._preempted) == ["r6", "r7", "r8"]


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_bounded_for_ever(shared: bool) -> None:
    rng = random.Random(2)
    bench = Bench(ngram_store_mb=1, ngram_shared=shared)
    for _ in range(6):
        for slot in range(SLOTS):
            bench.admit(slot)
        for _ in range(20):
            bench.ingest({slot: [rng.randrange(30000) for _ in range(400)] for slot in range(SLOTS)})
            assert bench.drafter.metrics()["bytes"] <= 1 << 20
        for slot, reason in zip(range(SLOTS), ("finished", "aborted", "preempted", "failed"), strict=True):
            bench.drafter.on_release(slot, reason)
    assert bench.drafter.metrics()["forgotten"] > 20_000
    assert (bench.drafter.metrics()["tokens"] > 0) == shared


def test_metrics_count_lookups_and_memory_is_given_back() -> None:
    bench = Bench()
    bench.ask([1, 2, 3, 1, 2])
    bench.ask([1, 2, 3])
    bench.ask([1, 2, 3, 1, 2], limit=0)  # not asked for: no lookup
    metrics = bench.drafter.metrics()
    assert (metrics["lookups"], metrics["declined"]) == (2, 1)
    assert metrics["tokens"] == 5
    bench.drafter.on_release(0, "aborted")
    after = bench.drafter.metrics()
    assert after["tokens"] == 0
    assert after["bytes"] < metrics["bytes"]
    bench.drafter.close()
    bench.drafter.close()
    bench.drafter.on_release(0, "failed")
