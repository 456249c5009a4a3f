"""How likely a text is to a model: perplexity over windows of its context, and the scores of continuations, through the engine."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.types import UserError

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """``loss``: the mean of -log p over ``tokens`` predicted tokens, in nats; ``perplexity``: its exponential (Jelinek et al., 1977).
    ``bits_per_byte``: the same sum in bits by the text's bytes, which texts cut by other tokenizers can be compared by."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    documents: int


def perplexity(llm: LLM, texts: Sequence[str], context: int = 0, stride: int = 0) -> PerplexityResult:
    """Of ``texts``, each a document that sees nothing of the others.

    A document is cut in windows of ``context`` tokens (0: all that the model has), each begun ``stride`` tokens after the one before
    (0: where that ends); of a window those tokens count that no window before it had, and the first token of a document is
    predicted by nothing. Raises ``UserError`` where nothing can be predicted."""
    longest = llm.engine.settings.max_model_len
    context = context or longest
    if not 2 <= context <= longest:
        raise UserError(f"the context of the perplexity is {context} tokens; it must be between 2 and the model's {longest}")
    if not 0 <= stride <= context - 1:
        raise UserError(f"the stride of the perplexity is {stride} tokens; it must be between 1 and {context - 1}, or 0")
    tokenizer = llm.get_tokenizer()
    windows = [
        window for text in texts for window in _windows(tokenizer.encode(text, add_special_tokens=True), context, stride or context - 1)
    ]
    if not windows:
        raise UserError("the data has no document of two tokens: there is nothing to predict; give it text")
    scores = score(llm, windows)
    total, tokens = math.fsum(value for value, _ in scores), sum(len(counted) for _, counted in windows)
    loss, size = -total / tokens, sum(len(text.encode()) for text in texts)
    return PerplexityResult(loss, math.exp(min(loss, 700.0)), -total / math.log(2) / size, tokens, len(texts))


def _windows(ids: Sequence[int], context: int, stride: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """(tokens that are seen, tokens behind them that are counted) of each window."""
    scored = 1
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        if end > scored:
            yield ids[begin:scored], ids[scored:end]
        scored = max(scored, end)
        if end == len(ids):
            return


def score(llm: LLM, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """For each (context, continuation) of token ids, neither empty: the sum of the continuation's log-probabilities in nats, and
    whether each of its tokens is the most likely one in its place."""
    scores: list[tuple[float, bool]] = []
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        outputs = llm.generate([{"prompt_token_ids": [*seen, *counted]} for seen, counted in part], params, use_tqdm=False)
        for (seen, counted), output in zip(part, outputs, strict=True):
            assert output.prompt_logprobs is not None
            entries = [(entry or {})[token] for entry, token in zip(output.prompt_logprobs[len(seen) :], counted, strict=True)]
            scores.append((math.fsum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)))
    return scores
