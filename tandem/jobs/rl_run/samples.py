"""The samples of a round: those in the journal are used and never drawn again."""

from collections.abc import Sequence
from functools import partial

from tandem.jobs.rl_run.draw_round import Listen, draw_round
from tandem.jobs.rl_run.rl_run import RLRun
from tandem.jobs.rl_run.scores import judge
from tandem.pod.pod import Pod
from tandem.rl.rollout.staleness import check_staleness
from tandem.types import Prompt, Sample
from tandem.types.round import joined

MOST_STEPS_MEASURED = 64
"""Steps whose samples a resumed run reads for the lengths that it expects of later ones."""


def samples_of_round(pod: Pod, run: RLRun, step: int, number: int) -> list[Sample]:
    """Returns the samples of round ``number`` of ``step`` from the journal, or draws and journals them. Those that are being drawn beside the trainer's work
    are waited for."""
    recorded = run.journal.samples(step, number)
    if recorded is not None:
        return recorded
    if pod.ahead is not None and (pod.ahead.step, number) == (step, 0):
        drawn, buffer = pod.end_rollout(), None
    else:
        expected, listen = partial(expected_lengths, run), listener(run, step, number)
        drawn, buffer = draw_round(pod, run.prompts, step, number, expected, listen, run.weights_of(step))
    if run.recipe.rollout.max_staleness:
        check_staleness(drawn, step, run.recipe.rollout.max_staleness)
    if (judging := run.judgements.get((step, number))) is not None:
        judging.complete(drawn)
    # Inference and update are sent the same.
    run.journal.commit_samples(step, drawn, number, buffer, pod.trainer.encode)
    return drawn


def listener(run: RLRun, step: int, number: int) -> Listen:
    """Returns what begins the judgement of round ``number`` of ``step``, and returns what adds its samples to it."""
    return lambda prompts: judge(run, (step, number), prompts, run.recipe.algorithm.group_size).add


def expected_lengths(run: RLRun, step: int, prompts: Sequence[Prompt]) -> list[float]:
    """Returns how long the samples of ``prompts`` are expected to be, from those of the steps before ``step`` that are judged when its samples are drawn. A
    task that generates prompts repeats none."""
    if run.prompts.source.task.size is None:
        return []
    earlier = [each for each in run.journal.journalled_steps() if each < step - run.recipe.rollout.max_staleness]
    for each in earlier[max(run.steps_measured, len(earlier) - MOST_STEPS_MEASURED) :]:
        run.lengths.add(joined(run.journal.rounds(each)).samples)
    run.steps_measured = len(earlier)
    return run.lengths.expected(prompts)
