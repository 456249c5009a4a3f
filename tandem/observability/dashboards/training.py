"""The dashboard of runs of any kind."""

from tandem.observability.dashboards.model import Dashboard, panel

RUN = '{run=~"$run"}'
RUNS = {"run": "label_values(tandem_run_info, run)"}

TRAINING = Dashboard(
    "training", "Tandem: training", RUNS,
    {
        "Progress": (
            panel("Step", f"tandem_step{RUN}"),
            panel("Steps per minute", f"60 * rate(tandem_steps_total{RUN}[$__rate_interval])"),
            panel("Seconds of a step", (f"tandem_timing_s_step{RUN}", "{{run}}"), (f"tandem_run_median_step_seconds{RUN}", "median {{run}}"), unit="s"),
            panel("Tokens per second", f"tandem_perf_tokens_per_s{RUN}"),
            panel("Since the last step", f"tandem_run_since_step_seconds{RUN}", unit="s"),
            panel("Phase now", f"tandem_run_phase{RUN}", legend="{{run}} {{phase}}"),
        ),
        "Learning (runs on data)": (
            panel("Loss", f"tandem_train_loss{RUN}"),
            panel("Held-out loss", f"tandem_evaluation_held_out_loss{RUN}"),
            panel("Held-out perplexity", f"tandem_evaluation_held_out_perplexity{RUN}"),
            panel("Held-out acceptance length of drafts", f"tandem_evaluation_held_out_drafts_acceptance_length{RUN}"),
        ),
        "Optimizer": (
            panel("Gradient norm", f"tandem_actor_grad_norm{RUN}"),
            panel("Learning rate", f"tandem_actor_lr{RUN}", unit="sci"),
            panel("Skipped steps, and rows that are not finite", (f"tandem_train_skipped_steps{RUN}", "skipped {{run}}"),
                  (f"tandem_not_finite_rows_total{RUN}", "not finite {{run}}")),
        ),
        "Time and ranks": (
            panel("Share of each phase", f"run:tandem_phase_seconds:share_5m{RUN}", legend="{{run}} {{phase}}", unit="percentunit", is_stacked=True),
            panel("Share of the time that a rank waits for others", f"rate(tandem_rank_wait_seconds_total{RUN}[$__rate_interval])",
                  legend="{{run}} rank {{rank}}", unit="percentunit"),
            panel("Steps per minute, by rank", f"60 * rate(tandem_rank_step{RUN}[$__rate_interval])", legend="{{run}} rank {{rank}}"),
            panel("Since a rank's last sign of life", f"tandem_rank_silent_seconds{RUN}", legend="{{run}} rank {{rank}}", unit="s"),
            panel("Sent in collectives", f"rate(tandem_rank_sent_bytes_total{RUN}[$__rate_interval])", legend="{{run}} rank {{rank}}", unit="Bps"),
            panel("Own work of a rank, as a share of the time", f"sum by (run, rank) (rate(tandem_rank_own_seconds_total{RUN}[$__rate_interval]))",
                  legend="{{run}} rank {{rank}}", unit="percentunit"),
            panel("By how much of a step a rank is late", f"tandem_rank_late_seconds{RUN}", legend="{{run}} rank {{rank}} on {{node}}", unit="s"),
            panel("Wait of the fastest rank above the slowest's", f"run:tandem_rank_wait_seconds:spread_5m{RUN}", unit="percentunit"),
        ),
        "Faults": (
            panel("Events since the start", f"tandem_events_total{RUN}", legend="{{run}} {{kind}}"),
            panel("Overdue (1: something takes longer than it ever did)", f"tandem_run_overdue{RUN}"),
            panel("Memory of the trainer, measured", f"tandem_memory_train_measured{RUN}", unit="bytes"),
        ),
    },
)  # fmt: skip
