"""The status page: one file of plain HTML, and the headers that keep anything else out of it."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

PAGE = files("specplug.serve").joinpath("page.html").read_text(encoding="utf-8")


def _digests(tag: str) -> str:
    """Return the CSP sources of the page's inline elements of this kind."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


HEADERS = {
    # Nothing but its own script runs, and it talks to its own server only, whatever a model writes.
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_digests('script')}; style-src {_digests('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
