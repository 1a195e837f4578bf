"""Masks against a trie of everything that a schema allows, and the matcher's rules of use."""

import json
import random

import numpy as np
import pytest
import torch

from specplug.grammar import masks as masking
from specplug.grammar.compile import Compiler
from specplug.grammar.masks import Looked, allowed, fill, forbid, unpacked, words64
from specplug.testing.tokenizer import EOS, SIZE, byte_tokenizer

WORDS = ("a", "ab", "abba", "b", "ba", "c[]")
TEXTS = tuple(json.dumps(word).encode() for word in WORDS)
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": list(WORDS)}}}


@pytest.fixture(scope="module")
def compiler():
    return Compiler(byte_tokenizer(), SIZE, (EOS,))


def follows(text):
    """Return the tokens that may follow `text`; None: nothing can, it is not allowed or has ended."""
    text = list(text)
    if EOS in text or not any(list(known[: len(text)]) == text for known in TEXTS):
        return None
    found = {known[len(text)] for known in TEXTS if list(known[: len(text)]) == text and len(known) > len(text)}
    return found | ({EOS} if bytes(text) in TEXTS else set())


def bits(row):
    return set(row.nonzero().flatten().tolist())


def check(compiler, committed, tokens, parents):
    """Assert each position's mask; returns how many could be reached."""
    grammar = compiler.grammar(FORMAT)
    grammar.commit(committed)
    mask = unpacked(fill([Looked(grammar, tokens, parents)], [1 + len(tokens)]), SIZE)
    reached = 0
    for node in range(-1, len(tokens)):
        path, at = [], node
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        wanted = follows([*committed, *reversed(path)])
        reached += wanted is not None
        assert bits(mask[node + 1]) == (set(range(SIZE)) if wanted is None else wanted), (committed, path)
    assert grammar.legal(tokens, parents) == [
        node for node in range(len(tokens)) if _legal(committed, tokens, parents, node)
    ]
    # And nothing of it is left behind.
    again = unpacked(fill([Looked(grammar, (), ())], [1]), SIZE)[0]
    assert bits(again) == follows(committed)
    return reached


def _legal(committed, tokens, parents, node):
    above = parents[node]
    path = []
    while above >= 0:
        path.append(tokens[above])
        above = parents[above]
    before = follows([*committed, *reversed(path)])
    return before is not None and tokens[node] in before


def test_chains_at_every_offset(compiler):
    reached = 0
    for text in TEXTS:
        whole = [*text, EOS, 65]
        for start in range(len(text) + 1):
            for wrong in range(start, len(whole) + 1):
                drafts = whole[start:]
                if wrong < len(whole):
                    drafts[wrong - start] = 33
                reached += check(compiler, whole[:start], drafts, list(range(-1, len(drafts) - 1)))
    assert reached > 300


def test_random_trees(compiler):
    rng = random.Random(7)
    pool = [*b'"abc[]', EOS, 0, 200]
    reached = 0
    for _ in range(300):
        text = rng.choice(TEXTS)
        committed = list(text[: rng.randrange(len(text) + 1)])
        count = rng.randrange(1, 9)
        parents = [rng.randrange(-1, node) for node in range(count)]
        tokens = [rng.choice(pool) for _ in range(count)]
        for node in range(count):  # most of them on some right path
            path, at = [], parents[node]
            while at >= 0:
                path.append(tokens[at])
                at = parents[at]
            right = follows([*committed, *reversed(path)])
            if right and rng.random() < 0.7:
                tokens[node] = rng.choice(sorted(right))
        reached += check(compiler, committed, tokens, parents)
    assert reached > 800


def test_many_rows_in_one_call_are_each_their_own(compiler):
    rows, sizes, wanted = [], [], []
    for text in TEXTS:
        grammar = compiler.grammar(FORMAT)
        grammar.commit(list(text[:2]))
        drafts = list(text[2:])
        rows.append(Looked(grammar, drafts, list(range(-1, len(drafts) - 1))))
        sizes.append(3 + len(drafts))  # wider than its drafts: the rest of them was not well formed
        wanted += [follows(text[: 2 + n]) for n in range(len(drafts) + 1)] + [None, None]
    mask = unpacked(fill(rows, sizes), SIZE)
    assert [bits(row) for row in mask] == [set(range(SIZE)) if one is None else one for one in wanted]


def test_rows_without_a_grammar_are_all_true_and_cost_nothing_alone(compiler, monkeypatch):
    grammar = compiler.grammar(FORMAT)
    mask = allowed([(None, (1, 2), (-1, 0)), (grammar, (34,), (-1,)), (None, (), ())], SIZE)
    assert mask.shape == (6, SIZE)
    assert mask[:3].all()
    assert mask[5].all()
    assert [bits(row) for row in mask[3:5]] == [follows(b""), follows(b'"')]
    monkeypatch.setattr(masking, "fill", None)
    assert allowed([(None, (1, 2), (-1, 0)), (None, (), ())], SIZE) is None


def test_a_token_beyond_the_vocabulary_is_not_shown_to_the_matcher(compiler):
    grammar = compiler.grammar(FORMAT)
    for token in (-1, SIZE, 2**40):  # an id that it does not know breaks a matcher for good
        mask = unpacked(fill([Looked(grammar, (34, token, 97), (-1, 0, 1))], [4]), SIZE)
        assert bits(mask[1]) == follows(b'"')
        assert mask[2:].all()
        assert grammar.legal((34, token, 97), (-1, 0, 1)) == [0]
        assert grammar.legal((34, token, 97), (-1, 0, 0)) == [0, 2]
    assert not grammar.error


def test_a_committed_token_that_is_not_allowed_is_an_error_and_not_a_crash(compiler):
    for bad in (33, SIZE, -1):
        grammar = compiler.grammar(FORMAT)
        grammar.commit([34, bad, 97])
        assert f"token {bad} " in grammar.error
        assert grammar.blame == "engine"  # a mask let it through: nothing that the request could change
        assert not grammar.matcher.is_error()
        assert not fill([Looked(grammar, (97,), (-1,))], [2]).any()
        assert grammar.legal((97,), (-1,)) == []
    ended = compiler.grammar(FORMAT)
    ended.commit(list(b'"b"'))
    ended.commit([97])
    assert "token 97" in ended.error


def test_a_grammar_that_fails_says_so_and_its_neighbour_goes_on():
    import llguidance

    compiler = Compiler(byte_tokenizer(), SIZE, (EOS,))
    fine = compiler.grammar(FORMAT)
    compiler._limits = llguidance.LLParserLimits(step_max_items=1, step_lexer_fuel=1, verbose_errors=False)
    hard = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(a|b)*c(d|e)*[^z]{40}"}}}
    failing = compiler.grammar(hard)
    masks = fill([Looked(failing, (34, 97), (-1, 0)), Looked(fine, (34,), (-1,))], [3, 2])
    assert "too complex" in failing.error
    assert failing.blame == "request"
    assert not masks[:3].any()
    assert bits(unpacked(masks, SIZE)[4]) == follows(b'"')


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 65, 257])
def test_forbid_sets_what_the_bits_say_and_nothing_else(vocab):
    rng = np.random.default_rng(vocab)
    masks = rng.integers(-(2**31), 2**31, (5, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
    values = torch.randn(9, vocab)
    at = torch.tensor([8, 0, 3, 5, 2])
    before = values.clone()
    forbid(values, at, torch.from_numpy(words64(masks)))
    wanted = before.clone()
    for row, place in enumerate(at.tolist()):
        for token in range(vocab):
            if not (int(masks[row, token // 32]) >> (token % 32)) & 1:
                wanted[place, token] = float("-inf")
    assert torch.equal(values, wanted)
    assert torch.equal(unpacked(masks, vocab), ~torch.isinf(wanted[at]))


def test_forbid_without_rows_is_nothing():
    values = torch.randn(2, 5)
    before = values.clone()
    forbid(values, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.int64))
    assert torch.equal(values, before)
