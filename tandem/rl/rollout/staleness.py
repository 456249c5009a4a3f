"""The age of samples, in optimizer steps: how far the weights that drew them are behind those that learn from them."""

from collections.abc import Sequence

from tandem.types import RunError, Sample


def weights_of(step: int, max_staleness: int) -> int:
    """Returns the step of the weights that draw the samples of ``step``. The first steps have no older ones than those of step 0."""
    return max(step - max_staleness, 0)


def too_old(samples: Sequence[Sample], step: int, max_staleness: int) -> list[str]:
    """Returns a line for each sample of ``step`` with a token that other weights drew than those of ``step`` or of the ``max_staleness`` steps before."""
    lines = []
    for sample in samples:
        ages = {step - version.step for each in sample.sequences for version in each.sampled_weight_versions}
        if any(not 0 <= age <= max_staleness for age in ages):
            named = ", ".join(str(step - age) for age in sorted(ages, reverse=True))
            lines.append(f"sample '{sample.id}' was drawn by the weights of step {named}, and step {step} may be at most {max_staleness} after them")
    return lines


def check_staleness(samples: Sequence[Sample], step: int, max_staleness: int) -> None:
    """Raises ``RunError`` where a sample of ``step`` is older than ``max_staleness``."""
    for line in too_old(samples, step, max_staleness):
        raise RunError(f"{line} (rollout.max_staleness); the journal and the checkpoints do not belong together")
