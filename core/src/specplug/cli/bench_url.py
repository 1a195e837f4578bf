"""``specplug bench --url``: from what was typed to a load on a running server. Torch-free."""

import os
from collections.abc import Mapping
from typing import Any

from specplug.bench.load import endpoint
from specplug.bench.url import UrlJob, run
from specplug.bench.workload import from_conversations
from specplug.cli.prompts import read_prompts
from specplug.errors import UserError
from specplug.sampling import SamplingParams
from specplug.serve.options import API_KEY_VARIABLE
from specplug.settings import option_of, validated


def run_url(
    url: str,
    *,
    model: str | None,
    prompts: str | None,
    limit: int | None,
    per_category: int | None,
    sampling: Mapping[str, Any],
    sizes: list[int],
    rates: str | None,
    seed: int,
    repeat: int,
    json_path: str | None,
    elsewhere: Mapping[str, object],
) -> int:
    """Check what was typed and run it. `elsewhere`: option -> value of those that a server decides itself."""
    for option, value in elsewhere.items():
        if value:
            raise UserError(f"{option} with --url {url}: the server was started with its own; leave it out")
    if prompts is None:
        raise UserError(f"--prompts is missing: give --url {url} a JSONL file of prompts")
    params = validated(SamplingParams, sampling, option_of)
    job = UrlJob(
        target=endpoint(url, os.environ.get(API_KEY_VARIABLE)),
        model=model,
        conversations=[
            source.conversation
            for source in from_conversations(read_prompts(prompts), limit, per_category)
            if source.conversation is not None
        ],
        # What is at its default is not sent, so that other servers, which lack ignore_eos, understand it.
        sampling={name: getattr(params, name) for name, value in sampling.items() if value is not False},
        clients=sizes,
        rates=[] if rates is None else _rates(rates),
        seed=seed,
        repeat=repeat,
        json_path=json_path,
    )
    return run(job)


def _rates(text: str) -> list[float]:
    how = "give numbers above 0, commas between"
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--request-rate {text}: {how}") from None
    if not all(0 < rate <= 1e6 for rate in rates):
        raise UserError(f"--request-rate {text}: {how}")
    return rates
