"""The events of a job. The command line shows them; a library user may ignore them."""

from collections.abc import Mapping


class Callback:
    """Receives the events of a run and ignores them; override the methods that you need. All are called from the job's thread."""

    def started(self, run_directory: str, max_steps: int, target: float | None) -> None:
        """The run has its directory and starts. ``target``: the held-out accuracy that it trains to, ``None`` without one."""

    def phase(self, name: str, step: int) -> None:
        """The run entered the phase ``name`` (a state of the pod, or a stage such as ``sft``) in ``step``."""

    def progress(self, name: str, done: float, total: float, text: str = "") -> None:
        """Progress inside a phase: ``done`` of ``total``."""

    def row(self, row: Mapping[str, float | int | str]) -> None:
        """A step has ended; ``row`` is its row of ``metrics.jsonl``."""

    def evaluated(self, step: int, accuracy: float, count: int, kind: str) -> None:
        """An evaluation on ``count`` held-out prompts has ended; ``kind`` is sampled, greedy or final."""

    def message(self, text: str) -> None:
        """A line for the user, such as a recovery or the share of faults."""
