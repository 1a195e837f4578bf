"""The installed plugins: found by metadata, loaded in isolation, asked one at a time. Torch-free.

A registry is an object, never a module global. A bad plugin never stops the host: it becomes a
record whose state says what is wrong, and an error only for whoever selects it.
"""

import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from specplug.distributions import ALGORITHMS, POLICIES, Found, installed, one_line, unmet, version_of
from specplug.errors import UserError
from specplug.manifests import RESERVED, ManifestError, load_manifest, new_manager, unregister
from specplug.names import fold
from specplug.records import Answer, Installed, Owner, Record, State
from specplug.spec import (
    API,
    AlgorithmSpec,
    Claim,
    Defaults,
    Problem,
    Refusal,
)

__all__ = ["Answer", "Installed", "Owner", "Record", "Registry", "State"]

CORE = "specplug"
_Key = tuple[str, str, str]  # group, folded entry-point name, distribution

# What each hook may answer besides None; a list or tuple of it too where the flag is set.
_ANSWERS: dict[str, tuple[tuple[type, ...], bool]] = {
    "specplug_resolve_name": ((Claim, Refusal), False),
    "specplug_defaults": ((Defaults,), True),
    "specplug_check": ((Problem,), True),
}


@dataclass(frozen=True)
class _Plugin:
    """A registered module."""

    distribution: str
    version: str
    group: str
    module: str
    keys: tuple[_Key, ...]


class Registry:
    """Everything that is installed for the groups `specplug.algorithms` and `specplug.policies`."""

    def __init__(self, found: Mapping[str, Found], warnings: Iterable[str], allowed: Collection[str] | None) -> None:
        """Use `discover`. `allowed`: folded distribution names to load, None for all."""
        self._found = dict(found)
        self._walk_warnings = tuple(warnings)
        self._load_warnings: list[str] = []
        self._allowed = allowed
        self._manager = new_manager()
        self._plugins: dict[str, _Plugin] = {}
        self._records: dict[_Key, Record] = {}
        self._modules: dict[tuple[str, str], list[_Key]] = {}
        self._doubled: set[_Key] = set()
        self._owners: dict[str, tuple[Owner, ...]] = {}
        self._left_out: dict[str, str] = {}
        self._loaded = False
        for name in sorted(self._found):
            self._scan(self._found[name])
        self._settle_words()

    @classmethod
    def discover(cls, *, path: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> "Registry":
        """Read the metadata of what is installed on `path` (default ``sys.path``); nothing is imported.

        `environ` (default ``os.environ``): ``SPECPLUG_PLUGINS`` is a comma list of the distributions
        to load, a blank one meaning none; ``SPECPLUG_REQUIRED_PLUGINS`` lists requirements as
        `require` takes them, which loads the manifests. Raises `UserError` when either cannot be met.
        """
        environ = os.environ if environ is None else environ
        found, warnings = installed(path)
        listed = environ.get("SPECPLUG_PLUGINS")
        allowed = None if listed is None else frozenset(fold(name) for name in listed.split(",") if name.strip())
        for name in sorted(allowed or ()):
            if name not in found or not found[name].entry_points:
                what = "is not installed" if name not in found else "offers no plugin"
                offering = [found_.name for found_ in found.values() if found_.entry_points]
                raise UserError(
                    f"SPECPLUG_PLUGINS={listed!r}: {name!r} {what}; installed plugins:"
                    f" {', '.join(sorted(offering)) or 'none'}"
                )
        registry = cls(found, warnings, allowed)
        required = environ.get("SPECPLUG_REQUIRED_PLUGINS", "").strip()
        if required:
            # A comma also separates the bounds of one range, so split only where a name begins.
            registry.require(re.split(r"[,\s]+(?=[A-Za-z])", required), option="SPECPLUG_REQUIRED_PLUGINS")
        return registry

    def load(self) -> None:
        """Import all manifests, once. Faults end in `records` and `warnings`; nothing is raised."""
        if self._loaded:
            return
        self._loaded = True
        for distribution, module in sorted(self._modules):
            self._load_module(self._found[distribution], module, self._modules[distribution, module])
        self._settle_words()

    @property
    def records(self) -> tuple[Record, ...]:
        """All entry points, sorted by group, folded name and distribution. Does not load."""
        return tuple(self._records[key] for key in sorted(self._records))

    @property
    def algorithms(self) -> Mapping[str, Installed]:
        """The algorithms that can be selected, by name, sorted. Loads."""
        self.load()
        return {
            record.word: Installed(record.specs[0], record.distribution, record.version)
            for record in self.records
            if record.group == ALGORITHMS and record.state == "loaded"
        }

    @property
    def draft_files(self) -> tuple[str, ...]:
        """The weight files that algorithms which can be selected name in their `draft_files`, sorted. Loads."""
        return tuple(sorted({name for each in self.algorithms.values() for name in each.spec.draft_files}))

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each unreadable distribution, each plugin that failed and each clash."""
        failed = {
            f"{record.label} is {record.state}: {record.reason}"
            for record in self.records
            if record.state in ("broken", "incompatible")
        }
        clashes = {_clash(word, owners) for word, owners in self._owners.items() if len(owners) > 1}
        return (*self._walk_warnings, *sorted(failed), *sorted(clashes), *self._load_warnings)

    @property
    def words(self) -> tuple[str, ...]:
        """Every word with an owner: names and aliases, folded and sorted. Loads."""
        self.load()
        return tuple(sorted(self._owners))

    def owners(self, word: str) -> tuple[Owner, ...]:
        """Return who owns `word`: nobody, one, or several, which is a clash. Loads."""
        self.load()
        return self._owners.get(fold(word), ())

    def unusable_because(self, word: str) -> str | None:
        """Say why an installed `word` cannot be selected, naming distribution, version and cause.

        None if it can be, and None if nothing installed has to do with it. Loads.
        """
        owners = self.owners(word)
        if len(owners) > 1:
            return _clash(fold(word), owners)
        if not owners:
            return self._left_out.get(fold(word))
        owner = owners[0]
        record = self._records[ALGORITHMS, owner.algorithm, owner.distribution]
        if record.state == "loaded":
            return None
        return record.reason if record.state == "clash" else f"{owner.label} is {record.state}: {record.reason}"

    def state_of(self, owner: Owner) -> State:
        """Return the state of the algorithm that `owner` offers."""
        return self._records[ALGORITHMS, owner.algorithm, owner.distribution].state

    def serving(self) -> frozenset[str]:
        """Return the distributions whose hooks are asked. Loads."""
        self.load()
        return frozenset(plugin.distribution for plugin in self._plugins.values())

    def about(self, distribution: str) -> str | None:
        """Say why `distribution` offers less than was hoped; None if it is not installed. Loads."""
        self.load()
        found = self._found.get(fold(distribution))
        if found is None:
            return None
        if self._allowed is not None and found.name not in self._allowed:
            return f"SPECPLUG_PLUGINS leaves {found.label} out"
        bad = [r for r in self.records if r.distribution == found.name and r.state in ("broken", "incompatible")]
        return f"{bad[0].label} is {bad[0].state}: {bad[0].reason}" if bad else f"{found.label} does not offer it"

    def require(self, requirements: Iterable[str], *, option: str = "--require") -> None:
        """Raise `UserError` unless each requirement, such as ``"some-plugin>=1.2"``, is an installed and sound plugin.

        A requirement on the core itself is one on its version. `option` is what the message calls the place
        they come from. Loads.
        """
        for text in requirements:
            why = self._missing(text)
            if why:
                raise UserError(f"{option} {text!r}: {why}")

    def each(
        self, hook: str, *, selected: str | None = None, distributions: Collection[str] | None = None, **kwargs: Any
    ) -> Iterator[Answer]:
        """Call `hook` with `kwargs`, one plugin at a time in sorted order, and yield what is not None.

        `distributions` limits whom to ask. An algorithm plugin that raises, or answers with the wrong
        type, becomes broken and is skipped; `UserError` if it owns the algorithm `selected`, or if it
        is a policy. Loads.
        """
        self.load()
        caller = getattr(self._manager.hook, hook)
        if set(kwargs) != set(caller.spec.argnames):
            raise TypeError(f"{hook} takes {sorted(caller.spec.argnames)}, got {sorted(kwargs)}")
        calls = [(self._plugins[call.plugin_name], call) for call in caller.get_hookimpls()]
        for plugin, call in sorted(calls, key=lambda pair: (pair[0].distribution, pair[0].module)):
            if plugin.module not in self._plugins or (
                distributions is not None and plugin.distribution not in distributions
            ):
                continue
            try:
                value = call.function(*(kwargs[name] for name in call.argnames))
                _check_answer(hook, value)
            except (Exception, SystemExit) as error:
                self._fail(plugin, hook, selected, error)
                continue
            if value is not None:
                yield Answer(plugin.distribution, plugin.version, plugin.group, value)

    def _scan(self, found: Found) -> None:
        """Make the records of one distribution, or remember that ``SPECPLUG_PLUGINS`` leaves it out."""
        if self._allowed is not None and found.name not in self._allowed:
            for point in found.entry_points:
                if point.group == ALGORITHMS:
                    self._left_out[fold(point.name)] = f"{found.label} offers it, but SPECPLUG_PLUGINS leaves it out"
            return
        for point in found.entry_points:
            key = (point.group, fold(point.name), found.name)
            record = Record(
                point.group, point.name, found.name, found.version, location=found.location, notes=found.notes
            )
            modules = self._modules.setdefault((found.name, point.value), [])
            if key in modules:
                continue
            modules.append(key)
            if key in self._records:
                self._doubled.add(key)  # two modules under one name: neither can be right
            self._records[key] = record

    def _load_module(self, found: Found, module: str, keys: list[_Key]) -> None:
        groups = {group for group, _, _ in keys}
        had_torch = "torch" in sys.modules
        try:
            if len(groups) > 1:
                raise ManifestError(f"{module} is in both groups: give the policy a module of its own")
            if ":" in module or "[" in module:
                raise ManifestError(f"the entry point must name a module, not {module!r}")
            if others := sorted({other for other, name in self._modules if name == module} - {found.name}):
                raise ManifestError(f"{module} is also an entry point of {', '.join(others)}: uninstall one")
            if doubled := sorted(self._doubled.intersection(keys)):
                raise ManifestError(f"its metadata gives the entry point {doubled[0][1]!r} two different modules")
            specs = load_manifest(self._manager, module, keys[0][0], (word for _, word, _ in keys))
        except (Exception, SystemExit) as error:
            self._mark_broken(found, keys, error)
            return
        finally:
            if "torch" in sys.modules and not had_torch:
                self._load_warnings.append(f"{found.label}: importing {module} imports torch; a manifest must not")
        self._plugins[module] = _Plugin(found.name, found.version, keys[0][0], module, tuple(keys))
        by_name = {spec.name: spec for spec in specs}
        for key in keys:
            spec = by_name.get(key[1])
            state, reason = self._judge(found, spec) if spec else ("loaded", "")
            self._set(key, state=state, reason=reason, specs=(spec,) if spec else ())
        if all(self._records[key].state == "incompatible" for key in keys):
            self._drop(module)

    def _judge(self, found: Found, spec: AlgorithmSpec) -> tuple[State, str]:
        if spec.api[0] != API[0] or spec.api[1] > API[1]:
            upgrade = CORE if spec.api > API else found.name
            here = version_of(CORE, self._found)
            return "incompatible", (
                f"needs plugin API {spec.api[0]}.{spec.api[1]}, this specplug {here or ''}".rstrip()
                + f" speaks {API[0]}.{API[1]}: pip install --upgrade {upgrade}"
            )
        lacking = [why for text in spec.requires if (why := unmet(text, self._found))]
        return ("unusable", "; ".join(lacking)) if lacking else ("loaded", "")

    def _mark_broken(self, found: Found, keys: Iterable[_Key], error: BaseException) -> None:
        """Record a failure; if the package asks for another specplug than this one, that is the better reason."""
        outdated = next((why for text in found.requires_of(CORE) if (why := unmet(text, self._found))), None)
        reason = str(error) if isinstance(error, ManifestError) else one_line(error)
        trace = "" if isinstance(error, ManifestError) else "".join(traceback.format_exception(error))
        for key in keys:
            if outdated:
                self._set(key, state="incompatible", reason=f"{outdated} ({reason})", traceback=trace)
            else:
                self._set(key, state="broken", reason=reason, traceback=trace)

    def _fail(self, plugin: _Plugin, hook: str, selected: str | None, error: BaseException) -> None:
        """Take a plugin whose hook failed out of service; `UserError` if the run depends on it."""
        reason = f"{hook} failed: {one_line(error)}"
        if plugin.group != POLICIES:  # a policy stays, so that asking again fails again
            self._drop(plugin.module)
        trace = "".join(traceback.format_exception(error))
        for key in plugin.keys:
            self._set(key, state="broken", reason=reason, traceback=trace)
        owns = selected is not None and any(o.distribution == plugin.distribution for o in self.owners(selected))
        if plugin.group == POLICIES or owns:
            raise UserError(
                f"{plugin.distribution} {plugin.version}: {reason}; upgrade or uninstall it,"
                " or leave it out with SPECPLUG_PLUGINS"
            ) from error

    def _drop(self, module: str) -> None:
        unregister(self._manager, module)
        self._plugins.pop(module, None)

    def _set(self, key: _Key, **changes: Any) -> None:
        self._records[key] = replace(self._records[key], **changes)

    def _settle_words(self) -> None:
        """Build the one table of names and aliases, and mark the records whose name has two owners."""
        table: dict[str, set[Owner]] = {}
        for record in self.records:
            if record.group == ALGORITHMS:
                owner = Owner(record.distribution, record.version, record.word)
                for word in {record.word, *(fold(alias) for spec in record.specs for alias in spec.aliases)}:
                    if word != RESERVED:
                        table.setdefault(word, set()).add(owner)
        self._owners = {
            word: tuple(sorted(owners, key=lambda owner: (owner.distribution, owner.algorithm)))
            for word, owners in sorted(table.items())
        }
        for key, record in self._records.items():
            owners = self._owners.get(record.word, ()) if record.group == ALGORITHMS else ()
            if len(owners) > 1 and record.state in ("available", "loaded", "unusable"):
                self._set(key, state="clash", reason=_clash(record.word, owners))

    def _missing(self, text: str) -> str | None:
        try:
            need = Requirement(text)
        except InvalidRequirement:
            return 'not a requirement; write a package and a range, such as "some-plugin>=1.2"'
        if need.marker is not None and not need.marker.evaluate():
            return None
        if need.extras:
            extras = ",".join(sorted(need.extras))
            return f"what the extra [{extras}] brings is not checked; leave [{extras}] out"
        if why := unmet(text, self._found):
            return why
        name = fold(need.name)
        if name == CORE:
            return None
        found = self._found.get(name)
        if found is None or not found.entry_points:
            return f"{name} is installed, but offers no plugin for specplug"
        if self._allowed is not None and name not in self._allowed:
            return f"{found.label} is left out by SPECPLUG_PLUGINS; add it there"
        self.load()
        bad = [r for r in self.records if r.distribution == name and r.state != "loaded"]
        return f"{bad[0].label} is {bad[0].state}: {bad[0].reason}" if bad else None


def _clash(word: str, owners: Iterable[Owner]) -> str:
    sides = " and ".join(f"{owner.label} (algorithm {owner.algorithm!r})" for owner in owners)
    return f"{word!r} is claimed by {sides}: list the packages to load in SPECPLUG_PLUGINS, or uninstall one"


def _check_answer(hook: str, value: object) -> None:
    if value is None or hook not in _ANSWERS:
        return
    kinds, many = _ANSWERS[hook]
    items: Sequence[object] = value if many and isinstance(value, list | tuple) else (value,)
    for item in items:
        if not isinstance(item, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"it answered with a {type(item).__name__}, not with {expected}")
