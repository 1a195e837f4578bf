"""The `response_format` of a request: what may be written there, and the JSON schema that it means. Torch-free."""

import json
from collections.abc import Mapping
from typing import Any

LARGEST = 1 << 18
"""Bytes of a schema at most."""

_TYPES = "text, json_object, or json_schema with a schema"
_FIELDS = frozenset({"name", "description", "schema", "strict"})


def checked(given: object) -> dict[str, Any] | None:
    """Return a `response_format` that is well formed, None where it asks for nothing; raises ValueError, one line.

    `strict` may be given and changes nothing: a schema is always kept to.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f'must be an object such as {{"type": "json_object"}}, not {type(given).__name__}')
    kind = given.get("type")
    _no_more(given, {"type", "json_schema"} if kind == "json_schema" else {"type"}, "")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise ValueError(f"type {kind!r} is not known here: write {_TYPES}")
    inner = given.get("json_schema")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping | bool):
        raise ValueError('type json_schema needs {"json_schema": {"name": ..., "schema": {...}}}')
    _no_more(inner, _FIELDS, "json_schema.")
    if not isinstance(inner.get("strict", False), bool | None):
        raise ValueError(f"json_schema.strict must be true, false or null, not {inner['strict']!r}")
    for field in ("name", "description"):
        if not isinstance(inner.get(field, ""), str | None):
            raise ValueError(f"json_schema.{field} must be text, not {inner[field]!r}")
    try:
        size = len(json.dumps(inner["schema"]).encode())
    except (TypeError, ValueError, RecursionError) as cause:
        raise ValueError(f"json_schema.schema is no JSON: {cause}") from None
    if size > LARGEST:
        raise ValueError(f"json_schema.schema has {size} bytes and may have {LARGEST}: make it smaller")
    return {"type": kind, "json_schema": dict(inner)}


def schema_text(response_format: Mapping[str, Any]) -> str:
    """Return the JSON schema, as text, that a checked `response_format` asks answers to keep to."""
    if response_format["type"] == "json_object":
        return '{"type":"object"}'
    # Order matters: properties are generated in the order in which they are written.
    return json.dumps(response_format["json_schema"]["schema"], separators=(",", ":"))


def _no_more(given: Mapping[Any, Any], known: set[str] | frozenset[str], where: str) -> None:
    more = [str(key) for key in given if key not in known]
    if more:
        raise ValueError(f"{where}{more[0]} is not known here: leave it out (known: {', '.join(sorted(known))})")
