"""Partial rollouts (Kimi Team, 2025, "Kimi k1.5: Scaling Reinforcement Learning with LLMs", section 2.6.2): a sample draws at most a budget of tokens in one
round; what is unfinished waits in a replay buffer, and later rounds continue it with the weights of then.

A step takes the oldest groups that are complete, as many as it has prompts. Each round begins as many groups as the step still lacks, so that on average a
step begins as many as it takes. Which groups a step takes depends on the tokens alone, so a repeated or resumed run takes the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tandem.types import FinishReason, ReplayBuffer, Sample


def groups_to_begin(buffer: ReplayBuffer, wanted: int, in_use: Collection[str], task_size: int | None) -> int:
    """Returns how many groups a round begins, for a step that still lacks ``wanted`` groups. ``in_use``: the prompts of the buffer and of the step, which are
    not begun again beside it; of a task of ``task_size`` prompts there may be fewer others."""
    count = max(wanted - len(buffer.complete_groups), 0)
    return count if task_size is None else min(count, task_size - len(in_use))


def with_drawn(buffer: ReplayBuffer, drawn: Sequence[Sample], started: int) -> ReplayBuffer:
    """Returns ``buffer`` after a round has ``drawn`` the samples that were unfinished and those of new groups."""
    newest = {sample.id: sample for sample in drawn}
    kept = tuple(newest.pop(sample.id, sample) for sample in buffer.samples)
    return ReplayBuffer(kept + tuple(newest.values()), started)


def taken(buffer: ReplayBuffer, wanted: int) -> tuple[list[Sample], ReplayBuffer]:
    """Returns the samples of the oldest complete groups, at most ``wanted`` groups, and the buffer without them."""
    chosen = [sample for group in buffer.complete_groups[:wanted] for sample in group]
    names = {sample.prompt_id for sample in chosen}
    return chosen, replace(buffer, samples=tuple(sample for sample in buffer.samples if sample.prompt_id not in names))


def cut_by_budget(sample: Sample, max_tokens: int) -> Sample:
    """Returns ``sample`` as unfinished where it ended at a length below ``max_tokens``, its own limit."""
    is_cut = sample.finish_reason is FinishReason.LENGTH and sample.sampled_tokens < max_tokens
    return replace(sample, finish_reason=FinishReason.ABORT) if is_cut else sample
