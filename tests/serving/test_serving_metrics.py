"""Metrics with the names that dashboards expect, and correct values."""

import math

from prometheus_client.parser import text_string_to_metric_families
from server_process import Server

NAMES = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    "counter": ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "request_success"),
    "histogram": (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
        "iteration_tokens_total",
    ),
}  # fmt: skip


def test_every_metric_has_its_name_kind_and_labels(shared: Server) -> None:
    shared.complete("x", max_tokens=3)
    response = shared.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {family.name: family for family in text_string_to_metric_families(response.text)}
    for kind, names in NAMES.items():
        for name in names:
            family = found[f"vllm:{name}"]
            assert family.type == kind, name
            assert all(sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0" for sample in family.samples) and family.samples, name


def test_the_counters_count(shared: Server) -> None:
    names = (
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
    )  # fmt: skip

    def read() -> list[float]:
        return [shared.metric(f"vllm:{name}") for name in names]

    before, firsts = read(), shared.metric("vllm:time_to_first_token_seconds_count")
    gaps = shared.metric("vllm:inter_token_latency_seconds_count")
    usage = shared.complete(["x", "a longer prompt"], max_tokens=9, n=2, seed=1, ignore_eos=True, cache_salt="metrics")["usage"]
    assert usage["completion_tokens"] == 36
    prompt = usage["prompt_tokens"]
    assert [after - old for after, old in zip(read(), before, strict=True)] == [prompt, 36, prompt, 2, 2]
    assert shared.metric("vllm:time_to_first_token_seconds_count") == firsts + 2
    shared.complete_stream("x", max_tokens=9, ignore_eos=True)
    assert shared.metric("vllm:inter_token_latency_seconds_count") == gaps + 8
    assert shared.metric("vllm:request_success_total", finished_reason="length") >= 3
    shared.wait_idle()
    steps, tokens = (shared.metric(f"vllm:iteration_tokens_total_{part}") for part in ("count", "sum"))
    assert steps > 0 and tokens >= shared.metric("vllm:generation_tokens_total") / 2 and math.isfinite(tokens)
