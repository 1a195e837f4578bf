"""Triton kernels of acceptance against plain torch and against an independent generator, on awkward inputs."""

import random
import warnings
from types import SimpleNamespace

import pytest
import torch

from specplug.proposal import Proposal
from specplug.runtime.device import compact, penalties, walk
from specplug.runtime.device.decide import Decider
from specplug.runtime.device.noise import gumbel_argmax
from specplug.runtime.device.rows import StepRows
from specplug.runtime.device.sampling import Filters, filtered
from specplug.runtime.kv import KVPool
from specplug.runtime.processors import processors_for
from specplug.sampling import SamplingParams

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def philox(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 (Salmon et al. 2011) in plain integers."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = seed & mask, seed >> 32
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & mask, (low >> 32) ^ c3 ^ k1, low & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def number(seed: int, choice: int, index: int, tag: int, place: int) -> float:
    """The uniform number that belongs to vocabulary id `place`."""
    tile, within = divmod(place, 1024)
    words = philox(seed, (tile * 256 + within % 256, index, choice, tag))
    return ((words[within // 256] >> 1) + 0.5) / 2**31


# --- noise ----------------------------------------------------------------------------------------------------------


def test_uniform_numbers_are_philox() -> None:
    from specplug.runtime.device.noise_triton import uniform_rows

    seeds, choices, indices, ranks = (2**62 + 7, 3, 0), (0, 5, 127), (9, 70_000, 0), (0, 31, 2)
    for stream, code in (("target", 0), ("draft", 1), ("coin", 2), ("residual", 3)):
        for size in (1, 255, 1500):
            made = uniform_rows(ints(*seeds), ints(*choices), ints(*indices), stream, size, ints(*ranks)).cpu()
            assert made.shape == (3, size)
            for row in range(3):
                for place in {0, size // 2, size - 1}:
                    tag = code + 4 * ranks[row]
                    wanted = number(seeds[row], choices[row], indices[row], tag, place)
                    assert float(made[row, place]) == wanted, (stream, size, row, place)
    plain = uniform_rows(ints(4), ints(0), ints(1), "coin", 1)
    assert torch.equal(plain, uniform_rows(ints(4), ints(0), ints(1), "coin", 1, ints(0)))


def test_gumbel_noise_is_minus_log_of_an_exponential() -> None:
    from specplug.runtime.device.noise_triton import gumbel_rows, uniform_rows

    keys = ints(1, 2**63 - 1), ints(0, 3), ints(5, 6)
    for vocab in (1, 1023, 2049):
        made = gumbel_rows(*keys, "draft", vocab).double()
        uniform = uniform_rows(*keys, "draft", vocab)
        torch.testing.assert_close(made, -torch.log(-torch.log1p(-uniform)), rtol=2e-5, atol=2e-5)
        # The first numbers do not depend on the size of the vocabulary.
        assert torch.equal(made[:, :1], gumbel_rows(*keys, "draft", 5000).double()[:, :1])
    some = gumbel_rows(*keys, "draft", 100, torch.tensor([False, True], device=DEVICE))
    assert torch.equal(some[0], torch.zeros(100, device=DEVICE))
    assert torch.equal(some[1], gumbel_rows(*keys, "draft", 100)[1])


@pytest.mark.parametrize("vocab", [1, 17, 1024, 5003])
@pytest.mark.parametrize("count", [1, 3, 300])
def test_gumbel_argmax_is_the_argmax_of_logits_and_noise(vocab: int, count: int) -> None:
    from specplug.runtime.device import noise_triton

    generator = torch.Generator().manual_seed(vocab + count)
    logits = torch.randn(count + 2, vocab, generator=generator).to(DEVICE)
    logits[:, ::3] = float("-inf")
    logits[:, 0] = 0.0
    rows = torch.randint(0, count + 2, (count,), generator=generator).to(DEVICE)
    seed = torch.randint(0, 2**62, (count,), generator=generator).to(DEVICE)
    index = torch.randint(0, 2**20, (count,), generator=generator).to(DEVICE)
    choice = index % 5
    noise = noise_triton.gumbel_rows(seed, choice, index, "target", vocab)
    for heat in (None, torch.rand(count, generator=generator).to(DEVICE) + 0.5):
        got = noise_triton.gumbel_argmax(logits, seed, choice, index, "target", rows, heat)
        values = logits[rows] if heat is None else logits[rows] / heat[:, None]
        values = values + noise
        reached = values.gather(1, got[:, None])[:, 0]
        assert torch.isfinite(reached).all()
        torch.testing.assert_close(reached, values.amax(1), rtol=0, atol=1e-5)
    alone = noise_triton.gumbel_argmax(logits[:count], seed, choice, index, "target")
    assert torch.equal(alone, (logits[:count] + noise).argmax(1))


def test_gumbel_argmax_of_nothing_is_the_first_id() -> None:
    from specplug.runtime.device import noise_triton

    logits = torch.full((2, 3000), float("-inf"), device=DEVICE)
    assert noise_triton.gumbel_argmax(logits, ints(1, 2), ints(0, 0), ints(3, 4), "target").tolist() == [0, 0]


# --- the walk -------------------------------------------------------------------------------------------------------


def random_drafts(rng: random.Random, slots: int, nodes: int, depth: int, vocab: int) -> walk.Drafts:
    tokens = [[rng.randrange(-1, vocab + 1) for _ in range(nodes)] for _ in range(slots + 1)]
    parents = [[rng.randrange(-1, node + (rng.random() < 0.1)) for node in range(nodes)] for _ in range(slots + 1)]
    if nodes > 1:
        parents[0][1] = -2
    valid = [rng.randrange(nodes + 1) for _ in range(slots + 1)]
    made = (torch.tensor(part, dtype=torch.int64) for part in (tokens, parents, valid))
    return walk.Drafts(*made, vocab, depth)


def on_device(drafts: walk.Drafts) -> walk.Drafts:
    return drafts._replace(**{name: getattr(drafts, name).to(DEVICE) for name in ("tokens", "parents", "num_valid")})


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 3), (7, 2), (33, 9)])
def test_walk_equals_torch(nodes: int, depth: int) -> None:
    from specplug.runtime.device import walk_triton

    rng = random.Random(nodes)
    accepted = 0
    for _ in range(20):
        slots, rows, vocab = 5, 6, 3
        drafts = random_drafts(rng, slots, nodes, depth, vocab)
        start = torch.tensor([rng.choice([-1, 0, 4, 9]) for _ in range(rows)])
        choice = torch.tensor([rng.randrange(-1, vocab) for _ in range(11 + nodes)])
        drafted = torch.tensor([rng.randrange(nodes + 1) for _ in range(rows)])
        slot = torch.tensor([rng.randrange(slots + 1) for _ in range(rows)])
        lead = torch.tensor([rng.randrange(depth + 2) for _ in range(rows)])
        inputs = [part.to(DEVICE) for part in (choice, start, drafted, slot)]
        for most in (None, lead):
            wanted = walk.walk(choice, start, drafted, slot, drafts, most)
            got = walk_triton.walk(*inputs, on_device(drafts), None if most is None else most.to(DEVICE))
            for name, one, other in zip(wanted._fields, wanted, got, strict=True):
                assert torch.equal(one, other.cpu()), name
            accepted += int(wanted.accepted.sum())
    assert accepted > 5


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (7, 3), (33, 9)])
def test_lineage_equals_torch(nodes: int, depth: int) -> None:
    from specplug.runtime.device import walk_triton

    rng = random.Random(nodes)
    for count in (1, 64, 130):
        drafts = random_drafts(rng, 4, nodes, depth, 5)
        node = torch.tensor([rng.randrange(-1, nodes) for _ in range(count)])
        slot = torch.tensor([rng.randrange(5) for _ in range(count)])
        wanted = walk.lineage(node, slot, drafts)
        got = walk_triton.lineage(node.to(DEVICE), slot.to(DEVICE), on_device(drafts))
        assert torch.equal(wanted[0], got[0].cpu())
        assert torch.equal(wanted[1], got[1].cpu())


# --- filters and penalties ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 1000, 2500])
@pytest.mark.parametrize("step", [0.0, 0.25])  # 0.25: many equal values
def test_filters_equal_torch(vocab: int, step: float) -> None:
    from specplug.runtime.device import sampling_triton

    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(14, vocab, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    logits[2, ::2] = float("-inf")
    logits[3] = 1.5
    rows = torch.tensor([1, 2, 3, 13, 5, 6, 7, 8, 2, 3])
    heat = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 1.0, 4.0, 0.25, 1.0, 1.0])
    top_k = torch.tensor([0, 2, 2, 50, vocab, vocab + 5, 1, 0, vocab - 1, 3])
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.3, 0.999, 1.0, 0.9, 1e-6, 0.7, 0.9])
    min_p = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.01, 0.9, 0.0, 0.0, 0.5, 0.0])
    for use in (Filters(), Filters(top_k=True), Filters(top_p=True), Filters(min_p=True), Filters(True, True, True)):
        options = (heat, top_k * use.top_k, top_p if use.top_p else torch.ones(10), min_p * use.min_p)
        wanted = filtered(logits, *options, use, rows)
        inputs = [part.to(DEVICE) for part in (logits, *options)]
        got = sampling_triton.filtered(*inputs, use, rows.to(DEVICE)).cpu()
        kept, there = torch.isfinite(wanted), torch.isfinite(got)
        for row in range(len(rows)):
            apart = int((kept[row] != there[row]).sum())
            assert apart <= (1 if use.top_p else 0), (use, row, int(kept[row].sum()), int(there[row].sum()))
        both = kept & there
        torch.testing.assert_close(got[both], wanted[both], rtol=1e-6, atol=1e-6)


def test_penalties_equal_torch() -> None:
    from specplug.runtime.device import penalties_triton

    generator = torch.Generator().manual_seed(2)
    slots, vocab, count = 3, 1537, 5
    values = torch.randn(count, vocab, generator=generator) * 4
    values[0, 5] = float("-inf")
    counts = torch.randint(0, 3, (slots + 1, vocab), generator=generator, dtype=torch.int32)
    seen = (counts > 0) | (torch.rand(slots + 1, vocab, generator=generator) < 0.2)
    options = torch.tensor([[1.3, 0.7, -0.4], [1.0, 0.0, 0.0], [0.6, -1.0, 2.0], [1.0, 0.0, 0.0]])
    slot = torch.tensor([0, 2, 1, 0, 2])
    above = torch.tensor([[-1, -1, -1, -1], [3, 3, 3, -1], [4, 5, -1, -1], [7, 8, 9, 7], [0, vocab - 1, -1, -1]])
    table = penalties.Penalties(slots, vocab, torch.device("cpu"))
    table._counts, table._seen, table._options = counts, seen, options
    wanted = values.clone()
    table.penalise(wanted, slot, above)
    got = values.to(DEVICE)
    penalties_triton.penalise(got, *(part.to(DEVICE) for part in (slot, above, counts, seen, options)))
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)


# --- compaction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(2, 8, 8), (3, 5, 7), (8, 192, 128)])
def test_compaction_equals_torch(heads: int, k_dim: int, v_dim: int) -> None:
    from specplug.runtime.device import compact_triton

    generator = torch.Generator().manual_seed(heads)
    page, pages = 4, 12
    k = torch.randn(3, (pages + 1) * page, heads, k_dim, generator=generator)
    v = torch.randn(3, (pages + 1) * page, heads, v_dim, generator=generator)
    empty = torch.zeros(0, dtype=torch.int64)
    rows = StepRows(
        slots=torch.tensor([1, 0, 2, 2]),  # the last two are pads
        row_start=empty,
        begin=torch.tensor([6, 3, 0, 0]),
        drafted=torch.tensor([9, 6, 0, 0]),
        token_row=empty,
        tokens=empty,
        positions=empty,
        kv_rows=empty,
        ancestors=None,
        tables=torch.tensor([[9, 2, 0, 12, 12], [4, 11, 3, 7, 12], [12, 12, 12, 12, 12]], dtype=torch.int32),
        page_size=page,
    )
    accepted = torch.tensor([4, 2, 0, 0])
    path = torch.tensor([[1, 2, 5, 8], [0, 4, -1, -1], [-1] * 4, [-1] * 4])
    got_k, got_v = k.clone().to(DEVICE), v.clone().to(DEVICE)
    fields = {name: getattr(rows, name).to(DEVICE) for name in ("slots", "begin", "tables")}
    there = SimpleNamespace(**fields, page_size=page)
    compact_triton.move(got_k, got_v, there, accepted.to(DEVICE), path.to(DEVICE))
    wanted_k, wanted_v = k.clone(), v.clone()
    compact.move(SimpleNamespace(groups={0: (wanted_k, wanted_v)}), rows, accepted, path)
    assert not torch.equal(wanted_k, k)
    assert torch.equal(got_k.cpu(), wanted_k)
    assert torch.equal(got_v.cpu(), wanted_v)


# --- everything together --------------------------------------------------------------------------------------------

VOCAB, NODES = 12, 3
ROWS = 3000


def a_step(count: int, slots: int, drafted: int, device: str) -> tuple[StepRows, list[int], torch.Tensor]:
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    rows = StepRows(
        slots=torch.arange(count, device=device),
        row_start=empty,
        begin=torch.full((count,), 7, device=device),
        drafted=torch.full((count,), drafted, device=device),
        token_row=empty,
        tokens=empty,
        positions=empty,
        kv_rows=empty,
        ancestors=None,
        tables=torch.zeros(slots + 1, 1, dtype=torch.int32, device=device),
        page_size=16,
    )
    starts = [at * (1 + drafted) for at in range(count)]
    return rows, starts, torch.tensor(starts, device=device)


def live_rows(options: list[SamplingParams], drafted: int) -> list[SimpleNamespace]:
    made = []
    for slot, sampling in enumerate(options):
        request = SimpleNamespace(
            sampling=sampling,
            seed=slot * 7919,
            choice=0,
            tokens=[1, 2, 3, 4, 5, 6, 3, 2],
            prompt_len=4,
            processors=processors_for(sampling, [1, 2, 3, 4], ends=(0,), vocab=VOCAB),
            grammar=None,
            slot=slot,
        )
        made.append(SimpleNamespace(request=request, slot=slot, start=7, tokens=[-1], drafted=drafted))
    return made


def decided(rule, options, logits, drafts, device, parents=None) -> tuple[torch.Tensor, ...]:
    """Decide one step of rows with `options`, all with the same drafts, on `device` without waiting for it."""
    count, drafted = len(options), len(drafts)
    proposal = Proposal(count, NODES, VOCAB, rule=rule, dense=False, device=torch.device(device))
    proposal.tokens[:, :drafted] = torch.tensor(drafts, dtype=torch.int64, device=device)
    if parents:
        proposal.parents[:, :drafted] = torch.tensor(parents, device=device)
    proposal.num_valid.fill_(drafted)
    decider = Decider(
        rule, count, VOCAB, proposal, rows=count, nodes=NODES, depth=NODES, device=torch.device(device), mean=2.5
    )
    live = live_rows(options, drafted)
    rows, starts, start = a_step(count, count, drafted, device)
    every = logits.repeat(count, 1).to(device)
    choice = every.argmax(1)
    decider.warm_up(rows, every)
    if device == "cuda":
        refuse_waiting()
    try:
        for row in live:
            decider.admit(row.request)
        decider.decide(rows, live, starts, start, every, choice)
        decider.decide(rows, live, starts, start, every, choice)  # what the first emitted is counted now
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return decider.accepted.cpu(), decider.path.cpu(), decider.token.cpu()


def refuse_waiting() -> None:
    """Make every wait for the device an error; the mode itself warns that it is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")


def test_greedy_rows_equal_the_cpu_and_nothing_waits() -> None:
    logits = (torch.randn(1 + NODES, VOCAB, generator=torch.Generator().manual_seed(3)) * 4).round() / 2
    options = [
        SamplingParams(temperature=0, **more)
        for more in (
            {},
            {"repetition_penalty": 1.5},
            {"frequency_penalty": 0.5, "presence_penalty": -0.25},
            {"logit_bias": {4: 3.0, 0: 50.0}, "min_tokens": 6},
            {"logit_bias": {0: 50.0}},
        )
    ]
    drafts = logits[:-1].argmax(1).tolist()
    on_gpu = decided("coupled", options, logits, drafts, DEVICE)
    on_cpu = decided("coupled", options, logits, drafts, "cpu")
    assert all(torch.equal(one, other) for one, other in zip(on_gpu, on_cpu, strict=True))
    assert int(on_cpu[0][0]) == NODES
    assert len({tuple(path) for path in on_cpu[1].tolist()}) > 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("drafts", [[], [2], [2, 5, 3]])
def test_the_first_token_follows_p(rule: str, drafts: list[int]) -> None:
    # Breaks with: noise shared between streams; a residual that is not p - q; a filter that changes the distribution.
    logits = torch.randn(1 + len(drafts), VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    count = ROWS
    options = [SamplingParams(temperature=0.8, top_k=9, top_p=0.97)] * count
    accepted, path, token = decided(rule, options, logits, drafts, DEVICE, parents=[-1] * len(drafts))
    table = torch.tensor([*drafts, 0])
    first = torch.where(accepted > 0, table[path[:, 0]], token)
    view = [torch.tensor([value]) for value in (0.8, 9, 0.97, 0.0)]
    p = torch.softmax(filtered(logits[:1], *view, Filters(top_k=True, top_p=True)), 1)[0]
    seen = torch.bincount(first, minlength=VOCAB).double()
    assert float(seen[p == 0].sum()) == 0
    wanted = p[p > 0].double() * count
    chi_square = float(((seen[p > 0] - wanted) ** 2 / wanted).sum())
    assert chi_square < 31.3, chi_square  # at most 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize("rule", ["coupled", "rejection", "synthetic"])
def test_sampled_rows_do_not_wait(rule: str) -> None:
    logits = torch.randn(1 + NODES, VOCAB, generator=torch.Generator().manual_seed(6))
    options = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, min_p=0.1, repetition_penalty=1.2, logit_bias={1: 1.0}, min_tokens=20),
        SamplingParams(temperature=0),
    ]
    accepted, _, token = decided(rule, options, logits, [1, 2, 3], DEVICE)
    assert ((token >= 0) & (token < VOCAB)).all()
    if rule == "synthetic":
        assert set(accepted.tolist()) <= {1, 2}


def test_drawing_from_many_rows_is_fair() -> None:
    logits = torch.zeros(4000, 8, device=DEVICE)
    seed = torch.arange(4000, device=DEVICE)
    zero = torch.zeros_like(seed)
    seen = torch.bincount(gumbel_argmax(logits, seed, zero, zero, "draft"), minlength=8).double()
    assert float(((seen - 500) ** 2 / 500).sum()) < 24.3  # 7 degrees of freedom, p = 0.001


def test_a_pool_of_several_shapes_is_moved_whole() -> None:
    from specplug.models.base import KVGeometry

    pool = KVPool(
        [KVGeometry(1, 4, 4), KVGeometry(2, 4, 4), KVGeometry(1, 4, 4)], 8, torch.float32, torch.device(DEVICE)
    )
    for part in (*pool.k, *pool.v):
        part.copy_(torch.arange(8.0, device=DEVICE)[:, None, None].expand_as(part))
    rows = SimpleNamespace(
        slots=ints(0),
        begin=ints(0),
        tables=torch.tensor([[0, 1], [1, 1]], dtype=torch.int32, device=DEVICE),
        page_size=4,
    )
    compact.move(pool, rows, ints(1), ints(2, -1).view(1, 2))
    for part in (*pool.k, *pool.v):
        assert part[:, 0, 0].tolist() == [0, 3, 2, 3, 4, 5, 6, 7]
