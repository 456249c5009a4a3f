"""The loop of reinforcement learning in a pod: rollout, rewards and inference, training."""

from tandem.jobs.rl_run.ahead import collect_ahead, draw_ahead, keep_drawn, state_needed
from tandem.jobs.rl_run.evaluations import final_evaluation, target_holds
from tandem.jobs.rl_run.rl_run import RLRun
from tandem.jobs.rl_run.rows import write_row
from tandem.jobs.rl_run.samples import samples_of_round
from tandem.jobs.rl_run.scores import scores_of_round
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.recovery import catch_up, recover
from tandem.runtime.traces.spans import span
from tandem.runtime.traces.steps import STEP
from tandem.types import Round


def reinforce(pod: Pod, run: RLRun) -> int:
    """Trains until the target is reached or ``run.max_steps`` are done; returns the number of optimizer steps taken.

    A step has one round of rollout and rewards; with dynamic sampling, as many as it needs. One step off, the rollout of the next step begins before a step
    trains and is waited for before the weights change; in a synchronous run ``collect_ahead``, ``catch_up`` and ``draw_ahead`` do nothing.

    Any line may run again after a fault: samples, scores and evaluations in the journal are used and never computed again.
    """
    step, last = run.first_step, run.recipe.run.max_steps
    while True:
        with run.step_span(step):
            try:
                collect_ahead(pod, run, step)
                catch_up(pod, step)
                due = run.trigger.due(step)
                if due != "nothing":
                    run.checkpoint(pod, step)
                else:
                    run.copy_checkpoint(pod, step)
                if due == "stop":
                    run.finish_checkpoints(pod)
                    run.stop(step)
                if target_holds(pod, run, step) or step == last:
                    final_evaluation(pod, run, step)
                    run.checkpoint(pod, step)
                    run.finish_checkpoints(pod)
                    return step
                draw_ahead(pod, run, step)
                rounds: list[Round] = []
                while not run.is_complete(rounds):
                    samples = samples_of_round(pod, run, step, len(rounds))
                    rounds.append(Round(samples, scores_of_round(pod, run, step, len(rounds), samples)))
                metrics = run.train(pod, step, rounds)
                write_row(pod, run, step, rounds, metrics)
                step += 1
            except SidecarDied as death:
                keep_drawn(pod, run)
                with span("recovery", {STEP: step, "tandem.sidecar": death.role, "error.message": str(death)}):
                    recover(pod, death, state_needed(run, step))
