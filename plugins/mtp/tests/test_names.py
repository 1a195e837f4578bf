"""What the words mean, for every word, target, draft and set of installed packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specplug import Checkpoint, Facts, RefusedError
from specplug.testing.setup import Registry, resolve
from specplug.testing.stubs import Stub, on_path
from specplug_mtp.names import resolve as answer

LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2}
MIMO = {**LLAMA, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
ONE: Any = ("float32", (1,))

TARGETS = {
    "plain": Checkpoint(path="target", config=LLAMA, tensors={"model.norm.weight": ONE}),
    "with heads": Checkpoint(path="target", config=MIMO, tensors={"model.mtp_layers.0.input_proj.weight": ONE}),
    "heads dropped": Checkpoint(path="target", config=MIMO, tensors={"model.norm.weight": ONE}),
    "not read": Checkpoint(path="target", config=MIMO, tensors=None),
}
DRAFTS = {
    "none": None,
    "own": "own",
    "eagle": Checkpoint(path="draft", config=LLAMA, tensors={"fc.weight": ONE}),
    "mtp": Checkpoint(
        path="draft", config={"speculators_model_type": "mtp"}, tensors={"mtp_layers.0.input_proj.weight": ONE}
    ),
    "export": Checkpoint(
        path="draft", config={**LLAMA, "num_hidden_layers": 1}, tensors={"model.layers.0.eh_proj.weight": ONE}
    ),
    "assistant": Checkpoint(path="draft", config={"architectures": ["Gemma4AssistantForCausalLM"]}, tensors={}),
    "unified": Checkpoint(path="draft", config={"architectures": ["Gemma4UnifiedAssistantForCausalLM"]}, tensors={}),
}
B, E, F = "builtin-mtp", "eagle", "frozen-kv-mtp"
#           none own eagle mtp export assistant unified
MEANT = {
    "plain": (E, E, E, B, B, F, F),
    "with heads": (B, B, E, B, B, F, F),
    "heads dropped": (E, E, E, B, B, F, F),
    "not read": (B, B, E, B, B, F, F),
}
"""What NEXTN and EAGLE mean, by target and draft."""
INSTALLED = {"both": ("mtp", "eagle"), "no eagle": ("mtp",), "no mtp": ("eagle",)}
CASES = list(product(MEANT, DRAFTS))


def facts_of(target: str, draft: str) -> Facts:
    found = DRAFTS[draft]
    return Facts(target=TARGETS[target], draft=TARGETS[target] if found == "own" else found)


@contextmanager
def registry(site: Path, installed: str) -> Iterator[Registry]:
    """The package itself and a stand-in for specplug-eagle, as far as they are `installed`."""
    site.mkdir()
    if "mtp" in INSTALLED[installed]:
        info = site / "specplug_mtp-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specplug-mtp\nVersion: 0.1.0\n", encoding="utf-8")
        points = "".join(f"{name} = specplug_mtp.plugin\n" for name in (B, F))
        (info / "entry_points.txt").write_text(f"[specplug.algorithms]\n{points}", encoding="utf-8")
    if "eagle" in INSTALLED[installed]:
        Stub(
            "specplug-eagle", algorithms=["eagle", "eagle3"], aliases={"eagle3": ["eagle-3"]}, package="stub_eagle"
        ).write(site)
    with on_path(site):
        yield Registry.discover(path=[str(site)], environ={})


@pytest.fixture(scope="module", params=INSTALLED)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Registry]]:
    with registry(tmp_path_factory.mktemp("names") / "site", request.param) as made:
        yield request.param, made


@pytest.mark.parametrize(("target", "draft"), CASES)
@pytest.mark.parametrize("word", ["NEXTN", "EAGLE"])
def test_nextn_and_eagle(found: tuple[str, Registry], word: str, target: str, draft: str) -> None:
    installed, known = found
    meant = MEANT[target][list(DRAFTS).index(draft)]
    facts = facts_of(target, draft)
    if installed == "no mtp":
        if word == "EAGLE":  # nobody says otherwise
            assert resolve(known, word, facts).algorithm == E
            return
        with pytest.raises(RefusedError, match="'NEXTN' is not installed: pip install specplug-mtp"):
            resolve(known, word, facts)
    elif installed == "no eagle" and meant == E:
        with pytest.raises(RefusedError, match="pip install specplug-eagle") as told:
            resolve(known, word, facts)
        assert "\n" not in str(told.value)
    else:
        resolution = resolve(known, word, facts)
        assert resolution.algorithm == meant
        hop = word.lower() != meant
        assert any("specplug-mtp 0.1.0 says" in line for line in resolution.trace) == hop, resolution.trace


@pytest.mark.parametrize(("target", "draft"), CASES)
@pytest.mark.parametrize("word", ["EAGLE3", "eagle-3"])
def test_eagle3_is_no_assistant(found: tuple[str, Registry], word: str, target: str, draft: str) -> None:
    installed, known = found
    facts = facts_of(target, draft)
    if installed != "no mtp" and draft in ("assistant", "unified"):
        with pytest.raises(RefusedError, match=r"is a Gemma 4 assistant.*frozen-kv-mtp"):
            resolve(known, word, facts)
    elif installed == "no eagle":
        with pytest.raises(RefusedError, match="pip install specplug-eagle"):
            resolve(known, word, facts)
    else:
        assert resolve(known, word, facts).algorithm == "eagle3"


@pytest.mark.parametrize(("target", "draft"), CASES)
def test_exact_names_and_mtp(found: tuple[str, Registry], target: str, draft: str) -> None:
    """An exact name means itself whatever the models are; MTP is no value, and says what to write."""
    installed, known = found
    facts = facts_of(target, draft)
    for word in ("builtin-mtp", "FROZEN_KV_MTP"):
        if installed == "no mtp":
            with pytest.raises(RefusedError, match="pip install specplug-mtp"):
                resolve(known, word, facts)
        else:
            assert resolve(known, word, facts).algorithm == word.lower().replace("_", "-")
    with pytest.raises(RefusedError, match="'MTP' is no value: write nextn"):
        resolve(known, "MTP", facts)


def test_without_a_model_only_the_declaration_counts() -> None:
    """Nothing may be said of another package's words on no facts; NEXTN is then what the manifest declares."""
    for word in ("nextn", "eagle", "eagle3", "eagle-3", "ngram", "none"):
        assert answer(word, Facts.empty()) is None


def test_other_words_are_left_alone() -> None:
    for target, draft in CASES:
        for word in ("ngram", "standalone", "builtin-mtp", "frozen-kv-mtp", "dflash"):
            assert answer(word, facts_of(target, draft)) is None
