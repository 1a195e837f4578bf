"""Triton kernels of a step's begin and end (prologue, commit, reorder) against plain torch, on awkward inputs."""

import dataclasses
import os
import random
from typing import Any

import pytest
import torch

from specplug.drafter import SamplingView
from specplug.proposal import Proposal
from specplug.runtime.device import outcome as torch_outcome
from specplug.runtime.device import prologue as torch_prologue
from specplug.runtime.device import reorder as torch_reorder
from specplug.runtime.device.outcome import Committed, Verdicts
from specplug.runtime.device.prologue import PrologueInputs
from specplug.runtime.device.rows import StepRows, words_for

DEVICE = os.environ.get("SPECPLUG_TEST_DEVICE", "cuda")  # "cpu", for Triton's interpreter
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOTS, VOCAB, PAGE, COLUMNS = 9, 50, 4, 60


def moved(value: Any, device: str) -> Any:
    """Return a copy of `value` whose tensors lie on `device`; nothing is shared with the original."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, tuple | list):
        return type(value)(moved(part, device) for part in value)
    if isinstance(value, Proposal):
        twin = Proposal(SLOTS, value.tokens.shape[1], VOCAB, rule="coupled", dense=False, device=torch.device(device))
        for name in ("tokens", "parents", "num_valid", "limit"):
            getattr(twin, name).copy_(getattr(value, name))
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return type(value)(**fields)
    return value


def same(found: Any, wanted: Any, what: str = "") -> None:
    """Compare every tensor of `found` with `wanted`, bit for bit."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found.cpu(), wanted), what
    elif isinstance(wanted, tuple | list):
        for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{what}[{at}]")
    elif isinstance(wanted, Proposal):
        for name in ("tokens", "parents", "num_valid", "limit"):
            same(getattr(found, name), getattr(wanted, name), f"{what}.{name}")
    elif dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            same(getattr(found, field.name), getattr(wanted, field.name), f"{what}.{field.name}")


def ints(generator: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator)


def random_proposal(generator: torch.Generator, nodes: int, *, malformed: bool) -> Proposal:
    made = Proposal(SLOTS, nodes, VOCAB, rule="coupled", dense=False, device=torch.device("cpu"))
    made.tokens.copy_(ints(generator, 0, VOCAB, SLOTS + 1, nodes))
    made.parents.copy_(ints(generator, 0, 2**31, SLOTS + 1, nodes) % torch.arange(1, nodes + 1) - 1)
    made.num_valid.copy_(ints(generator, 0, nodes + 1, SLOTS + 1))
    made.limit.copy_(ints(generator, 0, nodes + 1, SLOTS + 1))
    if malformed:
        made.parents.copy_(ints(generator, -5, nodes + 5, SLOTS + 1, nodes))
        made.tokens[::2] = ints(generator, -(2**40), 2**40, *made.tokens[::2].shape)
        made.num_valid[1] = 2**31
        made.num_valid[2] = -4
    return made


def random_rows(seed: int, nodes: int, *, trees: bool) -> tuple[StepRows, PrologueInputs]:
    """Ragged live rows, empty pad rows, and pad tokens behind them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    live = rng.randint(1, SLOTS)
    rung = rng.randint(live, SLOTS)
    kinds = [(rng.randint(1, 6), 0) if rng.random() < 0.3 else (1, rng.randint(0, nodes)) for _ in range(live)]
    widths = [literals + drafted for literals, drafted in kinds]
    total, pads = sum(widths), rng.randrange(5)
    starts = [sum(widths[:row]) for row in range(live)] + [total] * (SLOTS + 1 - live)
    slots = torch.tensor(rng.sample(range(SLOTS), live) + [SLOTS] * (SLOTS + 1 - live))
    begins = torch.tensor([rng.randrange(PAGE * COLUMNS - nodes - 6) for _ in range(live)] + [0] * (SLOTS + 1 - live))
    literals = torch.tensor([one for one, _ in kinds] + [0] * (SLOTS + 1 - live))
    tables = ints(generator, 0, 700, SLOTS + 1, COLUMNS).int()
    tables[SLOTS] = 700
    owners = [row for row, width in enumerate(widths) for _ in range(width)] + [SLOTS] * pads
    literal = ints(generator, 0, VOCAB, total + pads)
    literal[torch.rand(total + pads, generator=generator) < 0.3] = -1
    tokens = total + pads
    rows = StepRows(
        slots=slots[:rung].clone(),
        row_start=torch.tensor([*starts[:live], *[total] * (rung + 1 - live)]),
        begin=begins[:rung].clone(),
        drafted=torch.tensor([drafted for _, drafted in kinds] + [0] * (rung - live)),
        token_row=torch.tensor(owners),
        tokens=ints(generator, 0, 9, tokens),
        positions=ints(generator, 0, 9, tokens),
        kv_rows=ints(generator, 0, 9, tokens),
        ancestors=ints(generator, 0, 9, tokens, words_for(nodes)) if trees else None,
        tables=tables,
        page_size=PAGE,
    )
    inputs = PrologueInputs(
        literal=literal,
        slots=slots,
        starts=torch.tensor(starts),
        begins=begins,
        literals=literals,
        roots=ints(generator, 0, VOCAB, SLOTS + 1),
        vocab=VOCAB,
        depth=rng.choice((1, max(nodes, 1))),  # kernels are compiled for each
        trash_row=700 * PAGE,
    )
    return rows, inputs


@pytest.mark.parametrize("nodes", [0, 1, 3, 16, 63, 64, 130])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_prologue(nodes: int, trees: bool) -> None:
    """Ids, positions, pool rows and ancestor words; roots that only the device knows, malformed drafts, pads."""
    from specplug.runtime.device.prologue_triton import prologue

    if trees and not nodes:
        pytest.skip("no drafts, no trees")
    for seed in range(12):
        rows, inputs = random_rows(seed, nodes, trees=trees)
        generator = torch.Generator().manual_seed(seed)
        proposal = random_proposal(generator, nodes, malformed=seed % 2 > 0) if nodes else None
        found = moved(rows, DEVICE)
        prologue(found, moved(inputs, DEVICE), moved(proposal, DEVICE))
        torch_prologue.prologue(rows, inputs, proposal)
        if rows.ancestors is not None:  # what a pad sees is read by nobody
            live = rows.token_row < SLOTS
            same(found.ancestors.cpu()[live], rows.ancestors[live], "ancestors")
            found.ancestors = rows.ancestors = None
        same(found, rows, f"seed {seed}")


def random_options(generator: torch.Generator, count: int) -> SamplingView:
    return SamplingView(
        temperature=torch.rand(count, generator=generator),
        top_k=ints(generator, 0, 2**40, count),
        top_p=torch.rand(count, generator=generator),
        min_p=torch.rand(count, generator=generator),
        seed=ints(generator, 0, 2**62, count),
        choice=ints(generator, 0, 128, count),
    )


@pytest.mark.parametrize("nodes", [0, 1, 3, 16, 33])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_commit(nodes: int, lookahead: int) -> None:
    """Lengths, roots, limits, options and report, of final rows, unfinished chunks and pads."""
    from specplug.runtime.device.outcome_triton import commit

    for seed in range(12):
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        live = rng.randint(1, SLOTS)
        # One pad at most: several write the scratch slot's entries, in any order.
        count, depth = live + rng.randrange(2), max(nodes, 1) if seed % 2 else max(nodes // 2, 1)
        slots = torch.tensor(rng.sample(range(SLOTS), live) + [SLOTS] * (count - live))
        to = Committed(
            slots=slots,
            begin=ints(g, 0, 80, count),
            literals=ints(g, 0, 9, count),
            drafted=ints(g, 0, nodes + 1, count),
            start=torch.where(slots == SLOTS, -1, ints(g, -1, 6, count)),
            cap=ints(g, 0, nodes + 1, count),
            room=ints(g, 60, 95, count),
            following=ints(g, -1, VOCAB, count, lookahead),
            roots=ints(g, 0, VOCAB, SLOTS + 1),
            num_kept=ints(g, 0, 9, count),
            kv_len=ints(g, 0, 9, count),
            next_tokens=ints(g, 0, 9, count, lookahead),
            final=torch.zeros(count, dtype=torch.bool),
            sampling=random_options(g, count),
            report=ints(g, 0, 9, count, 3 + depth + 2 * nodes),
        )
        verdicts = Verdicts(ints(g, 0, depth + 1, count), ints(g, -1, depth, count, depth), ints(g, -1, VOCAB, count))
        options = random_options(g, SLOTS + 1)
        proposal = random_proposal(g, nodes, malformed=True) if nodes else None
        found, twin = moved(to, DEVICE), moved(proposal, DEVICE)
        commit(found, moved(verdicts, DEVICE), moved(options, DEVICE), twin)
        torch_outcome.commit(to, verdicts, options, proposal)
        same(found, to, f"seed {seed}")
        same(twin, proposal, f"seed {seed}: proposal")


@pytest.mark.parametrize("taps", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_first(taps: int, dtype: torch.dtype) -> None:
    from specplug.runtime.device.reorder_triton import kept_first

    for seed in range(12):
        rows, inputs = random_rows(seed, 11, trees=True)
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        depth, total, size = rng.choice((1, 4, 7)), rows.total, rng.choice([1, 5, 1030])
        path = torch.full((rows.rows, depth), -1)
        accepted = torch.zeros(rows.rows, dtype=torch.int64)
        for row, drafted in enumerate(rows.drafted.tolist()):
            nodes = sorted(rng.sample(range(drafted), rng.randint(0, min(drafted, depth))))
            path[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
            accepted[row] = len(nodes)
        literals = inputs.literals[: rows.rows].clone()
        states = tuple(torch.randn(total, size, generator=generator).to(dtype) for _ in range(taps))
        spare = (
            torch.zeros_like(rows.tokens),
            torch.zeros_like(rows.tokens),
            torch.zeros(total if taps else 0, size, dtype=dtype),
        )
        found, its_states = moved(rows, DEVICE), moved(states, DEVICE)
        where = [moved(part, DEVICE) for part in (literals, accepted, path)]
        kept_first(found, where[0], where[1], where[2], its_states, moved(spare, DEVICE))
        torch_reorder.kept_first(rows, literals, accepted, path, states, spare)
        same(found, rows, f"seed {seed}")
        same(its_states, states, f"seed {seed}: taps")
