"""The time of an engine's steps from measurements of a machine, as plain data. Imports no torch."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.estimate.serving.step_time import EngineStep
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What an engine was measured to take. ``decode_s``: (sequences, seconds) of steps that only decode, with ``decode_context`` tokens each;
    ``context_s``: seconds that a further token of context adds for each sequence. ``prompt_s``: (tokens, seconds) of steps that compute one whole prompt;
    ``prompt_context_s``: seconds that a further earlier token adds for each token of a chunk. ``request_s``: to queue a request and to return its output."""

    decode_s: tuple[tuple[float, float], ...]
    decode_context: float
    context_s: float
    prompt_s: tuple[tuple[float, float], ...]
    prompt_context_s: float
    request_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("decode_s", "prompt_s"):
            sizes = [size for size, _ in getattr(self, name)]
            if len(sizes) < 2 or sizes != sorted(set(sizes)):
                raise UserError(f"measured steps {name} has sizes {sizes}; it needs at least two, ascending")

    def __call__(self, step: EngineStep) -> float:
        """Returns the seconds of ``step``. A step with both has the fixed cost of a step once."""
        seconds = 0.0
        if step.decoding:
            beyond = step.decoding * (step.context - self.decode_context)
            seconds += max(0.0, interpolate(self.decode_s, step.decoding) + self.context_s * beyond)
        if step.prompt_tokens:
            beyond = step.prompt_tokens * (step.prompt_context - step.prompt_tokens / 2)
            seconds += max(0.0, interpolate(self.prompt_s, step.prompt_tokens) + self.prompt_context_s * beyond)
        if step.decoding and step.prompt_tokens:
            seconds -= min(max(0.0, interpolate(self.decode_s, 0)), max(0.0, interpolate(self.prompt_s, 0)))
        return seconds


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Returns the value at ``at`` of the line through the two neighbouring ``points``, or through the first or last two beside them."""
    right = min(max(bisect_right([size for size, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (at - x0) * (y1 - y0) / (x1 - x0)
