"""Server processes from start to end: refusals before loading, draining, a failing drafter, a killed engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specplug import cli
from specplug.testing.tokenizer import EOS

LONG = {"prompt": "abc", "ignore_eos": True, "temperature": 0}
SMALL = ("--context-length", "480", "--page-size", "8")


def child_of(process: subprocess.Popen[str]) -> int:
    """The engine's process id: the child that multiprocessing spawned."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    for thread in Path(f"/proc/{process.pid}/task").iterdir() if not found else ():
        found += [int(pid) for pid in (thread / "children").read_text().split()]
    return next(pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def state(url: str) -> Any:
    return httpx.get(f"{url}/server_info").json()


def streamed(url: str, body: Any, started: threading.Event | None = None, stop_after: int | None = None) -> list[Any]:
    """Ask for a stream and return its events; `stop_after`: leave after that many."""
    found: list[Any] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=30) as response:
        if response.status_code != 200:
            return [response.status_code]
        for line in response.iter_lines():
            if line:
                found.append(line.removeprefix("data: "))
                if started is not None:
                    started.set()
                if stop_after is not None and len(found) >= stop_after:
                    return found
    return found


# --- before anything is loaded -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--port", "x"], "--port x"),
        (["--request-timeout", "0"], "--request-timeout 0"),
        (["--max-body-bytes", "1"], "--max-body-bytes 1"),
        (["--sampling-defaults", "vllm"], "--sampling-defaults vllm"),
        (["--api-key", " "], "--api-key"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--speculative-algorithm", "nothing-like-it"], "nothing-like-it"),
    ],
)
def test_a_mistake_is_one_line(model_folder: Path, capsys: Any, args: list[str], said: str) -> None:
    if args[0] == "--speculative-algorithm":
        args = [*args, "--dry-run"]
    assert cli.main(["serve", str(model_folder), *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken(model_folder: Path, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(model_folder), "--port", str(port)]) == 2
    assert f"--port {port}: cannot listen there" in capsys.readouterr().err


def test_a_missing_extra_is_named(model_folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specplug.cli import serve

    monkeypatch.setattr(serve, "NEEDED", ("a_module_that_is_not_there",))
    assert cli.main(["serve", str(model_folder)]) == 2
    assert "specplug serve needs a_module_that_is_not_there: pip install 'specplug[serve]'" in capsys.readouterr().err


def test_dry_run_says_what_doctor_says(model_folder: Path, capsys: Any) -> None:
    assert cli.main(["serve", str(model_folder), "--dry-run"]) == 0
    mine = capsys.readouterr().out
    assert cli.main(["doctor", "none", str(model_folder)]) == 0
    assert capsys.readouterr().out == mine
    assert "usable: none" in mine


def test_dry_run_and_help_import_no_torch(model_folder: Path) -> None:
    code = "import sys; from specplug import cli; cli.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for args in (["serve", str(model_folder), "--dry-run"], ["serve", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_refused_start(model_folder: Path) -> None:
    command = [sys.executable, "-m", "specplug", "serve", str(model_folder), "--port", "0", "--context-length", "9999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --context-length 9999")
    assert "Traceback" not in done.stderr


# --- the end -----------------------------------------------------------------------------------------------------


def test_sigterm_drains_then_ends(model_folder: Path, site: Path, make_server: Any) -> None:
    server = make_server(model_folder, site, *SMALL)
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(streamed, server.url, LONG, started)
        assert started.wait(20)
        code, err = server.stop()
        events = asking.result()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert code == 0
    assert "Traceback" not in err


def test_an_impatient_end_cuts_answers_and_says_so(fake: Any) -> None:
    """The same end with a scripted engine that never comes to its own, and no time to wait for it."""
    from specplug.serve.run import HttpServer

    async def scene() -> None:
        client, service = fake((b"a", asyncio.Event(), "stop"), drain_timeout=0)
        server = HttpServer(service)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            running = asyncio.ensure_future(server.serve(sockets=[listening]))
            while not server.started:
                await asyncio.sleep(0)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            started = threading.Event()
            loop = asyncio.get_running_loop()
            asking = loop.run_in_executor(None, streamed, url, LONG, started)
            assert await loop.run_in_executor(None, started.wait, 20)
            server.handle_exit(signal.SIGTERM, None)
            events = await asking
            await running
        assert json.loads(events[-1])["error"]["code"] == "unavailable"
        assert client.running == 0
        service.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_drafter_that_raises_then_an_engine_that_is_killed(model_folder: Path, site: Path, make_server: Any) -> None:
    """Its step's requests end with an error that names it, eight at once; later ones are plain and say so."""
    server = make_server(
        *(model_folder, site, *SMALL, "--speculative-algorithm", "scripted"),
        *("--speculative-scripted-behaviour", "raise_propose"),
    )

    def ask(at: int) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 20}, timeout=30)

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(ask, range(8)))
    failed = [response for response in responses if response.status_code != 200]
    assert failed
    for response in failed:
        assert response.status_code == 500
        message = response.json()["error"]["message"]
        assert message.startswith("specplug-scripted 0.1.0 (scripted): propose raised RuntimeError")
        assert str(site) not in message
    assert httpx.get(f"{server.url}/health").json()["speculation"].startswith("failed: ")
    later = ask(0)
    assert later.status_code == 200
    assert later.json()["usage"]["speculative"]["speculation"].startswith("failed: ")
    assert later.headers["x-specplug-speculation"].startswith("failed: ")
    now = state(server.url)
    assert now["now"]["free_pages"] == now["kv"]["pages"]
    assert 'drafter_failed{algorithm="scripted",model="tiny"} 1.0' in httpx.get(f"{server.url}/metrics").text
    # The engine of the same server is killed in mid-answer.
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(streamed, server.url, LONG, started)
        assert started.wait(20)
        os.kill(child_of(server.process), signal.SIGKILL)
        events = asking.result()
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    server.process.wait(20)
    code, err = server.stop()
    assert code == 1
    assert "error: the engine" in err


# --- many clients ------------------------------------------------------------------------------------------------


def test_many_clients_some_of_whom_leave(model_folder: Path, site: Path, make_server: Any) -> None:
    """64 clients, each with a few requests, random ones leave in mid-answer: every page is back, counts agree."""
    server = make_server(
        *(model_folder, site, "--context-length", "128", "--page-size", "4", "--max-running-requests", "8"),
        *("--speculative-algorithm", "scripted", "--speculative-num-draft-tokens", "4"),
        *("--speculative-scripted-behaviour", "random_tree"),
        *("--max-queued-requests", "48", "--max-total-tokens", "512"),
    )

    def work(seed: int) -> tuple[int, int, int, int]:
        """Return counts of: finished, their tokens, those left, those refused."""
        rng = random.Random(seed)
        finished = tokens = left = refused = 0
        for _ in range(2):
            count = rng.randint(1, 24)
            body = {
                "prompt": "".join(rng.choices("abcdefgh", k=rng.randint(1, 40))),
                "max_tokens": count,
                "seed": seed,
                "temperature": rng.choice((0, 1)),
                "stream_options": {"include_usage": True},
                "speculative": {"enabled": rng.random() < 0.7},
                "logit_bias": {str(EOS): -100},
            }
            leave = rng.randint(1, 4) if rng.random() < 0.4 else None
            events = streamed(server.url, body, stop_after=leave)
            if events[0] == 503:
                refused += 1
            elif events[-1] == "[DONE]":
                usage = json.loads(events[-2])["usage"]
                assert usage["completion_tokens"] == count
                finished, tokens = finished + 1, tokens + count
            else:
                assert leave is not None, events[-1]
                left += 1
        return finished, tokens, left, refused

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(work, range(64)))
    finished, tokens, left, refused = (sum(each) for each in zip(*results, strict=True))
    assert finished + left + refused == 128
    assert finished > 20
    assert left > 5
    for _ in range(200):
        now = state(server.url)
        if not now["now"]["running"] + now["now"]["queued"]:
            break
    assert now["now"]["free_pages"] == now["kv"]["pages"]
    assert now["now"]["requests"] == []
    rows = [line.rsplit(" ", 1) for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line[0] != "#"]
    found = {name: float(value) for name, value in rows}
    label = 'algorithm="scripted",'
    ended = {
        reason: found[f'specplug:requests_total{{{label}finish_reason="{reason}",model="tiny"}}']
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended["stop"] == ended["error"] == 0
    assert ended["length"] + ended["abort"] == finished + left
    assert ended["length"] >= finished
    assert found[f'specplug:generation_tokens_total{{{label}model="tiny"}}'] >= tokens
    ledger = now["ledger"]
    assert ledger["output_tokens"] == found[f'specplug:generation_tokens_total{{{label}model="tiny"}}']
    assert 0 <= ledger["accepted"] <= ledger["drafted"]
    assert ledger["drafted"]
    code, err = server.stop()
    assert code == 0
    assert "Traceback" not in err
