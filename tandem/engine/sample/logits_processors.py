"""Logits processors: the changes that a request makes to its logits before a token is drawn.

Every processor is a function of the request and of the tokens before the position, so it can be evaluated for any position, in any order and
repeatedly: after a preemption, or for several positions of one sequence in one step.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.structured_output.manager import GrammarCursor, StructuredOutputManager
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError


@dataclass(frozen=True, slots=True, eq=False)
class LogitsProcessors:
    """A request's logits processors, resolved to token ids. ``bias``: (ids, values). ``seen[P]``: the prompt's distinct tokens, if
    ``repetition`` is not 1. ``allowed[W]``: a bit mask of the permitted tokens, 32 per word. ``bad_words``: the token ids of each word.
    ``end_tokens`` cannot be drawn before ``min_tokens``. ``grammar``: a compiled matcher."""

    bias: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    seen: Tensor | None = None
    allowed: Tensor | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    grammar: Any = None

    @property
    def counts_drawn(self) -> bool:
        return self.frequency != 0 or self.presence != 0

    def cursor(self) -> GrammarCursor | None:
        """Returns the state of the grammar for a new sequence, ``None`` without a grammar."""
        return None if self.grammar is None else GrammarCursor(self.grammar)


class Position(NamedTuple):
    """Row ``row`` of the logits predicts the token after ``output[L]`` int64 (on the CPU); ``processors`` apply to it."""

    row: int
    processors: LogitsProcessors
    cursor: GrammarCursor | None
    output: Tensor


def make_logits_processors(
    params: SamplingParams, prompt: Sequence[int], end_tokens: Iterable[int], vocab_size: int, tokenizer: Tokenizer | None,
    structured_outputs: StructuredOutputManager,
) -> LogitsProcessors | None:
    """Returns the logits processors of a request, ``None`` if it does not change its logits. ``end_tokens``: all that can end a completion.
    Raises ``UserError`` for bad words without a tokenizer and for a grammar that cannot be compiled."""
    if not _may_change_logits(params):
        return None
    bias = params.logit_bias or {}
    end = tuple(sorted(end_tokens)) if params.min_tokens else ()
    repeats = params.repetition_penalty != 1
    allowed = params.allowed_token_ids
    processors = LogitsProcessors(
        bias=(tuple(bias), tuple(bias.values())),
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        seen=torch.tensor(sorted(set(prompt))) if repeats else None,
        allowed=None if allowed is None else _packed(allowed, vocab_size),
        bad_words=tuple(ids for word in params.bad_words or () for ids in _spellings(word, tokenizer) if ids),
        min_tokens=params.min_tokens if end else 0,
        end_tokens=end,
        grammar=None if params.structured_outputs is None else structured_outputs.compile(params.structured_outputs),
    )
    has_bans = processors.bad_words or processors.min_tokens or allowed is not None or processors.grammar is not None
    return processors if bias or repeats or processors.counts_drawn or has_bans else None


def _may_change_logits(params: SamplingParams) -> bool:
    """Returns whether a request with ``params`` may have processors: most have none, and are told so at once."""
    penalises = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    forbids = params.allowed_token_ids is not None or params.structured_outputs is not None
    return bool(params.logit_bias or penalises or forbids or params.bad_words or params.min_tokens)


def apply_logits_processors(logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """Returns a copy of ``logits[R, V]`` with every processor applied. A row's bits depend only on its own position."""
    rows = torch.tensor([position.row for position in positions], device=logits.device)
    own = logits.index_select(0, rows).to(torch.promote_types(logits.dtype, torch.float32))
    _add_biases(own, positions)
    _penalise(own, positions)
    _mask(own, positions)
    _ban(own, positions)
    return logits.index_copy(0, rows, own.to(logits.dtype))


def _add_biases(own: Tensor, positions: Sequence[Position]) -> None:
    entries = [
        (i, token, value) for i, p in enumerate(positions) for token, value in zip(*p.processors.bias, strict=True)
    ]
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        own[list(rows), list(tokens)] += torch.tensor(values, dtype=own.dtype, device=own.device)


def _penalise(own: Tensor, positions: Sequence[Position]) -> None:
    """Applies the three penalties, in vLLM's order."""
    repeats = [(i, p) for i, p in enumerate(positions) if p.processors.seen is not None]
    if repeats:
        seen = [torch.cat((p.processors.seen, p.output)) for _, p in repeats if p.processors.seen is not None]
        rows, tokens, _ = _padded(own, [i for i, _ in repeats], seen)
        penalty = torch.tensor([[p.processors.repetition] for _, p in repeats], dtype=own.dtype, device=own.device)
        logits = own[rows, tokens]
        own[rows, tokens] = torch.where(logits > 0, logits / penalty, logits * penalty)
    drawn = [(i, p) for i, p in enumerate(positions) if p.processors.counts_drawn and p.output.numel()]
    if drawn:
        rows, tokens, ordered = _padded(own, [i for i, _ in drawn], [p.output for _, p in drawn])
        count = torch.searchsorted(ordered, tokens, right=True) - torch.searchsorted(ordered, tokens)
        penalty = torch.tensor([(p.processors.frequency, p.processors.presence) for _, p in drawn], dtype=own.dtype, device=own.device)
        own[rows, tokens] = own[rows, tokens] - penalty[:, :1] * count - penalty[:, 1:]


def _padded(own: Tensor, rows: list[int], tokens: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (rows[P, 1], tokens[P, L], ordered[P, L]): the non-empty ``tokens`` of each of ``rows``, padded with their first token; and
    sorted, with the padding at the end. A token that occurs several times is read and written several times with the same value."""
    past = own.shape[1]
    padded = pad_sequence(tokens, batch_first=True, padding_value=past).to(own.device)
    filled = torch.where(padded < past, padded, padded[:, :1])
    return torch.tensor(rows, device=own.device).unsqueeze(1), filled, padded.sort(1).values


def _mask(own: Tensor, positions: Sequence[Position]) -> None:
    """Sets the logits of tokens that allowed tokens and grammars forbid to -inf."""
    masked = [(i, p) for i, p in enumerate(positions) if p.processors.allowed is not None or p.cursor is not None]
    if not masked:
        return
    words = torch.full((len(masked), _words(own.shape[1])), -1, dtype=torch.int32)
    for row, (_, position) in zip(words, masked, strict=True):
        if position.cursor is not None:
            position.cursor.fill(position.output.tolist(), row)
        if position.processors.allowed is not None:
            both = row & position.processors.allowed
            # If no token satisfies both, the grammar wins: its end token or only continuation stays possible.
            row.copy_(both if bool(both.any()) else row)
    forbidden = _missing(words.to(own.device), own.shape[1])
    if len(masked) == len(own):
        own.masked_fill_(forbidden, -math.inf)
        return
    rows = torch.tensor([i for i, _ in masked], device=own.device)
    own.index_copy_(0, rows, own.index_select(0, rows).masked_fill_(forbidden, -math.inf))


def _ban(own: Tensor, positions: Sequence[Position]) -> None:
    """Sets the logits of bad words and early end tokens to -inf, except in a row in which no token would be left."""
    banned = [(i, token) for i, p in enumerate(positions) for token in _banned(p)]
    if not banned:
        return
    rows, tokens = torch.tensor(banned, device=own.device).unbind(1)
    before = own[rows, tokens]
    own[rows, tokens] = -math.inf
    is_empty = own.amax(1) == -math.inf
    own[rows, tokens] = before.masked_fill(~is_empty[rows], -math.inf)


def _banned(position: Position) -> list[int]:
    processors, length = position.processors, position.output.numel()
    tokens = list(processors.end_tokens) if length < processors.min_tokens else []
    if processors.bad_words:
        longest = max(map(len, processors.bad_words)) - 1
        tail = position.output[max(0, length - longest) :].tolist()
        tokens += [word[-1] for word in processors.bad_words if len(word) - 1 <= length and _ends_with(tail, word[:-1])]
    return tokens


def _ends_with(tail: list[int], tokens: tuple[int, ...]) -> bool:
    return not tokens or tuple(tail[-len(tokens) :]) == tokens


def _spellings(word: str, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Returns the tokens of ``word``, and of ``word`` after a space if that is a different spelling with as many tokens, as vLLM does."""
    if tokenizer is None:
        raise UserError("sampling bad_words need a tokenizer and this engine has none; use logit_bias")
    plain = tuple(tokenizer.encode(word.lstrip() or word))
    try:
        spaced = tuple(tokenizer.encode(" " + word.lstrip()))
    except UserError:  # A vocabulary without the space.
        return [plain]
    return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]


def _words(vocab_size: int) -> int:
    """Returns the number of 32-bit words with a bit for each token."""
    return -(-vocab_size // 32)


def _packed(tokens: Sequence[int], vocab_size: int) -> Tensor:
    bits = torch.zeros(_words(vocab_size) * 4, 8, dtype=torch.uint8)
    bits.view(-1)[list(tokens)] = 1
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8).view(torch.int32)


def _missing(words: Tensor, vocab_size: int) -> Tensor:
    """Maps ``words[A, W]`` int32 to bool [A, V], true where the bit of token t, bit ``t % 32`` of word ``t // 32``, is not set."""
    octets = words.view(torch.uint8).unsqueeze(2)
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=words.device)
    return ((octets & bits) == 0).flatten(1)[:, :vocab_size]
