"""Every alert rule fires on its fault and clears after it, evaluated by Prometheus' own ``promtool``."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tandem.observability.alerts import ALERTS
from tandem.observability.files import observability_files, write_files

RUN = 'job="grpo", run="r", instance="a:1"'
SERVER = 'job="server", model_name="m", engine="0", instance="s:1"'
GATEWAY = 'job="gateway", instance="g:1"'
BUCKETS = {"10": "0+0x60 10+10x80", "40": "0+10x140", "+Inf": "0+10x140"}
"""A queue in which every request waits for 10 to 40 s, until after 15 minutes none does."""

CASES: dict[str, tuple[dict[str, str], str, str]] = {
    "TandemTargetDown": ({f"up{{{RUN}}}": "1+0x4 0+0x8 1+0x20"}, "3m", "5m"),
    "TandemEngineDied": ({f"tandem:engine_restarts_total{{{SERVER}}}": "0+0x8 1+0x60"}, "3m", "10m"),
    "TandemBackendNotReady": ({f'tandem_gateway_backend_ready{{{GATEWAY}, backend="b"}}': "1+0x4 0+0x12 1+0x20"}, "4m", "6m"),
    "TandemGatewayErrors": (
        {f'tandem_gateway_requests_total{{{GATEWAY}, model="m", code="200"}}': "0+10x120", f'tandem_gateway_requests_total{{{GATEWAY}, model="m", code="502"}}':
         "0+5x40 200+0x80"}, "9m", "20m"),
    "TandemQueueOld": ({f"tandem_gateway_oldest_waiting_seconds{{{GATEWAY}}}": "0+0x4 31+15x8 0+0x20"}, "3m", "5m"),
    "TandemServerQueueSlow": (
        {f'vllm:request_queue_time_seconds_bucket{{{SERVER}, le="{le}"}}': values for le, values in BUCKETS.items()}, "11m", "25m"),
    "TandemKVCacheFull": (
        {f"vllm:kv_cache_usage_perc{{{SERVER}}}": "1+0x60", f"vllm:num_requests_waiting{{{SERVER}}}": "0+0x4 3+0x28 0+0x20"}, "8m", "10m"),
    "TandemRunStalled": (
        {f"tandem_run_since_step_seconds{{{RUN}}}": "1+0x8 0+15x20 1+0x10", f"tandem_run_median_step_seconds{{{RUN}}}": "2+0x40",
         f"tandem_step{{{RUN}}}": "8+0x40", f"tandem_run_max_steps{{{RUN}}}": "10+0x40"}, "5m", "8m"),
    "TandemRunOverdue": ({f"tandem_run_overdue{{{RUN}}}": "0+0x4 1+0x8 0+0x20"}, "3m", "5m"),
    "TandemNotFinite": ({f"tandem_not_finite_rows_total{{{RUN}}}": "0+0x8 1+0x90"}, "3m", "20m"),
    "TandemSkippedSteps": ({f"tandem_train_skipped_steps{{{RUN}}}": "0+0x8 2+0x90"}, "3m", "20m"),
    "TandemMismatch": ({f"tandem_mismatch_kl{{{RUN}}}": "0+0x4 0.001+0x4 0+0x20", f"tandem_run_exact{{{RUN}}}": "1+0x40"}, "2m", "4m"),
    "TandemRestarts": ({f'tandem_events_total{{{RUN}, kind="recovery"}}': "0+0x8 1+0x90"}, "3m", "20m"),
    "TandemNodeCordoned": ({f'tandem_events_total{{{RUN}, kind="cordon"}}': "0+0x8 1+0x90"}, "3m", "20m"),
    "TandemStraggler": ({f'tandem_rank_straggler{{{RUN}, rank="1", node="n2"}}': "0+0x4 1+0x8 0+0x20"}, "3m", "5m"),
    "TandemSlowLink": ({f'tandem_link_slow{{{RUN}, link="n1 - n2"}}': "0+0x4 1+0x8 0+0x20"}, "3m", "5m"),
    "TandemNodeUnfit": ({f'tandem_node_unfit{{{RUN}, node="n2"}}': "0+0x4 1+0x8 0+0x20"}, "3m", "5m"),
    "TandemGpuFault": ({f'tandem_gpu_fault{{{RUN}, node="n2", gpu="0:18"}}': "0+0x4 1+0x16 0+0x20"}, "4m", "7m"),
    "TandemMemoryGrowth": ({f'tandem_process_memory_leak{{{RUN}, node="n2", process="p", pid="7"}}': "0+0x4 1+0x16 0+0x20"}, "4m", "7m"),
    "TandemNodeSlow": ({f'tandem_node_loop_lag_seconds{{{RUN}, node="n2"}}': "0+0x4 9+0x4 0+0x20"}, "2m", "4m"),
    "TandemDamage": ({f'tandem_events_total{{{RUN}, kind="checkpoint_damaged"}}': "0+0x8 1+0x90"}, "3m", "20m"),
    "TandemControllerSlow": ({f"tandem_controller_loop_lag_s{{{RUN}}}": "0+0x4 9+0x4 0+0x20"}, "2m", "4m"),
    "TandemCheckpointTierLeftOut": ({f'tandem_checkpoint_tier_left_out{{{RUN}, tier="local"}}': "0+0x4 1+0x8 0+0x20"}, "3m", "5m"),
    "TandemDiskNearlyFull": (
        {f"tandem_run_disk_free_bytes{{{RUN}}}": "50+0x4 4+0x8 50+0x20", f"tandem_run_disk_size_bytes{{{RUN}}}": "100+0x40"}, "3m", "5m"),
}  # fmt: skip
"""For each alert: the series of a system in which its fault is injected and goes away, in steps of 15 s; when it must fire alone, and when nothing may."""

QUIET = {
    f"tandem_mismatch_kl{{{RUN}}}": "0.001+0x40", f"tandem_run_exact{{{RUN}}}": "0+0x40", f"vllm:kv_cache_usage_perc{{{SERVER}}}": "1+0x40",
    f"vllm:num_requests_waiting{{{SERVER}}}": "0+0x40", f"tandem_run_since_step_seconds{{{RUN}}}": "0+15x40",
    f"tandem_run_median_step_seconds{{{RUN}}}": "2+0x40", f"tandem_step{{{RUN}}}": "9+0x40", f"tandem_run_max_steps{{{RUN}}}": "10+0x40",
}  # fmt: skip
"""A run whose bits differ, a full cache for which nobody waits, and the end of a run, with its evaluations and its export."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt-get install prometheus), so rules are not tested")
    folders = {"runs_folder": tmp_path / "runs", "log_folder": tmp_path / "logs"}
    write_files(tmp_path, observability_files(tmp_path / "targets", 9090, 9093, interval_s=15, webhook="http://127.0.0.1:9/x", **folders))
    return tmp_path


def promtool(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expectation(at: str, fires: str | None) -> dict[str, object]:
    samples = [] if fires is None else [{"labels": f'{{alertname="{fires}"}}', "value": 1}]
    return {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": samples}


def case(series: dict[str, str], *expected: dict[str, object]) -> dict[str, object]:
    return {"interval": "15s", "input_series": [{"series": name, "values": values} for name, values in series.items()], "promql_expr_test": list(expected)}


def test_prometheus_and_alertmanager_accept_their_configuration(folder: Path) -> None:
    (folder / "targets").mkdir()
    promtool(folder, "check", "config", "prometheus.yml")
    if shutil.which("amtool") is not None:
        done = subprocess.run(["amtool", "check-config", "alertmanager.yml"], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_on_its_fault_alone_and_clears_after_it(folder: Path) -> None:
    assert list(CASES) == [alert.name for alert in ALERTS]
    cases = [case(series, expectation(fires, name), expectation(clears, None)) for name, (series, fires, clears) in CASES.items()]
    cases.append(case(QUIET, expectation("10m", None)))
    # On a busy machine a rank that is slow all the time is named in some of the looks, and a healthy one now and then.
    (name,) = CASES["TandemStraggler"][0]
    cases.append(case({name: "1 0 0 " * 20}, expectation("4m", "TandemStraggler")))
    cases.append(case({name: "1 0 0 0 0 0 0 0 " * 10}, expectation("9m", None)))
    (folder / "cases.yml").write_text(yaml.safe_dump({"rule_files": ["rules/recording.yml", "rules/alerts.yml"], "evaluation_interval": "15s", "tests": cases}))
    promtool(folder, "test", "rules", "cases.yml")


def test_an_alert_whose_fault_never_comes_fails_that_test(folder: Path) -> None:
    tests = [case(QUIET, expectation("10m", "TandemMismatch"))]
    (folder / "cases.yml").write_text(yaml.safe_dump({"rule_files": ["rules/alerts.yml"], "evaluation_interval": "15s", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", "cases.yml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1 and "FAILED" in done.stdout + done.stderr
