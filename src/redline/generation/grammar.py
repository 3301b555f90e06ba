"""Structured output: computes which tokens may come next so that a text matches a schema, a regex or a grammar.

Grammars are compiled in threads, because compiling a hostile schema may take long. The length of a grammar is limited,
and the engine limits the time of compiling.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from redline.errors import RedlineError, first_line
from redline.generation.request import Grammar

_THREADS = 2
_LONGEST_CHARACTERS = 200_000
# Limits whitespace between JSON values, because some models would generate it forever.
_JSON = {"whitespace_pattern": r"\n? {0,16}"}
_OBJECT = json.dumps({"type": "object"})


class Matcher:
    """Tracks one text, and returns which tokens may continue it."""

    def __init__(self, matcher: Any, stop_tokens: Sequence[int]) -> None:
        self._matcher = matcher
        self.stop_tokens = frozenset(stop_tokens)

    def mask(self) -> bytes:
        """Returns a bit for each token of the vocabulary, which is 1 if the token may come next."""
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask

    def accept(self, token: int) -> bool:
        """Appends a token, and returns whether the text is complete and no token may follow."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RedlineError(f"the grammar cannot be followed: {first_line(ValueError(self._matcher.get_error()))}.")


class GrammarCompiler:
    """Compiles grammars for a `tokenizers.Tokenizer` and a model with `vocabulary` tokens."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._by_stops: dict[tuple[int, ...], Any] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="redline-grammar")

    def start(self, grammar: Grammar, stop_tokens: frozenset[int]) -> Future[Matcher]:
        """Starts to compile. The future raises RedlineError if the grammar is not valid."""
        if len(grammar.text) > _LONGEST_CHARACTERS:
            raise RedlineError(f"the grammar has {len(grammar.text):,} characters; at most {_LONGEST_CHARACTERS:,}.")
        return self._threads.submit(self._compile, grammar, tuple(sorted(stop_tokens)))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar, stop_tokens: tuple[int, ...]) -> Matcher:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise RedlineError('structured output needs llguidance: `pip install "redline[structured]"`.') from error
        if stop_tokens not in self._by_stops:
            size = max(self._vocabulary, self._tokenizer.get_vocab_size(with_added_tokens=True))
            text = self._tokenizer.to_str()
            self._by_stops[stop_tokens] = LLTokenizer(text, n_vocab=size, eos_token=list(stop_tokens) or None)
        tokenizer = self._by_stops[stop_tokens]
        compilers = {
            "json": lambda _: LLMatcher.grammar_from_json_schema(_OBJECT, overrides=_JSON),
            "json_schema": lambda text: LLMatcher.grammar_from_json_schema(text, overrides=_JSON),
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
        }
        if grammar.kind not in compilers:
            raise RedlineError(f"unknown kind of grammar {grammar.kind!r}: use one of {', '.join(compilers)}.")
        try:
            matcher = LLMatcher(tokenizer, compilers[grammar.kind](grammar.text), log_level=0)
        except (ValueError, RuntimeError) as error:
            raise RedlineError(f"the grammar is not valid: {first_line(error)}.") from error
        if matcher.is_error():
            raise RedlineError(f"the grammar is not valid: {first_line(ValueError(matcher.get_error()))}.")
        return Matcher(matcher, stop_tokens or (tokenizer.eos_token,))
