"""From what a caller asks to requests: every fault of theirs is found here, before anything is queued."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from specplug.errors import UserError
from specplug.grammar.compile import compiler_for
from specplug.models.target import Target
from specplug.runtime.processors import LogitsProcessor, processors_for
from specplug.runtime.prompts import Prompt
from specplug.runtime.request import Request, answer_ends, check_sampling
from specplug.runtime.stop import Output
from specplug.sampling import SamplingParams
from specplug.settings import validated


def as_params(sampling: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Return validated options; a bad one is a UserError that names it."""
    return sampling if isinstance(sampling, SamplingParams) else validated(SamplingParams, sampling or {})


def paired(prompts: Sequence[Prompt], sampling: Any) -> list[tuple[Prompt, SamplingParams]]:
    """Give each prompt its options: one set for all, or a sequence with one each."""
    if isinstance(prompts, str) or not prompts:
        raise UserError(f"prompts must be a non-empty list of prompts, got {prompts!r}")
    one = not sampling or isinstance(sampling, SamplingParams | Mapping)
    each = [sampling or None] * len(prompts) if one else list(sampling)
    if len(each) != len(prompts):
        raise UserError(f"{len(prompts)} prompts but {len(each)} sets of sampling options: give one, or one each")
    return [(prompt, as_params(options)) for prompt, options in zip(prompts, each, strict=True)]


def make_requests(
    request_id: str,
    tokens: Sequence[int],
    params: SamplingParams,
    target: Target,
    max_tokens: int,
    *,
    max_drafted: int | None = None,
    logits_processor: LogitsProcessor | None = None,
) -> list[Request]:
    """Return one request per choice of a prompt. `max_tokens`: most tokens of prompt and output together."""
    vocab = target.model.vocab_size
    _check_prompt(tokens, vocab, max_tokens)
    if max_drafted is not None and max_drafted < 0:
        raise UserError(f"max_drafted {max_drafted} is below 0; use 0 to switch speculation off")
    if logits_processor is not None and not callable(logits_processor):
        raise UserError(f"logits_processor {logits_processor!r}: must be a function of (tokens, logits)")
    room, ends = max_tokens - len(tokens), answer_ends(params, target.eos_ids)
    check_sampling(params, vocab=vocab, ends=ends, room=room, has_tokenizer=target.tokenizer is not None)
    compiler = None
    if params.response_format is not None:
        compiler = compiler_for(target.tokenizer, vocab, target.eos_ids)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    most = min(params.max_tokens or room, room)
    tokenizer = target.tokenizer if params.detokenize or params.stop else None
    return [
        Request(
            id=request_id,
            tokens=list(tokens),
            prompt_len=len(tokens),
            sampling=params,
            seed=seed,
            max_drafted=max_drafted,
            output=Output(tokenizer, ends, params.stop, most, params.min_tokens),
            processors=processors_for(
                params, tokens, ends=ends, vocab=vocab, custom=logits_processor, never=target.never
            ),
            grammar=compiler.grammar(params.response_format) if compiler and params.response_format else None,
            choice=choice,
        )
        for choice in range(params.n)
    ]


def _check_prompt(tokens: Sequence[int], vocab: int, max_tokens: int) -> None:
    if not tokens:
        raise UserError("the prompt is empty: give at least one token of text")
    if not all(0 <= token < vocab for token in tokens):
        raise UserError(f"the prompt holds a token id outside 0..{vocab - 1}")
    if len(tokens) >= max_tokens:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, the context holds {max_tokens} with the answer: "
            "shorten it, or raise --context-length as far as the model and --max-total-tokens allow"
        )
