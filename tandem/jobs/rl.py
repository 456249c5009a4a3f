"""The loop of reinforcement learning in a pod: rollout, rewards and inference, training."""

from tandem.jobs.rl_run import RLRun
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.recovery import recover
from tandem.types import Round


def reinforce(pod: Pod, run: RLRun) -> int:
    """Trains until the target is reached or ``run.max_steps`` are done; returns the number of optimizer steps taken.

    A step has one round of rollout and rewards; with dynamic sampling, as many as it needs. Any line may run again after a fault: samples, scores and
    evaluations in the journal are used and never computed again.
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
            rounds: list[Round] = []
            while not run.is_complete(rounds):
                samples = run.samples(pod, step, len(rounds))
                rounds.append(Round(samples, run.scores(pod, step, len(rounds), samples)))
            metrics = run.train(pod, step, rounds)
            run.write_row(pod, step, rounds, metrics)
            step += 1
        except SidecarDied as death:
            recover(pod, death, step)
