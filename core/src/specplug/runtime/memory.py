"""How much KV fits beside everything else, and what memory is spent on. Bytes throughout; torch-free but for queries.

On a CPU the pool is bounded by `KV_BUDGET`. On a device, ``--mem-fraction-static`` of its memory is for weights, KV,
drafter and graphs; what the others leave of it becomes KV pages, so that a drafter's buffers are never found
missing after start. `size_pool` decides, `MemoryReport` shows, `out_of_memory` explains an estimate that was too low.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from specplug.errors import UserError
from specplug.options import EngineOptions
from specplug.runtime.demand import Demand

if TYPE_CHECKING:
    import torch

GIB = 2**30
KV_BUDGET = GIB
"""Bytes the KV pool takes at most on a CPU unless ``--max-total-tokens`` says otherwise."""
LEAST_TOKENS = 256
"""An engine on a device is refused when not even this many tokens' KV fit (or the context, where that is shorter)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory at one moment. Set by `device_memory`."""

    total: int
    free: int
    """What nobody holds: no other process, and no tensor of this one."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Set by `size_pool`."""

    max_tokens: int
    """Most tokens of a request, prompt and output."""
    pages: int
    """Pages of the pool, the trash page not counted."""


def device_memory(device: torch.device | str) -> DeviceMemory | None:
    """Return a CUDA device's memory now, what torch holds without using given back first; None for others."""
    import torch

    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free)


def fair_fraction(memory: DeviceMemory, fraction: float, engines: int) -> float:
    """Return the ``--mem-fraction-static`` for the next of `engines` that are to share what `fraction` leaves."""
    used = 1 - memory.free / memory.total
    return used + (fraction - used) / engines if used < fraction else fraction


# --- the pool ------------------------------------------------------------------------------------------------------


def size_pool(most: int, demand: Demand, options: EngineOptions, memory: DeviceMemory | None = None) -> PoolSize:
    """Return the longest request and the pages of the pool; a `UserError` says which number to lower.

    `most`: positions of the model. `memory`: `device_memory` after the target was loaded and before anything else was
    taken; None on a CPU, where `KV_BUDGET` bounds the pool.
    """
    asked, given = options.context_length, options.max_total_tokens
    if asked is not None and asked > most:
        raise UserError(f"--context-length {asked} is more than the model's {most} positions: use at most {most}")
    context = asked or most
    wanted = options.max_running_requests * context
    if memory is None:
        total = given or (min(wanted, KV_BUDGET // demand.token) if demand.token else wanted)
    else:
        total = _fitting(demand, options, memory, given or wanted)
        if given is not None and given > total:
            raise UserError(_too_much(f"--max-total-tokens {given}", given, total, demand, options, memory))
        least = min(given or wanted, context, LEAST_TOKENS)
        if total < least:
            raise UserError(_no_room(least, demand, options, memory))
        if asked is not None and asked > total and given is None:
            raise UserError(_too_much(f"--context-length {asked}", asked, total, demand, options, memory))
    if asked is not None and asked > total:
        raise UserError(
            f"--context-length {asked} does not fit the KV pool of {total} tokens: "
            f"lower it, or raise --max-total-tokens to at least {asked}"
        )
    return PoolSize(min(context, total), ceil(total / options.page_size))


def _room(demand: Demand, options: EngineOptions, memory: DeviceMemory) -> tuple[int, int]:
    """Return the bytes left for KV by ``--mem-fraction-static``, and by what is free."""
    used = memory.total - memory.free
    by_fraction = int(options.mem_fraction_static * memory.total) - used - demand.to_come
    return by_fraction, memory.free - demand.to_come - demand.activations


def _fitting(demand: Demand, options: EngineOptions, memory: DeviceMemory, wanted: int) -> int:
    """Return how many of `wanted` tokens fit: all, or whole pages with one more as the trash page. At least 0."""
    page = demand.token * options.page_size
    if not page:
        return wanted
    pages = min(_room(demand, options, memory)) // page - 1
    return wanted if ceil(wanted / options.page_size) <= pages else max(pages, 0) * options.page_size


def _too_much(
    option: str, tokens: int, total: int, demand: Demand, options: EngineOptions, memory: DeviceMemory
) -> str:
    needed, left = _kv_bytes(tokens, demand, options), max(min(_room(demand, options, memory)), 0)
    ways = [f"lower it to at most {total}"] if total >= 2 else []
    return f"{option} needs {size(needed)} of KV and {size(left)} is left{_spent(demand, memory)}: " + ", or ".join(
        [*ways, *_ways(needed, demand, options, memory)]
    )


def _no_room(least: int, demand: Demand, options: EngineOptions, memory: DeviceMemory) -> str:
    needed = _kv_bytes(least, demand, options)
    return (
        f"--mem-fraction-static {options.mem_fraction_static:g} of {size(memory.total)} leaves no room for KV: even "
        f"{least} tokens need {size(needed)}{_spent(demand, memory)}: "
        + ", or ".join(_ways(needed, demand, options, memory))
    )


def _kv_bytes(tokens: int, demand: Demand, options: EngineOptions) -> int:
    """Return the bytes of the pages that `tokens` tokens take, and of the trash page."""
    return (ceil(tokens / options.page_size) + 1) * options.page_size * demand.token


def _spent(demand: Demand, memory: DeviceMemory) -> str:
    """Return what takes the memory, largest first, in brackets."""
    parts = {
        "weights": demand.weights,
        "other processes and CUDA itself": _others(demand, memory),
        "proposal and q": demand.proposal,
        "draft weights": demand.draft_weights,
        "draft buffers": demand.draft_fixed + demand.draft_slots,
        "graphs": demand.graphs,
    }
    shown = sorted(((bytes_, name) for name, bytes_ in parts.items() if bytes_ >= 2**20), reverse=True)
    return " (" + ", ".join(f"{name} {size(bytes_)}" for bytes_, name in shown) + ")" if shown else ""


def _ways(needed: int, demand: Demand, options: EngineOptions, memory: DeviceMemory) -> list[str]:
    """Return what would make room for `needed` bytes of KV, the likeliest way first; at least one."""
    by_fraction, by_free = _room(demand, options, memory)
    found = []
    share = ceil(100 * (options.mem_fraction_static + (needed - by_fraction) / memory.total)) / 100
    if by_fraction < needed <= by_free and share < 1:
        found.append(f"raise --mem-fraction-static {options.mem_fraction_static:g} to {share:g}")
    if demand.proposal + demand.draft_slots >= min(needed, GIB) and options.max_running_requests > 1:
        found.append(f"lower --max-running-requests {options.max_running_requests}")
    if demand.graphs >= min(needed, GIB) and options.max_cuda_graphs > 1:
        found.append(f"lower --max-cuda-graphs {options.max_cuda_graphs}")
    if _others(demand, memory) > 2 * GIB:
        found.append("free what other processes hold")
    return found or ["take a smaller model or a larger device"]


def _others(demand: Demand, memory: DeviceMemory) -> int:
    return max(memory.total - memory.free - demand.weights, 0)


# --- what it is spent on -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What memory is set aside for, in bytes. Set by `memory_report`; what was measured since may replace a field."""

    total: int | None
    """Of the device; None on a CPU, or where the device is not here."""
    fraction: float | None
    """``--mem-fraction-static``, where it counts."""
    weights: int | None
    """None: not known before the model is loaded; so is all that has None below."""
    kv: int | None
    """The target's pages."""
    tokens: int | None
    pages: int | None
    page_size: int
    draft_kv: int | None
    """The drafter's layers on the same pages."""
    proposal: int
    draft_weights: int
    draft_fixed: int
    draft_slots: int
    graphs: int
    activations: int | None
    other: int = 0
    """Other processes, and what CUDA takes for itself."""

    @property
    def free(self) -> int | None:
        """What is left when all of it is taken; None where the device's total or a part is not known."""
        if self.total is None or self.weights is None or self.kv is None or self.draft_kv is None:
            return None
        taken = (self.proposal, self.draft_weights, self.draft_fixed, self.draft_slots, self.graphs, self.other)
        return self.total - self.weights - self.kv - self.draft_kv - sum(taken) - (self.activations or 0)

    def lines(self, unknown: str = "not known before loading") -> list[str]:
        """Return it for a terminal, one part a line; what is nothing is left out. `unknown`: said of what is None."""
        what = "memory"
        if self.total is not None and self.fraction is not None:
            static = f"{size(int(self.fraction * self.total))} of them by --mem-fraction-static {self.fraction:g}"
            what = f"memory {size(self.total)}, {static}"
        pages = ""
        if self.tokens is not None and self.pages is not None:
            pages = f"{self.tokens} tokens in {self.pages} pages of {self.page_size}"
        parts: list[tuple[str, int | None, str]] = [
            ("weights", self.weights, ""),
            ("KV pages", self.kv, pages),
            ("draft KV", self.draft_kv, "on the same pages"),
            ("proposal and q", self.proposal, ""),
            ("draft weights", self.draft_weights, ""),
            ("draft fixed", self.draft_fixed, ""),
            ("draft slots", self.draft_slots, ""),
            ("graphs", self.graphs, "set aside"),
            ("activations", self.activations, "at most, while a step runs"),
            ("other", self.other, "other processes, and CUDA itself"),
            ("free", self.free, ""),
        ]
        shown = [part for part in parts if part[1] or part[0] in ("weights", "KV pages")]
        return [what] + [
            f"  {name:<15}{unknown if amount is None else size(amount):>12}  {note}".rstrip()
            for name, amount, note in shown
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it: every field, and `free`."""
        return asdict(self) | {"free": self.free}


def memory_report(
    demand: Demand, pool: PoolSize, options: EngineOptions, memory: DeviceMemory | None = None
) -> MemoryReport:
    """Return the report of a run whose pool was sized with the same arguments."""
    rows = (pool.pages + 1) * options.page_size
    return MemoryReport(
        total=memory.total if memory else None,
        fraction=options.mem_fraction_static if memory else None,
        weights=demand.weights,
        kv=rows * demand.kv_token,
        tokens=pool.pages * options.page_size,
        pages=pool.pages,
        page_size=options.page_size,
        draft_kv=rows * demand.draft_kv_token,
        proposal=demand.proposal,
        draft_weights=demand.draft_weights,
        draft_fixed=demand.draft_fixed,
        draft_slots=demand.draft_slots,
        graphs=demand.graphs,
        activations=demand.activations,
        other=_others(demand, memory) if memory else 0,
    )


def size(amount: int) -> str:
    """Return bytes as people read them: ``15.0 GiB``, ``3.4 MiB``, ``0.5 KiB``."""
    units = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    unit, name = next((each for each in units if abs(amount) >= each[0]), units[-1])
    return f"{amount / unit:.1f} {name}"


# --- when it was too little after all ------------------------------------------------------------------------------

_LOWER = {
    "load weights": "take a smaller --dtype or model, or free what other processes hold",
    "allocate KV pages": "lower --mem-fraction-static, --max-total-tokens or --context-length",
    "start drafter": "lower --max-running-requests or --mem-fraction-static",
    "capture graphs": "lower --max-cuda-graphs or --mem-fraction-static, or give --disable-cuda-graph",
    "first step": "lower --chunked-prefill-size, --max-running-requests or --mem-fraction-static",
}
"""Stage of the start -> what to do; any other stage: lower ``--mem-fraction-static``."""


def out_of_memory(stage: str, report: MemoryReport | None = None) -> UserError:
    """Return the error for a device that ran out of memory in `stage`: one line with the number to lower.

    `stage`: a word of `specplug.runtime.progress.STAGES`. `report`: what was set aside, where that was settled.
    """
    set_aside = "".join(f"; {line.strip()}" for line in report.lines()[1:]) if report else ""
    parts = " ".join(set_aside.split())
    advice = _LOWER.get(stage, "lower --mem-fraction-static")
    return UserError(f"the device ran out of memory at {stage!r}{parts}: {advice}")


@contextmanager
def refusing_out_of_memory(stage: str, report: Callable[[], MemoryReport | None] = lambda: None) -> Iterator[None]:
    """Turn the device's running out of memory inside the block into `out_of_memory`'s one line.

    `report` is called only then, so that it may return what was settled inside the block.
    """
    try:
        yield
    except RuntimeError as error:
        import torch

        if not isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise out_of_memory(stage, report()) from None
