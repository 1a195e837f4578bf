"""The file of ``--speculative-adaptive-config``: SGLang's JSON, and beside it what ``specplug tune`` has measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specplug.adaptive.tiers import SETTINGS, Tier
from specplug.errors import UserError
from specplug.settings import shown

OPTION = "--speculative-adaptive-config"
MEASURED = "measured"
"""Key of what was measured. SGLang ignores keys that it does not know."""
DEEPEST = 512

_WHOLE = {"warmup_batches": 0, "update_interval": 1}
_PARTS = ("verify_ms", "draft_ms", "acceptance")


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs and acceptance to begin with. Written by ``specplug tune``; empty where nothing is known."""

    verify: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(rows, tokens) -> seconds of a forward and of what decides on it."""
    draft: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(rows, depth) -> seconds from one decision to the next forward, drafting included."""
    acceptance: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Rows -> by depth, the share of drafts accepted of those that stood below an accepted one."""

    def as_json(self) -> dict[str, Any]:
        """Return it as the file holds it, in milliseconds."""
        return {
            "verify_ms": [[*at, round(1e3 * seconds, 6)] for at, seconds in sorted(self.verify.items())],
            "draft_ms": [[*at, round(1e3 * seconds, 6)] for at, seconds in sorted(self.draft.items())],
            "acceptance": [[rows, [round(each, 6) for each in by]] for rows, by in sorted(self.acceptance.items())],
        }


@dataclass(frozen=True, slots=True)
class AdaptiveFile:
    """A configuration file that was read."""

    tiers: tuple[Tier, ...]
    measured: Measured = field(default_factory=Measured)


def read_adaptive(path: str, option: str = OPTION) -> AdaptiveFile:
    """Read a configuration file; every fault is a UserError that names `option` and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{option} {path}: cannot read it ({cause}): give a JSON file") from None
    try:
        found = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{option} {path}, line {error.lineno}: not valid JSON ({error.msg}): "
            """write an object like '{"1": {"candidate_steps": [1, 3]}}'"""
        ) from None
    return _Reader(f"{option} {path}", text).file(found)


class _Pairs(dict[str, Any]):
    """An object that remembers which of its names stand there twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.twice = next((name for name in names if names.count(name) > 1), None)


class _Reader:
    def __init__(self, where: str, text: str) -> None:
        self._where = where
        self._text = text

    def file(self, found: Any) -> AdaptiveFile:
        if not isinstance(found, _Pairs):
            raise self._fault((), f"is {shown(found)}", "write a JSON object of batch sizes")
        self._unique(found, ())
        numbered = {name: value for name, value in found.items() if name.isdecimal()}
        shared = {name: value for name, value in found.items() if name not in numbered and name != MEASURED}
        everywhere = {name: self._setting(name, value, ()) for name, value in shared.items()}
        if not numbered:
            raise self._fault((), "names no batch size", """write a tier like "1": {"candidate_steps": [1, 3]}""")
        if len({int(name) for name in numbered}) < len(numbered):
            raise self._fault((), "names a batch size twice", "keep one tier for each")
        tiers = [self._tier(name, value, everywhere) for name, value in numbered.items()]
        measured = self._measured(found[MEASURED]) if MEASURED in found else Measured()
        return AdaptiveFile(tuple(sorted(tiers, key=lambda tier: tier.least)), measured)

    def _tier(self, name: str, value: Any, everywhere: Mapping[str, Any]) -> Tier:
        if int(name) < 1:
            raise self._fault((name,), f"batch size {name}", "give a whole number of at least 1")
        if not isinstance(value, _Pairs):
            raise self._fault((name,), f"is {shown(value)}", """write an object with "candidate_steps\"""")
        self._unique(value, (name,))
        if "candidate_steps" not in value:
            raise self._fault((name,), "has no candidate_steps", "give a list of whole numbers such as [0, 1, 3]")
        steps = value["candidate_steps"]
        if not (isinstance(steps, list) and steps and all(_is_whole(each) and 0 <= each <= DEEPEST for each in steps)):
            how = f"give a list, not empty, of whole numbers from 0 to {DEEPEST}"
            raise self._fault((name, "candidate_steps"), f"is {shown(steps)}", how)
        if len(set(steps)) < len(steps):
            raise self._fault((name, "candidate_steps"), f"is {shown(steps)}", "give each depth once")
        own = {key: self._setting(key, each, (name,)) for key, each in value.items() if key != "candidate_steps"}
        return Tier(int(name), tuple(sorted(steps)), **{**everywhere, **own})

    def _setting(self, name: str, value: Any, where: tuple[str, ...]) -> Any:
        at = (*where, name)
        if name not in SETTINGS:
            known = ", ".join(SETTINGS if where else (*SETTINGS, MEASURED))
            extra = "candidate_steps belongs into a tier; " if name == "candidate_steps" else ""
            raise self._fault(at, "is no setting here", f"{extra}known are batch sizes and {known}")
        if name in _WHOLE:
            if not (_is_whole(value) and value >= _WHOLE[name]):
                raise self._fault(at, f"is {shown(value)}", f"give a whole number of at least {_WHOLE[name]}")
            return value
        if not _is_number(value):
            raise self._fault(at, f"is {shown(value)}", "give a number")
        if name == "ema_alpha" and not 0 < value <= 1:
            raise self._fault(at, f"is {shown(value)}", "give a number above 0 and at most 1")
        if name == "ceiling_coeff" and value < 0:
            raise self._fault(at, f"is {shown(value)}", "give a number of at least 0; 0 is no ceiling")
        return float(value)

    def _measured(self, value: Any) -> Measured:
        if not isinstance(value, _Pairs):
            raise self._fault((MEASURED,), f"is {shown(value)}", "leave it as specplug tune wrote it")
        for name, entries in value.items():
            if name in _PARTS and not isinstance(entries, list):
                raise self._fault((MEASURED, name), f"is {shown(entries)}", "leave it as specplug tune wrote it")
        acceptance: dict[int, Sequence[float]] = {}
        for entry in value.get("acceptance", []):
            if not (
                isinstance(entry, list)
                and len(entry) == 2
                and _is_whole(entry[0])
                and entry[0] >= 1
                and isinstance(entry[1], list)
                and all(_is_number(each) and 0 <= each <= 1 for each in entry[1])
            ):
                how = "write [rows, [shares from 0 to 1]]"
                raise self._fault((MEASURED, "acceptance"), f"has the entry {shown(entry)}", how)
            acceptance[entry[0]] = entry[1]
        return Measured(self._times(value, "verify_ms", 1), self._times(value, "draft_ms", 0), acceptance)

    def _times(self, value: Mapping[str, Any], name: str, least: int) -> dict[tuple[int, int], float]:
        found = {}
        for entry in value.get(name, []):
            if not (
                isinstance(entry, list)
                and len(entry) == 3
                and all(_is_whole(each) for each in entry[:2])
                and entry[0] >= 1
                and entry[1] >= least
                and _is_number(entry[2])
                and entry[2] >= 0
            ):
                what = "tokens" if least else "depth"
                raise self._fault((MEASURED, name), f"has the entry {shown(entry)}", f"write [rows, {what}, ms]")
            found[entry[0], entry[1]] = entry[2] / 1e3
        return found

    def _unique(self, found: _Pairs, where: tuple[str, ...]) -> None:
        if found.twice is not None:
            raise self._fault((*where, found.twice), "stands there twice", "keep one of them")

    def _fault(self, keys: tuple[str, ...], said: str, remedy: str) -> UserError:
        """Return the error for what stands under `keys`, one name inside the other."""
        at = 0
        for key in keys:
            at = max(at, self._text.find(json.dumps(key), at))
        line = self._text.count("\n", 0, at) + 1
        what = " ".join(keys)
        return UserError(f"{self._where}, line {line}: {what + ' ' if what else 'it '}{said}: {remedy}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
