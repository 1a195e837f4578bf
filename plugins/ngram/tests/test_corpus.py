"""The external corpus: read, refused with file and line, and drafted from."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from specplug import Checkpoint, DraftPlan, Facts, HostRow, Limits, RequestView, SamplingParams, UserError
from specplug_ngram import corpus
from specplug_ngram.config import NgramConfig
from specplug_ngram.drafter import NgramDrafter
from specplug_ngram.plugin import plan, specplug_check

WORDS = ["[UNK]", "one", "two", "three", "four", "five", "six"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of seven words."""
    folder = tmp_path / "target"
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    return str(path)


def make(target: Path, **fields: object) -> tuple[NgramDrafter, DraftPlan]:
    config = NgramConfig(ngram_external_sam_budget=4, ngram_min_confidence=0, ngram_min_gain=0, **fields)
    facts = Facts(
        target=Checkpoint(path=str(target)),
        features=frozenset({"tree_verify", "rollback"}),
        limits=Limits(max_running_requests=2),
    )
    planned = plan(config, facts, None)
    assert isinstance(planned, DraftPlan)
    return NgramDrafter(config, planned, SimpleNamespace(slots=2, facts=facts)), planned


def test_drafts_come_from_the_corpus(tmp_path: Path, target: Path) -> None:
    path = write(tmp_path, b'"one two three four five six"\n\n"one one"\n')
    drafter, planned = make(target, ngram_external_corpus_path=path)
    drafter.load(SimpleNamespace())
    drafter.on_admit(RequestView(1, "r", (), SamplingParams(), None))
    row = HostRow(1, [2, 3], 2, 15)
    step = SimpleNamespace(host=SimpleNamespace(rows=[row]), depth=planned.depth)
    tokens, parents = (np.zeros((3, planned.nodes), dtype=np.int64) for _ in range(2))
    out = SimpleNamespace(tokens=tokens, parents=parents, num_valid=np.zeros(3, dtype=np.int64))
    drafter.ingest(step)
    drafter.propose(step, out)
    assert tokens[1, : out.num_valid[1]].tolist() == [4, 5, 6]  # documents do not run into each other


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'"one"\n\n{"text": "two"}\n', "line 3 of .*corpus.jsonl is a JSON dict"),
        (b'"one"\ntwo\n', "line 2 of .*corpus.jsonl is not valid JSON"),
        (b'"one"\n"\xff"\n', "line 2 of .*corpus.jsonl is not valid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, target: Path, content: bytes, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=said) as caught:
        list(corpus.documents(path))
    assert "\n" not in str(caught.value)
    drafter, _ = make(target, ngram_external_corpus_path=path)
    with pytest.raises(UserError, match=f"--speculative-ngram-external-corpus-path: {said}"):
        drafter.load(SimpleNamespace())


def test_a_missing_file_and_a_missing_tokenizer_are_said_before_weights_load(tmp_path: Path, target: Path) -> None:
    def problems(path: str, folder: Path) -> list[str]:
        config = NgramConfig(ngram_external_corpus_path=path, ngram_external_sam_budget=4)
        found = specplug_check("ngram", config, None, Facts(target=Checkpoint(path=str(folder))))
        assert all(p.severity == "error" and p.field == "ngram_external_corpus_path" for p in found)
        return [p.message for p in found]

    good = write(tmp_path, b'"one"')
    assert problems(good, target) == []
    [message] = problems(str(tmp_path / "none.jsonl"), target)
    assert "none.jsonl cannot be read: No such file" in message
    [message] = problems(good, tmp_path)
    assert "a tokenizer.json is needed" in message
    [message] = problems(write(tmp_path, b"[1]"), target)
    assert "line 1" in message
    assert specplug_check("other", None, None, Facts.empty()) == ()
    assert specplug_check("ngram", NgramConfig(), None, Facts.empty()) == ()


def test_a_corpus_beyond_the_memory_names_the_line(tmp_path: Path, target: Path) -> None:
    rng = np.random.default_rng(0)
    line = lambda: b'"' + " ".join(WORDS[i] for i in rng.integers(1, 7, 3000)).encode() + b'"\n'  # noqa: E731
    path = write(tmp_path, b"".join(line() for _ in range(9)))
    drafter, _ = make(target, ngram_external_corpus_path=path, ngram_store_mb=1)
    with pytest.raises(UserError, match=r"ngram_store_mb 1 is full at line [3-9] of .*; raise it"):
        drafter.load(SimpleNamespace())
