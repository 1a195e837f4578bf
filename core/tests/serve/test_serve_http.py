"""The HTTP layer over a scripted engine: shapes of answers and errors, limits, disconnects, the engine's death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest

from specplug.sampling import SamplingParams
from specplug.serve.app import make_app
from specplug.serve.options import ServeOptions
from specplug.serve.service import Service

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
TEXT = {"prompt": "hello"}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


async def call(service: Any, method: str, path: str, **more: Any) -> httpx.Response:
    transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, **more)


def post(service: Any, path: str, body: Any, **more: Any) -> Any:
    return call(service, "POST", path, json=body, **more)


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_whole_answer(fake: Any, path: str, body: Any) -> None:
    async def scene() -> None:
        client, service = fake()
        response = await post(service, path, body | {"user": "me", "metadata": {"a": "b"}, "logit_bias": None})
        found = response.json()
        assert response.status_code == 200, found
        choice = found["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert (text, choice["finish_reason"], found["model"]) == ("abc", "stop", "tiny")
        usage = found["usage"]
        prompt = 1 if path.startswith("/v1/chat") else 5
        assert [usage[f"{part}_tokens"] for part in ("prompt", "completion", "total")] == [prompt, 3, prompt + 3]
        assert usage["speculative"]["seed"] == 7
        assert usage["speculative"]["output_tokens"] == 3
        assert service.live == 0
        assert client.asked[0][1].max_tokens is None

    run(scene())


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_stream_is_the_whole_answer_in_pieces(fake: Any, path: str, body: Any) -> None:
    async def scene() -> None:
        _, service = fake((b"ab", b"", b"c", "length"))
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        found = events(await post(service, path, body | stream))
        assert found.pop() == "[DONE]"
        last = found.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        assert all(chunk["usage"] is None for chunk in found)
        choices = [chunk["choices"][0] for chunk in found]
        chat = path.startswith("/v1/chat")
        assert [choice["delta"]["content"] if chat else choice["text"] for choice in choices] == ["ab", "c", ""]
        assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
        if chat:
            assert ["role" in choice["delta"] for choice in choices] == [True, False, False]
        assert len({chunk["id"] for chunk in [*found, last]}) == 1
        assert "usage" not in events(await post(service, path, body | {"stream": True}))[0]

    run(scene())


def test_chat_logprobs_whole_and_streamed(fake: Any) -> None:
    async def scene() -> None:
        _, service = fake()
        asked = CHAT | {"logprobs": True, "top_logprobs": 1}
        whole = (await post(service, "/v1/chat/completions", asked)).json()["choices"][0]["logprobs"]["content"]
        # No tokenizer, so tokens are shown by their ids; JSON has no minus infinity.
        assert [entry["token"] for entry in whole] == ["token_id:97", "token_id:98", "token_id:99"]
        assert whole[0]["logprob"] == -9999.0
        assert whole[0]["bytes"] == list(b"token_id:97")
        assert whole[0]["top_logprobs"] == [{"token": "token_id:97", "logprob": -0.5, "bytes": whole[0]["bytes"]}]
        chunks = events(await post(service, "/v1/chat/completions", asked | {"stream": True}))[:-1]
        pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry for piece in pieces if piece for entry in piece["content"]] == whole

    run(scene())


def test_completion_logprobs_count_the_likeliest(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake()
        found = (await post(service, "/v1/completions", TEXT | {"logprobs": 2})).json()["choices"][0]["logprobs"]
        assert client.asked[0][1].top_logprobs == 2
        assert found["token_logprobs"] == [-9999.0] * 3
        assert found["top_logprobs"][0] == {"token_id:97": -0.5}
        assert found["text_offset"] == [0, 11, 22]
        none = (await post(service, "/v1/completions", TEXT | {"logprobs": 0})).json()["choices"][0]["logprobs"]
        assert none["top_logprobs"] is None
        assert len(none["token_logprobs"]) == 3

    run(scene())


def test_tokens_with_their_depths(fake: Any) -> None:
    async def scene() -> None:
        _, service = fake((b"abc", b"d", "stop"))
        asked = TEXT | {"speculative": {"tokens": True}}
        whole = (await post(service, "/v1/completions", asked)).json()["choices"][0]["speculative"]["tokens"]
        assert [(token["id"], token["depth"], token["corrected"]) for token in whole] == [
            *((97, 0, False), (98, 1, False), (99, 0, True), (100, 0, False))
        ]
        chunks = events(await post(service, "/v1/completions", asked | {"stream": True}))[:-1]
        pieces = [token for chunk in chunks for token in chunk["choices"][0]["speculative"]["tokens"]]
        assert pieces == whole

    run(scene())


@pytest.mark.parametrize(("body", "count"), [({}, 1), ({"stream": True}, 3), ({"stream": True, "n": 1}, 3)])
def test_time_from_commit_to_bytes(fake: Any, monkeypatch: pytest.MonkeyPatch, body: Any, count: int) -> None:
    async def scene() -> None:
        _, service = fake((b"ab", b"c", "stop"))
        seen: list[float] = []
        monkeypatch.setattr(service.metrics.commit_to_bytes, "observe", seen.append)
        assert (await post(service, "/v1/completions", TEXT | body)).status_code == 200
        assert len(seen) == count  # one per chunk, and one for an answer in one piece
        assert all(0 < spent < 5 for spent in seen)

    run(scene())


def test_several_prompts_and_choices_are_numbered_through(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake()
        found = (await post(service, "/v1/completions", {"prompt": ["ab", "cde"]})).json()
        assert [choice["index"] for choice in found["choices"]] == [0, 1]
        assert found["usage"]["prompt_tokens"] == 5
        assert found["usage"]["completion_tokens"] == 6
        assert found["usage"]["speculative"]["seeds"] == [7, 7]
        assert found["usage"]["speculative"]["requests"] == 2
        assert [prompt for prompt, _, _ in client.asked] == [list(b"ab"), list(b"cde")]

    run(scene())


def test_speculative_reaches_the_engine(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake()
        for value in ({"enabled": False}, {"max_drafted": 2}, {"enabled": True, "max_drafted": 2}, {}, None):
            assert (await post(service, "/v1/completions", TEXT | {"speculative": value})).status_code == 200
        assert [most for _, _, most in client.asked] == [0, 2, 2, None, None]
        _, plain = fake(nodes=0)
        for value, status in (({"enabled": True}, 400), ({"enabled": False}, 200), ({"max_drafted": 2}, 200)):
            assert (await post(plain, "/v1/completions", TEXT | {"speculative": value})).status_code == status

    run(scene())


FAULTS = [
    ("chat", {"temperature": 200}, "temperature"),
    ("chat", {"temperature": "0.5"}, "temperature"),
    ("chat", {"top_p": 0}, "top_p"),
    ("chat", {"n": True}, "n"),
    ("chat", {"n": 129}, "n"),
    ("chat", {"n": 5}, "n"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("chat", {"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
    ("chat", {"repetition_penalty": 0}, "repetition_penalty"),
    ("chat", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("chat", {"logit_bias": {"1": 101}}, "logit_bias"),
    ("chat", {"stop": [""]}, "stop"),
    ("chat", {"stop": [1]}, "stop"),
    ("chat", {"seed": -1}, "seed"),
    ("chat", {"top_logprobs": 2}, "top_logprobs"),
    ("chat", {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ("chat", {"logprobs": 2}, "logprobs"),
    ("completion", {"logprobs": 21}, "logprobs"),
    ("completion", {"logprobs": True}, "logprobs"),
    ("chat", {"stream": "yes"}, "stream"),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat", {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ("chat", {"speculative": {"enabled": 1}}, "speculative.enabled"),
    ("chat", {"speculative": {"max_drafted": -1}}, "speculative.max_drafted"),
    ("chat", {"speculative": {"enabled": False, "max_drafted": 1}}, "speculative.max_drafted"),
    ("chat", {"speculative": {"depth": 1}}, "speculative.depth"),
    ("chat", {"speculative": True}, "speculative"),
    ("chat", {"tools": [{"type": "function"}]}, "tools"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("chat", {"separate_reasoning": True}, "separate_reasoning"),
    ("chat", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat", {"store": True}, "store"),
    ("chat", {"store": 0}, "store"),
    ("chat", {"user": 1}, "user"),
    ("chat", {"temprature": 1}, "temprature"),
    ("chat", {"detokenize": False}, "detokenize"),
    ("chat", {"prompt": "x"}, "prompt"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ("chat", {"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    ("chat", {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ("completion", {"prompt": []}, "prompt"),
    ("completion", {"prompt": [1, "a"]}, "prompt"),
    ("completion", {"prompt": [[1], []]}, "prompt"),
    ("completion", {"prompt": ["a"] * 5}, "n"),
    ("completion", {"echo": True}, "echo"),
    ("completion", {"suffix": "x"}, "suffix"),
    ("completion", {"best_of": 2}, "best_of"),
]


@pytest.mark.parametrize(("kind", "change", "param"), FAULTS, ids=[str(fault[1])[:60] for fault in FAULTS])
def test_a_fault_names_its_field(fake: Any, kind: str, change: Any, param: str) -> None:
    async def scene() -> None:
        client, service = fake()
        path, body = ("/v1/chat/completions", CHAT) if kind == "chat" else ("/v1/completions", TEXT)
        response = await post(service, path, body | change)
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert error["param"] == param, error
        assert error["type"] == "invalid_request_error"
        assert param.rpartition(".")[2].rpartition("]")[2] in error["message"]
        assert "\n" not in error["message"]
        assert error["code"]
        if param not in SamplingParams.model_fields:  # whose errors Python callers read too
            assert "True" not in error["message"]  # as the client wrote it
        assert not client.asked
        assert b'requests_refused_total{algorithm="scripted",model="tiny",status="400"} 1.0' in service.metrics.text()

    run(scene())


def test_null_and_default_values_are_accepted(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake()
        defaults = {
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "reasoning_effort": "medium",
            "modalities": ["text"],
            "store": False,
            "service_tier": "auto",
            "n": 1,
            "stop": "x",
            "response_format": {"type": "text"},
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "temperature": 1,
            "top_p": 1,
            "logprobs": False,
            "max_completion_tokens": 3,
        }
        properties = make_app(service).openapi()["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
        every = dict.fromkeys(properties["application/json"]["schema"]["properties"])
        for body in (CHAT | defaults, every | CHAT):
            response = await post(service, "/v1/chat/completions", body)
            assert response.status_code == 200, response.text
        assert client.asked[0][1].max_tokens == 3
        assert client.asked[0][1].stop == ("x",)
        every = {"best_of": 2, "n": 2, "echo": False, "suffix": ""}
        assert (await post(service, "/v1/completions", TEXT | every)).status_code == 200

    # The scripted engine knows one choice only; that two were asked for is what counts here.
    run(scene())


def test_what_the_checkpoint_says_stands_in_for_what_is_left_out(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake(sampling_defaults="model")
        defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
        client.info = replace(client.info, sampling_defaults=defaults)
        told = Service(client, service.options)
        for body in (
            TEXT,
            TEXT | {"temperature": None, "top_k": 0},
            TEXT | {"temperature": 0, "repetition_penalty": 1},
        ):
            assert (await post(told, "/v1/completions", body)).status_code == 200
        seen = [(params.temperature, params.top_k, params.repetition_penalty) for _, params, _ in client.asked]
        assert seen == [(0.6, 20, 1.1), (0.6, 0, 1.1), (0.0, 20, 1.0)]
        assert (await call(told, "GET", "/server_info")).json()["sampling_defaults"] == defaults
        openai = Service(client, ServeOptions(sampling_defaults="openai"))
        assert (await post(openai, "/v1/completions", TEXT)).status_code == 200
        assert (client.asked[-1][1].temperature, client.asked[-1][1].top_k) == (1.0, 0)

    run(scene())


def test_messages_reach_the_template(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake()
        seen: list[Any] = []
        client.encode = lambda prompt: seen.append(prompt) or [1]
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        answer = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "audio": None}
        messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}, answer]
        assert (await post(service, "/v1/chat/completions", {"messages": messages})).status_code == 200
        roles = [("system", "s"), ("user", "a\nb"), ("assistant", "c")]
        assert seen == [[{"role": role, "content": text} for role, text in roles]]
        long = [{"role": "user", "content": "x" * 5000}]  # encoded beside the loop
        assert (await post(service, "/v1/chat/completions", {"messages": long})).status_code == 200
        assert seen[-1] == long

    run(scene())


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}", "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 415),
        (b'{"prompt": "' + b"a" * 3000 + b'"}', "application/json", 413),
    ],
    ids=["cut", "list", "surrogate", "nan", "deep", "latin", "huge", "type", "large"],
)
def test_bodies_that_are_none(fake: Any, raw: bytes, kind: str, status: int) -> None:
    async def scene() -> None:
        _, service = fake(max_body_bytes=200_000 if len(raw) >= 100_000 else 2048)
        headers = {"content-type": kind}

        async def chunks() -> Any:
            for at in range(0, len(raw), 1000):
                yield raw[at : at + 1000]

        for content in (raw, chunks()):  # with its length, and without
            response = await call(service, "POST", "/v1/completions", content=content, headers=headers)
            assert response.status_code == status, response.text
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    run(scene())


def test_unknown_paths_methods_and_models(fake: Any) -> None:
    async def scene() -> None:
        _, service = fake()
        for method, path, status in (
            ("GET", "/v2", 404),
            ("GET", "/v1/completions", 405),
            ("GET", "/v1/models/x", 404),
        ):
            response = await call(service, method, path)
            assert response.status_code == status
            assert response.json()["error"]["code"]
            assert path.removeprefix("/v1/models/") in response.json()["error"]["message"]
        response = await post(service, "/v1/completions", TEXT | {"model": "gpt-5"})
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
        assert (await post(service, "/v1/completions", TEXT | {"model": "tiny"})).status_code == 200
        models = (await call(service, "GET", "/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["tiny"]
        assert (await call(service, "GET", "/v1/models/tiny")).json() == models[0]

    run(scene())


def test_key(fake: Any) -> None:
    async def scene() -> None:
        _, service = fake(api_key="key")
        for path in ("/v1/models", "/metrics", "/server_info", "/openapi.json", "/nothing"):
            for header in ({}, {"Authorization": "Bearer kez"}, {"Authorization": "key"}, {"Authorization": "Bearer "}):
                response = await call(service, "GET", path, headers=header)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
        refused = b'requests_refused_total{algorithm="scripted",model="tiny",status="401"} 20.0'
        assert refused in service.metrics.text()
        for path in ("/", "/health"):
            assert (await call(service, "GET", path)).status_code == 200
        response = await call(service, "GET", "/v1/models", headers={"Authorization": "Bearer key"})
        assert response.status_code == 200

    run(scene())


def test_full_queue_is_503_and_nothing_stays_queued(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake((asyncio.Event(), "stop"))
        client.room = 1
        response = await post(service, "/v1/completions", {"prompt": ["a", "b"]})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        await asyncio.sleep(0)
        assert client.submissions[0].aborted.is_set()
        while service.live:
            await asyncio.sleep(0)
        assert client.running == 0

    run(scene())


def test_an_answer_that_fails_is_500_without_paths(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake((b"a", "error"))
        client.speculation = f"failed: {client.error}"
        response = await post(service, "/v1/completions", TEXT)
        assert response.status_code == 500
        message = response.json()["error"]["message"]
        assert "propose raised ValueError" in message
        assert "/srv" not in message
        found = events(await post(service, "/v1/completions", TEXT | {"stream": True}))
        assert found[-1]["error"]["type"] == "server_error"
        assert (await call(service, "GET", "/health")).json()["status"] == "ok"

    run(scene())


def test_an_answer_whose_own_options_leave_no_token_is_400(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake((b"a", "error"))
        client.blame = "request"
        client.error = "response_format: its schema became too complex to follow here; simplify it"
        client.speculation = f"failed: {client.error}"  # what it says does not matter
        response = await post(service, "/v1/completions", TEXT)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")

    run(scene())


def test_failed_speculation_is_said(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake()
        client.speculation = "failed: acme 1.0: propose raised ValueError: x"
        assert (await call(service, "GET", "/health")).json()["speculation"] == client.speculation
        response = await post(service, "/v1/completions", TEXT)
        assert response.json()["usage"]["speculative"]["speculation"] == client.speculation
        assert response.headers["x-specplug-speculation"] == client.speculation
        assert b'specplug:drafter_failed{algorithm="scripted",model="tiny"} 1.0' in service.metrics.text()

    run(scene())


@pytest.mark.parametrize("stream", [False, True])
def test_timeout_ends_the_request(fake: Any, stream: bool) -> None:
    async def scene() -> None:
        client, service = fake((b"a", asyncio.Event(), "stop"), request_timeout=0.05)
        response = await post(service, "/v1/completions", TEXT | {"stream": stream})
        error = events(response)[-1]["error"] if stream else response.json()["error"]
        assert error["code"] == "timeout"
        assert response.status_code == (200 if stream else 504)
        assert client.submissions[0].aborted.is_set()
        while service.live:
            await asyncio.sleep(0)
        assert b'specplug:requests_total{algorithm="scripted",finish_reason="abort",model="tiny"} 1.0' in (
            service.metrics.text()
        )

    run(scene())


@pytest.mark.parametrize("stream", [False, True])
def test_engine_death(fake: Any, stream: bool) -> None:
    async def scene() -> None:
        client, service = fake((b"a", asyncio.Event(), "stop"))
        asking = asyncio.ensure_future(post(service, "/v1/completions", TEXT | {"stream": stream}))
        while not client.submissions:
            await asyncio.sleep(0)
        client.death.set()
        response = await asking
        error = events(response)[-1]["error"] if stream else response.json()["error"]
        assert error["type"] == "server_error"
        assert (await call(service, "GET", "/health")).status_code == 503
        assert (await post(service, "/v1/completions", TEXT)).status_code == 503
        assert (await call(service, "GET", "/metrics")).status_code == 200
        assert b'specplug:up{algorithm="scripted",model="tiny"} 0.0' in service.metrics.text()

    run(scene())


def test_draining_refuses_and_abort_all_ends_what_runs(fake: Any) -> None:
    async def scene() -> None:
        client, service = fake((b"a", asyncio.Event(), "stop"))
        asking = asyncio.ensure_future(post(service, "/v1/completions", TEXT))
        while not client.submissions:
            await asyncio.sleep(0)
        service.draining = True
        assert (await post(service, "/v1/completions", TEXT)).status_code == 503
        assert (await call(service, "GET", "/health")).json()["status"] == "ending"
        service.abort_all()
        response = await asking
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")

    run(scene())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_client_that_leaves_ends_its_request(fake: Any, stream: bool, count: int) -> None:
    async def scene() -> None:
        client, service = fake((b"a", asyncio.Event(), "stop"))
        body = json.dumps({"prompt": ["x"] * count, "stream": stream}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        serving = asyncio.ensure_future(make_app(service)(scope, receive, send))
        while len(client.submissions) < count:
            await asyncio.sleep(0)
        assert service.live == count
        left.set()
        await serving
        while service.live:
            await asyncio.sleep(0)
        assert client.running == 0
        # What came before it left is counted, and so is its end.
        text = service.metrics.text()
        assert f'specplug:generation_tokens_total{{algorithm="scripted",model="tiny"}} {count}.0'.encode() in text
        assert (
            f'specplug:requests_total{{algorithm="scripted",finish_reason="abort",model="tiny"}} {count}.0'.encode()
            in text
        )

    run(scene())


def test_an_internal_fault_has_no_traceback(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        client, service = fake()

        def encode(prompt: Any) -> Any:
            raise RuntimeError("at /secret/place")

        client.encode = encode
        response = await post(service, "/v1/completions", TEXT)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert "Traceback" not in response.text

    run(scene())
