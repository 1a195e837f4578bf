"""From the word a user typed to one installed algorithm, on facts and with every hop said. Torch-free."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import NoReturn

from specplug.errors import RefusedError, UserError
from specplug.manifests import RESERVED
from specplug.names import fold
from specplug.registry import Answer, Installed, Registry
from specplug.spec import Claim, Facts

OPTION = "--speculative-algorithm"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Known:
    """A word of `catalogue.json`: what it is, whether or not the package is installed."""

    dist: str | None
    """The distribution that offers it; None if none does."""
    instead: str | None
    """What to write, for a word that is no value; None for one that is."""


@dataclass(frozen=True)
class Resolution:
    """What a word means for these models."""

    word: str
    """As typed."""
    algorithm: str
    """Folded name, or ``"none"``."""
    installed: Installed | None
    """None for ``"none"`` only."""
    trace: tuple[str, ...]
    """One line per hop, with who said so."""


@cache
def catalogue() -> Mapping[str, Known]:
    """Return the known words, folded, so that a bare core can say what to install or to write."""
    text = files("specplug").joinpath("catalogue.json").read_text(encoding="utf-8")
    return MappingProxyType({word: Known(**entry) for word, entry in json.loads(text).items()})


def resolve(registry: Registry, word: str, facts: Facts) -> Resolution:
    """Resolve `word` for the models that `facts` describe.

    Every loaded manifest is asked at each hop, for exact names too. Raises `RefusedError`, whose
    `trace` holds the hops so far, for: a word that is unknown, not installed, in clash, no value or
    unusable; two different answers; a loop; a claim on something that is not installed; a plugin's
    `Refusal`; a failing hook of the owner or of a policy.
    """
    return _Walk(registry, word, facts).run()


class _Walk:
    """One resolution under way."""

    def __init__(self, registry: Registry, word: str, facts: Facts) -> None:
        self.registry = registry
        self.word = word
        self.facts = facts
        self.trace: list[str] = []
        self.hops: dict[str, str] = {}  # word -> what sent it on, said by whom
        self.ignored: list[str] = []  # answers that were not made on facts

    def run(self) -> Resolution:
        current = fold(self.word)
        if current != self.word:
            self.say(f"{self.word!r} is read as {current!r}")
        if current == RESERVED:
            self.say(f"{RESERVED!r} is plain decoding")
            return Resolution(self.word, RESERVED, None, tuple(self.trace))
        if not current:
            self.refuse(f"is empty; {self.choices()}")
        while True:
            self.check_word(current)
            target = self.ask(current)
            if target is None:
                owners = self.registry.owners(current)
                if not owners:
                    self.refuse("; ".join((self.unknown(current), *(f"not followed: {line}" for line in self.ignored))))
                target = owners[0].algorithm
                if target == current:
                    return self.arrive(current)
                self.hop(current, target, f"an alias, declared by {owners[0].label}")
            current = target

    def arrive(self, name: str) -> Resolution:
        installed = self.registry.algorithms.get(name)
        if installed is None:
            # A hook may have failed on the way here and taken the algorithm out of service.
            self.refuse(f"cannot be used: {self.registry.unusable_because(name)}; {self.choices()}")
        self.say(f"{name!r} is an algorithm of {installed.distribution} {installed.version}")
        return Resolution(self.word, name, installed, tuple(self.trace))

    def check_word(self, word: str) -> None:
        """Refuse a word that nobody needs to be asked about."""
        owners = self.registry.owners(word)
        if not owners:
            self.check_no_value(word)
            return
        why = self.registry.unusable_because(word)
        # An unmet requirement of the algorithm is no obstacle to a redirect away from it.
        if why and not (len(owners) == 1 and self.registry.state_of(owners[0]) == "unusable"):
            self.refuse(f"cannot be used: {why}; {self.choices()}")

    def check_no_value(self, word: str) -> None:
        said = {
            (text, f"{installed.distribution} {installed.version}")
            for installed in self.registry.algorithms.values()
            for key, text in installed.spec.instead.items()
            if fold(key) == word
        }
        if said:
            self.refuse("is no value: write " + "; or ".join(f"{text} (says {who})" for text, who in sorted(said)))
        known = catalogue().get(word)
        if known and known.instead:
            self.refuse(self.unknown(word))

    def ask(self, word: str) -> str | None:
        """Ask every plugin what `word` means; return the next word, or None if it means itself."""
        owners = self.registry.owners(word)
        selected = owners[0].algorithm if owners else None
        owning = {owner.distribution for owner in owners}
        answers = self.answers(word, self.facts, selected, None)
        strangers = {answer.distribution for answer in answers if answer.distribution not in owning}
        if strangers:
            blind = {a.distribution for a in self.answers(word, Facts.empty(), selected, strangers)}
            for answer in answers:
                if answer.distribution in blind:
                    self.ignored.append(
                        f"{_quote(answer)} about {word!r} whatever the models are, and does not own the word"
                    )
                    self.say(f"not followed: {self.ignored[-1]}")
            broken = strangers - self.registry.serving()
            answers = [a for a in answers if a.distribution not in blind and a.distribution not in broken]
        refusals = [answer for answer in answers if not isinstance(answer.value, Claim)]
        if refusals:
            self.refuse("; ".join(_quote(answer) for answer in refusals))
        targets = {fold(answer.value.to) for answer in answers}
        if len(targets) > 1:
            sides = " but ".join(_quote(answer) for answer in answers)
            self.refuse(f"has two meanings for these models: {sides}; name the algorithm you want")
        if not targets or targets == {word}:
            return None
        target = targets.pop()
        self.hop(word, target, " and ".join(_quote(answer) for answer in answers))
        self.check_target(word, target, answers)
        return target

    def answers(
        self, word: str, facts: Facts, selected: str | None, distributions: Iterable[str] | None
    ) -> list[Answer]:
        limit = None if distributions is None else frozenset(distributions)
        try:
            return list(
                self.registry.each(
                    "specplug_resolve_name", selected=selected, distributions=limit, name=word, facts=facts
                )
            )
        except UserError as error:
            raise RefusedError(f"{OPTION} {self.word!r} cannot be used: {error}", tuple(self.trace)) from error

    def check_target(self, word: str, target: str, answers: Iterable[Answer]) -> None:
        who = " and ".join(answer.label for answer in answers)
        if target == RESERVED:
            self.refuse(f"means {target!r} according to {who}, but falling back to plain decoding is yours to decide")
        if not self.registry.owners(target):
            self.refuse(f"means {target!r} according to {who}, but {target!r} {self.unknown(target)}")

    def hop(self, word: str, target: str, who: str) -> None:
        self.say(f"{word!r} -> {target!r}: {who}")
        self.hops[word] = who
        if target in self.hops:
            chain = " -> ".join(map(repr, (*self.hops, target)))
            self.refuse(f"goes in a loop, {chain}: {'; '.join(self.hops.values())}; name the algorithm you want")

    def say(self, line: str) -> None:
        self.trace.append(line)
        _log.info(line)

    def refuse(self, why: str) -> NoReturn:
        message = " ".join(f"{OPTION} {self.word!r} {why}".split())
        raise RefusedError(message, tuple(self.trace))

    def choices(self) -> str:
        return f"installed: {', '.join(self.registry.algorithms) or 'no algorithm'}; or {RESERVED!r}"

    def unknown(self, word: str) -> str:
        """Say why a word without an owner is of no use, and what comes nearest."""
        left_out = self.registry.unusable_because(word)
        if left_out:
            return f"cannot be used: {left_out}; {self.choices()}"
        known = catalogue().get(word)
        if known and known.instead:
            absent = known.dist and self.registry.about(known.dist) is None
            get = f", after pip install {known.dist}" if absent else ""
            return f"is no value: write {known.instead}{get}; {self.choices()}"
        if known and known.dist:
            state = self.registry.about(known.dist)
            if state is None:
                return f"is not installed: pip install {known.dist}; {self.choices()}"
            return f"should come from {known.dist}, but {state}: pip install --upgrade {known.dist}; {self.choices()}"
        return f"is unknown{self.nearest(word)}; {self.choices()}"

    def nearest(self, word: str) -> str:
        here = [name for name in self.registry.words if self.registry.unusable_because(name) is None] + [RESERVED]
        elsewhere = [name for name, known in catalogue().items() if known.dist and not known.instead]
        for words, hint in ((here, lambda near: ""), (elsewhere, _how_to_install)):
            if near := get_close_matches(word, words, n=1):
                return f" (did you mean {near[0]!r}{hint(near[0])}?)"
        return ""


def _how_to_install(word: str) -> str:
    return f", from pip install {catalogue()[word].dist}"


def _quote(answer: Answer) -> str:
    """Say who answered what, and why, on one line."""
    value = answer.value
    if isinstance(value, Claim):
        text = f"{answer.label} says {fold(value.to)!r} ({value.because})"
    else:
        text = f"{answer.label} refuses it: {value.reason}" + (
            f" (try {value.try_instead})" if value.try_instead else ""
        )
    return " ".join(text.split())
