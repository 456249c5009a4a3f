"""What a job tells whoever watches it. The command line shows it; a library user may ignore it."""

from collections.abc import Mapping


class Callback:
    """Hears of a run and does nothing; override what is wanted. Every method is called from the job's own thread."""

    def started(self, run_directory: str, max_steps: int, target: float | None) -> None:
        """The run has its directory and is about to work. ``target``: held-out accuracy it trains to, if it does."""

    def phase(self, name: str, step: int) -> None:
        """The pod entered ``name`` (a state of the figure, or a stage such as ``sft``) in ``step``."""

    def progress(self, name: str, done: float, total: float, text: str = "") -> None:
        """Long work inside a phase: ``done`` of ``total``."""

    def row(self, row: Mapping[str, float | int | str]) -> None:
        """A step is complete; ``row`` is its row of ``metrics.jsonl``."""

    def evaluated(self, step: int, accuracy: float, count: int, kind: str) -> None:
        """An evaluation on ``count`` held-out prompts; ``kind`` is sampled, greedy or final."""

    def message(self, text: str) -> None:
        """One line that a person should see: a recovery, a fault share, where the model lies."""
