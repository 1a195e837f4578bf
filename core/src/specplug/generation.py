"""What a checkpoint's ``generation_config.json`` asks for, and what becomes of each of its fields. Torch-free.

- ``eos_token_id``: ends answers (`specplug.models.target.eos_ids`).
- ``suppress_tokens``, ``begin_suppress_tokens``: ids that no answer holds, or begins with (`Suppressed`).
- ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``: what ``specplug serve`` puts where a request
  leaves them out (`sampling_defaults`). In Python nothing stands in for what was not given.
- What changes no token, or only asks how a computation is to be done, is passed over.
- Everything else is named in one warning at start (`objection`), with its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from specplug.sampling import SamplingParams
from specplug.spec import Problem

FILE = "generation_config.json"

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields that stand in for what a request of the server leaves out, as in vLLM and SGLang."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (True,),  # requests say so by their temperature
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_length": (20,),  # transformers' own default, which older files spell out
    "guidance_scale": (1.0,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "forced_decoder_ids": ([],),
    "bad_words_ids": ([],),
    "stop_strings": ([],),
}
"""Fields that change nothing at these values; null, and an empty list, never do."""

_NO_EFFECT = frozenset(
    {
        *("_from_model_config", "transformers_version", "generation_kwargs", "trust_remote_code"),
        *("bos_token_id", "pad_token_id", "decoder_start_token_id"),  # a prompt's own first token is the tokenizer's
        *("use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "prefill_chunk_size"),
        *("max_cache_len", "continuous_batching_config", "compile_config", "disable_compile", "low_memory"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp", "is_assistant"),
    }
)
"""Fields that change no token: how to compute, what to return, and how transformers would draft."""


class Suppressed(NamedTuple):
    """Token ids that a model must not say."""

    always: tuple[int, ...] = ()
    """At no position."""
    first: tuple[int, ...] = ()
    """Not as the first token of an answer."""


def suppressed(generation: Mapping[str, Any], vocab: int) -> Suppressed:
    """Return the ids that are suppressed, ascending; what is no id of this vocabulary cannot be said anyhow."""

    def ids(field: str) -> tuple[int, ...]:
        return tuple(sorted({token for token in _ids(generation.get(field)) or () if 0 <= token < vocab}))

    return Suppressed(ids("suppress_tokens"), ids("begin_suppress_tokens"))


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return field of `SamplingParams` -> value, of those that the file names and that differ from its default."""
    found = {}
    for field in SAMPLING:
        value = generation.get(field)
        if value is not None and _allowed(field, value) and value != SamplingParams.model_fields[field].default:
            found[field] = value
    return found


def spelt(values: Mapping[str, Any]) -> str:
    """Return values as they are said in one line: ``temperature 0.7, top_p 0.9``."""
    return ", ".join(f"{field} {_short(value)}" for field, value in values.items())


def objection(generation: Mapping[str, Any]) -> Problem | None:
    """Return the warning that names every field which is not carried out; None where there is none."""
    found = {field: value for field, value in generation.items() if not _carried_out(field, value)}
    if not found:
        return None
    return Problem(
        severity="warning",
        field="",
        message=f"{FILE} of MODEL asks for what is not carried out: {spelt(found)}; where a request can ask for it "
        "(max_tokens, min_tokens, stop, logit_bias), let it do so",
    )


def _carried_out(field: str, value: Any) -> bool:
    """Whether a field is, or asks for nothing."""
    if value is None or field in _NO_EFFECT or field == "eos_token_id":
        return True
    if field in ("suppress_tokens", "begin_suppress_tokens"):
        return _ids(value) is not None
    if field in SAMPLING:
        return _allowed(field, value)
    return any(value == neutral for neutral in _NEUTRAL.get(field, ()))


def _ids(value: Any) -> list[int] | None:
    """Return a list of token ids as it is, None for what is none."""
    if isinstance(value, list | tuple) and all(type(token) is int for token in value):
        return list(value)
    return None


def _allowed(field: str, value: Any) -> bool:
    try:
        SamplingParams.model_validate({field: value}, strict=True)
    except ValidationError:
        return False
    return True


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
