"""Metrics in Prometheus' text format, with vLLM's names, so that its dashboards work."""

import time
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.engine.metrics.stats import EngineStats
from tandem.engine.processing.outputs import RequestOutput
from tandem.runtime.exposition.text import exposition
from tandem.serving.engines.messages import EngineInfo
from tandem.serving.engines.stream import Stream

_LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_REASONS = ("stop", "length", "repetition", "abort", "error")


class Totals(NamedTuple):
    """Tokens that all engines have computed so far, and their load now. ``prompt_tokens``: of answered requests. ``kv_cache_usage``: the mean."""

    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    running: int
    waiting: int
    kv_cache_usage: float


class Metrics:
    """The figures of one server; label ``engine`` is the instance's number. Times of the engine are its own; tokens of a
    request that is not streamed arrive together and count in no ``inter_token_latency``."""

    def __init__(self, model_name: str, engines: int) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._before = [EngineStats(0, 0, 0.0, 0, 0, 0)] * engines
        self._prompt_tokens = self._generation_tokens = self._prefix_queries = self._prefix_hits = 0

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, _LABELS, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = _LABELS) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets)

        self._running = gauge("vllm:num_requests_running", "Sequences that are computed.")
        self._waiting = gauge("vllm:num_requests_waiting", "Sequences that wait to be computed.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.")
        self._cache_config = Gauge(
            "vllm:cache_config_info", "The KV cache; always 1.", (*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
            registry=self.registry,
        )  # fmt: skip
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that were answered.")
        self._generated = counter("vllm:generation_tokens", "Tokens generated.")
        self._since_start = {
            "num_preemptions": counter("vllm:num_preemptions", "Preemptions."),
            "num_swaps": counter("tandem:num_swaps", "Preemptions that kept their keys and values in host memory."),
            "num_drafts": counter("vllm:spec_decode_num_drafts", "Guesses that were tried."),
            "num_draft_tokens": counter("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed."),
            "num_accepted_tokens": counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
        }
        """Figures that an engine counts from its own start."""
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens that the prefix cache was asked for.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens that the prefix cache held.")
        self._success = counter("vllm:request_success", "Requests that were answered.", (*_LABELS, "finished_reason"))
        self._restarts = counter("tandem:engine_restarts", "Engines that died and were started again.")
        self._first = histogram("vllm:time_to_first_token_seconds", "From the request to its first token.")
        self._between = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a stream.")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From the request to its last token.")
        self._queue = histogram("vllm:request_queue_time_seconds", "From the engine's inbox to the first step.")
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._request_generated = histogram("vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _TOKENS)
        self._transfers = counter("tandem:kv_transfers", "Prompts whose KV blocks were to be moved, by what came of them.", ("direction", "outcome"))
        self._transfer_bytes = counter("tandem:kv_transfer_bytes", "KV blocks of other servers that were used.", ())
        self._transfer_s = Histogram(
            "tandem:kv_transfer_seconds", "From the request for a prompt's KV blocks until an engine has them.", registry=self.registry, buckets=_SECONDS
        )
        self._transfer_held = Gauge("tandem:kv_transfer_held_bytes", "Shared memory of KV blocks that wait or arrive.", registry=self.registry)
        self._transfer_prompts = Gauge("tandem:kv_transfer_held_prompts", "Prompts whose KV blocks wait or arrive.", registry=self.registry)
        # A counter that exists from the start, so that a rate over it does.
        for engine in range(engines):
            labels = self._labels(engine)
            for metric in (self._prompt, self._generated, self._queries, self._hits, self._restarts, *self._since_start.values()):
                metric.labels(*labels)
            for gauge_ in (self._running, self._waiting, self._usage):
                gauge_.labels(*labels).set(0)
            for reason in _REASONS:
                self._success.labels(*labels, reason)
            self._between.labels(*labels)

    def text(self) -> bytes:
        return exposition(self.registry)

    def totals(self) -> Totals:
        """Returns the figures of the log."""
        loads = self._before
        return Totals(
            self._prompt_tokens, self._generation_tokens, self._prefix_queries, self._prefix_hits, sum(stats.num_requests_running for stats in loads),
            sum(stats.num_requests_waiting for stats in loads), sum(stats.kv_cache_usage for stats in loads) / len(loads),
        )  # fmt: skip

    def loaded(self, engine: int, info: EngineInfo) -> None:
        """The engine is there, with an empty cache."""
        prefix_caching = str(info.enable_prefix_caching)
        self._cache_config.labels(*self._labels(engine), str(info.block_size), str(info.num_blocks), prefix_caching).set(1)
        self._before[engine] = EngineStats(0, 0, 0.0, 0, 0, 0)

    def restarted(self, engine: int) -> None:
        labels = self._labels(engine)
        self._restarts.labels(*labels).inc()
        for gauge in (self._running, self._waiting, self._usage):
            gauge.labels(*labels).set(0)

    def stepped(self, engine: int, stats: EngineStats) -> None:
        labels = self._labels(engine)
        self._running.labels(*labels).set(stats.num_requests_running)
        self._waiting.labels(*labels).set(stats.num_requests_waiting)
        self._usage.labels(*labels).set(stats.kv_cache_usage)
        for name, metric in self._since_start.items():
            metric.labels(*labels).inc(max(0, getattr(stats, name) - getattr(self._before[engine], name)))
        self._before[engine] = stats
        if stats.step_tokens:
            self._iteration.labels(*labels).observe(stats.step_tokens)

    def produced(self, engine: int, stream: Stream, output: RequestOutput, tokens: int) -> None:
        """An output with ``tokens`` new tokens."""
        labels, now = self._labels(engine), time.monotonic()
        self._generated.labels(*labels).inc(tokens)
        self._generation_tokens += tokens
        stream.generated += tokens
        if tokens and not stream.last_output_s:
            first = output.times.first_token_s if output.times is not None and output.times.first_token_s else now
            self._first.labels(*labels).observe(first - stream.started_s)
        elif tokens:
            self._between.labels(*labels).observe(now - stream.last_output_s)
        if tokens:
            stream.last_output_s = now

    def ended(self, engine: int, stream: Stream, output: RequestOutput | None) -> None:
        """A request was answered, or (``None``) left by its client."""
        labels, now = self._labels(engine), time.monotonic()
        prompt = len(stream.request.prompt_token_ids)
        self._prompt.labels(*labels).inc(prompt)
        self._prompt_tokens += prompt
        self._whole.labels(*labels).observe(now - stream.started_s)
        self._request_prompt.labels(*labels).observe(prompt)
        self._request_generated.labels(*labels).observe(stream.generated)
        if output is None:
            self._success.labels(*labels, "abort").inc()
            return
        reason = output.outputs[-1].finish_reason if output.outputs else None
        self._success.labels(*labels, reason or "stop").inc()
        self._queries.labels(*labels).inc(prompt)
        self._hits.labels(*labels).inc(output.num_cached_tokens)
        self._prefix_queries += prompt
        self._prefix_hits += output.num_cached_tokens
        times = output.times
        if times is not None and times.scheduled_s and times.first_token_s:
            self._queue.labels(*labels).observe(times.scheduled_s - times.arrival_s)
            self._prefill.labels(*labels).observe(times.first_token_s - times.scheduled_s)
            self._decode.labels(*labels).observe(max(0.0, now - times.first_token_s))

    def kv_transfer(self, direction: str, outcome: str, size_bytes: int = 0, seconds: float | None = None) -> None:
        """The KV blocks of a prompt were ``sent`` or ``received``, or were not."""
        self._transfers.labels(direction, outcome).inc()
        self._transfer_bytes.inc(size_bytes)
        if seconds is not None:
            self._transfer_s.observe(seconds)

    def kv_memory(self, held: Callable[[], tuple[int, int]]) -> None:
        """Asks ``held`` for the bytes and the prompts whose KV blocks are in shared memory, whenever the figures are asked for."""
        self._transfer_held.set_function(lambda: held()[0])
        self._transfer_prompts.set_function(lambda: held()[1])

    def failed(self, engine: int) -> None:
        """A request ended with an error."""
        self._success.labels(*self._labels(engine), "error").inc()

    def _labels(self, engine: int) -> tuple[str, str]:
        return self._model_name, str(engine)
