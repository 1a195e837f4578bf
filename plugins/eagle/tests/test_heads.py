"""Loaded heads: every spelling gives the same tensors, and the forward is the published equations."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import Head, eagle1, eagle3, modelopt, official, prefixed, speculators
from torch import Tensor
from torch.nn import functional as F

from specplug import SamplingParams, UserError

ROWS = 7


@pytest.fixture(scope="module")
def target(models: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((models.target / "config.json").read_text(encoding="utf-8"))
    return found


def with_llama3_rope(head: Head) -> Head:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return head.but({"rope_theta": 500.0, "rope_scaling": {**scaling, "original_max_position_embeddings": 16}})


HEADS: dict[str, tuple[str, Any]] = {
    "eagle3": ("eagle3", lambda t: eagle3(t, 1)),
    "query and key norm": ("eagle3", lambda t: eagle3(t, 2, qk_norm=True)),
    "own head_dim": ("eagle3", lambda t: eagle3(t, 3, head_dim=16)),
    "attention bias": ("eagle3", lambda t: eagle3(t, 4, attention_bias=True)),
    "fc_norm": ("eagle3", lambda t: eagle3(t, 5, fc_norm=True)),
    "norm_before_fc": ("eagle3", lambda t: eagle3(t, 6, norm_before_fc=True)),
    "norm_output": ("eagle3", lambda t: eagle3(t, 7, norm_output=True)),
    "norm_before_residual": ("eagle3", lambda t: eagle3(t, 8, norm_before_residual=True)),
    "two layers": ("eagle3", lambda t: eagle3(t, 9, layers=2, qk_norm=True)),
    "five states in another order": ("eagle3", lambda t: eagle3(t, 10, boundaries=(2, 0, 1, 1, 0))),
    "final state alone": ("eagle3", lambda t: eagle3(t, 11, use_aux=False)),
    "own hidden size": ("eagle3", lambda t: eagle3(t, 12, hidden=48)),
    "fc bias": ("eagle3", lambda t: eagle3(t, 13, fc_bias=True)),
    "full vocabulary": ("eagle3", lambda t: eagle3(t, 14, rows=64, ships_embed=True)),
    "borrowed head": ("eagle3", lambda t: eagle3(t, 15, rows=64, ships_head=False)),
    "scaled logits": ("eagle3", lambda t: eagle3(t, 16).but({"logit_scale": 0.25})),
    "scaled rope": ("eagle3", lambda t: with_llama3_rope(eagle3(t, 17))),
    "linear rope": ("eagle3", lambda t: eagle3(t, 18).but({"rope_scaling": {"type": "linear", "factor": 2.0}})),
    "tied": ("eagle3", lambda t: eagle3(t, 19, rows=64, ships_head=False, ships_embed=True).but(TIED)),
    "eagle": ("eagle", lambda t: eagle1(t, 20)),
    "eagle, fc bias": ("eagle", lambda t: eagle1(t, 21, fc_bias=True)),
    "eagle, query bias": ("eagle", lambda t: eagle1(t, 22, qkv_bias=True)),
    "eagle, two layers": ("eagle", lambda t: eagle1(t, 23, layers=2)),
}
TIED = {"tie_word_embeddings": True}


class Dense:
    """Causal attention of one sequence; what it is asked is what a `KVStep` is asked."""

    def __init__(self, kv_heads: int) -> None:
        self._kv_heads = kv_heads

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        k, v = (part.repeat_interleave(q.shape[1] // self._kv_heads, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Equations:
    """checkpoints.md 1 and 2.3 written down in plain torch, from the tensors in the plain spelling."""

    def __init__(self, head: Head, target: Any) -> None:
        self.w, self.c = head.tensors, head.config
        self.third = "layers.0.hidden_norm.weight" in self.w
        model = target.model
        own = self.third and "embed_tokens.weight" in self.w
        self.embed = self.w["embed_tokens.weight"] if own else model.embed_tokens.weight
        self.lm_head = self.w.get(
            "lm_head.weight", self.embed if self.c.get("tie_word_embeddings") else model.lm_head.weight
        )

    def project(self, taps: list[Tensor]) -> Tensor:
        if not self.third or "fc.weight" not in self.w:
            return taps[0]
        if "fc_norm.0.weight" in self.w:
            taps = [self.norm(tap, f"fc_norm.{i}.weight") for i, tap in enumerate(taps)]
        g = torch.cat(taps, 1)
        if "input_norm.weight" in self.w:
            g = self.norm(g, "input_norm.weight")
        return F.linear(g, self.w["fc.weight"], self.w.get("fc.bias"))

    def forward(self, tokens: Tensor, g: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        e = self.embed[tokens]
        if self.third:
            normed = self.norm(g, "layers.0.hidden_norm.weight")
            x = torch.cat((self.norm(e, "layers.0.input_layernorm.weight"), normed), 1)
            h = self.block(0, x, normed if self.c.get("norm_before_residual") else g, positions)
        else:
            x = F.linear(torch.cat((e, g), 1), self.w["fc.weight"], self.w.get("fc.bias"))
            h = self.block(0, x, x, positions)
        if "layers.1.mlp.up_proj.weight" in self.w:
            h = self.block(1, self.norm(h, "layers.1.input_layernorm.weight"), h, positions)
        if not self.third:
            return h, h
        final = self.norm(h, "norm.weight")
        return final, final if self.c.get("norm_output") else h

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(state, self.lm_head) * self.c.get("logit_scale", 1.0)

    def block(self, layer: int, x: Tensor, residual: Tensor, positions: Tensor) -> Tensor:
        at = f"layers.{layer}."
        q, k, v = (self.linear(x, f"{at}self_attn.{part}_proj") for part in "qkv")
        heads, kv_heads = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        q, k, v = q.view(len(x), heads, -1), k.view(len(x), kv_heads, -1), v.view(len(x), kv_heads, -1)
        if f"{at}self_attn.q_norm.weight" in self.w:
            q = self.norm(q, f"{at}self_attn.q_norm.weight")
            k = self.norm(k, f"{at}self_attn.k_norm.weight")
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        attended = Dense(kv_heads).attend(layer, q, k, v).flatten(1)
        a = residual + self.linear(attended, f"{at}self_attn.o_proj")
        m = self.norm(a, f"{at}post_attention_layernorm.weight")
        gated = F.silu(self.linear(m, f"{at}mlp.gate_proj")) * self.linear(m, f"{at}mlp.up_proj")
        return a + self.linear(gated, f"{at}mlp.down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * self.w[name]

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turn = self.c.get("rope_theta", 10000.0) ** (-torch.arange(half) / half)
        scaling = self.c.get("rope_scaling") or {}
        if scaling.get("type") == "linear":
            turn = turn / scaling["factor"]
        elif scaling:  # llama3
            original, low, high = scaling["original_max_position_embeddings"], 1.0, 4.0
            length = 2 * torch.pi / turn
            smooth = ((original / length - low) / (high - low)).clamp(0, 1)
            turn = (1 - smooth) * turn / scaling["factor"] + smooth * turn
        angle = positions[:, None, None] * turn
        real, imaginary = x[..., :half], x[..., half:]
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), -1)


def seen(head: Head, target: Mapping[str, Any], seed: int = 0) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Return tokens, taps and positions of a few rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = head.config.get("eagle_aux_hidden_state_layer_ids") or [None]
    third = "layers.0.hidden_norm.weight" in head.tensors
    taps = tuple(torch.randn(ROWS, target["hidden_size"], generator=generator) for _ in (ids if third else [None]))
    tokens = torch.randint(target["vocab_size"], (ROWS,), generator=generator)
    return tokens, taps, torch.arange(3, 3 + ROWS)


@pytest.mark.parametrize("name", HEADS)
def test_the_forward_is_the_equations(models: Any, target: dict[str, Any], loads: Any, name: str) -> None:
    """Both the state that makes logits and the one that is recycled, over two steps."""
    algorithm, make = HEADS[name]
    written = make(target)
    head, oracle = loads(written, algorithm), Equations(written, models.loaded)
    tokens, taps, positions = seen(written, target)
    hidden, expected = head.project(taps), oracle.project(list(taps))
    attention = Dense(written.config["num_key_value_heads"])
    for _ in range(2):
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        before = hidden.clone()
        state, recycled = head(tokens, hidden, positions, attention)
        assert torch.equal(hidden, before), "what came in was changed"
        state_, expected = oracle.forward(tokens, expected, positions)
        torch.testing.assert_close(state, state_, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(state), oracle.logits(state_), rtol=1e-4, atol=1e-3)
        hidden, tokens, positions = recycled, tokens.flip(0), positions + 1


def test_what_is_recycled_is_normed_only_when_told(target: dict[str, Any], loads: Any) -> None:
    """The norm's weight is not all ones: 10.5, recycling test."""
    written = eagle3(target, 1)
    tokens, taps, positions = seen(written, target)
    for head, normed in (
        (loads(written), False),
        (loads(written.but({"norm_output": True})), True),
        (loads(written, eagle_norm_output=True), True),
        (loads(written.but({"norm_output": True}), eagle_norm_output=False), False),
    ):
        state, recycled = head(tokens, head.project(taps), positions, Dense(2))
        assert torch.equal(state, recycled) == normed
        if not normed:
            torch.testing.assert_close(head.norm(recycled), state)


def test_the_residual_is_normed_only_when_told(target: dict[str, Any], loads: Any) -> None:
    written = eagle3(target, 1)
    tokens, taps, positions = seen(written, target)
    plain, flagged, overridden = (
        head(tokens, head.project(taps), positions, Dense(2))[0]
        for head in (
            loads(written),
            loads(written.but({"norm_before_residual": True})),
            loads(written, eagle_norm_before_residual=True),
        )
    )
    assert torch.equal(flagged, overridden)
    assert not torch.allclose(plain, flagged)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
@pytest.mark.parametrize("silent", ["token", "state"])
def test_the_embedding_comes_first(target: dict[str, Any], loads: Any, algorithm: str, silent: str) -> None:
    """10.5, concat-order test: with one half's weights zero the head does not look at that input."""
    written = eagle1(target, 1) if algorithm == "eagle" else eagle3(target, 1)
    hidden = target["hidden_size"]
    zeroed = slice(0, hidden) if silent == "token" else slice(hidden, 2 * hidden)
    names = ["fc"] if algorithm == "eagle" else [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
    changed = {}
    for name in names:
        weight = written.tensors[f"{name}.weight"].clone()
        weight[:, zeroed] = 0
        changed[f"{name}.weight"] = weight
    head = loads(Head(written.config, {**written.tensors, **changed}), algorithm)
    tokens, taps, positions = seen(written, target)
    state = head.project(taps)
    first = head(tokens, state, positions, Dense(2))[0]
    if silent == "token":
        assert torch.equal(first, head(tokens.flip(0) + 1 - 1, state, positions, Dense(2))[0])
        assert not torch.allclose(first, head(tokens, state.flip(0), positions, Dense(2))[0])
    else:
        # EAGLE-3 adds the state beside attention: the same for both.
        other = head(tokens, state if algorithm == "eagle3" else state.flip(0), positions, Dense(2))[0]
        assert torch.equal(first, other)
        assert not torch.allclose(first, head(tokens.flip(0), state, positions, Dense(2))[0])


# --- spellings -------------------------------------------------------------------------------------------------------


def tensors_of(head: Any) -> dict[str, Tensor]:
    found = dict(head.state_dict())
    found |= {f"end {i}": end.weight for i, end in enumerate(head._ends)}
    return found if head.target_ids is None else {**found, "target ids": head.target_ids}


SPELLINGS: dict[str, Any] = {
    "authors": official,
    "ModelOpt": modelopt,
    "authors, all under model.": lambda head: prefixed(official(head)),
    "ModelOpt, all under draft_model.": lambda head: prefixed(modelopt(head), "draft_model."),
    "without t2d": lambda head: head.but(t2d=None),
    "without d2t": lambda head: head.but(d2t=None),
    "inverse frequencies": lambda head: official(head).but(midlayer__self_attn__rotary_emb__inv_freq=torch.ones(4)),
}


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_load_alike(target: dict[str, Any], loads: Any, name: str, binary: bool) -> None:
    written = eagle3(target, 3, norm_before_fc=True, qk_norm=True, layers=2)
    plain, spelt = loads(written), loads(SPELLINGS[name](written), binary=binary)
    expected, found = tensors_of(plain), tensors_of(spelt)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    for flag in ("taps", "norm_before_fc", "norm_output", "norm_before_residual", "sizes", "rows"):
        assert getattr(plain.layout, flag) == getattr(spelt.layout, flag)


def test_speculators_loads_alike(target: dict[str, Any], loads: Any) -> None:
    written = eagle3(target, 3, ships_embed=True, norm_before_residual=True, fc_norm=True)
    expected, found = tensors_of(loads(written)), tensors_of(loads(speculators(written)))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    plain, spelt = loads(written).layout, loads(speculators(written)).layout
    assert dataclasses.replace(spelt, names=None, taps_because="") == dataclasses.replace(
        plain, names=None, taps_because=""
    )


def test_eagle1_spellings_load_alike(models: Any, target: dict[str, Any], loads: Any) -> None:
    written = eagle1(target, 3)
    expected = tensors_of(loads(written, "eagle"))
    nested = Head({"model_type": "eagle", "model": written.config}, dict(written.tensors)).but(
        lm_head__weight=models.loaded.model.lm_head.weight
    )
    renamed = written.but(fc__weight=None, eagle_linear__weight=written.tensors["fc.weight"])
    for spelt in (prefixed(written), nested, renamed, eagle1(target, 3, ships_embed=True)):
        found = tensors_of(loads(spelt, "eagle", binary=True))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


LAYER_NORM = "layers.1.input_layernorm.weight"


def test_further_layers_of_sglang_name_their_norm_otherwise(target: dict[str, Any], loads: Any) -> None:
    written = eagle3(target, 3, layers=2)
    renamed = {name: tensor for name, tensor in written.tensors.items() if name != LAYER_NORM}
    spelt = Head(written.config, {**renamed, "layers.1.hidden_norm.weight": written.tensors[LAYER_NORM]})
    expected, found = tensors_of(loads(written)), tensors_of(loads(spelt))
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("spelling", [official, modelopt, prefixed])
def test_missing_and_unexpected_tensors_are_fatal_with_the_list(
    target: dict[str, Any], loads: Any, spelling: Any
) -> None:
    written = eagle3(target, 3)
    lacking = spelling(written.but(norm__weight=None, layers__0__mlp__down_proj__weight=None))
    with pytest.raises(
        UserError, match=r"--speculative-draft-model-path .*2 missing: .*mlp.down_proj.weight.*norm.weight"
    ) as told:
        loads(lacking)
    assert "\n" not in str(told.value)
    for extra in ("extra.weight", "layers.0.self_attn.q_proj.extra", "layers.0.more.weight"):
        with pytest.raises(UserError, match=rf"1 unexpected: \S*{re.escape(extra.removeprefix('layers.0.'))}"):
            loads(spelling(Head(written.config, {**written.tensors, extra: torch.ones(2)})))


def test_one_tensor_in_two_spellings_is_refused(target: dict[str, Any], loads: Any) -> None:
    written = eagle3(target, 3)
    with pytest.raises(UserError, match="stored twice"):
        loads(written.but(model__norm__weight=written.tensors["norm.weight"].clone()))


def test_eagle1_needs_every_tensor(target: dict[str, Any], loads: Any) -> None:
    with pytest.raises(UserError, match=r"1 missing: layers.0.post_attention_layernorm.weight"):
        loads(eagle1(target).but(layers__0__post_attention_layernorm__weight=None), "eagle")
    with pytest.raises(UserError, match=r"1 unexpected: norm.weight"):
        loads(eagle1(target).but(norm__weight=torch.ones(32)), "eagle")


# --- vocabularies ----------------------------------------------------------------------------------------------------


def test_row_j_is_the_jth_marked_token(target: dict[str, Any], loads: Any) -> None:
    """Gaps of uneven size, the first one not at 0: offsets, ids and their order all differ."""
    written = eagle3(target, 5, rows=9)
    marked = written.tensors["t2d"].nonzero()[:, 0]
    assert len(marked.diff().unique()) > 2
    for head in (written, written.but(t2d=None), written.but(d2t=None)):
        loaded = loads(head)
        assert torch.equal(loaded.target_ids, marked)
        assert loaded.rows == 9


def test_maps_that_cannot_be_are_refused(target: dict[str, Any], loads: Any) -> None:
    written = eagle3(target, 5, rows=40)
    ids = torch.arange(40) + written.tensors["d2t"]
    with pytest.raises(UserError, match=r"d2t leads to id .*offsets"):
        loads(written.but(d2t=ids, t2d=None))
    moved = written.tensors["t2d"].roll(1)
    with pytest.raises(UserError, match="d2t and t2d differ"):
        loads(written.but(t2d=moved))
    with pytest.raises(UserError, match="t2d marks 41"):
        loads(written.but(t2d=torch.cat((torch.ones(41), torch.zeros(23))).bool()))


def test_a_full_vocabulary_needs_no_map(target: dict[str, Any], loads: Any) -> None:
    assert loads(eagle3(target, 5, rows=64)).target_ids is None
    identity = eagle3(target, 5, rows=64).but(d2t=torch.zeros(64, dtype=torch.int64))
    assert loads(identity).target_ids is None


def test_equal_ends_are_the_targets_own(models: Any, target: dict[str, Any], loads: Any) -> None:
    """Copies of the target's embeddings and output head are not kept twice; what was trained is kept."""
    model = models.loaded.model
    written = eagle3(target, 5, rows=64)
    copies = written.but(embed_tokens__weight=model.embed_tokens.weight, lm_head__weight=model.lm_head.weight)
    embed, head = loads(copies)._ends
    assert embed is model.embed_tokens
    assert head is model.lm_head
    trained = eagle3(target, 5, rows=64, ships_embed=True)
    embed, head = loads(trained)._ends
    assert torch.equal(embed.weight, trained.tensors["embed_tokens.weight"])
    assert torch.equal(head.weight, trained.tensors["lm_head.weight"])
    borrowed = loads(eagle1(target), "eagle")._ends
    assert borrowed == (model.embed_tokens, model.lm_head)


def test_nothing_is_left_uninitialised_under_dummy(models: Any, target: dict[str, Any], tmp_path: Path) -> None:
    """Load format dummy reads no file: the config alone decides, and a round runs."""
    for algorithm, written in (("eagle3", official(eagle3(target, 5))), ("eagle", eagle1(target, 5))):
        folder = tmp_path / algorithm
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(written.config), encoding="utf-8")
        with models.engine(folder, algorithm, {"eagle_topk": 2}, speculative_draft_load_format="dummy") as engine:
            (result,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=6))
            assert result.ledger["drafted"] > 0


# --- token maps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["pt", "json", "txt"])
@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_a_token_map_keeps_those_rows(
    target: dict[str, Any], loads: Any, tmp_path: Path, algorithm: str, ending: str
) -> None:
    ids = [40, 3, 17, 63]
    file = tmp_path / f"hot.{ending}"
    if ending == "pt":
        torch.save(torch.tensor(ids), file)
    else:
        file.write_text(json.dumps(ids) if ending == "json" else "\n".join(map(str, ids)), encoding="utf-8")
    written = eagle1(target, 2) if algorithm == "eagle" else eagle3(target, 2, rows=64)
    whole, part = loads(written, algorithm), loads(written, algorithm, eagle_token_map=str(file))
    assert part.target_ids.tolist() == sorted(ids)
    assert part.rows == 4
    state = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(part.logits(state), whole.logits(state)[:, sorted(ids)])
