"""The status page: what it consists of, what its script does in node, and all of it in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

STUB = """
// As much of a browser as the page uses: elements with text, and fetch of the server under test.
class Element {
  constructor() { Object.assign(this, { children: [], listeners: {}, textContent: "", className: "", value: "" }); }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  addEventListener(name, work) { this.listeners[name] = work; }
  get text() { return this.textContent + this.children.map((c) => c.text ?? c).join(""); }
}
const elements = {};
globalThis.document = {
  getElementById: (id) => elements[id] ??= new Element(),
  createElement: () => new Element(),
};
const base = process.argv[2], direct = globalThis.fetch;
globalThis.fetch = (path, options) => direct(base + "/" + path, options);
const el = globalThis.document.getElementById;
el("key").value = process.argv[3]; el("prompt").value = "abcabc"; el("most").value = "8"; el("temperature").value = "0";
el("chat").checked = process.argv[4] === "chat"; el("drafts").checked = true;
"""

ACT = """
(async () => {
  const event = makeEvents(), pieces = makePieces();
  const split = [...event('data: {"a"'), ...event(':1}\\n'), ...event('\\ndata: [DONE]\\n\\ndata: {"b":2}\\n\\n')];
  const seed = event('data: {"seed":3988877397123069999,"text":"\\\\"seed\\\\":1"}\\n\\n');
  const text = pieces([
    { bytes: [0xc3], depth: 1, corrected: false }, { bytes: [0xa9, 0x61], depth: 0, corrected: true },
    { bytes: [0x62], depth: 0, corrected: false },
  ]);
  await el("ask").listeners.submit({ preventDefault() {} });
  await refresh();
  console.log(JSON.stringify({
    split, seed, text, model: el("model").text, about: el("about").text, tiles: el("tiles").text,
    result: el("result").text,
    bars: el("bars").children.map((bar) => bar.text), answer: el("answer").text,
    spans: el("answer").children.map((span) => span.className), send: el("send").disabled,
  }));
  process.exit(0);
})();
"""


@pytest.fixture(scope="module")
def page(serving: Any) -> httpx.Response:
    return httpx.get(serving.url)


def test_nothing_foreign_and_nothing_missing(page: httpx.Response) -> None:
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    found: dict[str, str] = {}

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            assert not {name for name in given if name.startswith("on") or name in ("style", "src", "href")}
            if name := given.get("id"):
                assert name not in found
                found[name] = tag

    Reader().feed(page.text)
    used = set(re.findall(r'byId\("(\w+)"\)', page.text))
    assert used <= found.keys()
    assert {"tiles", "bars", "requests", "prompt", "answer", "alarm"} <= used
    assert "innerHTML" not in page.text  # what a model writes is text


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_its_script_against_the_server(serving: Any, page: httpx.Response, kind: str, tmp_path: Any) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node to run the script")
    script = re.search(r"<script>(.*)</script>", page.text, re.DOTALL)
    assert script is not None
    file = tmp_path / "page.js"
    file.write_text(STUB + script[1].replace('"use strict";', "") + ACT, encoding="utf-8")
    done = subprocess.run(
        [node, str(file), serving.url, "let-me-in", kind], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["split"] == [{"a": 1}, {"b": 2}]
    assert found["seed"] == [{"seed": "3988877397123069999", "text": '"seed":1'}]
    kinds = [(piece["text"], piece["kind"]) for piece in found["text"]]
    assert kinds == [("", "draft"), ("éa", "corrected"), ("b", "own")]
    assert found["model"] == "tiny"
    assert "scripted (specplug-scripted 0.1.0)" in found["about"]
    assert "tokens/s" in found["tiles"]
    assert found["bars"]
    assert found["send"] is False
    assert len(found["spans"]) == 8
    assert found["spans"] == ["own", *["draft", "draft", "corrected"] * 2, "own"]
    assert len(found["answer"]) == 8
    assert found["result"].startswith("8 tokens, ")


# --- in a browser --------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PATIENCE = 30.0

WHEN = """
new Promise((resolve) => {
  const look = () => { const found = (%s)(); if (found) { watch.disconnect(); resolve(found); } };
  const watch = new MutationObserver(look);
  watch.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
  look();
})
"""
"""Resolves with what a function returns once that is something, looked at whenever the page changes."""


class Browser:
    """Headless Chromium, spoken to by the DevTools protocol through its pipe: JSON, a zero byte between messages."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        arguments = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        arguments += [
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-proxy-server",
        ]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # which refuses to run as root
        # It reads 3 and writes 4; a shell gives them those numbers.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, program, *arguments],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._numbers = count(1)
        self._rest = b""
        self._session: dict[str, str] = {}
        self._at, self._loaded = "", False
        self.faults: list[str] = []
        """What the console complained about: exceptions, and what the content policy stopped."""

    def open(self, url: str) -> None:
        """Load a page, and go on in it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for part in ("Page", "Runtime", "Log"):
            self.call(f"{part}.enable")
        self.call("Page.navigate", url=url)
        while not self._loaded or self._at.rstrip("/") != url:
            self._next(monotonic() + PATIENCE)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = monotonic() + PATIENCE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, code: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def when(self, function: str) -> Any:
        """Return what a function in the page returns, once it returns something that is true."""
        return self.run(WHEN % function)

    def click(self, name: str) -> None:
        """Press and release the mouse on the element with this id."""
        element = f"document.getElementById('{name}')"
        self.run(f"{element}.scrollIntoView()")
        box = self.run(f"{element}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, name: str, text: str) -> None:
        """Take the place of what stands in a field."""
        self.run(f"document.getElementById('{name}').select()")
        self.call("Input.insertText", text=text)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def _next(self, deadline: float) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], max(0.0, deadline - monotonic()))[0], "the browser does not answer"
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        raw, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(raw)
        if message.get("method") == "Page.frameNavigated":
            self._at, self._loaded = message["params"]["frame"]["url"], False
        elif message.get("method") == "Page.loadEventFired":
            self._loaded = True
        elif message.get("method") == "Runtime.exceptionThrown":
            self.faults.append(message["params"]["exceptionDetails"]["text"])
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            entry = message["params"]["entry"]
            self.faults.append(f"{entry['text']} {entry.get('url')}")
        return message


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to look at the page with")
    browser = Browser(CHROMIUM, tmp_path / "profile")
    yield browser
    browser.close()


SPANS = """() => byId("result").textContent && [...byId("answer").children].map((span) => [
  span.className, span.textContent, getComputedStyle(span).backgroundColor, getComputedStyle(span).borderBottomStyle,
])"""
BARS = """() => {
  const bars = [...document.querySelectorAll("#bars meter")];
  const found = bars.map((meter) => [meter.parentNode.textContent, meter.value, meter.getBoundingClientRect().width]);
  return JSON.stringify(found.map((bar) => bar[0])) === %s && found;
}"""


def test_a_prompt_in_a_browser(serving: Any, browser: Browser) -> None:
    browser.open(serving.url)
    browser.when("() => byId('about').textContent.includes('the API key is missing or wrong')")
    browser.write("key", "let-me-in")
    browser.when("() => byId('about').textContent.includes('scripted (specplug-scripted 0.1.0)')")
    assert browser.run("document.getElementById('model').textContent") == "tiny"
    browser.write("prompt", "abcabc")
    browser.write("most", "8")
    browser.click("send")
    spans = browser.when(SPANS)
    kinds = ["own", *["draft", "draft", "corrected"] * 2, "own"]
    assert [kind for kind, *_ in spans] == kinds
    assert len("".join(text for _, text, *_ in spans)) == 8
    # Breaks with: a style that the content policy stops, two kinds of one look.
    looks = {kind: (colour, line) for kind, _, colour, line in spans}
    assert len(set(looks.values())) == 3
    assert looks["own"][0] == "rgba(0, 0, 0, 0)"
    assert len({looks[kind][0] for kind in ("draft", "corrected", "own")}) == 3
    assert browser.run("byId('result').textContent").startswith("8 tokens, 4 of 6 drafts accepted")
    ledger = httpx.get(f"{serving.url}/server_info", headers={"Authorization": "Bearer let-me-in"}).json()["ledger"]
    shares = [at["conditional"] for at in ledger["acceptance_by_depth"]]
    assert len(shares) == 3
    assert shares[2] == 0.0 < shares[0]
    texts = [
        f"depth {depth}{int(100 * share + 0.5)} % of {seen}"
        for depth, (share, seen) in enumerate(zip(shares, ledger["reached"], strict=True), 1)
    ]
    bars = browser.when(BARS % json.dumps(json.dumps(texts, separators=(",", ":"))))
    assert [value for _, value, _ in bars] == pytest.approx(shares)
    assert all(width > 50 for *_, width in bars)
    assert browser.run("getComputedStyle(byId('alarm')).display") == "none"
    assert [fault for fault in browser.faults if "401" not in fault] == []  # those before the key was typed


def test_running_requests_and_the_alarm_in_a_browser(
    model_folder: Path, site: Path, drafts: str, make_server: Callable[..., Any], browser: Browser
) -> None:
    wrong = json.dumps(json.loads(drafts) | {"scripted_behaviour": "wrong"})
    server = make_server(
        *(model_folder, site, "--speculative-algorithm", "scripted", "--speculative-config", wrong),
        *("--context-length", "96", "--page-size", "4", "--max-running-requests", "2"),
    )
    done = threading.Event()

    def ask() -> None:
        body = {"prompt": "abcabc", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "n": 2}
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            while not done.is_set():
                client.post("/v1/completions", json=body).raise_for_status()

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        browser.open(server.url)
        rows = browser.when(
            "() => byId('requests').children.length > 2 && "
            "[...byId('requests').children].map((row) => [...row.children].map((cell) => cell.textContent))"
        )
        text = browser.when("() => byId('alarm').className === 'on' && byId('alarm').textContent")
        shown = browser.run("getComputedStyle(byId('alarm')).display")
        tiles = browser.run("[...byId('tiles').children].map((tile) => tile.textContent)")
    finally:
        done.set()
        for client in clients:
            client.join()
    assert {row[1] for row in rows} == {"running", "queued"}
    assert sum(row[1] == "running" for row in rows) == 2
    assert {row[2] for row in rows} == {"6"}
    assert all(row[5] == "0" for row in rows)  # nothing is accepted
    assert text == "Alarm: almost no first draft is accepted. Does the draft belong to this model?"
    assert shown == "block"
    assert "accept rate" in tiles[4]
    assert browser.faults == []
