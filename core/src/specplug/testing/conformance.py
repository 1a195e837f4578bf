"""`DrafterConformance`: inherit from it in a test file, and everything a drafter must be is checked.

class TestMine(DrafterConformance):
    algorithm = "mine"
    config = {"num_draft_tokens": 8}
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from specplug.models.target import Target
from specplug.testing.bench import Bench, Kind
from specplug.testing.checks_declared import DeclaredChecks
from specplug.testing.checks_device import DeviceChecks
from specplug.testing.checks_drafter import DrafterChecks
from specplug.testing.checks_engine import EngineChecks
from specplug.testing.since import as_it_is

_PREFIX = "test_"


class DrafterConformance(DeclaredChecks, DrafterChecks, EngineChecks, DeviceChecks):
    """The conformance kit for one algorithm. Set `algorithm`; the rest has defaults.

    A check that cannot hold for a drafter is named in `expected_failures` with the reason: it must then
    fail (strict xfail). A check that is overridden or deleted without being named there fails the suite. A check
    that is newer than the API version of the drafter's manifest warns for one minor version before it fails.
    """

    algorithm: str = ""
    """Name of an installed algorithm."""
    config: Mapping[str, Any] = {}
    """Its options, without the ``speculative_`` prefix."""
    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Check, without ``test_`` -> reason."""

    # --- hooks --------------------------------------------------------------------------------------------------

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        """Write a tiny random draft checkpoint for the target in `target_dir` into the empty `out_dir`.

        Override it for a drafter with weights; the target is then a two-layer decoder on disk.
        """
        raise NotImplementedError

    def make_config(self, bench: Bench, kind: Kind) -> Mapping[str, Any]:
        """Return the options; override it where they depend on the target."""
        return self.config

    def make_target(self, kind: Kind, folder: Path) -> Target:
        """Return the target of `kind`; `folder` may be used for it. Override it for one of your own."""
        return self._bench.default_target(kind, folder)

    def search_path(self, folder: Path) -> Sequence[str] | None:
        """Return where distributions are looked for; None is ``sys.path``."""
        return None

    # --- machinery ----------------------------------------------------------------------------------------------

    _bench: Bench
    _opened: ClassVar[Bench]

    def has_draft(self) -> bool:
        """Whether `make_draft` is overridden."""
        return type(self).make_draft is not DrafterConformance.make_draft

    @classmethod
    def open_bench(cls, folder: Path) -> Bench:
        """Return a bench for this class; `folder` is an empty one that outlives it."""
        subject = cls()
        subject._bench = Bench(subject, folder)
        return subject._bench

    @pytest.fixture
    def bench(self, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        """The bench of this class, built once for all its checks."""
        cls = type(self)
        # Kept on the class by hand: what a class-scoped fixture may be differs between pytest 8 and 10.
        if "_opened" not in vars(cls):
            cls._opened = self.open_bench(tmp_path_factory.mktemp("bench"))
        return cls._opened

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for check, reason in cls.expected_failures.items():
            original = getattr(DrafterConformance, _PREFIX + check, None)
            if original is not None and _PREFIX + check not in vars(cls):
                setattr(cls, _PREFIX + check, _must_fail(as_it_is(original), reason))

    def test_no_check_is_missing(self) -> None:
        """Every check is the kit's own, or is named with a reason in `expected_failures`."""
        for check, reason in self.expected_failures.items():
            assert check in check_names(), f"expected_failures names {check!r}, which is no check"
            assert reason.strip(), f"expected_failures gives no reason for {check!r}"
        changed = [
            check
            for check in check_names()
            if getattr(type(self), _PREFIX + check, None) is not getattr(DrafterConformance, _PREFIX + check)
            and check not in self.expected_failures
        ]
        assert not changed, f"overridden or deleted without a reason in expected_failures: {changed}"


def check_names() -> tuple[str, ...]:
    """Return the names of all checks, without ``test_``, sorted."""
    return tuple(sorted(name.removeprefix(_PREFIX) for name in dir(DrafterConformance) if name.startswith(_PREFIX)))


def _must_fail(check: Any, reason: str) -> Any:
    @functools.wraps(check)
    def expected(self: Any, *args: Any, **kwargs: Any) -> None:
        check(self, *args, **kwargs)

    # A list of its own: `wraps` shares the original's, parametrisation included.
    expected.pytestmark = [*getattr(check, "pytestmark", ())]  # type: ignore[attr-defined]
    return pytest.mark.xfail(reason=reason, strict=True)(expected)
