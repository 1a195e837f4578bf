"""The kinds of drafts that can be trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dflash import DFlash
from draft import Draft
from eagle3 import Eagle3
from mtp import Mtp
from standalone import Standalone

from specplug import UserError

KINDS: Mapping[str, type[Draft]] = {"eagle3": Eagle3, "mtp": Mtp, "dflash": DFlash, "standalone": Standalone}
"""Word of ``--kind`` -> what it means."""


def kind_in(folder: Path) -> str:
    """Return the kind of the draft in `folder`, by its ``config.json``."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"--draft {folder}: there is no config.json; give a folder that train.py wrote")
    named = json.loads(path.read_text(encoding="utf-8")).get("architectures") or ["none"]
    for word, kind in KINDS.items():
        if kind.architecture == named[0]:
            return word
    known = ", ".join(kind.architecture for kind in KINDS.values())
    raise UserError(f"--draft {folder}: its architecture is {named[0]}, and train.py writes {known}")
