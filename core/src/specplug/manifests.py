"""Importing one plugin module, checking it and registering its hooks. Torch-free."""

import importlib
import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from types import ModuleType

import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from specplug.distributions import POLICIES
from specplug.draft_files import name_faults
from specplug.hookspecs import PROJECT, Hooks
from specplug.names import fold
from specplug.spec import AlgorithmSpec

HOOKS = frozenset(name for name in vars(Hooks) if name.startswith("specplug_"))
RESERVED = "none"
"""The word for plain decoding; no package may take it."""


class ManifestError(Exception):
    """A plugin module breaks the contract; the message says how, and no traceback would say more."""


def new_manager() -> pluggy.PluginManager:
    """Return an empty plugin manager that knows the hooks."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    return manager


def load_manifest(
    manager: pluggy.PluginManager, module_name: str, group: str, entry_points: Iterable[str]
) -> tuple[AlgorithmSpec, ...]:
    """Import `module_name`, register it under that name, check it and return the algorithms it offers.

    `entry_points` are the folded names that lead to this module. Whatever goes wrong escapes as
    `ManifestError` or as what the module raised, `SystemExit` included, and leaves nothing registered.
    """
    module = importlib.import_module(module_name)
    try:
        _check_marked(manager, module)
        manager.register(module, module_name)
        _check_hooks(manager, module)
        specs = _offered(module)
        _check_offer(specs, group, frozenset(entry_points))
    except BaseException:
        unregister(manager, module_name)
        raise
    return specs


def unregister(manager: pluggy.PluginManager, module_name: str) -> None:
    """Remove a module and its hooks, also one whose registration failed half-way (pluggy <= 1.6 keeps it)."""
    if manager.has_plugin(module_name):
        manager.unregister(name=module_name)


def _check_marked(manager: pluggy.PluginManager, module: ModuleType) -> None:
    for name in sorted(HOOKS):
        if inspect.isfunction(vars(module).get(name)) and manager.parse_hookimpl_opts(module, name) is None:
            raise ManifestError(f"{name} lacks @specplug.hookimpl and would never be called")


def _check_hooks(manager: pluggy.PluginManager, module: ModuleType) -> None:
    for caller in manager.get_hookcallers(module) or ():
        for implementation in caller.get_hookimpls():
            if implementation.plugin is not module:
                continue
            # `check_pending` asks the same, but of all plugins at once.
            if not caller.has_spec() and not implementation.optionalhook:
                near = get_close_matches(caller.name, HOOKS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the hooks are {', '.join(sorted(HOOKS))}"
                raise ManifestError(f"unknown hook {caller.name}: {hint}")
            if implementation.hookwrapper or implementation.wrapper:
                raise ManifestError(f"{caller.name} is a hook wrapper: nobody may rewrite another package's answer")
            _check_parameters(caller.name, inspect.signature(implementation.function))


def _check_parameters(hook: str, signature: inspect.Signature) -> None:
    for parameter in signature.parameters.values():
        if parameter.default is not parameter.empty:
            raise ManifestError(f"{hook} gives its parameter {parameter.name!r} a default: some pluggy never fill it")
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise ManifestError(f"{hook} must take named parameters only, not {str(parameter)!r}")


def _offered(module: ModuleType) -> tuple[AlgorithmSpec, ...]:
    function = vars(module).get("specplug_algorithms")
    if function is None:
        return ()
    specs = tuple(function())
    for spec in specs:
        if not isinstance(spec, AlgorithmSpec):
            raise ManifestError(f"specplug_algorithms returned a {type(spec).__name__}, not an AlgorithmSpec")
    return specs


def _check_offer(specs: tuple[AlgorithmSpec, ...], group: str, entry_points: frozenset[str]) -> None:
    names = [spec.name for spec in specs]
    if group == POLICIES:
        if names:
            raise ManifestError(f"a policy offers no algorithms, this one offers {_words(names)}")
        return
    if len(set(names)) < len(names):
        raise ManifestError(f"specplug_algorithms offers one name twice: {_words(names)}")
    if set(names) != entry_points:
        raise ManifestError(
            f"entry points and specplug_algorithms differ: {_words(entry_points)} against {_words(names) or 'nothing'}"
        )
    for spec in specs:
        _check_spec(spec)


def _check_spec(spec: AlgorithmSpec) -> None:
    words = {spec.name, *map(fold, spec.aliases)}
    no_values = set(map(fold, spec.instead))
    for word in sorted(words | no_values):
        if word in ("", RESERVED):
            raise ManifestError(f"{spec.name!r} uses the word {word!r}, which is reserved")
    if words & no_values:
        raise ManifestError(f"{spec.name!r} lists {_words(words & no_values)} as a name and as no value")
    for fault in name_faults(spec):
        raise ManifestError(fault)
    for text in spec.requires:
        try:
            Requirement(text)
        except InvalidRequirement:
            raise ManifestError(f"{spec.name!r} requires {text!r}, which is no PEP 508 requirement") from None


def _words(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
