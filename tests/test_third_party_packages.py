"""The packages of `tests/third_party`, as if installed: the kit on each, and what is special about it.

Nothing is installed: their metadata is written from their ``pyproject.toml``, and their sources are importable while
this file runs.
"""

import importlib.util
import json
import random
import re
import shutil
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from specplug import Engine, RefusedError, SamplingParams, TapRequest, UserError
from specplug.testing.bench import PROMPTS
from specplug.testing.paths import device_path
from specplug.testing.registry import write_distribution
from specplug.testing.setup import Registry
from specplug.testing.targets import decoder_target, dense_forward, table_target

HERE = Path(__file__).resolve().parent / "third_party"
NAMES = ("fallback", "medusa", "suffix")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    before = list(sys.path)
    sys.path[:0] = [str(HERE / name / "src") for name in NAMES]
    yield
    sys.path[:] = before
    for module in [name for name in sys.modules if name.startswith(tuple(f"specplug_{name}" for name in NAMES))]:
        del sys.modules[module]


def write_metadata(folder: Path) -> list[str]:
    """Write what pip would, and return a search path on which the packages are found beside the installed ones."""
    for name in NAMES:
        project = tomllib.loads((HERE / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        points = project["entry-points"]["specplug.algorithms"]
        requires = tuple(project["dependencies"])
        write_distribution(folder, project["name"], points, version=project["version"], requires=requires)
    return [str(folder), *sys.path]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return Registry.discover(path=write_metadata(tmp_path_factory.mktemp("site")), environ={})


def own_test(name: str) -> Any:
    """Return a package's own conformance test."""
    file = HERE / name / "tests" / "test_conformance.py"
    spec = importlib.util.spec_from_file_location(f"third_party_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Beside:
    """Found through metadata that this file wrote."""

    def search_path(self, folder: Path) -> Sequence[str]:
        return write_metadata(folder)


class TestSuffix(Beside, own_test("suffix").TestSuffix):
    pass


class TestMedusa(Beside, own_test("medusa").TestMedusa):
    pass


@pytest.mark.slow  # the class below drives the same package through both sides
class TestFallback(Beside, own_test("fallback").TestFallback):
    pass


class TestFallbackOnBothSides(Beside, own_test("fallback").TestFallback):
    """A tree of the host, then a chain of a model on the device, which is the target's copy."""

    config = {  # noqa: RUF012
        "num_draft_tokens": 4,
        "fallback_first": "suffix-decoding",
        "fallback_first_options": {"suffix_min_probability": 0.6},
        "fallback_then": "standalone",
    }

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        shutil.copytree(target_dir, out_dir, dirs_exist_ok=True)


def test_they_are_listed(registry: Registry) -> None:
    registry.load()
    states = {record.distribution: record.state for record in registry.records}
    assert [states[f"specplug-{name}"] for name in NAMES] == ["loaded"] * len(NAMES)


# --- suffix decoding -------------------------------------------------------------------------------------------------


def counts(trie: Any) -> Counter[tuple[int, ...]]:
    """Return how often each run occurred, as the trie says."""
    found: Counter[tuple[int, ...]] = Counter()
    waiting: list[tuple[tuple[int, ...], Any]] = [((), trie.root)]
    while waiting:
        run, node = waiting.pop()
        for token, child in node.children.items():
            found[(*run, token)] = child.count
            waiting.append(((*run, token), child))
    return found


def runs(texts: Sequence[Sequence[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[at : at + length])
        for text in texts
        for at in range(len(text))
        for length in range(1, min(depth, len(text) - at) + 1)
    )


def test_a_trie_counts_every_run_and_forgets_texts() -> None:
    from specplug_suffix.trie import SuffixTrie

    draw = random.Random(3)
    texts = [[draw.randrange(3) for _ in range(draw.randrange(1, 30))] for _ in range(8)]
    trie = SuffixTrie(5)
    for text in texts:
        trie.add(text)
    assert counts(trie) == runs(texts, 5)
    for gone in range(1, 9):
        trie.remove(texts[gone - 1])
        assert counts(trie) == runs(texts[gone:], 5)


def test_a_match_is_the_longest_suffix_that_occurred() -> None:
    from specplug_suffix.trie import SuffixTrie, best_tree

    trie = SuffixTrie(6)
    trie.add([1, 2, 3, 4, 5])
    trie.add([2, 3, 4, 4])
    ends = trie.ends([9, 2, 3])
    assert len(ends) == 2
    # After (2, 3): 4 always, then 5 or 4, each in half of the cases: 1 + 0.5 + 0.5.
    assert best_tree(ends, 8, 5, 2.0, 0.1) == ([4, 5, 4], [-1, 0, 0], 2.0)
    assert best_tree(ends, 8, 1, 2.0, 0.1).tokens == [4]
    assert best_tree(ends, 8, 5, 1.0, 0.1).tokens == [4, 5]
    assert best_tree(ends, 8, 5, 2.0, 0.6).tokens == [4]
    assert best_tree(trie.ends([7]), 8, 5, 2.0, 0.1).tokens == []


def test_an_earlier_answer_drafts_a_later_one(registry: Registry) -> None:
    """A question, another one, the first again: drafted from its answer if two are kept, and the same in any case."""
    target = table_target(64, 2, 5)
    answers, gained = [], {}
    for kept in (0, 1, 2):
        config = {"suffix_cached_requests": kept}
        with Engine(target, algorithm="suffix-decoding", config=config, registry=registry) as engine:
            first, _, again = (engine.generate([prompt], GREEDY)[0] for prompt in ([3, 4], [8, 2], [3, 4]))
        answers += [first.ids, again.ids]
        gained[kept] = again.ledger["accepted"] - first.ledger["accepted"]
    assert all(answer == answers[0] for answer in answers), "what is kept changes answers"
    assert gained[0] == gained[1] == 0
    assert gained[2] > 8


def test_a_draft_model_that_nobody_reads_is_refused(registry: Registry, tmp_path: Path) -> None:
    decoder_target(2, folder=tmp_path / "draft")
    options: dict[str, Any] = {"registry": registry, "speculative_draft_model_path": str(tmp_path / "draft")}
    with pytest.raises(RefusedError, match="reads no draft model: try leaving --speculative-draft-model-path out"):
        Engine(table_target(64, 2, 5), algorithm="suffix-decoding", **options)


# --- Medusa ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A target on disk, and heads for it."""
    folder = tmp_path_factory.mktemp("medusa")
    target = decoder_target(4, 64, folder=folder / "target")
    heads = folder / "heads"
    heads.mkdir()
    own_test("medusa").TestMedusa().make_draft(folder / "target", heads, 1)
    return target, heads


def test_the_tree_is_made_of_the_likeliest_paths() -> None:
    from specplug_medusa.paths import best_paths, parents_of

    for nodes, depth, top_k in ((15, 3, 8), (64, 4, 10), (3, 1, 2), (200, 2, 3), (0, 3, 3), (5, 0, 3)):
        paths = best_paths(nodes, depth, top_k)
        every = [path for length in range(1, depth + 1) for path in product(range(top_k), repeat=length)]
        # Once in prod 2 (rank + 1) cases a path is right; of two that are as likely the shorter stands first.
        likeliest = sorted(every, key=lambda path: (prod(2 * rank + 2 for rank in path), len(path), path))
        assert paths == likeliest[:nodes]
        parents = parents_of(paths)
        assert all(parent < at for at, parent in enumerate(parents)), "parents first"
        assert [paths[at] if at >= 0 else () for at in parents] == [path[:-1] for path in paths]
    assert best_paths(8, 3, 4) == [(0,), (1,), (0, 0), (2,), (3,), (0, 1), (1, 0), (0, 0, 0)]


def test_heads_draft_what_the_paper_says(medusa: tuple[Any, Path], registry: Registry) -> None:
    """From the file as it is published: head m's candidates after the state of the last processed token."""
    from specplug_medusa.paths import best_paths

    target, folder = medusa
    weights = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    prompt, width = list(PROMPTS[0]), 3
    state = final_state(target, prompt)
    best = []
    for head in range(3):
        inner = F.linear(state, weights[f"{head}.0.linear.weight"], weights[f"{head}.0.linear.bias"])
        best.append((weights[f"{head}.1.weight"] @ (state + F.silu(inner))).topk(width).indices.tolist())
    with engine_of(target, registry, folder, "host") as engine:
        request = engine.submit(prompt, GREEDY)
        engine.step()
        assert request.draft is not None
        assert request.draft.tokens == [best[len(path) - 1][path[-1]] for path in best_paths(7, 3, width)]


def test_the_device_accepts_what_the_host_does(medusa: tuple[Any, Path], registry: Registry) -> None:
    """The drafts of the device's path stay there; as many are right, at each depth, as on the host's."""
    target, folder = medusa
    ledgers = []
    for path in ("host", "device"):
        with engine_of(target, registry, folder, path, num_draft_tokens=40, medusa_top_k=16) as engine:
            engine.generate(PROMPTS, GREEDY.model_copy(update={"max_tokens": 60}))
            ledgers.append(engine.ledger.report())
    assert ledgers[0] == ledgers[1]
    assert ledgers[0]["accepted"] > 0


def engine_of(target: Any, registry: Registry, folder: Path, path: str, **config: Any) -> Engine:
    options: dict[str, Any] = {
        "algorithm": "medusa",
        "config": {"num_draft_tokens": 8, "medusa_top_k": 3, **config},
        "registry": registry,
        "speculative_draft_model_path": str(folder),
        "page_size": 4,
        "context_length": 96,
    }
    if path == "host":
        return Engine(target, **options)
    with device_path():
        return Engine(target, **options)


def final_state(target: Any, prompt: Sequence[int]) -> Any:
    """Return the target's state after its final norm at the last token of `prompt`, [H]."""
    with torch.inference_mode():
        return dense_forward(target.model, prompt, (TapRequest(at="final_norm"),))[1][0][-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"medusa_num_heads": None}, "names no medusa_num_heads"),
        ({"medusa_num_heads": 5}, "holds no 5 heads of 1 layers"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    change: dict[str, Any], says: str, medusa: tuple[Any, Path], registry: Registry, tmp_path: Path
) -> None:
    target, folder = medusa
    shutil.copytree(folder, tmp_path / "heads")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(RefusedError, match=says):
        engine_of(target, registry, tmp_path / "heads", "host")


def test_heads_are_read_in_every_form_in_which_they_are_published(
    medusa: tuple[Any, Path], registry: Registry, tmp_path: Path
) -> None:
    """As safetensors too, which are preferred, beside a tuned target or not; and not twice."""
    target, folder = medusa
    weights = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    drafts = []
    for form in ("pt", "safetensors", "both", "beside", "converted"):
        heads = tmp_path / form
        heads.mkdir()
        shutil.copy(folder / "config.json", heads)
        if form in ("pt", "both", "beside"):
            torch.save(weights if form == "pt" else {"0": torch.zeros(1)}, heads / "medusa_lm_head.pt")
        if form in ("safetensors", "both", "beside"):
            save_file(weights, heads / "medusa_lm_head.safetensors")
        if form == "beside":
            shutil.copy(Path(target.checkpoint.path) / "model.safetensors", heads)
        if form == "converted":
            save_file(weights, heads / "model.safetensors")
        with engine_of(target, registry, heads, "host") as engine:
            request = engine.submit(PROMPTS[0], GREEDY)
            engine.step()
            assert request.draft is not None
            drafts.append(request.draft.tokens)
    assert drafts == drafts[:1] * 5
    save_file(weights, tmp_path / "beside" / "model.safetensors")
    with pytest.raises(RefusedError, match=r"stored in model.safetensors and in medusa_lm_head.safetensors; keep one"):
        engine_of(target, registry, tmp_path / "beside", "host")


def test_heads_that_are_missing_or_another_algorithms_are_refused(
    medusa: tuple[Any, Path], registry: Registry, tmp_path: Path
) -> None:
    target, folder = medusa
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(
        UserError, match=r"lacks weights \(model\*.* or medusa_lm_head\.pt or medusa_lm_head\.safetensors"
    ):
        engine_of(target, registry, tmp_path, "host")
    (tmp_path / "config.json").write_bytes((Path(target.checkpoint.path) / "config.json").read_bytes())
    shutil.copy(folder / "medusa_lm_head.pt", tmp_path)
    with pytest.raises(RefusedError, match=r"'standalone' cannot run here: .* is no whole language model"):
        Engine(target, algorithm="standalone", registry=registry, speculative_draft_model_path=str(tmp_path))


def test_heads_for_another_target_are_refused(medusa: tuple[Any, Path], registry: Registry, tmp_path: Path) -> None:
    small = decoder_target(4, 32, folder=tmp_path / "small")
    with pytest.raises(RefusedError, match="trained for this target"):
        engine_of(small, registry, medusa[1], "host")


# --- the combinator --------------------------------------------------------------------------------------------------


def test_the_second_drafts_where_the_first_has_nothing(medusa: tuple[Any, Path], registry: Registry) -> None:
    """A text that repeats itself is drafted by its past, another by the heads; the plan is both together."""
    target, folder = medusa
    config = {
        "fallback_first": "suffix-decoding",
        "fallback_first_options": {"num_draft_tokens": 4},
        "fallback_then": "medusa",
        "fallback_then_options": {"num_draft_tokens": 8, "medusa_top_k": 3},
    }
    options: dict[str, Any] = {"speculative_draft_model_path": str(folder), "page_size": 4, "context_length": 96}
    with (
        Engine(target, algorithm="fallback", config=config, registry=registry, **options) as engine,
        engine_of(target, registry, folder, "host") as alone,
    ):
        assert engine.run.plan is not None
        assert engine.run.plan.needs.runs_on == {"host", "device"}
        assert [tap.at for tap in engine.run.plan.needs.taps] == ["final_norm"]
        assert engine.run.plan.nodes == 7
        fresh, heads = engine.submit([2, 6, 1], GREEDY), alone.submit([2, 6, 1], GREEDY)
        known = engine.submit(range(64), GREEDY)  # whatever the next token is, it occurred
        engine.step()
        alone.step()
        assert fresh.draft is not None
        assert heads.draft is not None
        assert known.draft is not None
        assert fresh.draft.tokens == heads.draft.tokens
        assert known.draft.tokens == [known.tokens[-1] + 1]


def test_a_part_that_refuses_says_so(registry: Registry, tmp_path: Path) -> None:
    for config, says in (
        ({"fallback_then": "nothing"}, "its part 'nothing': no algorithm 'nothing' is installed"),
        ({"fallback_then": "fallback"}, "cannot be part of itself"),
        ({}, "its part 'standalone': standalone drafts with a smaller language model, and none is given"),
    ):
        with pytest.raises(UserError, match=says):
            Engine(table_target(64, 2, 5), algorithm="fallback", config=config, registry=registry)


def test_ngram_can_stand_before_a_model(registry: Registry, tmp_path: Path) -> None:
    """The model of the draft path is for the second; the first, which refuses one, is not given it."""
    target = decoder_target(4, folder=tmp_path / "target")
    options: dict[str, Any] = {"registry": registry, "speculative_draft_model_path": str(tmp_path / "target")}
    with Engine(target, algorithm="fallback", **options) as engine:
        (result,) = engine.generate([[2, 6, 1]], GREEDY)
        assert result.ledger["accepted"] > 16, "the target's copy knows what the target says"
    for draft in ("first", "both"):
        with pytest.raises(RefusedError, match=r"its part 'ngram': ngram drafts from the text .* reads no draft model"):
            Engine(target, algorithm="fallback", config={"fallback_draft": draft}, **options)


def test_what_is_planned_without_the_draft_is_not_built_with_it(
    registry: Registry, medusa: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said as the combinator's fault, whether or not the part would take the draft."""
    from specplug_fallback.drafter import FallbackDrafter

    def build(self: Any, config: Any, plan: Any, ctx: Any) -> None:
        super(FallbackDrafter, self).__init__(config, plan, ctx)
        self.parts = [ctx.build(part.name, part.options, draft=not part.draft) for part in config.parts()]

    monkeypatch.setattr(FallbackDrafter, "__init__", build)
    target, folder = medusa
    says = (
        "'fallback' cannot be used, a fault of specplug-fallback 0.1.0: its part 'ngram' was planned without the draft "
        "model and is built with it; facts.plan_of and ctx.build have to be given the same draft; report it"
    )
    config = {"fallback_then": "medusa"}
    with pytest.raises(UserError, match=re.escape(says)):
        Engine(
            target,
            algorithm="fallback",
            config=config,
            registry=registry,
            speculative_draft_model_path=str(folder),
        )
