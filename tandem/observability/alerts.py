"""The alert rules."""

from tandem.observability.rules import Alert

ALERTS = (
    Alert(
        "TandemTargetDown", "up == 0", "critical", "{{ $labels.job }} {{ $labels.run }} at {{ $labels.instance }} does not answer",
        "Its process has died or hangs, or the network is cut. 'tandem resume' continues a run; a server is started again.", "1m",
    ),
    Alert(
        "TandemEngineDied", "increase(tandem:engine_restarts_total[5m]) > 0", "warning",
        "an engine of {{ $labels.model_name }} at {{ $labels.instance }} died and was started again", "The server's log has its last words.",
    ),
    Alert(
        "TandemBackendNotReady", "tandem_gateway_backend_ready == 0", "warning", "backend {{ $labels.backend }} of the gateway is not ready",
        "Ask its /readiness why; the gateway gives its requests to others.", "2m",
    ),
    Alert(
        "TandemGatewayErrors", "gateway:tandem_gateway_errors:ratio_5m > 0.05", "critical",
        "{{ $value | humanizePercentage }} of the requests at {{ $labels.instance }} end with an error", "The gateway's log has a line for each.", "5m",
    ),
    Alert(
        "TandemQueueOld", "tandem_gateway_oldest_waiting_seconds > 30", "warning",
        "a request has waited for {{ $value | humanizeDuration }} at {{ $labels.instance }}",
        "Add servers, or lower queue.max_waiting so that clients go elsewhere.", "1m",
    ),
    Alert(
        "TandemServerQueueSlow",
        "histogram_quantile(0.95, sum by (model_name, instance, le) (rate(vllm:request_queue_time_seconds_bucket[5m]))) > 30", "warning",
        "requests wait {{ $value | humanizeDuration }} for an engine of {{ $labels.model_name }}", "Add servers, or raise max_num_seqs.", "5m",
    ),
    Alert(
        "TandemKVCacheFull", "vllm:kv_cache_usage_perc > 0.95 and vllm:num_requests_waiting > 0", "warning",
        "the KV cache of {{ $labels.model_name }} at {{ $labels.instance }} is full and requests wait",
        "Sequences are preempted. Add servers, raise gpu_memory_utilization or lower max_num_seqs.", "5m",
    ),
    Alert(
        "TandemRunStalled",
        "tandem_run_since_step_seconds > 10 * tandem_run_median_step_seconds and tandem_run_since_step_seconds > 60 and tandem_step + 1 < tandem_run_max_steps",
        "critical", "run {{ $labels.run }} has taken no step for {{ $value | humanizeDuration }}",
        "The last line of 'tandem train', and logs/stacks-*.txt of the run, say who waits for whom.",
    ),
    Alert(
        "TandemRunOverdue", "tandem_run_overdue == 1", "warning", "something in run {{ $labels.run }} takes longer than it ever did",
        "The last line of 'tandem train' says what. The watchdog replaces what is stuck.", "1m",
    ),
    Alert(
        "TandemNotFinite", "increase(tandem_not_finite_rows_total[15m]) > 0", "critical", "run {{ $labels.run }} has a NaN or an infinity in its metrics",
        "See metrics.jsonl. Lower trainer.learning_rate, or raise trainer.warmup_steps.",
    ),
    Alert(
        "TandemSkippedSteps", "delta(tandem_train_skipped_steps[15m]) > 0", "warning", "run {{ $labels.run }} skips steps",
        "The gradients were not finite; the batches are in skipped/ of the run.",
    ),
    Alert(
        "TandemMismatch", "tandem_mismatch_kl != 0 and on (instance, run) tandem_run_exact == 1", "critical",
        "rollout and trainer of run {{ $labels.run }} disagree, where they compute the same bits",
        "Weights, samples or memory are damaged: 'tandem verify RUN'.",
    ),
    Alert(
        "TandemRestarts", 'increase(tandem_events_total{kind="recovery"}[15m]) > 0', "warning",
        "processes of run {{ $labels.run }} died or hung and were replaced",
        "The report has the reasons, logs/ the last words.",
    ),
    Alert(
        "TandemNodeCordoned", 'increase(tandem_events_total{kind="cordon"}[15m]) > 0', "warning", "a node of run {{ $labels.run }} has failed and is cordoned",
        "'tandem status RUN' names it, with the reason. A spare has its place, if one was left; repair the node before the next run.",
    ),
    Alert(
        # Where steps are short and other work is heavy, a rank is named, no longer, and named again.
        "TandemStraggler", "max by (run, job, instance, rank, node) (avg_over_time(tandem_rank_straggler[2m])) > 0.25", "warning",
        "rank {{ $labels.rank }} on {{ $labels.node }} holds up run {{ $labels.run }}",
        "The run's events say in which phase. Look at the node's clocks, temperature and other processes.", "1m",
    ),
    Alert(
        "TandemSlowLink", "max by (run, job, instance, link) (avg_over_time(tandem_link_slow[2m])) > 0.25", "warning",
        "the link {{ $labels.link }} holds up run {{ $labels.run }}",
        "The run's events have its round trip. Look at the network of the two nodes.", "1m",
    ),
    Alert(
        "TandemNodeUnfit", "tandem_node_unfit == 1", "critical", "node {{ $labels.node }} of run {{ $labels.run }} has a fatal GPU error",
        "It is cordoned: 'tandem nodes' has the reason. Drain and reset it before 'tandem nodes uncordon'.",
    ),
    Alert(
        "TandemGpuFault", "max by (run, job, instance, node) (tandem_gpu_fault) == 1", "warning",
        "a GPU of node {{ $labels.node }} is throttled or has errors", "The events of run {{ $labels.run }} say which and why.", "2m",
    ),
    Alert(
        "TandemMemoryGrowth", "tandem_process_memory_leak == 1", "warning",
        "the memory of {{ $labels.process }} ({{ $labels.pid }}) on {{ $labels.node }} grows without end",
        "The run ends when it is full. Stop and resume it in time.", "2m",
    ),
    Alert(
        "TandemNodeSlow", "tandem_node_loop_lag_seconds > 5", "warning",
        "processes of run {{ $labels.run }} on {{ $labels.node }} had to wait {{ $value | humanizeDuration }} for their turn",
        "The machine is overloaded, or was suspended.",
    ),
    Alert(
        "TandemDamage", 'increase(tandem_events_total{kind=~"damage|checkpoint_damaged|weights_damaged|journal_lost"}[15m]) > 0', "critical",
        "run {{ $labels.run }} has found damage ({{ $labels.kind }})", "It was repaired or left out; look at the disk and the memory of the machine.",
    ),
    Alert(
        "TandemControllerSlow", "tandem_controller_loop_lag_s > 5", "warning",
        "the controller of run {{ $labels.run }} stood still for {{ $value | humanizeDuration }}",
        "The machine is overloaded, or was suspended.",
    ),
    Alert(
        "TandemCheckpointTierLeftOut", "tandem_checkpoint_tier_left_out == 1", "warning",
        "run {{ $labels.run }} writes no more checkpoints to tier {{ $labels.tier }}",
        "'tandem status' says why; the farther tiers go on. It is used again when the ranks start again.",
    ),
    Alert(
        "TandemDiskNearlyFull", "tandem_run_disk_free_bytes / tandem_run_disk_size_bytes < 0.05", "critical",
        "{{ $value | humanizePercentage }} of the disk of run {{ $labels.run }} is free",
        "Lower checkpoint.keep, or make room; a full disk stops the run.", "1m",
    ),
)  # fmt: skip
