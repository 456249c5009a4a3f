"""The recording rules: what dashboards ask often, and OpenTelemetry's GenAI names for the gateway and the servers."""

from tandem.observability.rules import Record


def _otel(name: str, source: str, label: str, otel_label: str) -> tuple[Record, ...]:
    """Returns the three series of the histogram ``source`` under OpenTelemetry's name, with its label for the model."""
    return tuple(
        Record(f"{name}_{part}", f'label_replace({source}_{part}, "{otel_label}", "$1", "{label}", "(.*)")') for part in ("bucket", "sum", "count")
    )


GEN_AI = (
    *_otel("gen_ai_server_time_to_first_token_seconds", "tandem_gateway_time_to_first_byte_seconds", "model", "gen_ai_request_model"),
    *_otel("gen_ai_server_request_duration_seconds", "tandem_gateway_request_seconds", "model", "gen_ai_request_model"),
    *_otel("gen_ai_server_time_per_output_token_seconds", "vllm:inter_token_latency_seconds", "model_name", "gen_ai_response_model"),
)
"""``gen_ai.server.time_to_first_token``, ``gen_ai.server.request.duration`` and ``gen_ai.server.time_per_output_token`` of OpenTelemetry's semantic
conventions, as Prometheus writes them. The first byte of a streamed answer is that of its first token."""

RECORDS = (
    Record(
        "model:vllm_time_to_first_token_seconds:p95_5m",
        "histogram_quantile(0.95, sum by (model_name, le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
    ),
    Record(
        "model:tandem_gateway_time_to_first_byte_seconds:p95_5m",
        "histogram_quantile(0.95, sum by (model, le) (rate(tandem_gateway_time_to_first_byte_seconds_bucket[5m])))",
    ),
    Record(
        "gateway:tandem_gateway_errors:ratio_5m",
        '(sum by (instance) (rate(tandem_gateway_requests_total{code=~"5.."}[5m])) or sum by (instance) (rate(tandem_gateway_requests_total[5m])) * 0)'
        " / sum by (instance) (rate(tandem_gateway_requests_total[5m]))",
    ),
    Record(
        "run:tandem_phase_seconds:share_5m",
        "rate(tandem_phase_seconds_total[5m]) / on (run, job, instance) group_left () sum by (run, job, instance) (rate(tandem_phase_seconds_total[5m]))",
    ),
    Record(
        "run:tandem_rank_wait_seconds:spread_5m",
        "max by (run, job, instance) (rate(tandem_rank_wait_seconds_total[5m])) - min by (run, job, instance) (rate(tandem_rank_wait_seconds_total[5m]))",
    ),
    *GEN_AI,
)
