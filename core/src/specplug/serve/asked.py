"""From a request body to what the engine is asked for; every fault is an `ApiError` with its field. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from specplug.runtime.prompts import Prompt
from specplug.sampling import SamplingParams
from specplug.serve.errors import ApiError, bad
from specplug.serve.fields import IGNORED, SPECULATIVE, STREAM_OPTIONS, Kind, body_schema, engine_fields, fixed
from specplug.serve.messages import read_messages
from specplug.settings import explain, shown

_NAMES: Mapping[Kind, frozenset[str]] = {
    kind: frozenset(body_schema(kind)["properties"]) for kind in ("chat", "completion")
}

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, read and checked as far as the engine is not needed for it."""

    kind: Kind
    prompts: Sequence[Prompt]
    """One for chat; for completions one or more. Each is answered `params.n` times."""
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    max_drafted: int | None = None
    wants_drafts: bool = False
    """``speculative.enabled`` is true: a server without drafts must refuse."""
    tokens: bool = False
    """Report each token's id, bytes and draft depth."""


def read_body(raw: bytes) -> dict[str, Any]:
    """Parse a body. NaN, lone surrogates, absurd nesting and anything but an object are refused."""
    try:
        found = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise bad(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(found, dict):
        raise bad(None, "the body must be a JSON object", "invalid_json")
    return found


def read(kind: Kind, body: Mapping[str, Any], served: str, defaults: Mapping[str, Any] = NOTHING) -> Asked:
    """Read the body of this endpoint. Null is the same as absent, for every field.

    `served`: the model's name; `defaults`: field of `SamplingParams` -> value that stands in for an absent one.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in _NAMES[kind]:
            raise _unknown(kind, name)
    _check_model(given.pop("model", served), served)
    _check_fixed(kind, given)
    source = "messages" if kind == "chat" else "prompt"
    if source not in given:
        raise bad(source, f"{source} is required", "missing_required_parameter")
    prompts = [read_messages(given.pop(source))] if kind == "chat" else _prompts(given.pop(source))
    stream = _switch("stream", given.pop("stream", False))
    include_usage = _stream_options(given.pop("stream_options", None), stream)
    max_drafted, wanted, tokens = _speculative(given.pop("speculative", None))
    return Asked(
        kind,
        prompts,
        _params(kind, {**defaults, **given}),
        stream=stream,
        include_usage=include_usage,
        max_drafted=max_drafted,
        wants_drafts=wanted,
        tokens=tokens,
    )


def _unknown(kind: Kind, name: str) -> ApiError:
    near = difflib.get_close_matches(name, sorted(_NAMES[kind]), n=1)
    hint = f"; the nearest is {near[0]}" if near else ""
    return bad(name, f"{shown(name)} is not a field of this request{hint}: leave it out", "unknown_parameter")


def _check_model(model: object, served: str) -> None:
    if model != served:
        raise ApiError(
            404 if isinstance(model, str) else 400,
            f"model {_said(model)} is not served here: it is {served}, or leave model out",
            param="model",
            code="model_not_found",
        )


def _check_fixed(kind: Kind, given: dict[str, Any]) -> None:
    """Take out of `given` what has no effect, and refuse what would have one and cannot."""
    for name, (allowed, why) in fixed(kind).items():
        if name not in given:
            continue
        value = given.pop(name)
        if name == "best_of" and type(value) is int and value == given.get("n", 1):
            continue  # all of them are returned
        if not any(type(value) is type(one) and value == one for one in allowed):
            rest = f"leave it out, or give {' or '.join(map(_said, allowed))}" if allowed else "leave it out"
            raise bad(name, f"{name} {_said(value)} is not supported: {why}; {rest}", "unsupported_parameter")
    for name, schema in IGNORED.items():
        value = given.pop(name, None)
        wanted = str if schema["type"] == "string" else dict
        if value is not None and not isinstance(value, wanted):
            raise bad(name, f"{name} {_said(value)}: must be {'text' if wanted is str else 'a JSON object'}")


def _params(kind: Kind, given: dict[str, Any]) -> SamplingParams:
    """Return the engine's options from what is left of a body."""
    spelt = {}  # field of SamplingParams -> name in the body
    if kind == "chat" and "max_completion_tokens" in given:
        limit = given.pop("max_completion_tokens")
        if given.setdefault("max_tokens", limit) != limit:
            raise bad(
                "max_completion_tokens",
                f"max_completion_tokens {_said(limit)} and max_tokens {_said(given['max_tokens'])} differ: give one",
            )
        spelt["max_tokens"] = "max_completion_tokens"
    if kind == "completion" and "logprobs" in given:  # there it is the number of likeliest tokens
        given["top_logprobs"], given["logprobs"] = given["logprobs"], True
        spelt["top_logprobs"] = "logprobs"
    elif given.get("top_logprobs") and "logprobs" not in given:
        raise bad("top_logprobs", "top_logprobs needs logprobs: add logprobs true, or leave it out")
    if given.get("response_format") == {"type": "text"}:
        del given["response_format"]
    for name in ("stop", "stop_token_ids"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    assert given.keys() <= {*engine_fields(kind), "top_logprobs"}, given.keys()
    try:
        return SamplingParams.model_validate(given, strict=True)
    except ValidationError as error:
        field = str(next((item["loc"][0] for item in error.errors() if item["loc"]), ""))
        name = spelt.get(field, field)
        line = explain(error, SamplingParams, lambda field: spelt.get(field, field))[0]
        raise bad(name or None, line, "invalid_value") from None


def _prompts(value: object) -> list[Prompt]:
    """Read the prompt of a completion: text, token ids, or a list of either."""
    wrong = bad("prompt", "prompt must be text, a list of texts, a list of token ids, or a list of such lists")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong
    if all(type(item) is int for item in value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return list(value)
    for item in value:
        if not isinstance(item, list) or not item or not all(type(token) is int for token in item):
            raise wrong
    return list(value)


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise bad(name, f"{name} {_said(value)}: must be true or false")
    return value


def _stream_options(value: object, stream: bool) -> bool:
    """Return whether usage is to be streamed."""
    if value is None:
        return False
    found = _members("stream_options", value, STREAM_OPTIONS)
    if not stream:
        raise bad("stream_options", "stream_options needs stream: add stream true, or leave it out")
    for name, one in found.items():
        _switch(f"stream_options.{name}", one)
    return bool(found.get("include_usage", False))


def _speculative(value: object) -> tuple[int | None, bool, bool]:
    """Return the most drafts per step, whether drafts were asked for, and whether tokens are to be reported."""
    if value is None:
        return None, False, False
    found = _members("speculative", value, tuple(SPECULATIVE))
    enabled = found.get("enabled")
    if enabled is not None:
        _switch("speculative.enabled", enabled)
    most = found.get("max_drafted")
    if most is not None and (type(most) is not int or not 0 <= most < 2**31):
        raise bad("speculative.max_drafted", f"speculative.max_drafted {_said(most)}: must be a whole number from 0")
    if enabled is False and most:
        raise bad(
            "speculative.max_drafted",
            f"speculative.max_drafted {most} asks for drafts and speculative.enabled false for none: give one of them",
        )
    tokens = _switch("speculative.tokens", found.get("tokens", False))
    return (0 if enabled is False else most), enabled is True and most != 0, tokens


def _members(name: str, value: object, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(name, f"{name} {_said(value)}: must be a JSON object")
    for key in value:
        if key not in known:
            raise bad(f"{name}.{key}", f"{name} has no {shown(key)}: it has {', '.join(known)}", "unknown_parameter")
    return {key: one for key, one in value.items() if one is not None}


def _said(value: object) -> str:
    """Return a value of a body as its client wrote it: JSON, a text without quotes."""
    return shown(value if isinstance(value, str) else dumps(value))
