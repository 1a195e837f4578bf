"""The device's acceptance against `specplug.accept`, token for token, on the CPU, over several steps of mixed rows."""

import random
from types import SimpleNamespace

import pytest
import torch

from specplug import tree
from specplug.accept import Verdict, VerifyRow, accept
from specplug.generation import Suppressed
from specplug.proposal import Proposal
from specplug.runtime.device.decide import Decider
from specplug.runtime.device.rows import StepRows
from specplug.runtime.device.work import needs_host
from specplug.runtime.processors import processors_for
from specplug.sampling import SamplingParams

VOCAB = 7  # small, so that drafts are met and filters cut
NODES, DEPTH = 7, 7
SLOTS, ROWS = 9, 8
CPU = torch.device("cpu")
ENDS = (0, 5)


def no_repeat(tokens, logits):
    logits[tokens[-1]] = float("-inf")
    return logits


def options(rng: random.Random, case: str) -> SamplingParams:
    given: dict = {"temperature": rng.choice([0.0, 0.6, 1.0, 1.7])}
    if case != "plain":
        given |= {
            "top_k": rng.choice([0, 0, 1, 3, 40]),
            "top_p": rng.choice([1.0, 1.0, 0.9, 0.5]),
            "min_p": rng.choice([0.0, 0.0, 0.1, 1.0]),
        }
    if case in ("processors", "custom") and rng.random() < 0.7:
        given |= {
            "repetition_penalty": rng.choice([1.0, 1.4, 0.7]),
            "frequency_penalty": rng.choice([0.0, 0.8, -0.5]),
            "presence_penalty": rng.choice([0.0, 1.1]),
            "logit_bias": rng.choice([{}, {3: 2.0, 6: -3.0}, {0: 5.0}]),
            "min_tokens": rng.choice([0, 3, 9]),
        }
    return SamplingParams(**given)


def a_request(rng: random.Random, slot: int, case: str) -> SimpleNamespace:
    sampling = options(rng, case)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
    output = [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 4))]
    custom = no_repeat if case == "custom" and rng.random() < 0.5 else None
    never = Suppressed((2, 4), (0, *ENDS)) if case == "processors" and rng.random() < 0.3 else Suppressed()
    processors = processors_for(sampling, prompt, ends=ENDS, vocab=VOCAB, custom=custom, never=never)
    for token in output:
        if processors:
            processors.commit(token)
    return SimpleNamespace(
        sampling=sampling,
        seed=rng.randrange(2**63),
        choice=rng.randrange(3),
        tokens=prompt + output,
        prompt_len=len(prompt),
        processors=processors,
        grammar=None,
        slot=slot,
    )


def fill(rng: random.Random, proposal: Proposal, slot: int, shape: str, step: int) -> None:
    """Write random drafts, with a duplicate sibling, a bad token or a bad parent now and then."""
    parents = [node - 1 if shape == "chain" else rng.randrange(-1, node) for node in range(NODES)]
    tokens = [rng.randrange(VOCAB) for _ in range(NODES)]
    if shape == "malformed":
        at = rng.randrange(NODES)
        if rng.random() < 0.5:
            tokens[at] = rng.choice([-1, VOCAB, 10**6])
        else:
            parents[at] = rng.choice([-2, at, at + 3])
    proposal.tokens[slot] = torch.tensor(tokens)
    proposal.parents[slot] = torch.tensor(parents)
    proposal.num_valid[slot] = rng.randrange(NODES + 1)
    proposal.dense[slot] = rng.random() < 0.5
    if proposal.q is not None:
        generator = torch.Generator().manual_seed(step * SLOTS + slot)
        proposal.q[slot] = torch.softmax(torch.randn(NODES, VOCAB, generator=generator), 1)


def step_rows(live: list[SimpleNamespace], logits_of: dict[int, int]) -> tuple[StepRows, torch.Tensor]:
    pad = ROWS - len(live)
    q_len = [len(row.tokens) + row.drafted for row in live] + [0] * pad
    total = sum(q_len)
    zeros = torch.zeros(total, dtype=torch.int64)
    rows = StepRows(
        slots=torch.tensor([row.slot for row in live] + [SLOTS] * pad),
        row_start=torch.tensor([0, *q_len]).cumsum(0),
        begin=torch.tensor([row.start for row in live] + [0] * pad),
        drafted=torch.tensor([row.drafted for row in live] + [0] * pad),
        token_row=zeros,
        tokens=zeros,
        positions=zeros,
        kv_rows=zeros,
        ancestors=None,
        tables=torch.zeros(SLOTS + 1, 1, dtype=torch.int32),
        page_size=16,
    )
    return rows, torch.tensor([logits_of.get(at, -1) for at in range(len(live))] + [-1] * pad)


def expected(rule: str, row: SimpleNamespace, start: int, logits: torch.Tensor, proposal: Proposal, mean: float):
    request, slot = row.request, row.slot
    count = min(row.drafted, int(proposal.num_valid[slot]))
    tokens, parents = proposal.tokens[slot, :count].tolist(), proposal.parents[slot, :count].tolist()
    count = tree.valid_prefix(tokens, parents, VOCAB)
    dense = proposal.q is not None and bool(proposal.dense[slot])
    verify = VerifyRow(
        start,
        row.start + len(row.tokens) - 1,
        request.sampling,
        request.seed,
        request.choice,
        tokens[:count],
        parents[:count],
        proposal.q[slot, :count] if dense else None,
        request.processors,
    )
    (verdict,) = accept(rule, logits, [verify], mean=mean)
    return verdict, tokens


def run(rule: str, case: str, shape: str, steps: int, seed: int, mean: float = 0.0) -> int:
    """Run a few steps over changing requests; returns how many drafts were accepted."""
    rng = random.Random(seed)
    proposal = Proposal(SLOTS, NODES, VOCAB, rule=rule, dense=True, device=CPU)
    kept = {"rows": ROWS, "nodes": NODES, "depth": DEPTH, "device": CPU, "mean": mean}
    decider = Decider(rule, SLOTS, VOCAB, proposal, **kept)
    held: dict[int, SimpleNamespace] = {}
    accepted = 0
    for step in range(steps):
        for slot in rng.sample(range(SLOTS), 3):  # ends some requests and admits others to the same slot
            held[slot] = a_request(rng, slot, case)
            decider.admit(held[slot])
        chosen = rng.sample(sorted(held), min(len(held), rng.randrange(1, ROWS + 1)))
        live, at, starts = [], 2, {}  # logits rows 0 and 1 are nobody's
        for slot in chosen:
            request = held[slot]
            fill(rng, proposal, slot, shape, step)
            literal = rng.choice([1, 1, 1, len(request.tokens)])
            drafted = rng.randrange(NODES + 1) if literal == 1 else 0
            start = len(request.tokens) - literal
            row = SimpleNamespace(request=request, slot=slot, start=start, tokens=[-1] * literal, drafted=drafted)
            if rng.random() < 0.85:
                starts[len(live)] = at
                at += 1 + drafted
            live.append(row)
        generator = torch.Generator().manual_seed(seed * 1000 + step)
        logits = torch.randn(at + 3, VOCAB, generator=generator) * 2
        logits = (logits * 4).round() / 4  # ties
        for row in range(len(logits)):
            if rng.random() < 0.15:  # nothing but ends of the answer: with min_tokens nothing is left
                logits[row, [token for token in range(VOCAB) if token not in ENDS]] = float("-inf")
        before = logits.clone()
        wanted = {row: expected(rule, live[row], start, logits, proposal, mean) for row, start in starts.items()}
        rows, start = step_rows(live, starts)
        choice = logits.argmax(1)
        decider.decide(rows, live, [starts.get(row, -1) for row in range(len(live))], start, logits, choice)
        assert torch.equal(logits, before)
        assert torch.equal(choice, logits.argmax(1))
        for row in range(ROWS):
            verdict, tokens = wanted.get(row, (Verdict((), -1), []))
            path = decider.path[row].tolist()
            assert path == [*verdict.path, *[-1] * (DEPTH - len(verdict.path))], (step, row)
            assert int(decider.accepted[row]) == len(verdict.path)
            assert int(decider.token[row]) == (-1 if verdict.error else verdict.token), (step, row)
            if row in wanted:
                accepted += len(verdict.path)
                emitted = [*(tokens[node] for node in verdict.path), *([] if verdict.error else [verdict.token])]
                live[row].request.tokens += emitted
                for token in emitted:
                    if live[row].request.processors:
                        live[row].request.processors.commit(token)
    return accepted


@pytest.mark.parametrize("shape", ["chain", "tree", "malformed"])
@pytest.mark.parametrize("case", ["plain", "filters", "processors", "custom"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_equals_the_host_on_random_batches(rule: str, case: str, shape: str) -> None:
    # Breaks with: another stream, rank or token index; a penalty counted at the wrong node, or not after a commit;
    # bias or min_tokens at the wrong position; a count left from the slot's last request; a filter's tie cut otherwise;
    # a walk that goes on where nothing can be chosen.
    accepted = sum(run(rule, case, shape, 20, seed) for seed in range(3))
    assert accepted > 10, "the batches must exercise the walk"


@pytest.mark.parametrize("mean", [1.0, 2.5, 3.999, 20.0])
@pytest.mark.parametrize("case", ["plain", "processors"])
def test_synthetic_equals_the_host(case: str, mean: float) -> None:
    accepted = run("synthetic", case, "tree", 12, 3, mean)
    assert (accepted > 0) == (mean > 1.0)


@pytest.mark.parametrize("mean", [1.0, 2.0, 2.25, 3.9])
def test_synthetic_emits_the_mean(mean: float) -> None:
    # Breaks with: the bonus not counted; a coin that is not uniform; the coin tossed once per request.
    logits = torch.zeros(8, VOCAB)
    rows = [
        VerifyRow(0, index, SamplingParams(temperature=0), seed, 0, [4] * NODES, list(range(-1, NODES - 1)))
        for seed in range(40)
        for index in range(100)
    ]
    verdicts = accept("synthetic", logits, rows, mean=mean)
    emitted = [len(verdict.path) + 1 for verdict in verdicts]
    assert set(emitted) <= {int(mean), int(mean) + 1}
    assert abs(sum(emitted) / len(emitted) - mean) < 0.03
    assert all(verdict.token == 0 for verdict in verdicts), "the last token is the target's own"


def test_synthetic_is_bounded_by_the_first_path() -> None:
    tokens, parents = [1, 2, 3, 4], [-1, -1, 0, 1]
    row = VerifyRow(0, 0, SamplingParams(temperature=0), 1, 0, tokens, parents)
    (verdict,) = accept("synthetic", torch.zeros(5, VOCAB), [row], mean=9.0)
    assert verdict.path == (0, 2)


def test_a_greedy_batch_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specplug.runtime.device.work.upload", None)
    row = SimpleNamespace(
        request=SimpleNamespace(sampling=SamplingParams(temperature=0), processors=None, grammar=None),
        slot=0,
        start=3,
        tokens=[1],
        drafted=0,
    )
    decider = Decider("coupled", SLOTS, VOCAB, None, rows=ROWS, nodes=0, depth=0, device=CPU)
    rows, start = step_rows([row], {0: 1})
    decider.decide(rows, [row], [1], start, torch.zeros(2, VOCAB), torch.tensor([5, 6]))
    assert decider.token.tolist() == [6] + [-1] * (ROWS - 1)
    assert decider.accepted.tolist() == [0] * ROWS


def test_a_row_whose_options_forbid_everything_has_no_token() -> None:
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    request = SimpleNamespace(
        sampling=sampling,
        seed=0,
        choice=0,
        tokens=[2],
        prompt_len=1,
        processors=processors_for(sampling, [2], ends=(1,), vocab=3),
        grammar=None,
        slot=0,
    )
    row = SimpleNamespace(request=request, slot=0, start=0, tokens=[2], drafted=0)
    decider = Decider("coupled", 1, 3, None, rows=ROWS, nodes=0, depth=0, device=CPU)
    decider.admit(request)
    rows, start = step_rows([row], {0: 0})
    rows.slots.clamp_(max=1)
    logits = torch.tensor([[float("-inf"), 1.0, float("-inf")]])
    decider.decide(rows, [row], [0], start, logits, logits.argmax(1))
    assert int(decider.token[0]) == -1


def test_a_failing_custom_processor_is_told_by_row() -> None:
    def broken(tokens, logits):
        raise RuntimeError("no")

    sampling = SamplingParams(temperature=0)
    request = SimpleNamespace(
        sampling=sampling,
        seed=0,
        choice=0,
        tokens=[2],
        prompt_len=1,
        processors=processors_for(sampling, [2], ends=(), vocab=VOCAB, custom=broken),
        grammar=None,
        slot=0,
    )
    row = SimpleNamespace(request=request, slot=0, start=0, tokens=[2], drafted=0)
    decider = Decider("coupled", SLOTS, VOCAB, None, rows=ROWS, nodes=0, depth=0, device=CPU)
    assert needs_host(request)
    decider.admit(request)
    rows, start = step_rows([row], {0: 0})
    decider.decide(rows, [row], [0], start, torch.zeros(1, VOCAB), torch.zeros(1, dtype=torch.int64))
    assert int(decider.token[0]) == -1
    assert "RuntimeError: no" in decider.errors[0]


def test_options_are_gathered_by_slot() -> None:
    decider = Decider("coupled", SLOTS, VOCAB, None, rows=ROWS, nodes=0, depth=0, device=CPU)
    rng = random.Random(1)
    requests = [a_request(rng, slot, "filters") for slot in range(SLOTS)]
    for request in requests:
        decider.admit(request)
    view = decider.view(torch.tensor([7, 2, SLOTS]))
    assert view.seed.tolist() == [requests[7].seed, requests[2].seed, 0]
    assert view.choice.tolist() == [requests[7].choice, requests[2].choice, 0]
    assert view.top_k.tolist() == [requests[7].sampling.top_k, requests[2].sampling.top_k, 0]
    heat = [0.0 if requests[at].sampling.greedy else requests[at].sampling.temperature for at in (7, 2)]
    assert view.temperature.tolist() == pytest.approx([*heat, 0.0])
