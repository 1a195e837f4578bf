"""Stub distributions on disk, sound or with one fault each, for tests of discovery and names.

A stub is a real ``.dist-info`` folder with a real package beside it, written into a folder that a
test puts on the path::

    good = Stub("acme-lookup", algorithms=["lookup"], aliases={"lookup": ["find"]})
    bad = Stub("acme-bad", algorithms=["bad"], fault="system-exit")
    with stub_registry(tmp_path, good, bad) as registry:
        assert list(registry.algorithms) == ["lookup"]

Imports neither torch nor a test runner.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from specplug.distributions import ALGORITHMS, POLICIES
from specplug.names import fold
from specplug.registry import Registry
from specplug.spec import API

FAULTS: Mapping[str, str] = {
    "import-error": "the manifest raises ImportError",
    "missing-module": "the entry point names a module that is not there",
    "raises": "the manifest raises RuntimeError with a message of two lines",
    "system-exit": "the manifest calls sys.exit",
    "half-registered": "hooks are sound, the last one registered asks for a parameter that does not exist",
    "default-parameter": "a hook's parameter has a default value",
    "star-parameter": "a hook takes **kwargs",
    "hook-wrapper": "a hook is a wrapper",
    "unknown-hook": "a marked function is no hook: specplug_algoritms",
    "unmarked-hook": "specplug_algorithms lacks the marker",
    "other-names": "the algorithms are not named as the entry points",
    "not-a-spec": "specplug_algorithms returns a dict",
    "offer-raises": "specplug_algorithms raises KeyError",
    "resolve-raises": "specplug_resolve_name raises KeyError",
    "resolve-exits": "specplug_resolve_name calls sys.exit",
    "resolve-wrong-type": "specplug_resolve_name returns a str",
    "imports-torch": "the manifest imports torch",
    "newer-major": "the spec asks for the next major plugin API",
    "newer-minor": "the spec asks for the next minor plugin API",
    "older-major": "the spec asks for the previous major plugin API",
    "newer-core": "needs a newer specplug by its metadata, and its spec has a field unknown here",
    "attribute": "the entry point is MODULE:ATTRIBUTE",
    "no-metadata": "the .dist-info has entry points and no METADATA",
    "no-version": "METADATA lacks the version",
    "malformed-entry-points": "entry_points.txt has a line without '='",
}
"""Every fault that `Stub.fault` takes, and what it is."""


@dataclass(frozen=True)
class Stub:
    """One distribution to write. Everything it offers is harmless: its drafters never draft."""

    name: str
    version: str = "1.0"
    algorithms: Sequence[str] = ()
    """Entry-point names, as spelled in the metadata; all lead to one manifest."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Algorithm -> other spellings."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Words that are no value -> what to write; declared by the first algorithm."""
    requires: Sequence[str] = ()
    """PEP 508 requirements of every algorithm."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Word -> algorithm, claimed whatever the models are."""
    claims_if: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Key of the target's config -> word -> algorithm, claimed when the key is there."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Word -> reason, refused when the target's config is not empty."""
    policies: Sequence[str] = ()
    """Entry-point names of a second module, which holds `policy_source`."""
    policy_source: str = ""
    extra: str = ""
    """Python source appended to the manifest, where ``specplug`` and its public names are imported."""
    package: str = ""
    """Import name; from the distribution's name when empty."""
    fault: str | None = None
    """A key of `FAULTS`, or None."""

    @property
    def module(self) -> str:
        """The import name of the package."""
        return self.package or _underscored(self.name)

    def write(self, site: Path) -> Path:
        """Write package and metadata into folder `site`; return the ``.dist-info`` folder."""
        if self.fault is not None and self.fault not in FAULTS:
            raise ValueError(f"fault {self.fault!r}: known are {', '.join(FAULTS)}")
        package = site / self.module
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("", encoding="utf-8")
        (package / "drafter.py").write_text(_DRAFTER, encoding="utf-8")
        if self.fault != "missing-module":
            (package / "plugin.py").write_text(self.manifest(), encoding="utf-8")
        (package / "policy.py").write_text(f"{_IMPORTS}\n{self.policy_source}", encoding="utf-8")
        info = site / f"{_underscored(self.name)}-{self.version}.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(self.entry_points(), encoding="utf-8")
        if self.fault != "no-metadata":
            (info / "METADATA").write_text(self.metadata(), encoding="utf-8")
        importlib.invalidate_caches()
        return info

    def metadata(self) -> str:
        """Return the text of METADATA."""
        lines = ["Metadata-Version: 2.1", f"Name: {self.name}"]
        if self.fault != "no-version":
            lines.append(f"Version: {self.version}")
        if self.fault == "newer-core":
            lines.append(f"Requires-Dist: specplug>={API[0] + 98}")
        return "\n".join([*lines, "", "A stub.", ""])

    def entry_points(self) -> str:
        """Return the text of entry_points.txt."""
        value = f"{self.module}.plugin" + (":algorithm" if self.fault == "attribute" else "")
        lines = [f"[{ALGORITHMS}]", *(f"{name} = {value}" for name in self.algorithms)]
        lines += [f"[{POLICIES}]", *(f"{name} = {self.module}.policy" for name in self.policies)]
        if self.fault == "malformed-entry-points":
            lines.append("a line that says nothing")
        return "\n".join([*lines, ""])

    def manifest(self) -> str:
        """Return the source of the manifest."""
        api = {
            "newer-major": (API[0] + 1, 0),
            "newer-minor": (API[0], API[1] + 1),
            "older-major": (API[0] - 1, 0),
        }.get(self.fault or "", API)
        names = [f"other-{name}" for name in self.algorithms] if self.fault == "other-names" else list(self.algorithms)
        source = _MANIFEST.format(
            imports=_IMPORTS,
            module=self.module,
            names=names,
            api=api,
            aliases={name: tuple(words) for name, words in self.aliases.items()},
            instead=dict(self.instead),
            requires=tuple(self.requires),
            more=", tomorrow=1" if self.fault == "newer-core" else "",
            mark="" if self.fault == "unmarked-hook" else "@hookimpl\n",
            claims=dict(self.claims),
            claims_if={key: dict(words) for key, words in self.claims_if.items()},
            refuses=dict(self.refuses),
        )
        return f"{_HEAD.get(self.fault or '', '')}{source}\n{_TAIL.get(self.fault or '', '')}\n{self.extra}\n"


@contextmanager
def on_path(*sites: Path) -> Iterator[None]:
    """Put `sites` first on ``sys.path``; on leaving, forget them and every module imported from them."""
    folders = [str(site) for site in sites]
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in folders:  # one entry each: another call may have added the same
            sys.path.remove(folder)
        for name, module in list(sys.modules.items()):
            origin = getattr(module, "__file__", None) or ""
            if any(origin.startswith(folder + os.sep) for folder in folders):
                del sys.modules[name]
        importlib.invalidate_caches()


@contextmanager
def stub_registry(site: Path, *stubs: Stub, environ: Mapping[str, str] | None = None) -> Iterator[Registry]:
    """Write `stubs` into folder `site` and discover them there and nowhere else, while the folder is on the path."""
    for stub in stubs:
        stub.write(site)
    with on_path(site):
        yield Registry.discover(path=[str(site)], environ=environ or {})


def _underscored(name: str) -> str:
    return fold(name).replace("-", "_")


_IMPORTS = """\
import sys
import specplug
from specplug import (
    AlgorithmSpec, Capabilities, Claim, Defaults, DraftPlan, Problem, Refusal, SpecConfig, hookimpl,
)
"""

_DRAFTER = '''\
from specplug import Drafter


class StubDrafter(Drafter):
    def propose(self, step, out):
        """Decline every row."""
'''

_MANIFEST = """\
{imports}

def plan(config, facts, depth):
    nodes = (config.num_draft_tokens or 2) - 1 if depth is None else depth
    return DraftPlan(needs=Capabilities(), nodes=nodes, depth=nodes)


{mark}def specplug_algorithms():
    names = {names!r}
    return [
        AlgorithmSpec(
            name=specplug.fold(name), api={api!r}, summary="never drafts", aliases={aliases!r}.get(name, ()),
            instead={instead!r} if name == names[0] else {{}}, capabilities=Capabilities(), config_model=SpecConfig,
            plan=plan, drafter="{module}.drafter:StubDrafter", requires={requires!r}{more},
        )
        for name in names
    ]


CLAIMS, CLAIMS_IF, REFUSES = {claims!r}, {claims_if!r}, {refuses!r}


def answer(name, facts):
    if name in REFUSES and facts.target.config:
        return Refusal(reason=REFUSES[name])
    for key, words in CLAIMS_IF.items():
        if key in facts.target.config and name in words:
            return Claim(to=words[name], because="the target has " + key)
    if name in CLAIMS:
        return Claim(to=CLAIMS[name], because="because it says so")
    return None


@hookimpl
def specplug_resolve_name(name, facts):
    return answer(name, facts)
"""

# Source put before the manifest, by fault.
_HEAD = {
    "import-error": "import a_module_that_does_not_exist\n",
    "raises": 'raise RuntimeError("first line\\nsecond line")\n',
    "system-exit": "import sys\nsys.exit(3)\n",
    "imports-torch": "import torch\n",
}

# Source put after it; a later definition of a hook replaces the sound one.
_TAIL = {
    "half-registered": "@hookimpl(specname='specplug_check')\ndef z_check(weather):\n    return None\n",
    "default-parameter": "@hookimpl\ndef specplug_resolve_name(name, facts=None):\n    return None\n",
    "star-parameter": "@hookimpl\ndef specplug_resolve_name(name, **others):\n    return None\n",
    "hook-wrapper": "@hookimpl(wrapper=True)\ndef specplug_resolve_name(name, facts):\n    return (yield)\n",
    "unknown-hook": "@hookimpl\ndef specplug_algoritms():\n    return []\n",
    "not-a-spec": '@hookimpl\ndef specplug_algorithms():\n    return [{"name": "stub"}]\n',
    "offer-raises": '@hookimpl\ndef specplug_algorithms():\n    raise KeyError("offer")\n',
    "resolve-raises": '@hookimpl\ndef specplug_resolve_name(name, facts):\n    raise KeyError("resolve")\n',
    "resolve-exits": "@hookimpl\ndef specplug_resolve_name(name, facts):\n    sys.exit(4)\n",
    "resolve-wrong-type": "@hookimpl\ndef specplug_resolve_name(name, facts):\n    return name\n",
}
