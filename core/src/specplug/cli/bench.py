"""``specplug bench``: algorithms side by side on the same prompts, with medians, ledger and a check of the text."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from specplug.bench.columns import ColumnSpec, parse_columns
from specplug.bench.gate import FLOOR, SLACK, open_gate
from specplug.bench.workload import Source, from_conversations
from specplug.cli.flags import speculative_command
from specplug.cli.prompts import read_prompts
from specplug.errors import UserError
from specplug.names import fold
from specplug.options import EngineOptions
from specplug.planning import NONE
from specplug.settings import flag, option_of, validated

if TYPE_CHECKING:
    from specplug.registry import Registry

MAX_TOKENS = 128
RANDOM_BATCHES = 4
"""Random prompts are made for this many of the largest batch."""


def register(app: typer.Typer, registry: "Registry") -> None:
    """Add the command to `app`."""

    @speculative_command(app, registry, "bench")
    def bench(
        options: EngineOptions,
        algorithm: str,
        given: dict[str, object],
        model: str | None = None,
        algorithms: Annotated[
            str | None,
            typer.Option(metavar="COLUMNS", help="NAME, NAME@FILE.json or LABEL=NAME@FILE.json, commas between"),
        ] = None,
        prompts: Annotated[
            str | None, typer.Option("--prompts", metavar="FILE", help="JSONL with prompt, messages or turns, category")
        ] = None,
        limit: Annotated[int | None, typer.Option(min=1, help="use only that many prompts")] = None,
        per_category: Annotated[int | None, typer.Option(min=1, help="use only the first of each category")] = None,
        max_tokens: Annotated[str | None, typer.Option(help=f"most tokens per answer [default {MAX_TOKENS}]")] = None,
        ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after the model's end of text")] = False,
        random_input: Annotated[
            int | None, typer.Option(min=1, metavar="LEN", help="prompts of LEN random token ids instead of a file")
        ] = None,
        output_len: Annotated[
            int | None, typer.Option(min=2, metavar="N", help="with --random-input: exactly N tokens per answer")
        ] = None,
        batch_sizes: Annotated[str, typer.Option(metavar="SIZES", help="requests at once, commas between")] = "1",
        temperature: Annotated[str, typer.Option(help="0 is greedy [at least 0]")] = "0",
        seed: Annotated[int, typer.Option(min=0, max=2**62, help="of random input and of sampled answers")] = 0,
        repeat: Annotated[int, typer.Option(min=1, help="times that every batch is run")] = 3,
        transformers: Annotated[
            bool, typer.Option("--transformers", help="add transformers' own generate: plain, with drafts")
        ] = False,
        json_file: Annotated[
            str | None, typer.Option("--json", metavar="FILE|-", help="write everything as JSON; - is the output")
        ] = None,
        gate: Annotated[
            str | None,
            typer.Option(
                "--gate", metavar="BASELINE.json", help="exit 1 if text, acceptance or speed got worse than there"
            ),
        ] = None,
        gate_slack: Annotated[
            str | None,
            typer.Option(metavar="SHARE", help=f"by which tokens per target step may fall [default {SLACK}]"),
        ] = None,
        gate_floor: Annotated[
            str | None,
            typer.Option(metavar="RATIO", help=f"smallest speed-up over the first column [default {FLOOR}]"),
        ] = None,
        plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="draw it; needs matplotlib")] = None,
        url: Annotated[
            str | None,
            typer.Option(metavar="URL", help="put load on a running server instead; MODEL is its name there"),
        ] = None,
        request_rate: Annotated[
            str | None, typer.Option(metavar="RATES", help="with --url: requests started a second, commas between")
        ] = None,
    ) -> None:
        """Compare algorithms on MODEL: a folder, a .gguf file, a hub id, or 'demo'.

        The target is loaded once, and columns take turns on every batch. The first column is what speed-ups and
        texts refer to: usually 'none', plain decoding. Exit code 1 says that a column's text differs, or that
        something is worse than in the report of an earlier run (--gate).
        With --url: percentiles of a server's times, --batch-sizes clients at once or --request-rate.
        """
        for option, value in (("--gate-slack", gate_slack), ("--gate-floor", gate_floor)):
            if gate is None and value is not None:
                raise UserError(f"{option} {value} is for --gate: add --gate BASELINE.json, or leave it out")
        if url is not None:
            if gate is not None:
                raise UserError(
                    f"--gate {gate} with --url {url}: a server's report holds no texts to compare: "
                    "leave out --url to gate the algorithms here, or --gate"
                )
            from specplug.cli.bench_url import run_url

            foreign: dict[str, object] = {
                "--algorithms": algorithms,
                flag("algorithm"): fold(algorithm) != NONE,
                "--random-input": random_input,
                "--output-len": output_len,
                "--transformers": transformers,
                "--plot": plot,
            }
            foreign |= {flag(field): True for field in given}
            foreign |= {option_of(field): True for field in options.model_fields_set}
            code = run_url(
                url,
                model=model,
                prompts=prompts,
                limit=limit,
                per_category=per_category,
                sampling={
                    "temperature": temperature,
                    "max_tokens": max_tokens or MAX_TOKENS,
                    "ignore_eos": ignore_eos,
                },
                sizes=_sizes(batch_sizes),
                rates=request_rate,
                seed=seed,
                repeat=repeat,
                json_path=json_file,
                elsewhere=foreign,
            )
            if code:
                raise typer.Exit(code)
            return
        if request_rate is not None:
            raise UserError(f"--request-rate {request_rate} is for a running server: add --url URL, or leave it out")
        if model is None:
            raise UserError("MODEL is missing: give the folder or hub id of a model, or --url of a running server")
        columns = _columns(algorithms, algorithm, given)
        sizes = _sizes(batch_sizes)
        if bool(prompts) == bool(random_input):
            raise UserError("give either --prompts FILE or --random-input LEN")
        sources: list[Source] = []
        count = limit or RANDOM_BATCHES * max(sizes)
        sampling: dict[str, Any] = {"temperature": temperature}
        if prompts:
            if output_len is not None:
                raise UserError(f"--output-len {output_len} is for --random-input: write --max-tokens {output_len}")
            sources = from_conversations(read_prompts(prompts), limit, per_category)
            sampling |= {"max_tokens": MAX_TOKENS if max_tokens is None else max_tokens, "ignore_eos": ignore_eos}
        else:
            if max_tokens is not None:
                raise UserError(f"--max-tokens {max_tokens} is for --prompts: write --output-len {max_tokens}")
            if per_category is not None:
                raise UserError(f"--per-category {per_category} is for --prompts: leave it out with --random-input")
            sampling |= {"max_tokens": output_len or MAX_TOKENS, "ignore_eos": True}

        from specplug.bench.session import Job, run
        from specplug.sampling import SamplingParams

        params = validated(SamplingParams, sampling, option_of)
        sampling = {name: getattr(params, name) for name in sampling}
        if params.max_tokens is not None and params.max_tokens < 2:
            raise UserError("--max-tokens 1: the first token needs no drafts, so nothing is compared: give at least 2")
        if transformers and not params.greedy:
            raise UserError(
                f"--transformers with --temperature {temperature}: its samples are others, so only greedy answers "
                "are compared: leave one of them out"
            )
        if gate is not None:
            _check_gateable(gate, options, transformers, params.greedy)
        job = Job(
            model=model,
            columns=columns,
            options=options,
            sources=sources,
            random_input=random_input,
            count=count,
            sizes=sizes,
            sampling=sampling,
            seed=seed,
            repeat=repeat,
            transformers=transformers,
            json_path=json_file,
            plot_path=plot,
            about={"file": prompts, "random_input": random_input},
            gate=None if gate is None else open_gate(gate, gate_slack, gate_floor, json_file),
        )
        code = run(job, registry)
        if code:
            raise typer.Exit(code)


def _columns(text: str | None, algorithm: str, given: dict[str, object]) -> list[ColumnSpec]:
    """Return the columns of ``--algorithms``; without it, plain decoding against the algorithm named."""
    if text is None:
        if fold(algorithm) == NONE:
            raise UserError(f"--algorithms is missing: name the columns, such as --algorithms {NONE},NAME")
        return [ColumnSpec(NONE, NONE), ColumnSpec(algorithm, algorithm, given)]
    if fold(algorithm) != NONE:
        raise UserError(f"{flag('algorithm')} {algorithm} and --algorithms {text}: give one of them")
    if given:
        option = flag(next(iter(given)))
        raise UserError(f"{option} does not say for which column of --algorithms: write it into NAME@FILE.json")
    return parse_columns(text)


def _check_gateable(gate: str, options: EngineOptions, transformers: bool, greedy: bool) -> None:
    """Raise UserError for options under which a gate would judge nothing, or not what it promises."""
    rule = f"--gate {gate} with --speculative-acceptance {options.speculative_acceptance}"
    if options.lossy:
        raise UserError(f"{rule}: under synthetic acceptance the text means nothing: leave one of them out")
    if options.acceptance == "rejection" and not greedy:
        raise UserError(
            f"{rule}: sampled text then depends on the drafts, so a change proves nothing: "
            "take coupled, or --temperature 0"
        )
    if transformers:
        raise UserError(f"--gate {gate} with --transformers: its columns are not gated: leave one of them out")


def _sizes(text: str) -> list[int]:
    how = "give whole numbers from 1 to 4096, commas between, each once"
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--batch-sizes {text}: {how}") from None
    if len(set(sizes)) < len(sizes) or not all(1 <= size <= 4096 for size in sizes):
        raise UserError(f"--batch-sizes {text}: {how}")
    return sizes
