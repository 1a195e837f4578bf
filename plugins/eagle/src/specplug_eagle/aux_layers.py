"""Which hidden states of the target an EAGLE-3 head reads. Torch-free.

One number means two things in published files: *boundary* k, the residual stream that enters layer k, written
``B_k`` (0 the embeddings, n the last layer's output before the final norm), or the *output* of layer k, which
is ``B_(k+1)``. A wrong reading costs acceptance and raises no error, so the choice is made here, in one place,
and its reason is kept for the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Semantics = Literal["boundary", "output"]

_KEY = "eagle_aux_hidden_state_layer_ids"
_OWN_WORDS: Mapping[str, Semantics] = {
    "vllm": "boundary",
    "sglang": "output",
    "boundary": "boundary",
    "output": "output",
}
OPTION = "--speculative-eagle-aux-layers"


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Resolved boundaries, in the order in which the head concatenates them, and why these."""

    at: tuple[int, ...]
    because: str
    guessed: bool = False
    """Whether only the place of the ids speaks for this reading."""


@dataclass(frozen=True, slots=True)
class Stated:
    """Layer ids as the checkpoint has them."""

    ids: tuple[int, ...]
    key: str
    semantics: Semantics
    """What the place where they stand says of their meaning."""
    certain: bool = False
    """Whether it always means that; else the ids themselves may say otherwise."""


def stated(config: Mapping[str, Any]) -> Stated | None:
    """Return the layer ids in a head's ``config.json``, or None; raises ValueError for what are none."""
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    enveloped = "speculators_model_type" in config
    places: tuple[tuple[Any, str, Semantics, bool], ...] = (
        (config.get(_KEY), _KEY, "boundary", enveloped),
        (config.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids", "boundary", enveloped),
        (nested.get(_KEY), f"eagle_config.{_KEY}", "output", False),
        (config.get("target_layer_ids"), "target_layer_ids", "output", True),
    )
    for ids, key, semantics, certain in places:
        if ids is None:
            continue
        if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids or not all(type(i) is int for i in ids):
            raise ValueError(f"config.json has {key} = {ids!r}, a list of layer numbers is needed")
        return Stated(tuple(ids), key, semantics, certain)
    return None


def own_semantics(config: Mapping[str, Any]) -> Semantics | None:
    """Return what the checkpoint itself says its ids mean (``eagle_aux_layer_semantics``), or None."""
    word = config.get("eagle_aux_layer_semantics")
    if word is None:
        return None
    if word not in _OWN_WORDS:
        raise ValueError(f"config.json has eagle_aux_layer_semantics = {word!r}, known are vllm and sglang")
    return _OWN_WORDS[word]


def resolve(
    config: Mapping[str, Any],
    layers: int,
    count: int,
    given: Sequence[int] | None = None,
    semantics: Semantics | None = None,
) -> Boundaries:
    """Return the `count` boundaries of a target of `layers` layers that the head in `config` reads.

    `given` and `semantics` are the user's. Raises ValueError, one line, where they cannot be known or do not exist.
    """
    found = _resolve(config, layers, count, given, semantics)
    outside = [at for at in found.at if not 0 <= at <= layers]
    if outside:
        raise ValueError(
            f"{found.because}: that is boundary {outside[0]}, and the target of {layers} layers has 0 to {layers}; "
            f"give {OPTION}"
        )
    if len(found.at) != count:
        raise ValueError(
            f"{found.because}: these are {len(found.at)} states, and the head's fc joins {count}; give {count} in "
            f"{OPTION}"
        )
    return found


def _resolve(
    config: Mapping[str, Any], layers: int, count: int, given: Sequence[int] | None, semantics: Semantics | None
) -> Boundaries:
    if given is not None:
        return Boundaries(tuple(given), f"{OPTION} {','.join(map(str, given))}")
    named = stated(config)
    if named is None:
        if count != 3:
            raise ValueError(
                f"the head joins {count} states and its config.json names no layers; give {count} in {OPTION}"
            )
        return Boundaries((2, layers // 2, layers - 3), "the usual layers 2, n/2 and n-3")
    meaning, because = _meaning(named, layers, semantics or own_semantics(config), semantics is not None)
    at = tuple(number + 1 for number in named.ids) if meaning == "output" else named.ids
    return Boundaries(at, f"{named.key} {list(named.ids)}, taken as {_SAID[meaning]} ({because})", because == _PLACE)


_PLACE = "by the place where they stand"
_SAID: Mapping[Semantics, str] = {"boundary": "inputs of these layers", "output": "outputs of these layers"}


def _meaning(named: Stated, layers: int, said: Semantics | None, by_user: bool) -> tuple[Semantics, str]:
    """Return what the ids mean, and why; most certain signs first."""
    if said is not None:
        return said, "--speculative-eagle-aux-semantics" if by_user else "eagle_aux_layer_semantics"
    if named.certain:
        return named.semantics, "as this key always means"
    if named.ids == (1, layers // 2 - 1, layers - 4):
        return "output", "the usual layers 1, n/2-1 and n-4"
    if named.ids == (2, layers // 2, layers - 3):
        return "boundary", "the usual layers 2, n/2 and n-3"
    if layers in named.ids:
        return "boundary", f"{layers} is no layer's number"
    if named.ids[0] == 1:
        return "output", "the first is 1"
    return named.semantics, _PLACE
