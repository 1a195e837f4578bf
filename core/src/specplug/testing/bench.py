"""Everything one subject's checks share: its registry, targets, draft checkpoint, engines and oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from specplug.distributions import Found, installed
from specplug.facts import facts_of
from specplug.models.target import Target
from specplug.options import EngineOptions
from specplug.planning import Run, plan_run
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.sampling import SamplingParams
from specplug.spec import AlgorithmSpec, Facts
from specplug.testing.harness import Harness
from specplug.testing.oracle import Expected, expected
from specplug.testing.targets import decoder_target, reference_logits, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

Kind = Literal["ids", "text"]
"""Targets of a bench: ``ids`` has no tokenizer, ``text`` says letters, a token each."""

LETTERS = tuple(range(ord("a"), ord("i")))
"""Ids of what a ``text`` target says: few letters, so that its answers repeat themselves."""
PROMPTS: tuple[tuple[int, ...], ...] = (
    (3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3),
    (2, 6),
    (7,),
    (5, 5, 5, 5, 5, 5),
    (0, 2, 6, 0, 2, 6, 0),
)
"""Ids below 8, so that a target of 8 tokens takes them; most repeat themselves, for drafters that look back."""


class Subject(Protocol):
    """What a bench asks of a conformance class."""

    algorithm: str

    def search_path(self, folder: Path) -> Sequence[str] | None: ...
    def make_target(self, kind: Kind, folder: Path) -> Target: ...
    def make_config(self, bench: Bench, kind: Kind) -> Mapping[str, Any]: ...
    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None: ...
    def has_draft(self) -> bool: ...


class Bench:
    """Built once per conformance class; everything is made when it is first asked for, and kept."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        """`folder`: an empty one, for distributions and checkpoints."""
        self.subject = subject
        self.folder = folder
        self._targets: dict[Kind, Target] = {}
        self._logits: dict[Kind, Callable[[Sequence[int]], Tensor]] = {}
        self._configs: dict[Kind, Mapping[str, Any]] = {}
        self._drafts: dict[Kind, Path] = {}
        self._expected: dict[tuple[Any, ...], Expected] = {}

    # --- the plugin ---------------------------------------------------------------------------------------------

    @cached_property
    def path(self) -> Sequence[str] | None:
        """Where distributions are looked for; None is ``sys.path``."""
        return self.subject.search_path(self.folder)

    @cached_property
    def registry(self) -> Registry:
        """What is installed there."""
        return Registry.discover(path=self.path)

    @cached_property
    def distribution(self) -> Found:
        """The distribution that owns the algorithm."""
        owners = self.registry.owners(self.subject.algorithm)
        assert len(owners) == 1, f"{self.subject.algorithm!r} has the owners {owners}: install exactly one"
        return installed(self.path)[0][owners[0].distribution]

    @property
    def spec(self) -> AlgorithmSpec:
        """The algorithm's manifest."""
        found = self.registry.algorithms.get(self.subject.algorithm)
        assert found is not None, self.registry.unusable_because(self.subject.algorithm) or "it is not installed"
        return found.spec

    # --- models -------------------------------------------------------------------------------------------------

    def target(self, kind: Kind = "ids") -> Target:
        """The target of this kind."""
        if kind not in self._targets:
            self._targets[kind] = self.subject.make_target(kind, self.folder / f"target-{kind}")
        return self._targets[kind]

    def default_target(self, kind: Kind, folder: Path) -> Target:
        """A table where the algorithm reads tokens only; else a decoder, on disk if there is a draft to make."""
        capabilities = self.spec.capabilities
        inside = capabilities.taps or capabilities.borrows or capabilities.draft_kv or self.subject.has_draft()
        tokenizer = byte_tokenizer() if kind == "text" else None
        if inside:
            vocab, alphabet = (SIZE, LETTERS) if kind == "text" else (64, None)
            return decoder_target(1, vocab, folder=folder, tokenizer=tokenizer, alphabet=alphabet)
        if kind == "text":
            return table_target(SIZE, 2, 1, tokenizer=tokenizer, alphabet=LETTERS)
        return table_target(32, 2, 1, alphabet=range(8))

    def options(self, kind: Kind = "ids") -> dict[str, Any]:
        """Engine options that every run of the subject needs: the path of its draft, where it has one."""
        if not self.subject.has_draft():
            return {}
        if kind not in self._drafts:
            out = self.folder / f"draft-{kind}"
            out.mkdir()
            self.subject.make_draft(Path(self.target(kind).checkpoint.path), out, 0)
            self._drafts[kind] = out
        return {"speculative_draft_model_path": str(self._drafts[kind])}

    def config(self, kind: Kind = "ids") -> Mapping[str, Any]:
        """The subject's options."""
        if kind not in self._configs:
            self._configs[kind] = self.subject.make_config(self, kind)
        return self._configs[kind]

    # --- the answer ---------------------------------------------------------------------------------------------

    def logits(self, kind: Kind = "ids") -> Callable[[Sequence[int]], Tensor]:
        """The target as `specplug.reference` takes it: tokens -> logits [len(tokens), V]."""
        if kind not in self._logits:
            self._logits[kind] = reference_logits(self.target(kind))
        return self._logits[kind]

    def expected(
        self, prompt: Sequence[int], sampling: SamplingParams, kind: Kind = "ids", context: int = 256
    ) -> Expected:
        """What any run under `coupled` must answer, and any greedy run. Worked out once for each set of arguments."""
        target = self.target(kind)
        asked = (tuple(prompt), sampling.model_dump_json(), kind, context, target.eos_ids)
        if asked not in self._expected:
            self._expected[asked] = expected(
                self.logits(kind), prompt, sampling, context=context, eos=target.eos_ids, tokenizer=target.tokenizer
            )
        return self._expected[asked]

    # --- runs ---------------------------------------------------------------------------------------------------

    def facts(self, kind: Kind = "ids") -> Facts:
        """The facts of the subject's target and draft."""
        options = EngineOptions(**self.options(kind))
        return facts_of(self.target(kind).checkpoint, options, draft_files=self.registry.draft_files)

    def run(self, **changes: Any) -> Run:
        """Plan the subject with `changes` to its options."""
        return plan_run(self.registry, self.subject.algorithm, {**self.config(), **changes}, self.facts())

    def engine(
        self,
        changes: Mapping[str, Any] | None = None,
        kind: Kind = "ids",
        target: Target | None = None,
        **options: Any,
    ) -> Engine:
        """Return an engine with the subject and `changes` to its options. Pages are small, so borders are many.

        `target`: the one of this kind on another device.
        """
        return Engine(
            target or self.target(kind),
            algorithm=self.subject.algorithm,
            config={**self.config(kind), **(changes or {})},
            registry=self.registry,
            **{"page_size": 4, "context_length": 256, **self.options(kind), **options},
        )

    def harness(self, *, slots: int = 4, rule: Literal["coupled", "rejection"] = "coupled", **changes: Any) -> Harness:
        """Return a drafter to drive by hand, with `changes` to the subject's options."""
        return Harness(self.run(**changes), self.target(), slots=slots, rule=rule)

    @cached_property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """Whole sequences for a harness: a repetition, and each prompt with the target's greedy answer of 24 tokens."""
        sampling = SamplingParams(temperature=0.0, max_tokens=24)
        return (PROMPTS[0][:5] * 7, *((*prompt, *self.expected(prompt, sampling).ids) for prompt in PROMPTS))
