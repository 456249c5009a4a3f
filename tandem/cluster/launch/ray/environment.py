"""The environment variables of Ray's own processes."""

from pathlib import Path


def ray_environment(token: Path | None) -> dict[str, str]:
    """Returns the variables of a process that uses a cluster with the ``token`` in that file; ``None``: with what the environment says."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0"}
    if token is not None:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return variables


OWN_CLUSTER = {
    # The numbers of a run do not depend on it, but its speed does.
    "RAY_worker_niceness": "0",
    # The run has a check of its memory, and its processes are not Ray's to kill.
    "RAY_memory_monitor_refresh_ms": "0", "RAY_worker_oom_score_adjustment": "0",
    # A node is taken for dead after about five seconds without an answer, and not after half a minute.
    "RAY_health_check_initial_delay_ms": "2000", "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_enable_metrics_collection": "0",
}  # fmt: skip
"""Of the raylets of a cluster that is started for one run."""
