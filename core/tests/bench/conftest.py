"""The tiny models and prompts that `specplug bench` is tried with, and the command itself, run in this process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specplug import cli
from specplug.bench import session
from specplug.registry import Registry
from specplug.testing.bench import LETTERS
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test files by path; their helpers are found by name


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """The scripted drafters, and nothing that is really installed."""
    return bench_registry(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer decoder on disk, with the byte tokenizer."""
    place = tmp_path_factory.mktemp("model")
    decoder_target(1, SIZE, folder=place, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    return place


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without a tokenizer."""
    place = tmp_path_factory.mktemp("bare")
    decoder_target(2, 64, folder=place)
    return place


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of four prompts in two categories."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "category": text[:1]} for text in ("abcabc", "adadad", "bebebe", "b")]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def bench(registry: Registry, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on a quiet machine: its arguments in, exit code, stdout and stderr out."""
    monkeypatch.setattr(Registry, "discover", classmethod(lambda cls: registry))
    monkeypatch.setattr(session, "load_average", lambda: 0.0)

    def run(*args: object, model: Path | str = folder) -> tuple[int, str, str]:
        code = cli.main(["bench", str(model), *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    return run
