"""From a schema to a matcher: llguidance's grammars, compiled once per schema and model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from specplug.errors import UserError
from specplug.grammar.format import schema_text
from specplug.grammar.state import Grammar

KEPT = 64
"""Compiled schemas that are remembered per model."""


class Compiler:
    """Makes the grammars of one tokenizer. Any thread may call it: the library lets others run while it compiles."""

    def __init__(self, tokenizer: Any, vocab: int, ends: Collection[int]) -> None:
        """`tokenizer`: transformers' fast tokenizer; `vocab`: the model's; `ends`: its end-of-sequence ids.

        Raises UserError where there is nothing to build on.
        """
        if tokenizer is None:
            raise UserError("response_format needs a tokenizer, and this model has none: leave it out")
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UserError("response_format needs a fast tokenizer (tokenizer.json), and this model has none")
        backend = tokenizer.backend_tokenizer
        known = backend.get_vocab_size(with_added_tokens=True)
        self._ends = frozenset(end for end in ends if 0 <= end < min(vocab, known))
        if not self._ends:
            raise UserError(
                "response_format needs a token that ends an answer, and this model names no eos_token_id: leave it out"
            )
        library = _library()
        try:
            # From the text of the tokenizer itself, without padding or truncation; ids beyond it are never allowed.
            copied = type(backend).from_str(backend.to_str())
            copied.no_padding()
            copied.no_truncation()
            text, size = copied.to_str(), max(vocab, known)
            self._tokenizer = library.LLTokenizer(text, n_vocab=size, eos_token=sorted(self._ends))
        except ValueError as cause:
            raise UserError(f"response_format: this model's tokenizer cannot be used for it: {_line(cause)}") from None
        self._limits = library.LLParserLimits(verbose_errors=False)
        self._vocab = vocab
        self._words = -(-int(self._tokenizer.vocab_size) // 32)
        self._matchers: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    def grammar(self, response_format: Mapping[str, Any]) -> Grammar:
        """Return a grammar at its beginning. Raises UserError for a schema that cannot be kept to."""
        matcher = self._compiled(schema_text(response_format)).deep_copy()
        return Grammar(matcher, self._ends, self._vocab, self._words)

    def _compiled(self, schema: str) -> Any:
        with self._lock:
            if schema in self._matchers:
                self._matchers.move_to_end(schema)
                return self._matchers[schema]
        matcher = self._compile(schema)
        with self._lock:
            self._matchers[schema] = matcher
            while len(self._matchers) > KEPT:
                self._matchers.popitem(last=False)
        return matcher

    def _compile(self, schema: str) -> Any:
        library = _library()
        try:
            source = library.LLMatcher.grammar_from_json_schema(schema)
        except ValueError as cause:
            raise UserError(f"response_format: the schema cannot be read: {_line(cause)}") from None
        matcher = library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise UserError(
                f"response_format: the schema cannot be kept to: {_line(matcher.get_error())}; change it there"
            )
        return matcher


_compilers: WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], Compiler]] = WeakKeyDictionary()
_lock = Lock()


def compiler_for(tokenizer: Any, vocab: int, ends: Collection[int]) -> Compiler:
    """Return the compiler of a model. It is made when the first request needs it, which takes up to a second."""
    if tokenizer is None:
        return Compiler(None, vocab, ends)
    with _lock:
        known = _compilers.setdefault(tokenizer, {})
        key = (vocab, frozenset(ends))
        if key not in known:
            known[key] = Compiler(tokenizer, vocab, ends)
        return known[key]


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError(
            "response_format needs the package llguidance, which is not installed: pip install 'specplug[serve]'"
        ) from None
    return llguidance


def _line(cause: object) -> str:
    """Return what went wrong in one line."""
    lines = [line.strip() for line in str(cause).splitlines() if line.strip(" ^\t")]
    return " ".join(lines)[:300] or "no reason given"
