"""Which parts of a call are recorded, where it has thousands of a kind: the requests and episodes of a rollout, the calls of reward functions."""

import itertools
import random

from tandem.config.traces import REQUEST_RATIO, TracesConfig
from tandem.runtime.traces.context import SpanContext, current


def share_of_parts(config: TracesConfig | None, *, is_whole: bool) -> float:
    """Returns the share of the parts of a step that are recorded besides the first. ``is_whole``: the step is one of ``run.trace_steps``, with all parts."""
    return 1.0 if is_whole or config is None else config.ratio(REQUEST_RATIO)


class Parts:
    """Chooses parts of ``call``: the first one, and of the others the share ``ratio``. What belongs to a chosen part is recorded with it. Thread-safe."""

    def __init__(self) -> None:
        self._call: SpanContext | None = None
        self._ratio = 0.0
        self._numbers = itertools.count()
        # Not the generator of the module, whose numbers belong to functions of the user.
        self._random = random.Random()

    def begin(self, call: SpanContext | None, ratio: float) -> None:
        """Parts of ``call`` follow. Calls of one trace, such as those of a step, have one first part."""
        if call is None or self._call is None or call.trace_id != self._call.trace_id:
            self._numbers = itertools.count()
        self._call, self._ratio = call, ratio

    def choose(self) -> SpanContext | None:
        """Returns the span that the next part of the call is recorded below, ``None`` if it is not."""
        if self._call is None or not self._call.sampled:
            return None
        return self._call if next(self._numbers) == 0 or self._random.random() < self._ratio else None

    def parent(self) -> SpanContext | None:
        """Returns the span that what begins here is recorded below: the next part of the call, or a piece of a part that was chosen."""
        context = current()
        return self.choose() if context is not None and context == self._call else context
