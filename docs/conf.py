"""The site: Sphinx reads the Markdown of this folder. ``nox -s docs`` builds it."""

import re
from importlib.metadata import version as installed
from typing import Any

project = "specplug"
author = "the specplug authors"
release = version = installed("specplug")

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # an option's page may jump a level
root_doc = "README"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"specplug {release}"
html_copy_source = False

# What an index page links to is what stands below it in the menu, so a page that no index names is a warning.
_INDEX = re.compile(r"\]\((?!\.\.)([\w./-]+)\.md\)")
_LINK = re.compile(r"\[([^\]\n]*(?:\n[^\]\n]+)?)\]\(((?:\.\./)+[^)\s]+)\)")


def _prepare(app: Any, name: str, source: list[str]) -> None:
    """Turn links to files beside this folder into their paths, and give an index its menu."""
    up = name.count("/") + 1

    def shown(match: re.Match[str]) -> str:
        text, target = match.groups()
        if not target.startswith("../" * up):
            return match.group()
        path = target.removeprefix("../" * up)
        return f"`{path}`" if text in (path, target) else f"{text} (`{path}`)"

    text = _LINK.sub(shown, source[0])
    if name.endswith("README"):
        pages = dict.fromkeys(_INDEX.findall(text))
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    source[0] = text


def setup(app: Any) -> None:
    """Tell Sphinx of it."""
    app.connect("source-read", _prepare)
