"""Which checkpoints the built-in decoder runs, read from `config.json` alone. Torch-free.

Parsing refuses what the decoder would compute differently from the model's authors, so that a wrong
answer cannot come from a config key nobody looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specplug.errors import UserError


class NotCoveredError(UserError):
    """The built-in decoder computes something else; transformers may run the model."""


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, whatever its config says."""

    qkv_bias: bool | None = None
    """None: the config's `attention_bias` decides, for the output projection too."""
    qk_norm: bool = False
    window: Literal["never", "always", "flag"] = "never"
    """When `sliding_window` applies: never, always, or ``flag``: only with `use_sliding_window`."""
    head_dim: int | None = None
    """Used when the config names none; None: hidden size / heads."""


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, window="always"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="flag"),
    "Qwen3ForCausalLM": Family(qk_norm=True, window="flag", head_dim=128),
    "MiMoForCausalLM": Family(qkv_bias=True, window="flag"),
}
"""Architecture, as `config.json` names it -> family. SmolLM and SmolLM2 are Llama."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base and scaling. `kind` is ``default``, ``linear`` or ``llama3``."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything the decoder is built from. Sizes in elements, positions and windows in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    windows: tuple[int | None, ...]
    """One per layer: how many tokens it sees, itself included; None: all."""


def architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that `config` names, or a `NotCoveredError` listing the supported ones."""
    named = config.get("architectures") or ["none named"]
    if named[0] not in FAMILIES:
        raise NotCoveredError(
            f"MODEL has architecture {named[0]}, which this version does not run; supported: {', '.join(FAMILIES)}"
        )
    return str(named[0])


def decoder_sizes(config: Mapping[str, Any], like: str | None = None, name: str = "MODEL") -> DecoderConfig:
    """Parse the ``config.json`` of Llama-family layers, such as a draft head's.

    `like`: the architecture (a key of `FAMILIES`) whose rules apply, whatever `config` names; None: its own. A
    `UserError` that calls the model by `name` says what is missing, or what layers of this family would not compute.
    """
    try:
        return decoder_config(config if like is None else {**config, "architectures": [like]})
    except UserError as error:
        raise type(error)(str(error).replace("MODEL", name)) from error


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Parse a Llama-family `config`.

    A key missing is a `UserError` that names it, one beyond the decoder a `NotCoveredError`.
    """
    refuse_quantized(config)
    family = FAMILIES[architecture(config)]
    _refuse_activation(config)
    heads, layers = _size(config, "num_attention_heads"), _size(config, "num_hidden_layers")
    hidden = _size(config, "hidden_size")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(f"MODEL: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", family.head_dim or hidden // heads),
        max_position=_size(config, "max_position_embeddings"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        rope=_rope(config),
        windows=_windows(config, family, layers),
    )


def is_covered(config: Mapping[str, Any]) -> bool:
    """Whether the built-in decoder runs this `config`; one that is unusable for any model is a `UserError`."""
    try:
        decoder_config(config)
    except NotCoveredError:
        return False
    return True


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise UserError(f"MODEL: config.json has {key} = {value!r}, a whole number of at least 1 is needed")
    return value


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Raise a `UserError` for weights that have to be unpacked, on whichever path they would run."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UserError(
            f"MODEL holds weights quantized with {method!r}, which this version does not run; "
            "give an unquantized checkpoint or a .gguf file"
        )


def _refuse_activation(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise NotCoveredError(f"MODEL: config.json has hidden_act {activation!r}; supported: silu")


def _rope(config: Mapping[str, Any]) -> Rope:
    """Read either spelling: `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotCoveredError(
            f"MODEL: config.json has rotary scaling {dict(given)!r}; supported rope_type: default, linear, llama3"
        )
    if kind == "default":
        return Rope(theta)
    try:
        if kind == "linear":
            return Rope(theta, kind, float(given["factor"]))
        return Rope(
            theta,
            kind,
            float(given["factor"]),
            float(given["low_freq_factor"]),
            float(given["high_freq_factor"]),
            int(given.get("original_max_position_embeddings") or config["max_position_embeddings"]),
        )
    except KeyError as lacking:
        raise UserError(f"MODEL: config.json has rope_type {kind!r} without {lacking.args[0]!r}") from None


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    # Both families' own default, for a config.json that leaves the key out.
    window = config.get("sliding_window", 4096)
    uses = family.window == "always" or (family.window == "flag" and config.get("use_sliding_window", False))
    if not uses or window is None:
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        # With a flag, the first `max_window_layers` see everything.
        full = config.get("max_window_layers", 28) if family.window == "flag" else 0
        return tuple(None if layer < full else window for layer in range(layers))
    known = {"never": {"full_attention"}, "always": {"sliding_attention"}}
    unknown = sorted(set(kinds) - known.get(family.window, {"full_attention", "sliding_attention"}))
    if unknown or len(kinds) != layers:
        raise NotCoveredError(
            f"MODEL: config.json has {len(kinds)} layer_types {unknown or ''} for {layers} layers of "
            f"{architecture(config)}, which this version does not run; supported architectures: {', '.join(FAMILIES)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
