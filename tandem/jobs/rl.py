"""The loop of reinforcement learning in a pod: rollout, rewards and inference, training."""

from tandem.jobs.rl_run import RLRun
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod


def reinforce(pod: Pod, run: RLRun) -> int:
    """Trains until the target is reached or ``run.max_steps`` are done; returns the number of optimizer steps taken.

    Any line may run again after a fault: samples, scores and evaluations in the journal are used and never computed again.
    """
    step, last = run.first_step, run.recipe.run.max_steps
    while True:
        try:
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
            samples = run.samples(pod, step)
            scores = run.scores(pod, step, samples)
            metrics = pod.train(step, samples, scores)
            run.write_row(pod, step, samples, scores, metrics)
            step += 1
        except SidecarDied as death:
            pod.recover(death, step)
