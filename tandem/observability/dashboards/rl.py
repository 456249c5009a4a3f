"""The dashboard of reinforcement learning."""

from tandem.observability.dashboards.model import Dashboard, panel
from tandem.observability.dashboards.training import RUN, RUNS

RL = Dashboard(
    "rl", "Tandem: reinforcement learning", RUNS,
    {
        "Reward": (
            panel("Reward", (f"tandem_reward_mean{RUN}", "mean {{run}}"), (f"tandem_reward_std{RUN}", "standard deviation {{run}}")),
            panel("Accuracy", (f"tandem_accuracy{RUN}", "samples {{run}}"), (f"tandem_evaluation_sampled_accuracy{RUN}", "held-out, sampled {{run}}"),
                  (f"tandem_evaluation_greedy_accuracy{RUN}", "held-out, greedy {{run}}"), unit="percentunit"),
            panel("Groups without a signal (one reward), and faults", (f"tandem_reward_frac_zero_std{RUN}", "no signal {{run}}"),
                  (f"tandem_reward_fault_share{RUN}", "faults {{run}}"), unit="percentunit"),
        ),
        "Policy": (
            panel("KL to the reference", f"tandem_kl{RUN}"),
            panel("Entropy", f"tandem_actor_entropy{RUN}"),
            panel("Loss of the policy", f"tandem_actor_pg_loss{RUN}"),
            panel("KL of the update, and share of clipped tokens", (f"tandem_actor_ppo_kl{RUN}", "KL {{run}}"),
                  (f"tandem_actor_pg_clipfrac{RUN}", "clipped {{run}}")),
            panel("Rollout against trainer (0: the same bits)", (f"tandem_mismatch_kl{RUN}", "mismatch KL {{run}}"),
                  (f"tandem_mismatch_max_abs{RUN}", "largest difference {{run}}")),
            panel("Gradient norm", f"tandem_actor_grad_norm{RUN}"),
        ),
        "Rollout": (
            panel("Length of answers", (f"tandem_response_length_mean{RUN}", "mean {{run}}"), (f"tandem_response_length_max{RUN}", "longest {{run}}")),
            panel("Answers that were cut", f"tandem_response_length_clip_ratio{RUN}", unit="percentunit"),
            panel("Tokens drawn per second", f"tandem_perf_rollout_tokens_per_s{RUN}"),
            panel("Age of the samples, in steps", f"tandem_rollout_staleness{RUN}"),
            panel("Version of the weights", f"tandem_weight_version{RUN}"),
            panel("Does the same bits (1) or not (0)", f"tandem_run_exact{RUN}"),
        ),
        "Pod": (
            panel("Seconds of the phases of a step", *((f"tandem_timing_s_{name}{RUN}", f"{name} {{{{run}}}}") for name in (
                "rollout", "train", "inference", "reward", "update_weight", "register", "convert", "offload", "onload")), unit="s", is_stacked=True),
            panel("Memory of the trainer", (f"tandem_memory_train_measured{RUN}", "measured {{run}}"),
                  (f"tandem_memory_train_predicted{RUN}", "predicted {{run}}"),
                  unit="bytes"),
            panel("Memory of the rollout", (f"tandem_memory_rollout_measured{RUN}", "measured {{run}}"),
                  (f"tandem_memory_rollout_predicted{RUN}", "predicted {{run}}"), unit="bytes"),
            panel("Memory of the controller", f"tandem_controller_rss_bytes{RUN}", unit="bytes"),
            panel("Lag of the controller's loop", f"tandem_controller_loop_lag_s{RUN}", unit="s"),
            panel("Recoveries", 'tandem_events_total{run=~"$run", kind="recovery"}'),
        ),
    },
)  # fmt: skip
