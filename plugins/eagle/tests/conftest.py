"""Tiny targets and heads on disk, and engines over them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specplug import Engine
from specplug.testing import Bench, Harness
from specplug.testing.setup import Run, plan_run
from specplug.testing.targets import decoder_target

# pytest imports test files by path: a module that several of them share has to be found by its name.
sys.path.insert(0, str(Path(__file__).parent))

from eagle_checkpoints import Head


class Models:
    """A two-layer target in `target`, and a folder for heads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = folder / "target"
        self.loaded = decoder_target(3, 64, folder=self.target)

    def engine(
        self, draft: Path | None, algorithm: str = "eagle3", config: Mapping[str, Any] | None = None, **options: Any
    ) -> Engine:
        """Return an engine on the target; `draft` None decodes plainly."""
        if draft is not None:
            options |= {"algorithm": algorithm, "config": config or {}, "speculative_draft_model_path": str(draft)}
        return Engine(self.loaded, **{"page_size": 4, "context_length": 256, **options})


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Subject:
    """A head and its options, as `specplug.testing.Bench` takes a subject."""

    def __init__(self, models: Models, algorithm: str, head: Head, config: Mapping[str, Any], binary: bool) -> None:
        self.algorithm = algorithm
        self._models, self._head, self._config, self._binary = models, head, config, binary

    def search_path(self, folder: Path) -> Sequence[str] | None:
        return None

    def make_target(self, kind: Any, folder: Path) -> Any:
        return self._models.loaded

    def make_config(self, bench: Bench, kind: Any) -> Mapping[str, Any]:
        return self._config

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        self._head.save(out_dir, binary=self._binary)

    def has_draft(self) -> bool:
        return True


@pytest.fixture(scope="session")
def shared(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench whose registry all others use: what is installed is looked up once."""
    return Bench(Subject(models, "eagle3", Head({}), {}, False), tmp_path_factory.mktemp("shared"))


@pytest.fixture
def loads(models: Models, shared: Bench, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``loads(head, algorithm="eagle3", binary=False, **config)``: the head as the package loads it (`heads.Head`)."""

    def load(head: Head, algorithm: str = "eagle3", binary: bool = False, **config: Any) -> Any:
        config = {"eagle_topk": 1, "num_steps": 2, **config}
        bench = Bench(Subject(models, algorithm, head, config, binary), tmp_path_factory.mktemp("head"))
        bench.registry = shared.registry
        return Harness(bench.run(), bench.target()).drafter.head  # type: ignore[attr-defined]

    return load


@pytest.fixture
def settle(shared: Bench) -> Callable[..., Run]:
    """``settle(word, given, facts)``: the run that these words and options mean, as the commands settle it."""
    return partial(plan_run, shared.registry)
