"""The status page: what it consists of, and what its script does with a real server, in node where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
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
  const text = pieces([
    { bytes: [0xc3], depth: 1, corrected: false }, { bytes: [0xa9, 0x61], depth: 0, corrected: true },
    { bytes: [0x62], depth: 0, corrected: false },
  ]);
  await el("ask").listeners.submit({ preventDefault() {} });
  await refresh();
  console.log(JSON.stringify({
    split, text, model: el("model").text, about: el("about").text, tiles: el("tiles").text, result: el("result").text,
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
