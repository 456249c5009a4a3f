"""One round of rollout of a step: which groups it begins and continues, and what it leaves."""

from collections.abc import Callable, Sequence

from tandem.pod.pod import Pod
from tandem.pod.sidecars import OnSamples
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.rl.rollout.filter_groups import groups_lacking
from tandem.rl.rollout.partial import groups_to_begin, taken, with_drawn
from tandem.rl.rollout.round_prompts import RoundPrompts
from tandem.types import Prompt, ReplayBuffer, Sample
from tandem.types.round import joined

Expected = Callable[[int, Sequence[Prompt]], Sequence[float]]
"""Takes a step and prompts, and returns the expected length of the longest sample of each; empty if nothing is known."""
Listen = Callable[[Sequence[Prompt]], OnSamples]
"""Takes the prompts of a rollout, and returns what receives each of its samples as soon as it is finished."""


def draw_round(
    pod: Pod, prompts: RoundPrompts, step: int, number: int, expected: Expected, listen: Listen | None = None, weights: int | None = None
) -> tuple[list[Sample], ReplayBuffer | None]:
    """Returns the samples that round ``number`` of ``step`` adds to the step, and with partial rollouts the replay buffer that it leaves. The journal of
    ``prompts`` has all earlier rounds. ``listen`` is not called with partial rollouts, where a sample that is finished may wait for its group. ``weights``: the
    step of those that draw (``None``: ``step``)."""
    settings = _settings(prompts)
    if prompts.recipe.rollout.budget_tokens:
        return _draw_partial(pod, prompts, step, number, expected, settings)
    chosen = prompts.of(step, number)
    on_samples = listen(chosen) if listen is not None else None
    return pod.roll_out(step, chosen, settings, weights=weights, expected=expected(step, chosen), on_samples=on_samples), None


def begin_round(pod: Pod, prompts: RoundPrompts, step: int, expected: Expected, listen: Listen, weights: int) -> None:
    """Begins the first round of ``step`` beside the trainer's work; ``pod.end_rollout`` returns its samples. Arguments as of ``draw_round``; what ``listen``
    returns is called in another thread."""
    chosen = prompts.of(step, 0)
    pod.begin_rollout(step, chosen, _settings(prompts), weights=weights, expected=expected(step, chosen), on_samples=listen(chosen))


def _settings(prompts: RoundPrompts) -> dict[str, object]:
    recipe = prompts.recipe
    return sampling_settings(recipe.rollout, recipe.algorithm.group_size, recipe.run.seed)


def _draw_partial(
    pod: Pod, prompts: RoundPrompts, step: int, number: int, expected: Expected, settings: dict[str, object]
) -> tuple[list[Sample], ReplayBuffer]:
    """Draws budgets until as many groups are finished as the step lacks: one, but in the first steps of a run, whose buffer has too few."""
    journal, source, budget = prompts.journal, prompts.source, prompts.recipe.rollout.budget_tokens
    buffer, earlier = journal.replay_buffer(step, number), journal.rounds(step)[:number]
    in_step = {sample.prompt_id for sample in joined(earlier).samples}
    wanted = groups_lacking(earlier, prompts.recipe.algorithm.filter_groups, prompts.recipe.rollout.prompts_per_step)
    samples = list[Sample]()
    while wanted:
        in_use = in_step | {sample.prompt_id for sample in (*buffer.samples, *samples)}
        count = groups_to_begin(buffer, wanted, in_use, source.task.size)
        begun, started = prompts.after(step, buffer.started, count, in_use)
        chosen, drawn = [*prompts.of_samples(buffer.unfinished), *begun], list[Sample]()
        if chosen:
            lengths = [min(length, float(budget)) for length in expected(step, chosen)]
            drawn = pod.roll_out(step, chosen, settings, unfinished=buffer.unfinished, expected=lengths)
        new, buffer = taken(with_drawn(buffer, drawn, started), wanted)
        samples += new
        wanted -= len({sample.prompt_id for sample in new})
    return samples, buffer
