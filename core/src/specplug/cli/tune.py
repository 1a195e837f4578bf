"""``specplug tune``: what each depth costs and yields on the user's prompts, and the file that starts from there."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specplug.adaptive.depths import SWITCH
from specplug.adaptive.tiers import all_candidates
from specplug.bench.workload import from_conversations
from specplug.cli.flags import speculative_command
from specplug.cli.prompts import read_prompts
from specplug.errors import UserError
from specplug.names import fold
from specplug.options import EngineOptions
from specplug.planning import NONE
from specplug.settings import flag, option_of, validated

if TYPE_CHECKING:
    from specplug.adaptive.tuning import Tuned
    from specplug.registry import Registry
    from specplug.runtime.engine import Engine

MAX_TOKENS = 64


def register(app: typer.Typer, registry: "Registry") -> None:
    """Add the command to `app`."""

    @speculative_command(app, registry, "tune")
    def tune(
        model: str,
        options: EngineOptions,
        algorithm: str,
        given: dict[str, object],
        prompts: Annotated[
            str | None, typer.Option("--prompts", metavar="FILE", help="JSONL with prompt, messages or turns")
        ] = None,
        limit: Annotated[int | None, typer.Option(min=1, help="use only that many prompts")] = None,
        batch_sizes: Annotated[str, typer.Option(metavar="SIZES", help="requests at once, commas between")] = "1",
        depths: Annotated[
            str | None, typer.Option(metavar="DEPTHS", help="depths to measure, commas between; unset: those there are")
        ] = None,
        max_tokens: Annotated[str, typer.Option(help="most tokens per answer")] = str(MAX_TOKENS),
        temperature: Annotated[str, typer.Option(help="0 is greedy [at least 0]")] = "0",
        seed: Annotated[int, typer.Option(min=0, max=2**62, help="of sampled answers")] = 0,
        repeat: Annotated[int, typer.Option(min=1, help="times that every batch is run")] = 2,
        output: Annotated[
            str | None, typer.Option(metavar="FILE.json", help="write it for --speculative-adaptive-config")
        ] = None,
        plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="draw it; needs matplotlib")] = None,
    ) -> None:
        """Measure each depth at each batch size on MODEL and your prompts, and recommend settings.

        How deep is tried follows from the algorithm's own options, such as --speculative-num-steps.
        """
        if fold(algorithm) == NONE:
            raise UserError(f"{flag('algorithm')} is missing: name the algorithm whose depths are to be measured")
        if not prompts:
            raise UserError("--prompts FILE is missing: acceptance depends on what is asked")
        sizes = _numbers("--batch-sizes", batch_sizes, 1, 4096)
        wanted = None if depths is None else sorted({0, *_numbers("--depths", depths, 0, 512)})
        for option, path in (("--output", output), ("--plot", plot)):
            _check_writable(option, path)
        sources = from_conversations(read_prompts(prompts), limit, None)
        if len(sources) < max(sizes):
            raise UserError(
                f"--batch-sizes {batch_sizes}: {prompts} has {len(sources)} prompts, less than one batch of "
                f"{max(sizes)}: give more prompts, or smaller sizes"
            )

        from specplug.bench.plot import check_plot

        if plot is not None:
            check_plot(plot)
        from specplug.adaptive import tuning
        from specplug.runtime.engine import Engine
        from specplug.sampling import SamplingParams

        values = {"max_tokens": max_tokens, "temperature": temperature}
        params = validated(SamplingParams, values, option_of)
        if params.max_tokens is None or params.max_tokens < 4:
            raise UserError(f"--max-tokens {max_tokens}: too few to measure decoding by: give at least 4")
        chosen = {name: getattr(options, name) for name in options.model_fields_set}
        chosen |= {"speculative_adaptive": True, "speculative_adaptive_policy": "cost"}
        if "max_running_requests" not in chosen:
            chosen["max_running_requests"] = max(sizes)
        if chosen["max_running_requests"] < max(sizes):
            raise UserError(
                f"--max-running-requests {chosen['max_running_requests']} is below --batch-sizes {max(sizes)}: "
                "raise it, or leave it out (it then is the largest batch)"
            )
        with Engine(model, algorithm=algorithm, config=given, registry=registry, **chosen) as engine:
            for warning in engine.run.warnings:
                print(f"warning: {warning.message}", file=sys.stderr)
            measured = tuning.tune(
                engine,
                sources,
                batches=sizes,
                depths=_depths(engine, wanted),
                sampling={"max_tokens": params.max_tokens, "temperature": params.temperature},
                repeat=repeat,
                seed=seed,
            )
            config = engine.run.config
            steps = config is not None and "num_steps" in type(config).model_fields
        _show(measured, steps)
        if output is not None:
            tuning.write(output, measured)
            typer.echo(f"written: {output}; use it with {SWITCH} {SWITCH}-policy cost {SWITCH}-config {output}")
        if plot is not None:
            tuning.draw(plot, f"{model}, {engine.run.algorithm}", measured)


def _depths(engine: "Engine", wanted: list[int] | None) -> list[int]:
    """Return what to measure: the candidates of the run, or those of them that were named."""
    found = engine.run.depths
    if found is None:
        raise UserError(
            "nothing is drafted with these options, so there is no depth to measure: raise the draft length"
        )
    offered = all_candidates(found.tiers) if wanted is None else wanted
    missing = [depth for depth in offered if depth not in found.nodes]
    if missing:
        have = ", ".join(map(str, sorted(found.nodes)))
        raise UserError(
            f"--depths {missing[0]}: with these options there are {have}: name some of them, or let it draft deeper"
        )
    return sorted({0, *offered})


def _show(tuned: "Tuned", steps: bool) -> None:
    """Print the table and what is recommended."""
    from specplug.bench.table import _table, console

    table = _table("depth x batch", "batch", "depth", "accept length", "iteration ms", "tokens/s", "speed-up")
    for cell in sorted(tuned.cells, key=lambda cell: (cell.batch, cell.depth)):
        mark = " <" if cell == tuned.best(cell.batch) else ""
        table.add_row(
            str(cell.batch),
            str(cell.depth),
            f"{cell.accept_length:.2f}",
            f"{cell.iteration_ms:.2f}",
            f"{cell.tokens_per_second:.1f}",
            f"{cell.speed_up:.2f}x{mark}",
        )
    console(stderr=False).print(table)
    for batch in tuned.batches:
        best = tuned.best(batch)
        if best.depth == 0:
            said = f"do not draft (no depth gains more than {tuned.worth_percent} %)"
        else:
            option = f"--speculative-num-steps {best.depth}" if steps else f"depth {best.depth}"
            said = f"{option}, {best.speed_up:.2f}x plain decoding"
        typer.echo(f"batch {batch}: {said}")


def _numbers(option: str, text: str, low: int, high: int) -> list[int]:
    how = f"give whole numbers from {low} to {high}, commas between, each once"
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} {text}: {how}") from None
    if len(set(found)) < len(found) or not all(low <= each <= high for each in found):
        raise UserError(f"{option} {text}: {how}")
    return found


def _check_writable(option: str, path: str | None) -> None:
    place = Path(path) if path is not None else Path()
    folder = place.parent
    if path is not None and (place.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK)):
        raise UserError(f"{option} {path}: cannot be written there: give a file name in a folder that exists")
