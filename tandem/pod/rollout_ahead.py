"""A rollout beside the trainer's work: the one call of a pod that its controller does not wait for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from tandem.runtime.rpc.calls import Progress
from tandem.runtime.traces.context import in_context
from tandem.types import Sample

Drawn = tuple[list[Sample], dict[str, Any]]
"""Samples, and facts on the rollout, as ``RolloutSidecar.rollout`` returns them."""


class RolloutAhead:
    """The rollout of ``step``, which ``draw`` makes: in a thread of its own, or where the sidecars are no processes before this returns. ``lost``: what
    ``draw`` reports of workers and pods that were lost in it, also if it fails later.

    What it draws depends on its prompts and weights alone, so the results of a run do not depend on when it ends."""

    def __init__(self, step: int, draw: Callable[[Progress], Drawn], *, in_thread: bool) -> None:
        self.step, self.lost = step, list[dict[str, Any]]()
        self._draw = draw
        self._drawn: Future[Drawn] = Future()
        self._began = self._ended = perf_counter()
        if in_thread:
            # A daemon: a run that fails does not wait for it.
            threading.Thread(target=in_context(self._run), name=f"rollout-{step}", daemon=True).start()
            self._asked = float("inf")
        else:
            self._asked = self._began
            self._run()

    def _run(self) -> None:
        try:
            drawn = self._draw(self._report)
        except BaseException as error:
            self._ended = perf_counter()
            self._drawn.set_exception(error)
        else:
            self._ended = perf_counter()
            self._drawn.set_result(drawn)

    def _report(self, progress: dict[str, Any]) -> None:
        if "replaced" in progress or "left_out" in progress:
            self.lost.append(progress)

    def result(self) -> Drawn:
        """Waits until it ends, and returns what was drawn. Raises the error that ended it."""
        self._asked = min(self._asked, perf_counter())
        return self._drawn.result()

    @property
    def seconds(self) -> float:
        """The seconds that it took."""
        return self._ended - self._began

    @property
    def waited_s(self) -> float:
        """Those of its seconds in which somebody waited for it."""
        return max(self._ended - self._asked, 0.0)
