"""Parts of the server by themselves: figures over a window, bytes of tokens, what of an error may leave the house."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specplug.runtime.ledger import Ledger
from specplug.serve import guard
from specplug.serve.errors import public
from specplug.serve.fields import body_schema
from specplug.serve.histogram import Histogram
from specplug.serve.metrics import INTERVAL, Metrics, Window
from specplug.serve.options import ServeOptions
from specplug.serve.protocol import Counters, Snapshot
from specplug.serve.service import served_name
from specplug.serve.tokens import TokenBytes

DOCS = Path(__file__).parents[3] / "docs"


def snapshot(emitted: int = 0, **counts: int) -> Snapshot:
    ledger = Ledger(requests=1, **counts)  # type: ignore[arg-type]
    return Snapshot(1, 0, 8, 6, 3, 4, False, "on", Counters(emitted=emitted), ledger.report())


def test_window_looks_back_an_interval() -> None:
    window = Window()
    assert window.recent == (1.0, 0.0, 0.0)
    window.add(snapshot(), 0.0)
    assert window.recent == (1.0, 0.0, 0.0)
    window.add(snapshot(31, output_tokens=31, rounds=10, drafted=40, accepted=20), 1.0)
    assert window.recent == (3.0, 0.5, 31.0)
    # Nothing more is decoded: acceptance stays what it was, speed falls to 0.
    window.add(snapshot(31, output_tokens=31, rounds=10, drafted=40, accepted=20), 2 + INTERVAL)
    window.add(snapshot(31, output_tokens=31, rounds=10, drafted=40, accepted=20), 3 + INTERVAL)
    assert window.recent == (3.0, 0.5, 0.0)
    # What is older than the interval does not weigh.
    window.add(snapshot(41, output_tokens=41, rounds=20, drafted=40, accepted=20), 4 + INTERVAL)
    assert window.recent[:2] == (1.0, 0.0)


def test_counters_do_not_follow_a_ledger_that_falls(fake: Any) -> None:
    import asyncio

    async def scene() -> Metrics:
        return fake()[1].metrics

    metrics = asyncio.run(scene())
    for accepted in (5, 3):
        metrics.read(
            snapshot(output_tokens=9, rounds=4, drafted=8, accepted=accepted, accepted_at=[accepted], reached=[5])
        )
        text = metrics.text().decode()
    assert 'specplug:spec_accepted_tokens_total{algorithm="scripted",model="tiny"} 5.0' in text
    assert 'specplug:spec_accepted_at_total{algorithm="scripted",depth="1",model="tiny"} 5.0' in text


def test_a_drafters_own_counts_are_shown_where_they_are_numbers(fake: Any) -> None:
    import asyncio

    async def scene() -> Metrics:
        return fake()[1].metrics

    metrics = asyncio.run(scene())
    now = snapshot()
    metrics.read(replace(now, report={**now.report, "drafter": {"hits": 2.0, "bad": float("nan")}}))
    text = metrics.text().decode()
    assert 'specplug:drafter{algorithm="scripted",model="tiny",name="hits"} 2.0' in text
    assert not re.search(r" NaN", text, re.IGNORECASE)


def test_what_is_scraped_is_valid_from_the_first_time_on(fake: Any) -> None:
    import asyncio

    async def scene() -> Metrics:
        return fake()[1].metrics

    metrics = asyncio.run(scene())
    names = []
    for act in (
        lambda: None,
        lambda: metrics.read(snapshot()),
        lambda: metrics.first_token.observe(0.3),
        lambda: metrics.generated(3, "stop"),
    ):
        act()
        families = list(text_string_to_metric_families(metrics.text().decode()))
        found = [family.name for family in families]
        assert len(found) == len(set(found))
        assert all(family.documentation for family in families)
        assert not [sample for family in families for sample in family.samples if math.isnan(sample.value)]
        assert {"specplug:up", "specplug:generation_tokens", "specplug:time_to_first_token_seconds"} <= set(found)
        names.append(set(found))
    assert names[1] == names[3]


def test_a_histogram_is_what_the_library_makes() -> None:
    from prometheus_client import CollectorRegistry
    from prometheus_client import Histogram as Theirs
    from prometheus_client.openmetrics.exposition import generate_latest

    bounds, labels = (0.001, 0.25, 1.0, 30.0), (("model", "m"), ("algorithm", "none"))
    mine, registry = Histogram("specplug:x_seconds", "About.", labels, bounds), CollectorRegistry()
    theirs = Theirs("specplug:x_seconds", "About.", [name for name, _ in labels], buckets=bounds, registry=registry)
    for value, times in ((0.0005, 1), (0.001, 2), (0.0010001, 3), (1.0, 1), (29.0, 5), (1e9, 2)):
        mine.observe(value, times)
        for _ in range(times):
            theirs.labels("m", "none").observe(value)

    class Mine:
        def collect(self) -> Any:
            yield mine.family()

    other: Any = CollectorRegistry()
    other.register(Mine())

    def lines(of: Any) -> list[str]:
        return [line for line in generate_latest(of).decode().splitlines() if "_created" not in line]

    assert lines(other) == lines(registry)


def test_a_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda *both: seen.append(both) or False)
    made = guard.Guard(None, "key", 1, lambda status: None)  # type: ignore[arg-type]
    assert not made._knows(b"Bearer key")  # it has no other way to find out
    assert seen == [(b"key", b"key")]


@pytest.mark.parametrize("page", ["how-to/grafana-dashboard.json", "how-to/serve.md", "reference/server.md"])
def test_documents_name_metrics_that_exist(fake: Any, page: str) -> None:
    import asyncio

    async def scene() -> Metrics:
        return fake()[1].metrics

    metrics = asyncio.run(scene())
    metrics.read(snapshot(reached=[1], accepted_at=[1]))
    metrics.refused(400)
    known = set(re.findall(r"^specplug:(\w+)", metrics.text().decode(), re.MULTILINE)) | {"drafter"}
    text = (DOCS / page).read_text(encoding="utf-8")
    if page.endswith(".json"):
        assert json.loads(text)["panels"]
    named = set(re.findall(r"specplug:(\w+)", text))
    if page == "reference/server.md":
        table = text[text.index("## Metrics") :]
        named |= {
            name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        named -= {"depth", "name", "finish_reason", "status", "part"}
        families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known}
        assert {name for name in families if not name.endswith("_created")} <= named
        known |= families
    assert named <= known


def test_every_field_is_documented() -> None:
    text = (DOCS / "reference" / "server.md").read_text(encoding="utf-8")
    for kind in ("chat", "completion"):
        for name in body_schema(kind)["properties"]:  # type: ignore[arg-type]
            assert f"`{name}`" in text or f"`{name}." in text, name
    for name in ServeOptions.model_fields:
        assert f"`--{name.replace('_', '-')} " in text, name


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("reading /srv/me/model.bin failed", "reading (path) failed"),
        ("two\nlines", "two lines"),
        ("50 tokens/s and/or 3", "50 tokens/s and/or 3"),
        ("see http://host/v1/models", "see http://host/v1/models"),
        ("in '/tmp/x/y z'", "in '(path) z'"),
    ],
)
def test_paths_stay_here(said: str, kept: str) -> None:
    assert public(said) == kept


def test_served_name(tmp_path: Path) -> None:
    assert served_name(str(tmp_path), ServeOptions()) == tmp_path.name
    assert served_name("org/model", ServeOptions()) == "org/model"
    assert served_name(str(tmp_path), ServeOptions(served_model_name="it")) == "it"


def test_bytes_of_byte_level_tokens() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end é>")
    tokens = TokenBytes(fast)
    text = " é \u20ac\n\x00"
    ids = fast.encode(text)
    assert b"".join(map(tokens.bytes_of, ids)) == text.encode()
    assert {tokens.bytes_of(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
    assert tokens.text_of(fast.convert_tokens_to_ids("<end é>")) == "<end é>"
    assert tokens.text_of(ids[1]) == "bytes:\\xc3"
    assert tokens.text_of(ids[0]) == " "
    assert tokens.bytes_of(9999) == b""


def test_bytes_of_sentencepiece_tokens() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<0xC3>": 1, "\u2581the": 2, "cat": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert [tokens.bytes_of(token) for token in (1, 2, 3)] == [b"\xc3", b" the", b"cat"]
