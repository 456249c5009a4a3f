"""The row of a step in ``metrics.jsonl``, and what it is checked for."""

from collections.abc import Sequence
from typing import Any

from tandem.jobs.rl_run.rl_run import RLRun
from tandem.pod.pod import Pod
from tandem.rl.step_metrics import partial_metrics, rollout_metrics, staleness, staleness_max, tokens_by_version
from tandem.types import Round, RunError
from tandem.types.round import joined


def write_row(pod: Pod, run: RLRun, step: int, rounds: Sequence[Round], trained: dict[str, float]) -> None:
    """Writes the row of ``step``, once, from its ``rounds`` and the metrics of its update. Rewards and lengths are those of all samples that were drawn.
    Raises ``RunError`` as ``_check_mismatch``."""
    recipe, samples = run.recipe, joined(rounds).samples
    row: dict[str, Any] = {"step": step, "weight_version": step, "rollout/staleness": staleness(samples, step)}
    row.update(rollout_metrics(rounds, recipe))
    if recipe.rollout.max_staleness:
        row["rollout/staleness_max"] = staleness_max(samples, step)
    buffer = run.journal.replay_buffer(step + 1)
    if recipe.rollout.budget_tokens:
        row.update(partial_metrics(samples, buffer, step))
    row.update(run.prompts.metrics(step, samples))
    row.update(trained)
    held_out = run.journal.evaluation(step, "sampled")
    if held_out is not None:
        row["evaluation/accuracy"] = held_out["accuracy"]
    if rollout_s := run.records.timings.get("rollout"):
        drawn, newest = tokens_by_version((*samples, *buffer.samples)), run.weights_of(step)
        row["perf/rollout_tokens_per_s"] = sum(tokens for version, tokens in drawn.items() if version.step == newest) / rollout_s
        if recipe.rollout.max_staleness:
            row["perf/rollout_hidden_share"] = pod.hidden_s / rollout_s
            pod.hidden_s = 0.0
    predicted = {"train": run.memory.trainer, "rollout": run.memory.rollout, "wait_rollout": run.memory.trainer_idle, "inference": run.memory.inference}
    for phase, measured in sorted(pod.memory.items()):
        row[f"memory/{phase}/measured"] = measured
        row[f"memory/{phase}/predicted"] = float(predicted[phase])
    row.update(pod.device_metrics | pod.rollout_metrics | pod.moves.take() | run.watchdog.take_gauges())
    row.update({f"reward_s/{label}/{name}": seconds for label, took in run.reward_times.items() for name, seconds in took._asdict().items()})
    run.reward_times.clear()
    run.records.row(row, sum(len(s.prompt_token_ids) + len(s.token_ids) for sample in samples for s in sample.sequences))
    for alarm in run.watchdog.take_alarms():
        run.journal.record_event("alarm", {"step": step, "reason": alarm})
        run.records.callback.message(f"step {step}: {alarm}")
    _check_mismatch(run, step, trained)


def _check_mismatch(run: RLRun, step: int, trained: dict[str, float]) -> None:
    """Reports that rollout and trainer disagree where they compute the same bits. Raises ``RunError`` with ``run.on_mismatch: stop``."""
    largest = trained.get("mismatch_max_abs", 0.0)
    if not run.recipe.is_exact or (largest == 0 and trained.get("mismatch_kl", 0.0) == 0):
        return
    what = (
        f"step {step}: mismatch_kl is {trained['mismatch_kl']:.3g} (largest difference {largest:.3g}) and must be 0, since rollout and trainer compute "
        "the same bits; weights, samples or the memory of this machine are damaged"
    )
    run.journal.record_event("mismatch", {"step": step, "reason": what})
    run.records.callback.message(what)
    if run.recipe.run.on_mismatch == "stop":
        raise RunError(f"{what}; see 'tandem verify', then resume, with --run.on_mismatch=warn to continue in spite of it")
