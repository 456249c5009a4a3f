"""Requests on one engine: closed batches, an engine that always has requests waiting, and one that receives so many a second. Imports no torch."""

from dataclasses import dataclass

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.serving.engine_memory import predict_engine_memory
from tandem.estimate.serving.kv_cache import held_tokens
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.step_time import EngineStep, predict_decode_step, predict_prefill, predict_step
from tandem.layout.shapes import ModelShapes

CONTEXTS = 8
"""Lengths at which the steps of a completion are evaluated: their time is linear in the context but for windows and the change of the limiting factor."""

BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """An engine in a steady state. ``running``: sequences that decode at once. ``requests_per_s``, ``output_tokens_per_s``: what it completes;
    ``output_tokens_per_s_per_gpu``. ``step_s``: the mean step, which is the time between two tokens of a sequence. ``first_token_s``: from arrival.
    ``cache_share``: of the KV cache that is in use. ``is_full``: whether it runs as many sequences as memory and options allow."""

    running: float
    requests_per_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    step_s: float
    first_token_s: float
    cache_share: float
    is_full: bool


def predict_batch_seconds(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, sequences: int, prompt_tokens: int, output_tokens: int) -> float:
    """Returns the seconds of a closed batch of ``sequences`` requests that start and end together: their prompts, then one step for each further token, whose
    keys and values grow."""
    seconds = predict_prefill(shapes, layout, hardware, prompt_tokens, sequences)
    steps, parts = output_tokens - 1, min(CONTEXTS, max(1, output_tokens - 1))
    for part in range(parts):
        context = prompt_tokens + output_tokens * (part + 0.5) / parts
        seconds += steps / parts * predict_decode_step(shapes, layout, hardware, sequences, context).seconds
    return seconds


def predict_offline_seconds(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, requests: int, prompt_tokens: int, output_tokens: int, *, reserves_output: bool = False
) -> float:
    """Returns the seconds of ``requests`` requests of the same lengths that are all queued at the start: since those that run together end together, one
    closed batch follows another, and the last is smaller."""
    running = int(most_running(shapes, layout, hardware, prompt_tokens, output_tokens, reserves_output=reserves_output))
    full, rest = divmod(requests, running)
    seconds = full * predict_batch_seconds(shapes, layout, hardware, running, prompt_tokens, output_tokens) if full else 0.0
    return seconds + (predict_batch_seconds(shapes, layout, hardware, rest, prompt_tokens, output_tokens) if rest else 0.0)


def most_running(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, prompt_tokens: float, output_tokens: float, *, reserves_output: bool = False,
    shared_tokens: float = 0, variation: float = 1.0,
) -> float:
    """Returns how many sequences run at once: as ``max_num_seqs`` and the KV cache allow. A sequence is half written on average; ``reserves_output``: it has
    blocks for all of its output from the start. ``shared_tokens``: of its prompt, in blocks of a prefix that all share. ``variation``: as in
    ``written_tokens``."""
    cache = predict_engine_memory(shapes, layout, hardware).cache_tokens - shared_tokens
    written = output_tokens if reserves_output else written_tokens(output_tokens, variation)
    return max(1.0, min(layout.max_num_seqs, cache / held_tokens(shapes, prompt_tokens - shared_tokens + written)))


def written_tokens(output_tokens: float, variation: float = 1.0) -> float:
    """Returns how much of its output a running sequence has written on average. ``variation``: the mean square of the lengths of outputs over the square of
    their mean, because long outputs run longer, so that a sequence that runs has more than an average one (the inspection paradox)."""
    return output_tokens * variation / 2


def predict_saturated(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, prompt_tokens: float, output_tokens: float, *, reserves_output: bool = False,
    shared_tokens: float = 0, variation: float = 1.0,
) -> ServingLoad:
    """Returns the steady state of an engine with continuous batching and chunked prefill for which requests always wait. Every step draws a token for each
    running sequence and computes the prompts of those that take the place of the finished ones. ``shared_tokens``: of a prompt, found in the prefix cache.
    ``variation``: as in ``written_tokens``."""
    running = most_running(
        shapes, layout, hardware, prompt_tokens, output_tokens, reserves_output=reserves_output, shared_tokens=shared_tokens, variation=variation
    )
    computed = prompt_tokens - shared_tokens
    # A step has room for so many tokens; if prompts need more, steps take turns and fewer sequences decode.
    running = min(running, layout.max_num_batched_tokens / (1 + computed / output_tokens))
    context = prompt_tokens + written_tokens(output_tokens, variation)
    step = mean_step(shapes, layout, hardware, running, context, running / output_tokens, prompt_tokens, computed)
    return _load(shapes, layout, hardware, running, step, context, output_tokens, float("inf"), True)


def predict_load(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, requests_per_s: float, prompt_tokens: float, output_tokens: float, *,
    shared_tokens: float = 0, variation: float = 1.0,
) -> ServingLoad | None:
    """Returns the steady state of an engine that receives ``requests_per_s`` requests, ``None`` if it cannot complete so many.

    Little's law: a request decodes for ``output_tokens`` steps, so that requests per second times their duration are the sequences that run; the step's time
    grows with them, and the fixed point is found by bisection. A prompt waits for those before it as in a queue with Poisson arrivals and one server with
    equal services (Pollaczek-Khinchine), whose service is the prompt's own chunk."""
    most = predict_saturated(shapes, layout, hardware, prompt_tokens, output_tokens, shared_tokens=shared_tokens, variation=variation)
    if requests_per_s >= most.requests_per_s:
        return None
    context = prompt_tokens + written_tokens(output_tokens, variation)
    computed, low, high = prompt_tokens - shared_tokens, 0.0, most.running
    for _ in range(BISECTIONS):
        running = (low + high) / 2
        step = mean_step(shapes, layout, hardware, running, context, running / output_tokens, prompt_tokens, computed)
        low, high = (running, high) if running < requests_per_s * output_tokens * step else (low, running)
    own, added = prompt_seconds(shapes, layout, hardware, running, context, computed)
    busy = min(0.999, requests_per_s * added)
    first = step / 2 + own + busy / (2 * (1 - busy)) * own
    return _load(shapes, layout, hardware, running, step, context, output_tokens, first, False)


def prompt_seconds(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, running: float, context: float, computed: float
) -> tuple[float, float]:
    """Returns the seconds of the steps in which a prompt's ``computed`` tokens are computed beside ``running`` sequences of ``context`` tokens, and how much
    of that it adds to steps that these take anyway."""
    own = predict_prefill(shapes, layout, hardware, max(1, round(computed)), 1, decoding=running, context=context)
    return own, max(0.0, own - predict_decode_step(shapes, layout, hardware, running, context).seconds)


def mean_step(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, running: float, context: float, started: float, prompt_tokens: float, computed: float
) -> float:
    """Returns the mean seconds of a step in which ``running`` sequences of ``context`` tokens draw a token each, and ``started`` prompts are computed, of
    which ``computed`` of ``prompt_tokens`` tokens each."""
    # Prompts come in chunks: with fewer than one prompt a step, some steps have one and the others none, and both are averaged.
    share = min(1.0, started) if computed else 0.0
    before = prompt_tokens - computed / 2
    alone = predict_step(shapes, layout, hardware, EngineStep(running, context)).seconds if share < 1 else 0.0
    if not share:
        return alone
    with_prompt = predict_step(shapes, layout, hardware, EngineStep(running, context, started * computed / share, before)).seconds
    return share * with_prompt + (1 - share) * alone


def _load(
    shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, running: float, step_s: float, context: float, output_tokens: float,
    first_token_s: float, is_full: bool,
) -> ServingLoad:  # fmt: skip
    tokens, cache = running / step_s, predict_engine_memory(shapes, layout, hardware).cache_tokens
    share = running * held_tokens(shapes, context) / cache
    return ServingLoad(running, tokens / output_tokens, tokens, tokens / layout.tensor, step_s, first_token_s, min(1.0, share), is_full)
