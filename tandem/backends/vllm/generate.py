"""What ``/inference/v1/generate`` is asked for one completion, and what it answers: token ids in, token ids out."""

import ast
import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from tandem.backends.vllm.arguments import BOTH_LOGPROBS, MODEL_NAME, version_label
from tandem.engine.processing.outputs import CompletionOutput, Continuation, RequestTimes
from tandem.engine.processing.repetition import RepetitionDetector
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.text.tokenizer import Tokenizer
from tandem.types import EngineDied, RoutedExperts, WeightVersion

FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The parameters that leave tokens out, and their values when they are off."""
NOTHING = Continuation((), (), (), ())


def seed_of(seed: int, key: int, index: int, drawn: int = 0) -> int:
    """Returns the 32-bit seed of completion ``index`` of request ``key`` after the ``drawn`` tokens that it has already: as many bits as a generator of torch
    takes on a CPU. One that is continued draws with other numbers than those of its beginning."""
    text = f"{seed}\0{key}\0{index}" + (f"\0{drawn}" if drawn else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def is_processed(params: SamplingParams) -> bool:
    """Returns whether tokens are drawn from another distribution than the model's: two log-probabilities are recorded then. A greedy token has the model's
    alone."""
    return params.temperature not in (0, 1) or any(getattr(params, name) != off for name, off in FILTERS.items())


def generate_request(
    tokens: Sequence[int], params: SamplingParams, seed: int, stop_token_ids: Sequence[int], room: int, begun: Continuation = NOTHING
) -> dict[str, Any]:
    """Returns the body of ``/inference/v1/generate`` for one completion of the prompt ``tokens``, the rest of the one that was ``begun``. ``stop_token_ids``:
    our tokenizer's, so that no file of the model's folder decides what ends it. ``room``: tokens that are left in the context after the prompt."""
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    return {
        "model": MODEL_NAME,
        "token_ids": [*tokens, *begun.token_ids],
        "sampling_params": {
            "n": 1,
            **{name: getattr(params, name) for name in FILTERS},
            "temperature": params.temperature,
            "seed": seed,
            "max_tokens": limit - len(begun.token_ids),
            "ignore_eos": True,
            "stop_token_ids": list(stop_token_ids),
            "stop": list(params.stop_texts),
            "detokenize": bool(params.stop_texts),
            "logprobs": BOTH_LOGPROBS if is_processed(params) else 0,
            **({} if params.repetition_detection is None else {"repetition_detection": asdict(params.repetition_detection)}),
        },
    }


def completion_of(
    answer: Mapping[str, Any], name: str, index: int, prompt_tokens: int, params: SamplingParams, tokenizer: Tokenizer, version: WeightVersion,
    begun: Continuation = NOTHING, replays: bool = False,
) -> CompletionOutput:
    """Returns completion ``index`` of request ``name`` from the answer to ``generate_request``, with what was ``begun`` before it. ``replays``: it has the
    routing of the tokens. Raises ``EngineDied`` if a token was drawn by other weights than ``version``, or the answer is not whole."""
    (choice,) = answer["choices"]
    tokens, reason = tuple(choice["token_ids"]), choice["finish_reason"]
    sampling, logprobs = _logprobs(choice["logprobs"]["content"] or (), is_processed(params))
    if len(logprobs) != len(tokens) or reason not in ("stop", "length", *(("repetition",) if params.repetition_detection is not None else ())):
        raise EngineDied(f"vLLM answered {name} with {len(tokens)} tokens, {len(logprobs)} log-probabilities and finish reason '{reason}'")
    label = version_label(version)
    spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()]
    if spans != [(label, 0, len(tokens))]:
        raise EngineDied(f"vLLM drew {name} with the weights {spans}, and holds {label}")
    routed = routing_of(choice["routed_experts"], prompt_tokens + len(begun.token_ids) + len(tokens) - 1) if replays else None
    whole = CompletionOutput(
        index, "", [*begun.token_ids, *tokens], [*begun.raw_logprobs, *logprobs], [*begun.sampling_logprobs, *sampling],
        [*begun.weight_versions, *(version,) * len(tokens)], reason,
        choice["stop_reason"] if reason == "stop" and isinstance(choice["stop_reason"], str) else None, routed_experts=routed,
    )  # fmt: skip
    return _ended(_not_repeated(whole, len(begun.token_ids), prompt_tokens, params), len(begun.token_ids), prompt_tokens, params.stop_texts, tokenizer)


def times_of(answer: Mapping[str, Any], asked_s: float, answered_s: float) -> RequestTimes | None:
    """Returns when the completion of ``answer`` was asked for, scheduled and drew its first token, in seconds of the clock of ``asked_s`` and ``answered_s``;
    ``None`` where vLLM does not say it. vLLM has measured the parts; that the last one ends with the answer is an assumption, and what remains before them is
    the queue's."""
    measured = answer.get("metrics") or {}
    decode_ms, prefill_ms = measured.get("generation_time_ms"), measured.get("time_to_first_token_ms")
    if decode_ms is None or prefill_ms is None:
        return None
    first_token_s = max(asked_s, answered_s - decode_ms / 1000)
    return RequestTimes(asked_s, max(asked_s, first_token_s - prefill_ms / 1000), first_token_s)


def _not_repeated(completion: CompletionOutput, begun: int, prompt_tokens: int, params: SamplingParams) -> CompletionOutput:
    """Returns ``completion`` up to the token that completes a repetition. vLLM looks for it in what it draws: one that begins in the ``begun`` tokens is found
    here."""
    if not begun or params.repetition_detection is None:
        return completion
    detector = RepetitionDetector(params.repetition_detection)
    count = next((count for count, token in enumerate(completion.token_ids, start=1) if detector.push(token)), len(completion.token_ids))
    return completion if count == len(completion.token_ids) else _first(completion, count, prompt_tokens, "repetition", None)


def _ended(completion: CompletionOutput, begun: int, prompt_tokens: int, stops: Sequence[str], tokenizer: Tokenizer) -> CompletionOutput:
    """Returns ``completion`` with its text, cut before the stop text that ended it. vLLM looks for stop texts in what it draws: one that begins in the
    ``begun`` tokens is found here, and ends the completion at the token that completes it."""
    tokens, stop = completion.token_ids, completion.stop_reason
    text = _text(tokens, tokenizer)
    if begun and any(each in text for each in stops):
        count = next(count for count in range(begun + 1, len(tokens) + 1) if any(each in _text(tokens[:count], tokenizer) for each in stops))
        text = _text(tokens[:count], tokenizer)
        stop = next(each for each in stops if each in text)
        completion = _first(completion, count, prompt_tokens, "stop", stop)
    return replace(completion, text=text[: text.find(stop)] if isinstance(stop, str) and stop in stops and stop in text else text)


def _first(completion: CompletionOutput, count: int, prompt_tokens: int, reason: str, stop: str | None) -> CompletionOutput:
    """Returns the first ``count`` tokens of ``completion``, which ends there for ``reason``; ``stop``: the text that ends it."""
    routed = completion.routed_experts
    return replace(
        completion, token_ids=completion.token_ids[:count], raw_logprobs=completion.raw_logprobs[:count],
        sampling_logprobs=completion.sampling_logprobs[:count], weight_versions=completion.weight_versions[:count], finish_reason=reason, stop_reason=stop,
        routed_experts=None if routed is None else routed.first(prompt_tokens + count - 1),
    )  # fmt: skip


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Returns the text of ``tokens``; a model may have more ids than its tokenizer."""
    return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])


def _logprobs(content: Sequence[Mapping[str, Any]], is_both: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the log-probabilities of the tokens of an answer in the distribution that they were drawn from, and raw ones, which differ if ``is_both``. Raises
    ``EngineDied`` if those are missing."""
    sampling = tuple(float(each["logprob"]) for each in content)
    if not is_both:
        return sampling, sampling
    entries = [each["top_logprobs"] for each in content]
    if any(len(each) != BOTH_LOGPROBS for each in entries):
        raise EngineDied("vLLM answered without the raw log-probabilities of the tokens that it drew")
    return sampling, tuple(float(raw["logprob"]) for _, raw in entries)


def routing_of(text: str | None, tokens: int) -> RoutedExperts:
    """Returns the routing of ``tokens`` tokens from an answer: an array [tokens, layers, experts per token] in NumPy's format, in base64. Raises
    ``EngineDied`` if it is another."""
    data = base64.b64decode(text or "")
    # NumPy's format, version 1.0: magic, version, the length of the header, and the header, a literal of Python.
    start = 10 + int.from_bytes(data[8:10], "little")
    header = ast.literal_eval(data[10:start].decode("latin-1").strip() or "{}")
    item_bytes, shape = {"|u1": 1, "<u2": 2}.get(header.get("descr"), 0), header.get("shape", ())
    if not item_bytes or header["fortran_order"] or len(shape) != 3 or shape[0] != tokens or len(data) - start != math.prod(shape) * item_bytes:
        raise EngineDied(f"vLLM answered with the routing {header or 'of nothing'} for {tokens} tokens")
    return RoutedExperts(shape[1], shape[2], item_bytes, data[start:])
