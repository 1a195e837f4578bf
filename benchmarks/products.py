"""Products of few rows with a model's matrices on a CPU, in float32: the library's own way and the one turned round.

    python benchmarks/products.py [--rows 1 2 3 4 8] [--shapes 3072x576 ...] [--repeat 9]

`specplug.layers.linear` chooses between the two (`_turns`). Shapes are out x in; without `--shapes` the demo model's.
Both ways take turns, over so many different matrices that none stays in the caches. Figures are the fastest of
`--repeat`, in milliseconds for one product; `*` marks the way that is taken.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from time import perf_counter

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import torch
from torch import Tensor
from torch.nn import functional as F

from specplug.bench.host import describe
from specplug.layers.linear import _turned, _turns

DEMO = ("960x576", "576x576", "3072x576", "576x1536", "4096x576", "49152x576")
COLD = 2**26
"""Weights that are passed before one is used again: 256 MiB."""


def fastest(ways: dict[str, Callable[[Tensor, Tensor], Tensor]], x: Tensor, pool: Tensor, repeat: int) -> list[float]:
    """Return each way's milliseconds for one product of `x` [n, in], over the matrices `pool` [m, out, in]."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeat):
        for name, way in ways.items():
            begin = perf_counter()
            for weight in pool:
                way(x, weight)
            best[name] = min(best[name], perf_counter() - begin)
    return [1e3 * best[name] / len(pool) for name in ways]


def main(words: Sequence[str] | None = None) -> None:
    """Print one line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--shapes", nargs="+", default=DEMO, metavar="OUTxIN")
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args(words)
    host = describe({})
    print(
        f"{host['date']}, {host['processor']}, {host['threads']} threads, torch {torch.__version__}, "
        f"load average {host['load_average']:.2f}; library / turned, ms"
    )
    weights = torch.randn(COLD, generator=torch.Generator().manual_seed(0)) * 0.02
    for shape in args.shapes:
        outer, inner = map(int, shape.split("x"))
        count = max(1, COLD // (outer * inner))
        pool = weights[: count * outer * inner].view(count, outer, inner)
        cells = []
        for rows in args.rows:
            x = torch.randn(rows, inner)
            library, turned = fastest({"library": F.linear, "turned": _turned}, x, pool, args.repeat)
            stars = ("", "*") if _turns(rows, inner, outer) else ("*", "")
            cells.append(f"{rows}: {library:.2f}{stars[0]} / {turned:.2f}{stars[1]}")
        print(f"{shape:>10}  {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
