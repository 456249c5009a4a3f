"""The dashboard of servers and gateways."""

from tandem.observability.dashboards.model import Dashboard, Panel, panel

_MODEL = '{model_name=~"$model"}'
_ROUTED = '{model=~"$route"}'


def _quantiles(title: str, histogram: str, labels: str, by: str) -> Panel:
    rates = f"sum by ({by}, le) (rate({histogram}_bucket{labels}[$__rate_interval]))"
    return panel(title, *((f"histogram_quantile({q}, {rates})", f"p{q * 100:g} {{{{{by}}}}}") for q in (0.5, 0.95, 0.99)), unit="s")


SERVING = Dashboard(
    "serving", "Tandem: serving",
    {"model": "label_values(vllm:num_requests_running, model_name)", "route": "label_values(tandem_gateway_requests_total, model)"},
    {
        "Gateway": (
            panel("Requests per second, by status", f"sum by (model, code) (rate(tandem_gateway_requests_total{_ROUTED}[$__rate_interval]))",
                  legend="{{model}} {{code}}", unit="reqps"),
            panel("Share of errors", "gateway:tandem_gateway_errors:ratio_5m", legend="{{instance}}", unit="percentunit"),
            _quantiles("Time to the first byte", "tandem_gateway_time_to_first_byte_seconds", _ROUTED, "model"),
            _quantiles("Time of a request", "tandem_gateway_request_seconds", _ROUTED, "model"),
            _quantiles("Time in the queue", "tandem_gateway_queue_wait_seconds", _ROUTED, "model"),
            panel("Longest wait now", "tandem_gateway_oldest_waiting_seconds", legend="{{instance}}", unit="s"),
            panel("Waiting requests", f"tandem_gateway_waiting_requests{_ROUTED}", legend="{{model}}"),
            panel("Requests at backends", "tandem_gateway_in_flight_requests", legend="{{backend}}"),
            panel("Backends that are ready", "tandem_gateway_backend_ready", legend="{{backend}}"),
            panel("Attempts at backends, by outcome", "sum by (backend, outcome) (rate(tandem_gateway_attempts_total[$__rate_interval]))",
                  legend="{{backend}} {{outcome}}", unit="reqps"),
            panel("Retries and streams that went on elsewhere", ("rate(tandem_gateway_retries_total[$__rate_interval])", "retries {{instance}}"),
                  ("rate(tandem_gateway_resumed_streams_total[$__rate_interval])", "resumed {{instance}}"), unit="reqps"),
            panel("Circuit breakers (1: open)", "tandem_gateway_backend_breaker_open", legend="{{backend}}"),
        ),
        "Engines": (
            _quantiles("Time to the first token", "vllm:time_to_first_token_seconds", _MODEL, "model_name"),
            _quantiles("Between two tokens", "vllm:inter_token_latency_seconds", _MODEL, "model_name"),
            _quantiles("Time of a request", "vllm:e2e_request_latency_seconds", _MODEL, "model_name"),
            panel("Tokens per second", (f"sum by (model_name) (rate(vllm:generation_tokens_total{_MODEL}[$__rate_interval]))", "generated {{model_name}}"),
                  (f"sum by (model_name) (rate(vllm:prompt_tokens_total{_MODEL}[$__rate_interval]))", "prompts {{model_name}}")),
            panel("Sequences", (f"vllm:num_requests_running{_MODEL}", "computed {{instance}} {{engine}}"),
                  (f"vllm:num_requests_waiting{_MODEL}", "waiting {{instance}} {{engine}}")),
            panel("KV cache in use", f"vllm:kv_cache_usage_perc{_MODEL}", legend="{{instance}} {{engine}}", unit="percentunit"),
            panel("Prompt tokens found in the prefix cache",
                  f"rate(vllm:prefix_cache_hits_total{_MODEL}[$__rate_interval]) / rate(vllm:prefix_cache_queries_total{_MODEL}[$__rate_interval])",
                  legend="{{instance}} {{engine}}", unit="percentunit"),
            panel("Preemptions per second", f"rate(vllm:num_preemptions_total{_MODEL}[$__rate_interval])", legend="{{instance}} {{engine}}"),
            panel("Requests per second, by end", f"sum by (model_name, finished_reason) (rate(vllm:request_success_total{_MODEL}[$__rate_interval]))",
                  legend="{{model_name}} {{finished_reason}}", unit="reqps"),
            panel("Engines that died and were started again", f"tandem:engine_restarts_total{_MODEL}", legend="{{instance}} {{engine}}"),
            _quantiles("Time in the engine's queue", "vllm:request_queue_time_seconds", _MODEL, "model_name"),
            panel("Tokens computed in a step",
                  f"rate(vllm:iteration_tokens_total_sum{_MODEL}[$__rate_interval]) / rate(vllm:iteration_tokens_total_count{_MODEL}[$__rate_interval])",
                  legend="{{instance}} {{engine}}"),
        ),
    },
)  # fmt: skip
