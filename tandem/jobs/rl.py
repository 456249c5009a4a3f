"""The loop of reinforcement learning in a pod: rollout, rewards and inference, training."""

from tandem.jobs.rl_run import RLRun
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.recovery import catch_up, recover
from tandem.types import Round


def reinforce(pod: Pod, run: RLRun) -> int:
    """Trains until the target is reached or ``run.max_steps`` are done; returns the number of optimizer steps taken.

    A step has one round of rollout and rewards; with dynamic sampling, as many as it needs. One step off, the rollout of the next step begins before a step
    trains and is waited for before the weights change; in a synchronous run ``collect_ahead``, ``catch_up`` and ``draw_ahead`` do nothing.

    Any line may run again after a fault: samples, scores and evaluations in the journal are used and never computed again.
    """
    step, last = run.first_step, run.recipe.run.max_steps
    while True:
        try:
            run.collect_ahead(pod, step)
            catch_up(pod, step)
            due = run.trigger.due(step)
            if due != "nothing":
                run.checkpoint(pod, step)
            if due == "stop":
                run.finish_checkpoints(pod)
                run.stop(step)
            if run.target_holds(pod, step) or step == last:
                run.final_evaluation(pod, step)
                run.checkpoint(pod, step)
                run.finish_checkpoints(pod)
                return step
            run.draw_ahead(pod, step)
            rounds: list[Round] = []
            while not run.is_complete(rounds):
                samples = run.samples(pod, step, len(rounds))
                rounds.append(Round(samples, run.scores(pod, step, len(rounds), samples)))
            metrics = run.train(pod, step, rounds)
            run.write_row(pod, step, rounds, metrics)
            step += 1
        except SidecarDied as death:
            run.keep_drawn(pod)
            recover(pod, death, run.state_needed(step))
