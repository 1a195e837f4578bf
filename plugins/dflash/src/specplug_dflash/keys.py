"""Looking things up in a draft's ``config.json``, whose keys lie in one of several places. Torch-free."""

from collections.abc import Iterator, Mapping
from typing import Any

from specplug import UserError

_NESTED = ("dflash_config", "dspark_config")
_PREFIX = "dspark_"


class Keys:
    """A draft's ``config.json``: keys at the top, in ``dflash_config`` or ``dspark_config``, or called ``dspark_...``.

    The sizes of the layers lie at the top too, or in ``transformer_layer_config`` (the speculators envelope).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.top = config
        inner = config.get("transformer_layer_config")
        self.layers: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
        self.speculators = str(config["speculators_model_type"]) if config.get("speculators_model_type") else None
        """The format's own word for what the draft is, where the envelope is speculators'."""
        named = config.get("architectures")
        self.architecture = str(named[0]) if isinstance(named, list) and named else ""

    def found(self, name: str) -> dict[str, Any]:
        """Return place -> value of every place that holds `name`; None counts as absent."""
        return {place: value for place, value in self._places(name) if value is not None}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of `name`. A `UserError` where two places disagree."""
        found = self.found(name)
        if not found:
            return default
        (first, value), *others = found.items()
        for place, other in others:
            if other != value:
                raise UserError(f"the draft model: config.json has {first} = {value!r} and {place} = {other!r}")
        return value

    def whole(self, name: str, default: int | None = None, least: int = 0) -> int | None:
        """Return `name` as a whole number of at least `least`; a `UserError` where it is none."""
        value = self.get(name, default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise UserError(
                f"the draft model: config.json has {name} = {value!r}, a whole number of at least {least} is needed"
            )
        return value

    def number(self, name: str, default: float | None) -> float | None:
        """Return `name` as a number; a `UserError` where it is none."""
        value = self.get(name, default)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise UserError(f"the draft model: config.json has {name} = {value!r}, a number is needed")
        return value

    def _places(self, name: str) -> Iterator[tuple[str, Any]]:
        for nested in _NESTED:
            inner = self.top.get(nested)
            if isinstance(inner, Mapping):
                yield f"{nested}.{name}", inner.get(name)
        yield name, self.top.get(name)
        yield _PREFIX + name, self.top.get(_PREFIX + name)
