"""Which fields a request body may have, and what becomes of each: one table, which OpenAPI is made from too.

Fields of the OpenAI API that this server does not carry out are accepted where they are null or have the value that
changes nothing, and refused by name otherwise. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from specplug.sampling import SamplingParams

Kind = Literal["chat", "completion"]


class Fixed(NamedTuple):
    """A field that is accepted at some values only."""

    allowed: tuple[Any, ...]
    """Besides null."""
    why: str
    """What it would ask for, as the refusal says it."""


_TOOLS = "this server does not call tools"
_REASONING = "this server does not parse reasoning"
_TEXT = "this server reads and writes text only"

FIXED: Mapping[Kind, Mapping[str, Fixed]] = {
    "chat": {
        "tools": Fixed(([],), _TOOLS),
        "tool_choice": Fixed(("none", "auto"), _TOOLS),
        "parallel_tool_calls": Fixed((True, False), _TOOLS),
        "functions": Fixed(([],), _TOOLS),
        "function_call": Fixed(("none", "auto"), _TOOLS),
        "reasoning_effort": Fixed(("none", "medium"), _REASONING),
        "reasoning": Fixed((), _REASONING),
        "separate_reasoning": Fixed((False,), _REASONING),
        "stream_reasoning": Fixed((False,), _REASONING),
        "include_reasoning": Fixed((False,), _REASONING),
        "verbosity": Fixed(("medium",), "the model's verbosity cannot be set"),
        "modalities": Fixed((["text"],), _TEXT),
        "audio": Fixed((), _TEXT),
        "prediction": Fixed((), "predicted outputs are not used; drafts come from the server's own algorithm"),
        "web_search_options": Fixed((), "this server does not search"),
        "moderation": Fixed((), "this server does not moderate"),
    },
    "completion": {
        "best_of": Fixed((1,), "ask for n answers and choose among them yourself"),
        "echo": Fixed((False,), "the prompt is not repeated in the answer"),
        "suffix": Fixed(("",), "text is not inserted before a suffix"),
    },
}
"""Accepted at these values, at which nothing changes; refused by name at all others."""

_STORED = {
    "store": Fixed((False,), "answers are not stored"),
    "service_tier": Fixed(("auto", "default"), "there is one tier"),
    "prompt_cache_retention": Fixed(("in_memory", "in-memory", "24h"), "nothing is kept between requests"),
}

IGNORED: Mapping[str, Mapping[str, Any]] = {
    "user": {"type": "string"},
    "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
    "safety_identifier": {"type": "string"},
    "prompt_cache_key": {"type": "string"},
}
"""Accepted, and without effect: who asks changes nothing here. Their JSON types are checked."""

STREAM_OPTIONS = ("include_usage", "include_obfuscation")
SPECULATIVE: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "enabled": ({"type": "boolean"}, "false: no drafts for this request"),
    "max_drafted": ({"type": "integer", "minimum": 0}, "most drafts per step; 0 is off"),
    "tokens": ({"type": "boolean"}, "report each token's id, bytes and depth in its draft (0: the model's own)"),
}

_INTERNAL = {"detokenize"}
"""Fields of `SamplingParams` that are the server's own business."""
_OTHERWISE = {"logprobs", "top_logprobs", "response_format", "max_tokens", "n", "stop"}
"""Fields of `SamplingParams` whose form differs in a body."""


def fixed(kind: Kind) -> Mapping[str, Fixed]:
    """Return the fields of this endpoint that are accepted at some values only."""
    return {**FIXED[kind], **_STORED}


def engine_fields(kind: Kind) -> tuple[str, ...]:
    """Return the fields that are `SamplingParams`' own, under the same name."""
    left_out = _INTERNAL | (set() if kind == "chat" else {"top_logprobs"})
    return tuple(name for name in SamplingParams.model_fields if name not in left_out)


def body_schema(kind: Kind) -> dict[str, Any]:
    """Return the JSON schema of a request body, for OpenAPI."""
    found: dict[str, Any] = {"model": _or_null({"type": "string"}, "the served model's name; null: the one there is")}
    engine = SamplingParams.model_json_schema()["properties"]
    for name in engine_fields(kind):
        if name not in _OTHERWISE:
            about = engine[name].pop("description", "")
            found[name] = _or_null(
                {key: engine[name][key] for key in engine[name].keys() - {"title", "default"}}, about
            )
    count = {"type": "integer", "minimum": 1}
    found |= {
        "n": _or_null(count | {"maximum": 128}, "answers per prompt"),
        "max_tokens": _or_null(count, "most tokens of an answer; null: what the context leaves"),
        "stop": _or_null({"type": ["string", "array"], "items": {"type": "string"}}, "strings that end the answer"),
        "stream": _or_null({"type": "boolean"}, "send the answer as server-sent events"),
        "stream_options": _object({name: {"type": "boolean"} for name in STREAM_OPTIONS}, "with stream only"),
        "speculative": _object({name: schema for name, (schema, _) in SPECULATIVE.items()}, "drafts of this request"),
    }
    if "response_format" in SamplingParams.model_fields:
        types = {"type": "string", "enum": ["text", "json_object", "json_schema"]}
        form = {
            "type": "object",
            "properties": {"type": types, "json_schema": {"type": "object"}},
            "required": ["type"],
        }
        found["response_format"] = _or_null(form, "what the answer must be")
    if kind == "chat":
        found |= {
            "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
            "max_completion_tokens": _or_null(count, "the same as max_tokens"),
            "logprobs": _or_null({"type": "boolean"}, "report log-probabilities"),
            "top_logprobs": _or_null({"type": "integer", "minimum": 0, "maximum": 20}, "with logprobs"),
        }
    else:
        ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
        texts = {"type": "array", "minItems": 1, "items": {"type": "string"}}
        found |= {
            "prompt": {"anyOf": [{"type": "string"}, texts, ids, {"type": "array", "minItems": 1, "items": ids}]},
            "logprobs": _or_null({"type": "integer", "minimum": 0, "maximum": 20}, "likeliest tokens to report"),
        }
    for name, one in fixed(kind).items():
        found[name] = {"enum": [None, *one.allowed], "description": "accepted at these values, without effect"}
    for name, schema in IGNORED.items():
        found[name] = _or_null(schema, "accepted, without effect")
    required = ["messages" if kind == "chat" else "prompt"]
    return {"type": "object", "properties": found, "required": required, "additionalProperties": False}


_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        },
        "name": {"type": ["string", "null"]},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}


def _or_null(schema: Mapping[str, Any], about: str) -> dict[str, Any]:
    return {"anyOf": [dict(schema), {"type": "null"}], "description": about}


def _object(properties: Mapping[str, Any], about: str) -> dict[str, Any]:
    nullable = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in properties.items()}
    return _or_null({"type": "object", "properties": nullable, "additionalProperties": False}, about)
