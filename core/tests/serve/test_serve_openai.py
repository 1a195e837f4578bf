"""A real server process and the real `openai` client: every endpoint and option, against the engine in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

openai = pytest.importorskip("openai", reason="the extra `testing` is not installed")

from specplug.runtime.engine import Engine  # noqa: E402
from specplug.testing.tokenizer import EOS  # noqa: E402

KEY = "let-me-in"
PROMPT = "abcdabc"
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]
AS_TEXT = f"u:{PROMPT};a:"


@pytest.fixture(scope="module")
def client(serving: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    """The oracle: the same model, decoded plain."""
    with Engine(str(model_folder), context_length=96) as engine:
        yield engine


def idle(serving: Any) -> dict[str, Any]:
    """What the server says of itself; nothing may run."""
    found: dict[str, Any] = httpx.get(f"{serving.url}/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert found["now"]["running"] == found["now"]["queued"] == 0
    assert found["now"]["free_pages"] == found["kv"]["pages"]
    return found


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "specplug"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_wrong_key(serving: Any) -> None:
    wrong = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": -1},
    {"temperature": 0, "logit_bias": {"97": -100, "98": 5}},
    {"temperature": 1.3, "seed": 11, "top_p": 0.9},
    {"temperature": 0, "stop": ["ge", "zz"]},
    {"temperature": 0, "stop": "h"},
    {"temperature": 1, "seed": 3, "top_k": 3, "min_p": 0.05, "repetition_penalty": 1.3, "min_tokens": 4},
    {"temperature": 0, "stop_token_ids": [101, 104]},
    {"temperature": 0, "ignore_eos": True, "logit_bias": {str(EOS): 100}},
    {"temperature": 0, "logit_bias": {str(EOS): 9}},
]
EXTRA = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")


@pytest.mark.parametrize("options", OPTIONS, ids=[json.dumps(each)[:50] for each in OPTIONS])
def test_every_option_means_what_it_means_to_the_engine(client: Any, engine: Engine, options: dict[str, Any]) -> None:
    named = {name: value for name, value in options.items() if name not in EXTRA}
    extra = {name: value for name, value in options.items() if name in EXTRA}
    [result] = engine.generate([PROMPT], {**options, "max_tokens": 12})
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, **named, extra_body=extra)
    choice = found.choices[0]
    assert (choice.text, choice.finish_reason) == (result.text, result.finish_reason)
    assert found.usage.completion_tokens == len(result.ids)
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=12, **named, extra_body=extra
    )
    [result] = engine.generate([AS_TEXT], {**options, "max_tokens": 12})
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (result.text, result.finish_reason)
    # Streamed: the same text, and as many tokens in the chunks as in the usage.
    deltas = list(
        client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=12,
            stream=True,
            logprobs=True,
            **{"stream_options": {"include_usage": True}, **named, "extra_body": extra},
        )
    )
    parts = [delta.choices[0] for delta in deltas if delta.choices]
    assert "".join(part.delta.content for part in parts) == result.text
    assert sum(len(part.logprobs.content) for part in parts if part.logprobs) == len(result.ids)
    assert deltas[-1].usage.completion_tokens == len(result.ids)
    assert [part.finish_reason for part in parts][-1] == result.finish_reason


def test_token_ids_and_lists_as_prompts(client: Any, engine: Engine) -> None:
    prompts = ["abc", "dab", "hgf"]
    results = engine.generate(prompts, {"max_tokens": 6, "temperature": 0})
    for given in (prompts, [list(prompt.encode()) for prompt in prompts]):
        found = client.completions.create(model="tiny", prompt=given, max_tokens=6, temperature=0)
        assert [(choice.index, choice.text) for choice in found.choices] == [
            (at, result.text) for at, result in enumerate(results)
        ]
        assert found.usage.prompt_tokens == 9
    one = client.completions.create(model="tiny", prompt=list(b"abc"), max_tokens=6, temperature=0)
    assert one.choices[0].text == results[0].text


def test_several_choices_and_prompts(client: Any, engine: Engine) -> None:
    prompts = ["abc", "dab"]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 5, "n": 2}
    results = engine.generate(prompts, {**options, "top_k": 8})
    options["extra_body"] = {"top_k": 8}
    found = client.completions.create(model="tiny", prompt=prompts, **options)
    assert [choice.text for choice in found.choices] == [result.text for result in results]
    assert len({choice.text for choice in found.choices}) > 2
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=prompts, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [result.text for result in results]
    assert found.usage.completion_tokens == sum(len(result.ids) for result in results)
    assert found.usage.prompt_tokens == 6
    results = engine.generate([AS_TEXT], {"max_tokens": 6, "temperature": 1.0, "seed": 5, "n": 2, "top_k": 8})
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert texts == [result.text for result in results]


def test_logprobs_are_the_plain_runs(client: Any, engine: Engine) -> None:
    [result] = engine.generate([AS_TEXT], {"max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3})
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = chat.choices[0].logprobs.content
    assert result.logprobs is not None
    assert [entry.bytes for entry in entries] == [[token] for token in result.ids]
    assert [entry.token for entry in entries] == [chr(token) for token in result.ids]
    for entry, expected in zip(entries, result.logprobs, strict=True):
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [top.bytes for top in entry.top_logprobs] == [[token] for token, _ in expected.top]
    [result] = engine.generate([PROMPT], {"max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2})
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert "".join(logprobs.tokens) == found.choices[0].text
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 5
    assert result.logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in result.logprobs], abs=1e-3)


def test_a_character_split_over_tokens(client: Any) -> None:
    """The model is made to say é, byte by byte: half of it is no chunk, and what is held back comes at the end."""
    first, second = "é".encode()
    ask = {"model": "tiny", "prompt": "a", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    # Each byte pushes itself out of favour once it was said, so that they alternate.
    bias = {str(first): 100, str(second): 99}
    for count, text in ((2, "é"), (3, "é�"), (1, "�")):
        chunks = list(
            client.completions.create(**ask, max_tokens=count, logit_bias=bias, frequency_penalty=2, logprobs=0)
        )
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(part.text for part in parts) == text
        assert chunks[-1].usage.completion_tokens == count
        tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens]
        assert tokens == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3"][:count]


def test_default_budget_is_what_the_context_leaves(client: Any) -> None:
    found = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    assert found.usage.total_tokens == 96
    assert found.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a" * 96}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"min_tokens": 90}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_what_this_model_cannot_is_refused(serving: Any, body: dict[str, Any], param: str) -> None:
    response = httpx.post(
        f"{serving.url}/v1/completions", json={"prompt": PROMPT} | body, headers={"Authorization": f"Bearer {KEY}"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    idle(serving)


def test_speculation_per_request_mixed_in_one_batch(client: Any, serving: Any, engine: Engine) -> None:
    [result] = engine.generate([PROMPT], {"max_tokens": 10, "temperature": 0})

    def ask(value: Any) -> Any:
        return client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=10, temperature=0, extra_body={"speculative": value}
        )

    values: list[Any] = [{"enabled": False}, {"max_drafted": 1}, None, {"enabled": True}] * 2
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, values))
    assert {each.choices[0].text for each in found} == {result.text}
    for value, each in zip(values, found, strict=True):
        ledger = each.usage.speculative
        assert ledger["output_tokens"] == 10
        if value == {"enabled": False}:
            assert ledger["drafted"] == 0
        elif value == {"max_drafted": 1}:
            assert 0 < ledger["drafted"] <= ledger["drafted_rounds"]
            assert len(ledger["accepted_at"]) == 1
        else:
            assert ledger["drafted"] > ledger["drafted_rounds"]
            assert ledger["acceptance_by_depth"][1]["conditional"] == 1.0
            assert ledger["acceptance_by_depth"][2]["conditional"] == 0.0
    idle(serving)


def test_seed_is_reported_and_gives_the_text_again(client: Any) -> None:
    first = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=1)
    seed = first.usage.speculative["seed"]
    again = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=1, seed=seed)
    assert again.choices[0].text == first.choices[0].text


def test_counters_equal_the_sum_of_usages(client: Any, serving: Any) -> None:
    def scrape() -> dict[str, float]:
        text = httpx.get(f"{serving.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    label = '{algorithm="scripted",model="tiny"}'
    before = scrape()
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(
                lambda at: client.completions.create(
                    model="tiny", prompt=PROMPT[at:], max_tokens=9, temperature=0, stop=["gh", "fe"]
                ),
                range(5),
            )
        )
    after = scrape()
    generated = f"specplug:generation_tokens_total{label}"
    assert after[generated] - before[generated] == sum(each.usage.completion_tokens for each in found)
    prompts = f"specplug:prompt_tokens_total{label}"
    assert after[prompts] - before[prompts] == sum(each.usage.prompt_tokens for each in found)
    fallen = [name for name in before if "_total" in name and after[name] < before[name]]
    assert not fallen
    assert all(value == value for value in after.values())
    assert after[f"specplug:kv_free_pages{label}"] == after[f"specplug:kv_pages{label}"]
    depths = [value for name, value in after.items() if name.startswith("specplug:spec_accepted_at_total")]
    assert sum(depths) == after[f"specplug:spec_accepted_tokens_total{label}"]
    idle(serving)


def test_structured_output(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    found = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=60, seed=1, response_format=form)
    assert found.choices[0].finish_reason == "stop"
    assert json.loads(found.choices[0].message.content)["a"] in ("x", "y")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=CHAT, response_format={"type": "xml"})
    assert caught.value.param == "response_format"


def test_leaving_in_mid_answer_frees_pages(client: Any, serving: Any) -> None:
    for _ in range(5):
        with client.completions.create(model="tiny", prompt=PROMPT, stream=True, temperature=0) as stream:
            next(iter(stream))
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
    assert found.usage.completion_tokens == 2
    for _ in range(100):
        now = httpx.get(f"{serving.url}/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()["now"]
        if not now["running"]:
            break
    idle(serving)
