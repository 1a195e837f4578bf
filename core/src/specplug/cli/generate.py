"""``specplug generate``: answer prompts on the terminal or as JSON lines."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specplug.cli.flags import speculative_command
from specplug.cli.prompts import Conversation, read_prompts
from specplug.errors import UserError
from specplug.options import EngineOptions
from specplug.settings import option_of, validated

if TYPE_CHECKING:
    from specplug.registry import Registry
    from specplug.runtime.engine import Engine
    from specplug.runtime.logprobs import TokenLogprob

SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "top_logprobs"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Fields of `SamplingParams` with a flag of one value."""


def register(app: typer.Typer, registry: "Registry") -> None:
    """Add the command to `app`."""

    @speculative_command(app, registry, "generate")
    def generate(
        model: str,
        options: EngineOptions,
        algorithm: str,
        given: dict[str, object],
        prompt: Annotated[list[str] | None, typer.Option("--prompt", help="text to go on from; repeatable")] = None,
        prompts: Annotated[
            str | None, typer.Option("--prompts", metavar="FILE", help="JSONL with prompt, messages or turns")
        ] = None,
        chat: Annotated[bool, typer.Option("--chat", help="take each --prompt as a user's chat message")] = False,
        limit: Annotated[int | None, typer.Option(min=1, help="read only the first prompts of --prompts")] = None,
        max_tokens: Annotated[str | None, typer.Option(help="most tokens to generate [at least 1]")] = None,
        min_tokens: Annotated[str | None, typer.Option(help="fewest tokens; no end of text before")] = None,
        temperature: Annotated[str, typer.Option(help="0 is greedy [at least 0]")] = "0",
        top_k: Annotated[str | None, typer.Option(help="keep the k likeliest tokens; 0 keeps all")] = None,
        top_p: Annotated[str | None, typer.Option(help="keep the smallest set with this probability")] = None,
        min_p: Annotated[str | None, typer.Option(help="drop tokens below this share of the likeliest one")] = None,
        frequency_penalty: Annotated[
            str | None, typer.Option(help="lowers a token's logit for each time it was said [-2 to 2]")
        ] = None,
        presence_penalty: Annotated[
            str | None, typer.Option(help="lowers a token's logit once it was said [-2 to 2]")
        ] = None,
        repetition_penalty: Annotated[
            str | None, typer.Option(help="divides logits of tokens in prompt or answer [above 0; 1 is off]")
        ] = None,
        logit_bias: Annotated[
            str | None, typer.Option(metavar="JSON", help='added to logits by token id, such as {"42": -100}')
        ] = None,
        seed: Annotated[str | None, typer.Option(help="of sampled text; unset: drawn, and reported")] = None,
        n: Annotated[str | None, typer.Option("--n", help="answers per prompt [1 to 128]")] = None,
        stop: Annotated[list[str] | None, typer.Option(help="string that ends an answer; repeatable")] = None,
        stop_token_ids: Annotated[str | None, typer.Option(help="token ids that end an answer, with commas")] = None,
        ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after the model's end of text")] = False,
        logprobs: Annotated[
            bool, typer.Option("--logprobs", help="with --json: each token's log-probability, no option applied")
        ] = False,
        top_logprobs: Annotated[
            str | None, typer.Option(help="with --logprobs: that many of the likeliest tokens too [0 to 20]")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="one JSON object per answer: ids, text, ledger")] = False,
    ) -> None:
        """Answer prompts with MODEL: a folder, a .gguf file, a hub id, or 'demo'.

        One prompt is streamed; several are answered together and printed in order.
        """
        if bool(prompt) == bool(prompts):
            raise UserError("give either --prompt TEXT or --prompts FILE")
        if limit is not None and not prompts:
            raise UserError(f"--limit {limit} counts lines of --prompts: leave it out with --prompt")
        if logprobs and not as_json:
            raise UserError("--logprobs is shown in JSON only: add --json, or leave it out")
        values = (max_tokens, min_tokens, temperature, top_k, top_p, min_p, seed, n, top_logprobs)
        penalties = (frequency_penalty, presence_penalty, repetition_penalty)
        typed = dict(zip(SAMPLING, values + penalties, strict=True))
        sampling: dict[str, Any] = {name: value for name, value in typed.items() if value is not None}
        sampling |= {"stop": tuple(stop or ()), "ignore_eos": ignore_eos, "logprobs": logprobs}
        if logit_bias is not None:
            sampling["logit_bias"] = _bias(logit_bias)
        if stop_token_ids is not None:
            sampling["stop_token_ids"] = stop_token_ids.split(",")
        conversations = read_prompts(prompts, limit) if prompts else [_typed(text, chat) for text in prompt or ()]

        from specplug.runtime.engine import Engine
        from specplug.sampling import SamplingParams

        params = validated(SamplingParams, sampling, option_of)
        if params.n > 1 and any(conversation.rounds > 1 for conversation in conversations):
            raise UserError(f"--n {params.n} answers a single turn, and a prompt here has several: leave it out")
        chosen = {name: getattr(options, name) for name in options.model_fields_set}
        with Engine(model, algorithm=algorithm, config=given, registry=registry, **chosen) as engine:
            for warning in engine.run.warnings:
                print(f"warning: {warning.message}", file=sys.stderr)
            if len(conversations) == 1 and conversations[0].rounds == 1 and params.n == 1 and not as_json:
                _stream(engine, conversations[0], params)
            else:
                _answer_all(engine, conversations, params, as_json)


def _typed(text: str, chat: bool) -> Conversation:
    if not text:
        raise UserError("--prompt '' is empty: give at least one character")
    return Conversation(turns=(text,)) if chat else Conversation(text=text)


def _bias(text: str) -> object:
    """Read the value of ``--logit-bias``; what it may hold is `SamplingParams`' business."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise UserError(f"--logit-bias {text}: a token id stands there twice: give one bias for it")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(
            f"--logit-bias {text}: not valid JSON ({error.msg}): "
            """write an object of token ids and numbers, like '{"42": -100}'"""
        ) from None


def _stream(engine: "Engine", conversation: Conversation, params: Any) -> None:
    for delta in engine.stream([conversation.prompt([])], params):
        print(delta.text, end="", flush=True)
    print()


def _answer_all(engine: "Engine", conversations: list[Conversation], params: Any, as_json: bool) -> None:
    """Answer turn by turn, all conversations that still have one together; several choices only in a single turn."""
    answers: list[list[str]] = [[] for _ in conversations]
    for turn in range(max(conversation.rounds for conversation in conversations)):
        at = [number for number, conversation in enumerate(conversations) if turn < conversation.rounds]
        results = engine.generate([conversations[number].prompt(answers[number]) for number in at], params)
        for number, result in zip([number for number in at for _ in range(params.n)], results, strict=True):
            answers[number].append(result.text)
            if as_json:
                line = {
                    "prompt": number,
                    "turn": turn,
                    "choice": result.choice,
                    "text": result.text,
                    "ids": result.ids,
                    "finish_reason": result.finish_reason,
                    "seed": result.seed,
                    "ledger": result.ledger,
                }
                if engine.options.lossy:
                    line["lossy"] = True
                if result.logprobs is not None:
                    line["logprobs"] = [_entry(entry) for entry in result.logprobs]
                print(json.dumps(line), flush=True)
            else:
                which = f", choice {result.choice + 1}" if params.n > 1 else ""
                head = f"--- prompt {number + 1}, turn {turn + 1}{which} ({result.finish_reason})"
                print(f"{head}\n{result.text}", flush=True)


def _entry(entry: "TokenLogprob") -> dict[str, Any]:
    """Return a token's log-probability as JSON holds it: minus infinity, which it cannot, is -9999 as in OpenAI's."""
    top = [{"token": token, "logprob": max(value, -9999.0)} for token, value in entry.top]
    return {"token": entry.token, "logprob": max(entry.logprob, -9999.0), "top": top}
