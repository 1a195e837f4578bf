"""Triton form of `specplug.runtime.device.outcome`: one program per row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from specplug.drafter import SamplingView
from specplug.proposal import Proposal
from specplug.runtime.device.outcome import Committed, Verdicts

# Not specialised on where small arrays happen to lie: see `specplug.runtime.device.noise_triton`.
_LOOSE = [
    "slots", "begin", "literals", "drafted", "start", "cap", "room", "following",
    "roots", "num_kept", "kv_len", "next_tokens", "final", "report", "accepted", "path", "token",
    "draft_tokens", "draft_parents", "num_valid", "limit",
    "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "choices",
    "temperature", "top_k", "top_p", "min_p", "seed", "choice", "width",
]  # fmt: skip


@triton.jit(do_not_specialize=_LOOSE)
def _commit(
    slots, begin, literals, drafted, start, cap, room, following,
    roots, num_kept, kv_len, next_tokens, final, report,
    accepted, path, token,
    draft_tokens, draft_parents, num_valid, limit,
    temperatures, top_ks, top_ps, min_ps, seeds, choices,
    temperature, top_k, top_p, min_p, seed, choice,
    width,
    L: tl.constexpr, L2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, N: tl.constexpr, N2: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r)
    is_final = tl.load(start + r) >= 0
    count = tl.where(is_final, tl.load(accepted + r), 0)
    chosen = tl.where(is_final, tl.load(token + r), -1)
    kept = tl.load(literals + r) + count
    length = tl.load(begin + r) + kept
    tl.store(final + r, is_final)
    tl.store(num_kept + r, kept)
    tl.store(kv_len + r, length)
    ahead = tl.arange(0, L2)
    known = tl.load(following + r * L + ahead, mask=ahead < L, other=-1)
    tl.store(next_tokens + r * L + ahead, tl.where((ahead == 0) & is_final, chosen, known), mask=ahead < L)
    tl.store(roots + slot, tl.maximum(chosen, 0), mask=is_final)
    tl.store(temperature + r, tl.load(temperatures + slot))
    tl.store(top_k + r, tl.load(top_ks + slot))
    tl.store(top_p + r, tl.load(top_ps + slot))
    tl.store(min_p + r, tl.load(min_ps + slot))
    tl.store(seed + r, tl.load(seeds + slot))
    tl.store(choice + r, tl.load(choices + slot))
    line = report + r * width
    tl.store(line, count)
    tl.store(line + 1, chosen)
    step = tl.arange(0, D2)
    tl.store(line + 3 + step, tl.load(path + r * D + step, mask=step < D, other=-1), mask=step < D)
    if N > 0:
        node = tl.arange(0, N2)
        inside = node < N
        valid = tl.maximum(tl.minimum(tl.load(drafted + r), tl.load(num_valid + slot)), 0)
        tl.store(line + 2, tl.where(is_final, valid, 0))
        tokens = tl.load(draft_tokens + slot * N + node, mask=inside, other=0)
        parents = tl.load(draft_parents + slot * N + node, mask=inside, other=-1)
        tl.store(line + 3 + D + node, tokens, mask=inside)
        tl.store(line + 3 + D + N + node, parents, mask=inside)
        tl.store(num_valid + slot, count * 0)
        tl.store(limit + slot, tl.maximum(tl.minimum(tl.load(cap + r), tl.load(room + r) - length), 0))
    else:
        tl.store(line + 2, count * 0)


def commit(to: Committed, verdicts: Verdicts, options: SamplingView, proposal: Proposal | None) -> None:
    """See `specplug.runtime.device.outcome.commit`."""
    ahead, depth = to.next_tokens.shape[1], verdicts.path.shape[1]
    nodes = 0 if proposal is None else proposal.tokens.shape[1]
    none = to.slots
    _commit[(len(to.slots),)](
        to.slots, to.begin, to.literals, to.drafted, to.start, to.cap, to.room, to.following,
        to.roots, to.num_kept, to.kv_len, to.next_tokens, to.final, to.report,
        verdicts.accepted, verdicts.path, verdicts.token,
        none if proposal is None else proposal.tokens,
        none if proposal is None else proposal.parents,
        none if proposal is None else proposal.num_valid,
        none if proposal is None else proposal.limit,
        options.temperature, options.top_k, options.top_p, options.min_p, options.seed, options.choice,
        to.sampling.temperature, to.sampling.top_k, to.sampling.top_p, to.sampling.min_p, to.sampling.seed,
        to.sampling.choice,
        to.report.shape[1],
        L=ahead, L2=triton.next_power_of_2(ahead), D=depth, D2=triton.next_power_of_2(depth),
        N=nodes, N2=triton.next_power_of_2(max(nodes, 1)),
        num_warps=1,
    )  # fmt: skip
