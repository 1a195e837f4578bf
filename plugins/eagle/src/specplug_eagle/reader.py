"""Reads one head piece by piece: layers, inputs, flags, embeddings and output head. Torch-free.

Shapes decide where they are known; under load format ``dummy`` the config does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specplug import DecoderConfig, Facts, Refusal, TapRequest, decoder_sizes
from specplug_eagle import aux_layers
from specplug_eagle.config import Eagle3Config, EagleConfig
from specplug_eagle.formats import HEAD, OPTION, Shapes

Version = Literal[1, 3]
_OUTPUT = "layers.0.self_attn.o_proj.weight"
_MOST_DUMMY_LAYERS = 8
"""Above, `num_hidden_layers` is a left-over of the target's config (EAGLE3-Vicuna1.3-13B says 40 and holds 1)."""


class NoHead(Exception):
    """Carries a `Refusal`."""

    def __init__(self, reason: str, try_instead: str = "") -> None:
        super().__init__(reason)
        self.refusal = Refusal(reason=reason, try_instead=try_instead)


def number(config: Mapping[str, Any], key: str, whose: str = HEAD) -> int:
    """Return a size of a config; one that is missing or none raises `NoHead`."""
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise NoHead(f"{whose}: config.json has {key} = {value!r}, a whole number of at least 1 is needed")
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a target's config that describes its language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and "hidden_size" not in config else config


@dataclass(slots=True)
class Reader:
    """Reads one head whose version is known."""

    facts: Facts
    config: EagleConfig
    flat: Mapping[str, Any]
    names: Mapping[str, str] | None
    shapes: Shapes | None
    version: Version

    def has(self, name: str) -> bool:
        return self.shapes is not None and name in self.shapes

    def shape(self, name: str, dims: int = 2) -> tuple[int, ...] | None:
        found = None if self.shapes is None else self.shapes.get(name)
        if found is not None and len(found) != dims:
            raise NoHead(f"{HEAD}: tensor {name} has {len(found)} dimensions, {dims} are needed")
        return found

    # --- layers -------------------------------------------------------------------------------------------------

    def layer_count(self) -> int:
        if self.shapes is not None:
            return 1 + max(int(name.split(".")[1]) for name in self.shapes if name.startswith("layers."))
        said = self.flat.get("num_hidden_layers")
        return said if type(said) is int and 1 <= said <= _MOST_DUMMY_LAYERS else 1

    def layer_sizes(self, layers: int, vocab: int) -> DecoderConfig:
        """Parse the layers' config, corrected by the tensors: configs are copied from targets and seldom cleaned."""
        flat = dict(self.flat)
        flat["num_hidden_layers"] = layers
        flat["max_position_embeddings"] = flat.get("max_position_embeddings") or flat.get("max_sequence_length")
        flat["vocab_size"] = flat.get("vocab_size") or vocab
        kinds = flat.get("layer_types")
        if kinds is not None and (len(kinds) != layers or set(kinds) == {"full_attention"}):
            del flat["layer_types"]
        for key in ("rope_scaling", "rope_parameters"):
            scaling = flat.get(key)
            # Of a text all three positions of a multimodal embedding are one: it is the plain one.
            if isinstance(scaling, Mapping) and "mrope" in (scaling.get("rope_type"), scaling.get("type")):
                flat[key] = {k: v for k, v in scaling.items() if k != "type"} | {"rope_type": "default"}
        heads = number(flat, "num_attention_heads")
        inputs, norm = self.shape(_OUTPUT), self.shape("layers.0.self_attn.q_norm.weight", 1)
        if norm is not None:
            flat["head_dim"] = norm[0]
        elif inputs is not None:
            flat["head_dim"] = inputs[1] // heads
        keys, up = self.shape("layers.0.self_attn.k_proj.weight"), self.shape("layers.0.mlp.up_proj.weight")
        if keys is not None and flat.get("head_dim"):
            flat["num_key_value_heads"] = keys[0] // flat["head_dim"]
        if up is not None:
            flat["intermediate_size"] = up[0]
        sizes = decoder_sizes(flat, like="LlamaForCausalLM", name=HEAD)
        if inputs is not None and inputs[0] != sizes.hidden_size:
            raise NoHead(f"{HEAD}: config.json has hidden_size {sizes.hidden_size}, its tensors have {inputs[0]}")
        if self.shapes is None:
            is_qwen3 = flat.get("model_type") == "qwen3" or "Qwen3Eagle3Model" in (flat.get("architectures") or ())
            bias = sizes.qkv_bias or bool(flat.get("qkv_bias"))
            return dataclasses.replace(sizes, qk_norm=is_qwen3, qkv_bias=bias)
        return dataclasses.replace(
            sizes,
            qk_norm=norm is not None,
            qkv_bias=self.has("layers.0.self_attn.q_proj.bias"),
            o_bias=self.has("layers.0.self_attn.o_proj.bias"),
            mlp_bias=self.has("layers.0.mlp.up_proj.bias"),
        )

    # --- what comes in ------------------------------------------------------------------------------------------

    def joins(self) -> bool:
        if self.shapes is not None:
            return self.has("fc.weight")
        nested = self.flat.get("eagle_config")
        return not (isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False)

    def input_norm(self, flag: str) -> bool:
        """Whether a norm stands before `fc`: by its tensors, and a flag without them is a fault."""
        said = bool(self.flat.get(flag))
        if self.shapes is None:
            return said
        stored = any(
            name.startswith({"fc_norm": "fc_norm.", "norm_before_fc": "input_norm."}[flag]) for name in self.shapes
        )
        if said and not stored:
            raise NoHead(f"{HEAD}: config.json has {flag} on, and the file holds no tensor of that norm")
        return stored

    def fc_bias(self) -> bool:
        """The authors' classes give `fc` of EAGLE-1 a bias unless the config says otherwise, of EAGLE-3 never."""
        key = "fusion_bias" if "fusion_bias" in self.flat else "bias"
        said = self.flat.get(key)
        wanted = self.version == 1 if said is None else bool(said)
        if self.shapes is not None and self.has("fc.bias") != wanted:
            stated = f"config.json has {key} = {said!r}" if said is not None else f"config.json has no {key!r}"
            meant = "a bias" if wanted else "no bias"
            stored = "no fc.bias" if wanted else "fc.bias"
            raise NoHead(f"{HEAD}: {stated}, which means {meant} of fc, and the file holds {stored}")
        return wanted

    def taps(
        self, target: Mapping[str, Any], width: int, hidden: int, use_aux: bool
    ) -> tuple[tuple[TapRequest, ...], str, bool]:
        """Return what is read of the target, why these layers, and whether that is a guess."""
        fc = self.shape("fc.weight")
        own = self.config if isinstance(self.config, Eagle3Config) else Eagle3Config()
        if not use_aux:
            if hidden != width:
                raise NoHead(
                    f"{HEAD} was made for states of size {hidden}, the target's have {width}",
                    f"{OPTION} with a head made for this target",
                )
            if own.eagle_aux_layers is not None:
                raise NoHead(f"{aux_layers.OPTION} has no effect: the head reads the target's final state alone")
            if self.version == 1 and fc is not None and fc[1] != 2 * hidden:
                raise NoHead(f"{HEAD}: fc.weight reads {fc[1]} columns, an EAGLE-1/2 head's reads {2 * hidden}")
            return (TapRequest(at="final_norm"),), "the final state", False
        if fc is not None and fc[1] % width:
            raise NoHead(
                f"{HEAD}: fc.weight reads {fc[1]} columns, no multiple of the target's hidden size {width}",
                f"{OPTION} with a head made for this target",
            )
        count = fc[1] // width if fc is not None else self.count(own)
        layers = number(target, "num_hidden_layers", "the target")
        found = aux_layers.resolve(self.flat, layers, count, own.eagle_aux_layers, own.eagle_aux_semantics)
        return tuple(TapRequest(at=at) for at in found.at), found.because, found.guessed

    def count(self, own: Eagle3Config) -> int:
        """Number of states joined, where no tensor says it."""
        named = aux_layers.stated(self.flat)
        said = self.flat.get("num_aux_hidden_states")
        if own.eagle_aux_layers is not None:
            return len(own.eagle_aux_layers)
        return said if type(said) is int and said > 0 else 3 if named is None else len(named.ids)

    # --- flags --------------------------------------------------------------------------------------------------

    def recycles_normed(self) -> bool:
        own = self.config.eagle_norm_output if isinstance(self.config, Eagle3Config) else None
        return bool(self.flat.get("norm_output")) if own is None else own

    def normed_residual(self) -> bool:
        own = self.config.eagle_norm_before_residual if isinstance(self.config, Eagle3Config) else None
        if own is not None:
            return own
        said = self.flat.get("norm_before_residual")
        if said is None and "speculators_model_type" in self.flat:
            # Its trainer and its servers give a missing key opposite meanings.
            raise NoHead(
                f"{HEAD}: config.json has no norm_before_residual, and programs differ on what that means",
                "--speculative-eagle-norm-before-residual or --no-speculative-eagle-norm-before-residual",
            )
        return bool(said)

    # --- embeddings and output head -----------------------------------------------------------------------------

    def ends(self, sizes: DecoderConfig, width: int, vocab: int) -> tuple[int, bool, bool, int]:
        """Return (rows of its own embeddings, ships an output head, tied, rows of the logits)."""
        hidden = sizes.hidden_size
        embed, head = self.shape("embed_tokens.weight"), self.shape("lm_head.weight")
        said = self.flat.get("draft_vocab_size")
        if self.shapes is None:
            rows = said if self.version == 3 and type(said) is int else vocab
            return vocab if hidden != width else 0, rows < vocab or hidden != width, False, rows
        if self.version == 1:
            # What an EAGLE-1 file has of embeddings is the target's, and its authors never read it.
            embed = None
        if embed is None and hidden != width:
            raise NoHead(
                f"{HEAD} of hidden size {hidden} cannot share the target's embeddings of {width}, and ships none"
            )
        if embed is not None and embed[0] < vocab:
            raise NoHead(
                f"{HEAD} has embeddings of {embed[0]} tokens, the target has {vocab}",
                f"{OPTION} with a head made for this target",
            )
        if head is not None:
            rows = head[0]
        elif self.has("d2t") or self.has("t2d") or (type(said) is int and said != vocab):
            raise NoHead(f"{HEAD} has a vocabulary of its own and the file holds no lm_head.weight")
        elif sizes.tied and embed is not None:
            return embed[0], False, True, embed[0]
        elif hidden != width:
            raise NoHead(
                f"{HEAD} of hidden size {hidden} cannot share the target's output head of {width}, and ships none"
            )
        else:
            self.untied(sizes)
            rows = vocab
        self.same_vocabulary(rows, vocab)
        return 0 if embed is None else embed[0], head is not None, False, rows

    def untied(self, sizes: DecoderConfig) -> None:
        target = self.facts.target.config
        if sizes.tied and self.version == 3 and not text_config(target).get("tie_word_embeddings"):
            raise NoHead(f"{HEAD}: config.json ties lm_head to the embeddings, and the file holds neither")

    def same_vocabulary(self, rows: int, vocab: int) -> None:
        """Refuse a head without maps whose rows are not the target's, padding aside."""
        for name in ("d2t", "t2d"):
            length = self.shape(name, 1)
            if length is not None and name == "d2t" and length[0] != rows:
                raise NoHead(f"{HEAD}: d2t has {length[0]} entries for {rows} rows of lm_head.weight")
            if length is not None:
                return
        tokens = self.facts.target.tokenizer_size
        if rows != vocab and (tokens is None or min(rows, vocab) < tokens):
            raise NoHead(
                f"{HEAD} has {rows} rows for a target of {vocab}, and neither d2t nor t2d says which tokens they are",
                f"{OPTION} with a head made for this target",
            )
