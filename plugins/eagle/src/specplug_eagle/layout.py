"""Everything about one head that its ``config.json`` and the headers of its tensors say. Torch-free.

H is the head's hidden size, Ht the target's, V the target's vocabulary, k the states of the target that are joined.
Shapes decide where they are known; under load format ``dummy`` the config and the word typed do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specplug import DecoderConfig, Facts, Refusal, TapRequest, UserError
from specplug_eagle import formats
from specplug_eagle.config import EagleConfig
from specplug_eagle.formats import HEAD, OPTION, QUERY, Shapes
from specplug_eagle.reader import NoHead, Reader, Version, number, text_config

WORDS: Mapping[Version, str] = {1: "eagle", 3: "eagle3"}
_NAMES: Mapping[Version, str] = {1: "an EAGLE-1/2 head", 3: "an EAGLE-3 head"}
_OF_3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3Eagle3Model", "Eagle3Speculator", "Eagle3DraftModel")


@dataclass(frozen=True, slots=True)
class Layout:
    """A head that can be run for this target. Made by `read`."""

    version: Version
    """1: EAGLE-1 and 2, which share weights; 3: EAGLE-3 and 3.1."""
    sizes: DecoderConfig
    """Of its layers; `vocab_size` is that of its embeddings."""
    layers: int
    target_hidden: int
    vocab: int
    """V, rows of the target's output head."""
    rows: int
    """Rows of the head's own logits."""
    taps: tuple[TapRequest, ...]
    """What it reads of the target, in the order of `fc`'s columns."""
    taps_because: str
    taps_guessed: bool
    fc_bias: bool
    use_aux: bool
    """Whether `fc` joins several states; otherwise the final state is taken as it is."""
    norm_output: bool
    norm_before_residual: bool
    fc_norm: bool
    norm_before_fc: bool
    embed_rows: int
    """Rows of its own embeddings, 0: the target's are borrowed."""
    ships_head: bool
    tied: bool
    """The output head is the head's own embedding table."""
    d2t: bool
    t2d: int
    """Entries of t2d, 0: none is stored."""
    logit_scale: float
    token_map: str | None
    """File of the target ids that may be drafted."""
    names: Mapping[str, str] | None
    """Stored name -> canonical name; None where nothing is stored."""

    @property
    def hidden(self) -> int:
        """H."""
        return self.sizes.hidden_size

    @property
    def max_position(self) -> int:
        """Positions the head was made for."""
        return self.sizes.max_position

    @property
    def reduced(self) -> bool:
        """Whether the head has a vocabulary of its own."""
        return self.d2t or self.t2d > 0

    @property
    def mapped(self) -> bool:
        """Whether draft ids are not simply the target's."""
        return self.reduced or self.token_map is not None or self.rows != self.vocab

    def borrows(self, facts: Facts) -> frozenset[Literal["embed_tokens", "lm_head"]]:
        """Return what is borrowed of the target: what the file lacks, and what it may hold a copy of.

        Embeddings and output heads are often stored beside the head unchanged; such a copy is not kept in memory.
        """
        found: set[Literal["embed_tokens", "lm_head"]] = set()
        alike = self.names is not None and self.hidden == self.target_hidden
        if self.embed_rows == 0 or (
            alike and self.embed_rows == self.vocab and "borrow:embed_tokens" in facts.features
        ):
            found.add("embed_tokens")
        if not (self.ships_head or self.tied) or (
            alike and not self.reduced and self.rows == self.vocab and "borrow:lm_head" in facts.features
        ):
            found.add("lm_head")
        return frozenset(found)


def read(facts: Facts, config: EagleConfig) -> Layout | Refusal:
    """Return the layout of the draft in `facts`, or why it is no head for this target; never raises."""
    try:
        return _read(facts, config)
    except NoHead as no:
        return no.refusal
    except (UserError, ValueError) as error:
        return Refusal(reason=str(error))
    except (
        AttributeError,
        ArithmeticError,
        LookupError,
        TypeError,
    ) as error:  # a config of other types than it should be
        return Refusal(reason=f"{HEAD} cannot be understood by its config.json: {type(error).__name__}: {error}")


def _read(facts: Facts, config: EagleConfig) -> Layout:
    draft = facts.draft
    if draft is None:
        raise NoHead(f"{config.algorithm} drafts with a head made for the target, and none is given", f"{OPTION} HEAD")
    flat = formats.flattened(draft.config)
    _stop(formats.foreign_config(flat))
    names = None if draft.tensors is None else formats.canonical(draft.tensors)
    shapes: Shapes | None = None
    if names is not None and draft.tensors is not None:
        shapes = {names[stored]: tuple(info.shape) for stored, info in draft.tensors.items()}
    if draft.path and draft.path == facts.target.path:
        raise NoHead("the draft is the target itself, not a head", f"{OPTION} with a head made for this target")
    hidden = number(flat, "hidden_size")
    if shapes is not None:
        _stop(formats.foreign_tensors(shapes, hidden))
    version = _version(flat, shapes, hidden, config.algorithm)
    _same_word(version, config.algorithm, shapes is not None)
    _same_tokens(facts)
    return _assembled(Reader(facts, config, flat, names, shapes, version))


def _stop(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise NoHead(refusal.reason, refusal.try_instead)


def _version(flat: Mapping[str, Any], shapes: Shapes | None, hidden: int, word: str) -> Version:
    """Say which head this is: by the width of its first layer, or where that is not known by the config."""
    if shapes is not None:
        return 3 if shapes[QUERY][1] == 2 * hidden else 1
    nested = flat.get("eagle_config")
    signs = (
        flat.get("speculators_model_type") == "eagle3",
        bool(set(flat.get("architectures") or ()) & set(_OF_3)),
        flat.get("draft_vocab_size") is not None,
        isinstance(nested, Mapping),
    )
    return 3 if any(signs) or word == WORDS[3] else 1


def _same_word(version: Version, word: str, by_tensors: bool) -> None:
    if WORDS[version] != word:
        sign = "its tensors" if by_tensors else "its config.json"
        raise NoHead(
            f"the draft is {_NAMES[version]} by {sign}, and {word} runs {_NAMES[1 if version == 3 else 3]}",
            f"--speculative-algorithm {WORDS[version]}",
        )


def _same_tokens(facts: Facts) -> None:
    difference = facts.first_vocab_difference
    if difference is not None and all(difference[1:]):
        at, ours, theirs = difference
        raise NoHead(
            f"{HEAD} was made for another tokenizer: id {at} is {ours!r} in the target's and {theirs!r} in the draft's",
            f"{OPTION} with a head made for this target",
        )


def _assembled(reader: Reader) -> Layout:
    target = text_config(reader.facts.target.config)
    width, vocab = (number(target, key, "the target") for key in ("hidden_size", "vocab_size"))
    layers = reader.layer_count()
    sizes = reader.layer_sizes(layers, vocab)
    third = reader.version == 3
    use_aux = third and reader.joins()
    fc_norm, norm_before_fc = (third and reader.input_norm(key) for key in ("fc_norm", "norm_before_fc"))
    if fc_norm and norm_before_fc:
        raise NoHead(f"{HEAD} norms each state (fc_norm) and all of them together (norm_before_fc): only one can be")
    if (fc_norm or norm_before_fc) and not use_aux:
        raise NoHead(f"{HEAD} norms the inputs of an fc that it does not have")
    taps, because, guessed = reader.taps(target, width, sizes.hidden_size, use_aux)
    embed_rows, ships_head, tied, rows = reader.ends(sizes, width, vocab)
    return Layout(
        version=reader.version,
        sizes=sizes,
        layers=layers,
        target_hidden=width,
        vocab=vocab,
        rows=rows,
        taps=taps,
        taps_because=because,
        taps_guessed=guessed,
        fc_bias=reader.fc_bias() if use_aux or not third else False,
        use_aux=use_aux,
        norm_output=third and reader.recycles_normed(),
        norm_before_residual=third and reader.normed_residual(),
        fc_norm=fc_norm,
        norm_before_fc=norm_before_fc,
        embed_rows=embed_rows,
        ships_head=ships_head,
        tied=tied,
        d2t=reader.has("d2t") if reader.shapes is not None else third and rows < vocab,
        t2d=0 if reader.shapes is None or "t2d" not in reader.shapes else reader.shapes["t2d"][0],
        logit_scale=float(reader.flat.get("logit_scale") or 1.0),
        token_map=reader.config.eagle_token_map,
        names=reader.names,
    )
