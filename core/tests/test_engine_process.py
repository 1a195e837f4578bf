"""The engine in its own process, against an engine in this one; and what happens when either side goes away."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from time import monotonic

import pytest

from specplug.errors import RefusedError, UserError
from specplug.runtime.engine import Engine
from specplug.sampling import SamplingParams
from specplug.serve.engine_process import EngineArgs, EngineClient, EngineDiedError, QueueFullError
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import EOS, SIZE, byte_tokenizer

LONG = SamplingParams(temperature=1.0, seed=1, max_tokens=480, ignore_eos=True)
OPTIONS = (
    {"temperature": 0.0, "max_tokens": 20},
    {"temperature": 1.0, "seed": 5, "max_tokens": 40, "n": 2},
    {"temperature": 0.9, "seed": 6, "max_tokens": 20, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "seed": 7, "max_tokens": 60, "stop": ("a", "é", "0"), "ignore_eos": True},
    {"temperature": 1.0, "seed": 8, "max_tokens": 60, "stop_token_ids": tuple(range(0, 256, 9))},
    {"temperature": 1.0, "seed": 9, "max_tokens": 90, "response_format": {"type": "json_object"}},
    {"temperature": 1.0, "seed": 9, "max_tokens": 9, "detokenize": False},
)


class Side:
    """An event loop in a thread of its own, as a server has one."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def run(self, work: Coroutine):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=120)

    def end(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def side():
    side = Side()
    yield side
    side.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    decoder_target(1, SIZE, folder=place, tokenizer=byte_tokenizer(), eos=EOS)
    return place


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    place = tmp_path_factory.mktemp("plugins")
    return place, bench_registry(place)


@pytest.fixture(scope="module")
def args(folder, plugins):
    options = {"max_running_requests": 4, "max_queued_requests": 6, "speculative_alarm_below": 0.0}
    return EngineArgs(str(folder), "scripted-dense", {"scripted_spread": 0.5}, options, search_path=(str(plugins[0]),))


@pytest.fixture(scope="module")
def client(side, args):
    client = side.run(EngineClient.start(args))
    yield client
    side.run(client.close())


async def read(submission, choices=1):
    found = [[] for _ in range(choices)]
    async for delta in submission:
        found[delta.choice].append(delta)
    return found


def test_answers_are_those_of_an_engine_in_this_process(side, client, args, plugins):
    prompts = ["hello", "é", [3, 200, 10]]

    async def ask():
        submitted = [
            (options, await client.submit(prompt, SamplingParams(**options)))
            for options in OPTIONS
            for prompt in prompts[: 1 + 6 // len(OPTIONS)]
        ]
        return [(options, submission, await read(submission, options.get("n", 1))) for options, submission in submitted]

    with Engine(
        args.model, algorithm=args.algorithm, config=args.config, registry=plugins[1], **args.options
    ) as engine:
        wanted = engine.generate([prompts[0]] * len(OPTIONS), list(OPTIONS))
        found = side.run(ask())
        results = iter(wanted)
        for options, submission, choices in found:
            assert submission.prompt_tokens == 5
            for at, deltas in enumerate(choices):
                result = next(results)
                assert result.choice == at
                assert [token for delta in deltas for token in delta.ids] == result.ids
                # Breaks with: text of both sides, a last character that is not flushed, EOS in the text.
                assert "".join(delta.text for delta in deltas) == result.text
                assert submission.seed == result.seed or "seed" not in options
                end = deltas[-1].end
                assert [delta.end for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
                assert end.finish_reason == result.finish_reason
                assert end.completion_tokens == len(result.ids)
                assert end.ledger == result.ledger
                depths = [depth for delta in deltas for depth in delta.depths]
                assert len(depths) == len(result.ids)
                assert sum(depth > 0 for depth in depths) == result.ledger["accepted"]
                corrected = [one for delta in deltas for one in delta.corrected]
                assert len(corrected) == len(depths)
                assert not any(depth and one for depth, one in zip(depths, corrected, strict=True))
                assert any(corrected) == (result.ledger["accepted"] < result.ledger["path"])
                entries = [entry for delta in deltas for entry in delta.logprobs or ()]
                for entry, asked in zip(entries, result.logprobs or (), strict=True):
                    assert entry.token == asked.token
                    assert entry.logprob == pytest.approx(asked.logprob, abs=1e-3)  # another batch, another rounding
                    assert [token for token, _ in entry.top] == [token for token, _ in asked.top]
        assert next(results, None) is None


def test_what_it_tells_of_the_engine(client, args):
    info = client.info
    assert (info.model, info.algorithm, info.vocab, info.eos_ids) == (args.model, "scripted-dense", SIZE, (EOS,))
    assert info.distribution == "specplug-scripted 0.1.0"
    assert (info.nodes, info.depth) == (3, 3)
    assert info.settings["scripted_spread"] == {"value": 0.5, "source": "user", "because": ""}
    assert client.encode("é") == [0xC3, 0xA9]
    assert not client.dead


def test_when_a_delta_was_committed(side, client):
    async def ask():
        begin, times = monotonic(), []
        submission = await client.submit("x", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        async for _ in submission:
            times.append((submission.committed, monotonic()))
        return begin, times

    begin, times = side.run(ask())
    committed = [at for at, _ in times]
    assert len(times) > 2
    assert committed == sorted(set(committed))  # each step has its own
    assert begin < committed[0]
    assert all(at < read for at, read in times)


def test_a_snapshot_adds_up(side, client):
    async def look():
        before = await client.snapshot()
        submission = await client.submit("x", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, n=2))
        during = await client.snapshot()
        await read(submission, 2)
        return before, during, await client.snapshot()

    before, during, after = side.run(look())
    assert {state.choice for state in during.requests} == {0, 1}
    assert during.running + during.queued == 2
    assert (after.running, after.queued, after.requests) == (0, 0, ())
    assert after.free_pages == after.pages == client.info.pages
    assert after.kv_use == 0.0
    assert (after.depth, after.width, after.speculation, after.alarm) == (3, 4, "on", False)
    was, now = before.counters, after.counters
    assert now.submitted - was.submitted == 2
    assert now.finished["length"] - was.finished.get("length", 0) == 2
    assert now.emitted - was.emitted == 60
    assert now.accepted - was.accepted <= now.drafted - was.drafted
    assert now.emitted == after.report["output_tokens"]
    assert all(now.seconds[stage] >= spent for stage, spent in was.seconds.items())


def test_what_a_request_asks_in_vain_is_a_user_error(side, client):
    for prompt, options, says in (
        ("x", {"logit_bias": {300: 1.0}}, "logit_bias names token 300"),
        ("", {}, "the prompt is empty"),
        ([1] * 600, {}, "the prompt has 600 tokens"),
        ("x", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "Invalid type"),
        ([{"role": "user", "content": "x"}], {}, "no chat template"),
    ):
        with pytest.raises(UserError, match=says):
            side.run(client.submit(prompt, SamplingParams(**options)))
    assert not client._submissions
    assert not client._left


def test_one_that_is_not_read_holds_nobody_up_and_an_abort_gives_its_pages_back(side, client):
    async def work():
        unread = await client.submit("x", LONG)
        await read(await client.submit("y", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)))
        unread.abort()
        (deltas,) = await read(unread)
        unread.abort()  # it has ended: nothing happens
        client.abort(10**9)
        return deltas, await client.snapshot()

    deltas, after = side.run(work())
    assert deltas[-1].end.finish_reason == "abort"
    assert sum(len(delta.ids) for delta in deltas) == deltas[-1].end.completion_tokens < 480
    assert after.free_pages == after.pages
    assert after.counters.finished["abort"] >= 1


def test_a_full_queue_refuses_and_goes_on(side, client):
    async def work():
        accepted, refused = [], []
        for _ in range(16):
            try:
                accepted.append(await client.submit("x", LONG))
            except QueueFullError as error:
                refused.append(str(error))
        for submission in accepted:
            submission.abort()
            await read(submission)
        return refused, await client.snapshot()

    refused, after = side.run(work())
    assert 0 < len(refused) <= 6
    assert all("--max-queued-requests" in line for line in refused)
    assert (after.running, after.queued) == (0, 0)


def test_a_submit_that_is_cancelled_leaves_nothing_running(side, client):
    async def work():
        for options in (
            LONG,
            LONG.model_copy(update={"ignore_eos": False, "response_format": {"type": "json_object"}}),
        ):
            task = asyncio.ensure_future(client.submit("x", options))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # A later one is behind both in every queue.
        schema = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}
        await read(await client.submit("x", SamplingParams(max_tokens=3, response_format=schema)))
        return await client.snapshot()

    after = side.run(work())
    assert after.requests == ()
    assert not client._submissions


def test_signals_to_the_group_do_not_cut_off_what_is_drained_and_a_dead_engine_is_told_of(side, args):
    async def work():
        client = await EngineClient.start(args)
        pid = client._process.pid
        submission = await client.submit("x", LONG)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        first = await anext(submission)
        pending = asyncio.ensure_future(client.snapshot())
        os.kill(pid, signal.SIGKILL)
        why = await client.wait_dead()
        with pytest.raises(EngineDiedError, match="signal 9"):
            await read(submission)
        await asyncio.gather(pending, return_exceptions=True)
        for call in (lambda: client.submit("x", LONG), client.snapshot):
            with pytest.raises(EngineDiedError, match="signal 9"):
                await call()
        await client.close()
        return first, why

    first, why = side.run(work())
    assert first.end is None
    assert why == "the engine's process ended (killed by signal 9)"


def test_a_close_drains_and_then_aborts(side, args):
    async def work():
        client = await EngineClient.start(args)
        short = await client.submit("x", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        closing = asyncio.ensure_future(client.close(drain=60.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDiedError, match="shutting down"):
            await client.submit("x", LONG)
        (deltas,) = await read(short)
        assert deltas[-1].end.finish_reason == "length"
        await closing
        assert (client.dead, client._process.exitcode) == ("closed", 0)
        await client.close()

        client = await EngineClient.start(args)
        long = await client.submit("x", LONG)
        closing = asyncio.ensure_future(client.close(drain=60.0))
        await asyncio.sleep(0)
        await client.close(drain=0.0)  # less patience
        (deltas,) = await read(long)
        assert deltas[-1].end.finish_reason == "abort"
        await closing
        return client._process.exitcode

    assert side.run(work()) == 0


def test_a_start_that_fails_says_what_an_engine_in_this_process_says(side, args, plugins, tmp_path):
    cases = [
        (EngineArgs(str(tmp_path / "nothing")), UserError),
        (EngineArgs(args.model, "scripted", {"scripted_n": -1}, search_path=args.search_path), RefusedError),
    ]
    for wrong, kind in cases:
        with pytest.raises(UserError) as here:
            Engine(wrong.model, algorithm=wrong.algorithm, config=wrong.config, registry=plugins[1])
        with pytest.raises(kind) as there:
            side.run(EngineClient.start(wrong))
        assert str(there.value) == str(here.value)


def test_an_engine_that_dies_while_it_starts_is_told_of(side, args):
    async def work():
        before = set(multiprocessing.active_children())
        starting = asyncio.ensure_future(EngineClient.start(args))
        while not (found := set(multiprocessing.active_children()) - before):
            await asyncio.sleep(0.01)
        for each in found:
            each.kill()
        await starting

    # Breaks where this side keeps the other end of the pipe open.
    with pytest.raises(EngineDiedError, match="signal 9"):
        side.run(asyncio.wait_for(work(), 60))


ORPHAN = """
import asyncio, os, sys
import transformers.tokenization_utils_tokenizers
brought = "torch" in sys.modules  # by transformers itself, as 5.17 does
from specplug.serve.engine_process import EngineArgs, EngineClient

async def main():
    client = await EngineClient.start(EngineArgs(sys.argv[1]))
    assert client.tokenizer is not None and client.encode("a") == [97]
    assert brought or "torch" not in sys.modules
    print("started", flush=True)
    os._exit(7)  # nothing is closed

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_engine_ends_with_a_server_that_dies_and_the_server_needs_no_torch(args, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(ORPHAN, encoding="utf-8")
    # The engine holds this pipe too, so that reading it to its end waits for both.
    ended = subprocess.run([sys.executable, str(script), args.model], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout == "started\n"
