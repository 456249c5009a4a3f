"""The structured output manager: compiles and follows grammars with ``llguidance`` (the extra ``structured``), which is imported when the first
request needs it."""

import json
from collections import OrderedDict
from types import ModuleType
from typing import Any

from torch import Tensor

from tandem.engine.structured_output.params import StructuredOutputsParams
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

_COMPILED_GRAMMARS = 128
"""Capacity of the cache of compiled grammars, which evicts the least recently used."""


class StructuredOutputManager:
    """Compiles the grammars of requests for one tokenizer, and caches them. ``vocab_size``: the model's, which may exceed the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokens: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Any:
        """Returns a matcher in its initial state, of which ``GrammarCursor`` uses a copy. Raises ``UserError`` if the grammar cannot be
        compiled, llguidance is not installed, or there is no tokenizer or end token."""
        key = params.key()
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        library = _library()
        if self._tokens is None:
            self._tokens = _token_trie(library, self._tokenizer, self._vocab_size)
        try:
            grammar = _grammar(library, params)
        except ValueError as error:
            raise _refusal(params, str(error)) from None
        matcher = library.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise UserError(f"structured_outputs {params.kind}: no token of the vocabulary can begin such a text")
        self._compiled[key] = matcher
        if len(self._compiled) > _COMPILED_GRAMMARS:
            self._compiled.popitem(last=False)
        return matcher


class GrammarCursor:
    """The position of a sequence in its grammar. ``fill`` is a function of ``output`` only; the state kept here avoids parsing the same tokens
    again at the next position."""

    def __init__(self, start: Any) -> None:
        self._start = start
        self._matcher = start.deep_copy()
        self._read: list[int] = []

    def fill(self, output: list[int], words: Tensor) -> None:
        """Sets the bits in ``words[W]`` int32 (on the CPU, contiguous) of the tokens that may follow ``output``. Only end tokens may if
        ``output`` does not match, or if no token of the vocabulary continues it."""
        if output[: len(self._read)] != self._read:
            kept = next((i for i, (a, b) in enumerate(zip(self._read, output, strict=False)) if a != b), len(output))
            self._matcher.rollback(len(self._read) - kept)
            del self._read[kept:]
        rest = output[len(self._read) :]
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._read += rest[:taken]
        matcher = self._matcher
        if taken < len(rest):
            matcher = self._matcher.deep_copy()
            matcher.consume_token(rest[taken])
        matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * len(words))
        if self._matcher.is_error():
            # A matcher never leaves the error state, but another position may be valid.
            self._matcher, self._read = self._start.deep_copy(), []


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise UserError("structured_outputs need llguidance, which is not installed; pip install 'tandem-rl[structured]'") from None
    return llguidance


def _grammar(library: ModuleType, params: StructuredOutputsParams) -> str:
    """Returns the grammar in llguidance's format. Raises ``ValueError``."""
    if params.regex is not None:
        grammar = library.LLMatcher.grammar_from_regex(params.regex)
    elif params.choice is not None:
        grammar = library.grammar_from("choice", json.dumps(params.choice))
    elif params.grammar is not None:
        grammar = library.grammar_from("grammar", params.grammar)
    else:
        options: dict[str, Any] = {"whitespace_flexible": False} if params.disable_any_whitespace else {}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        schema = '{"type": "object"}' if params.json is None else params.json
        grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides=options or None)
    return str(grammar)


def _refusal(params: StructuredOutputsParams, message: str) -> UserError:
    line = " ".join(message.split())
    return UserError(f"structured_outputs {params.kind} cannot be compiled: {line[:300]}")


def _token_trie(library: ModuleType, tokenizer: Tokenizer | None, vocab_size: int) -> Any:
    """Returns llguidance's form of the tokenizer: the bytes of every token."""
    if tokenizer is None:
        raise UserError("structured_outputs need a tokenizer and this engine has none")
    if not tokenizer.eos_token_ids:
        raise UserError("structured_outputs need an end-of-sequence token and this tokenizer names none")
    end = list(tokenizer.eos_token_ids)
    text = tokenizer.backend.to_str()
    decoder = json.loads(text).get("decoder") or {}
    if decoder.get("type") == "Fuse":
        wrapped = library.TokenizerWrapper(_FusedTokens(tokenizer))
        return library.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=end)
    try:
        return library.LLTokenizer(text, n_vocab=vocab_size, eos_token=end)
    except ValueError as error:
        raise UserError(f"structured_outputs do not work with this tokenizer: {' '.join(str(error).split())}") from None


class _FusedTokens:
    """A tokenizer whose text is the concatenation of its tokens' texts, with llguidance's interface."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        added = tokenizer.backend.get_added_tokens_decoder()
        self.special_token_ids = [token for token, content in added.items() if content.special]
        self.tokens = [(tokenizer.backend.id_to_token(token) or "").encode() for token in range(tokenizer.vocab_size)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)
