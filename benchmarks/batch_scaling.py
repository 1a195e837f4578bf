"""Total decoding speed at batch 8 against batch 1, plain, on the demo model. The goal is 3 times.

    python benchmarks/batch_scaling.py [--model demo] [--batch 8] [--tokens 64] [--repeat 5]

The two take turns in one process on one loaded target. Every answer is exactly --tokens long, so that the
batch stays full to its end; speed is that of decode steps, prompts left out.
"""

import argparse
import os
import statistics
from collections.abc import Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

from specplug import Engine
from specplug.bench.figures import spread
from specplug.bench.host import QUIET_LOAD, describe
from specplug.bench.measure import EngineColumn
from specplug.bench.workload import Item, Source
from specplug.cli.demo_prompts import PROMPTS


def main(argv: Sequence[str] | None = None) -> None:
    """Print both speeds and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(argv)
    host = describe({})
    load = host["load_average"]
    print(f"{host['date']}, {host['processor']}, {host['cores']} cores, {host['threads']} threads")
    print(", ".join(f"{name} {number}" for name, number in host["versions"].items()))
    print(f"load average {load:.2f}" + (f", above {QUIET_LOAD}: not to be trusted" if load > QUIET_LOAD else ""))
    sampling = {"temperature": 0, "max_tokens": options.tokens, "ignore_eos": True}
    speeds: dict[int, list[float]] = {1: [], options.batch: []}
    with Engine(options.model, max_running_requests=options.batch) as engine:
        column = EngineColumn("none", engine)
        prompts = [engine.encode(PROMPTS[at % len(PROMPTS)].messages) for at in range(options.batch)]
        items = [Item(Source(at), 0, tuple(ids), at) for at, ids in enumerate(prompts)]
        column.run(items, {**sampling, "max_tokens": 4})
        for turn in range(options.repeat):
            for size in (1, options.batch):
                # Another prompt each time for the one that is alone.
                chosen = items if size > 1 else [items[turn % len(items)]]
                speed = column.run(chosen, sampling).speed
                assert speed is not None
                speeds[size].append(speed)
    for size, each in speeds.items():
        found = spread(each)
        assert found is not None
        print(f"batch {size}: {found['median']:.1f} tokens/s [{found['q1']:.1f}-{found['q3']:.1f}]")
    ratios = [many / one for one, many in zip(*speeds.values(), strict=True)]
    print(f"batch {options.batch} over batch 1: {statistics.median(ratios):.2f}x (median of {len(ratios)} pairs)")


if __name__ == "__main__":
    main()
