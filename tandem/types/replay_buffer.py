"""The replay buffer of partial rollouts: groups that no step was trained on yet."""

from dataclasses import dataclass

from tandem.types.sample import FinishReason, Sample


@dataclass(frozen=True, slots=True)
class ReplayBuffer:
    """``samples``: group by group, in the order in which the groups were begun; one that is unfinished has the finish reason ``ABORT``. ``started``: how
    many places in the order of the training prompts were passed for all groups of the run so far."""

    samples: tuple[Sample, ...] = ()
    started: int = 0

    @property
    def groups(self) -> list[list[Sample]]:
        """The groups, oldest first."""
        members: dict[str, list[Sample]] = {}
        for sample in self.samples:
            members.setdefault(sample.prompt_id, []).append(sample)
        return list(members.values())

    @property
    def unfinished(self) -> list[Sample]:
        """The samples that are to be continued."""
        return [sample for sample in self.samples if _is_unfinished(sample)]

    @property
    def complete_groups(self) -> list[list[Sample]]:
        """The groups of which every sample is finished, oldest first."""
        return [group for group in self.groups if not any(map(_is_unfinished, group))]


def _is_unfinished(sample: Sample) -> bool:
    """Returns whether ``sample`` is to be continued. An episode that a fault has ended has the same finish reason."""
    return sample.finish_reason is FinishReason.ABORT and not sample.fault
