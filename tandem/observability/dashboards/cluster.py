"""The dashboard of all processes of Tandem that Prometheus knows."""

from tandem.observability.dashboards.model import Dashboard, panel

_JOB = '{job=~"$job"}'

CLUSTER = Dashboard(
    "cluster", "Tandem: cluster", {"job": "label_values(up, job)"},
    {
        "Processes": (
            panel("Answer (1) or not (0)", f"up{_JOB}", legend="{{job}} {{run}} {{instance}}"),
            panel("Processes", f"count by (job) (up{_JOB})", legend="{{job}}"),
            panel("Alerts", 'ALERTS{alertstate="firing"} or on () vector(0)', legend="{{alertname}} {{run}} {{instance}}"),
            panel("Cores in use", f"rate(process_cpu_seconds_total{_JOB}[$__rate_interval])", legend="{{job}} {{run}} {{instance}}"),
            panel("Memory (gateways and controllers of runs)", f"process_resident_memory_bytes{_JOB}", legend="{{job}} {{run}} {{instance}}", unit="bytes"),
            panel("Memory of each process of a run", f"tandem_process_resident_memory_bytes{_JOB}", legend="{{node}} {{process}} {{pid}}", unit="bytes"),
            panel("Open files", f"process_open_fds{_JOB}", legend="{{job}} {{run}} {{instance}}"),
        ),
        "Runs": (
            panel("Disk that is free", f"tandem_run_disk_free_bytes{_JOB} / tandem_run_disk_size_bytes{_JOB}", legend="{{run}}", unit="percentunit"),
            panel("Recoveries", 'tandem_events_total{job=~"$job", kind="recovery"}', legend="{{run}}"),
            panel("Phase now", f"tandem_run_phase{_JOB}", legend="{{run}} {{phase}}"),
            panel("In the phase since", f"tandem_run_phase_age_seconds{_JOB}", legend="{{run}}", unit="s"),
            panel("Trainer ranks", f"count by (run) (tandem_rank_step{_JOB})", legend="{{run}}"),
            panel("Time of a scrape", f"scrape_duration_seconds{_JOB}", legend="{{job}} {{run}} {{instance}}", unit="s"),
        ),
        "Servers": (
            panel("Backends that are ready", f"sum by (instance) (tandem_gateway_backend_ready{_JOB})", legend="{{instance}}"),
            panel("Engines", f"count by (model_name) (vllm:num_requests_running{_JOB})", legend="{{model_name}}"),
            panel("KV cache in use", f"avg by (model_name) (vllm:kv_cache_usage_perc{_JOB})", legend="{{model_name}}", unit="percentunit"),
        ),
    },
)  # fmt: skip
