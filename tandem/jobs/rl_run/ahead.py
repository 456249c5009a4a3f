"""One step off: the samples of a step are drawn under the weights of the step before, while that one trains.

In a synchronous run nothing here does anything.
"""

from functools import partial

from tandem.jobs.rl_run.draw_round import begin_round
from tandem.jobs.rl_run.rl_run import RLRun
from tandem.jobs.rl_run.samples import expected_lengths, listener, samples_of_round
from tandem.jobs.rl_run.scores import scores_of_round
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.recovery import go_back
from tandem.types import Round


def draw_ahead(pod: Pod, run: RLRun, step: int) -> None:
    """Begins to draw the samples of the step after ``step`` under the weights after ``step`` steps, once those of ``step`` are there."""
    following = step + 1
    if not run.recipe.rollout.max_staleness or following >= run.recipe.run.max_steps:
        return
    _collect(pod, run, step)
    if pod.ahead is not None or _is_collected(run, following):
        return
    if run.journal.samples(following) is not None:
        pod.serve_weights(step)  # For its further rounds.
        return
    begin_round(pod, run.prompts, following, partial(expected_lengths, run), listener(run, following, 0), weights=step)


def collect_ahead(pod: Pod, run: RLRun, step: int) -> None:
    """Waits for the samples of ``step`` that are drawn under the weights of the step before, and journals them before these weights are replaced.

    A checkpoint of ``step`` follows, so a resume has no need of the weights before it. A run that is prolonged after its end has, and goes back to them."""
    if _lacks_samples(run, step):
        weights = run.weights_of(step)
        if pod.ahead is None and not pod.has_weights(weights):
            go_back(pod, weights)
        _collect(pod, run, step)


def keep_drawn(pod: Pod, run: RLRun) -> None:
    """Waits for what is drawn ahead when the trainer has died, and journals it. If the rollout has died too, it is drawn again."""
    if pod.ahead is None:
        return
    step = pod.ahead.step
    try:
        samples_of_round(pod, run, step, 0)
    except SidecarDied as death:
        # What is left of it goes when the trainer is replaced.
        pod.restarts.begin(death, step)
        pod.restarts.ended(death, step)
        return
    pod.rest_engine(step)  # It lives, and need not start again.


def state_needed(run: RLRun, step: int) -> int:
    """Returns how many optimizer steps the trainer must have taken for ``step`` to go on: those before the weights that draw its samples, if it lacks
    some."""
    return run.weights_of(step) if _lacks_samples(run, step) else step


def _lacks_samples(run: RLRun, step: int) -> bool:
    """Returns whether ``step`` lacks samples that older weights than its own draw. A run that ends with ``step`` needs none of it."""
    return run.weights_of(step) < step < run.recipe.run.max_steps and not _is_collected(run, step)


def _collect(pod: Pod, run: RLRun, step: int) -> None:
    """Journals the samples of ``step``; if it may have several rounds, also their scores, which say whether another follows."""
    rounds = list[Round]()
    while not run.is_complete(rounds):
        samples = samples_of_round(pod, run, step, len(rounds))
        if not run.recipe.has_rounds:
            return
        rounds.append(Round(samples, scores_of_round(pod, run, step, len(rounds), samples)))


def _is_collected(run: RLRun, step: int) -> bool:
    """Returns whether the journal has what ``_collect`` journals."""
    return run.is_complete(run.journal.rounds(step)) if run.recipe.has_rounds else run.journal.samples(step) is not None
