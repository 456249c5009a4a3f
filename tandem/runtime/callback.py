"""The events of a job. The display shows them; ``train(recipe, callbacks=[...])`` passes them on."""

from collections.abc import Mapping, Sequence
from typing import Any


class Callback:
    """Receives the events of a run and ignores them; override the methods that you need::

        class Log(tandem.Callback):
            def row(self, row):                                       # on_step_end and on_log of transformers and TRL
                tracker.log({"reward": row["reward/mean"]}, step=row["step"])

            def evaluated(self, step, accuracy, count, kind):         # on_evaluate
                tracker.log({f"accuracy/{kind}": accuracy}, step=step)

        tandem.train("sort", callbacks=[Log()])

    All but ``waiting`` are called in the process and the thread of ``train``, between the work of two phases; the run waits meanwhile. If a method raises, its
    callback is told nothing more, the step is completed and saved, and ``train`` raises ``RunError``: ``resume`` continues the run.
    """

    def started(self, run_directory: str, max_steps: int, target: float | None) -> None:
        """The run has its directory and starts. ``target``: the held-out accuracy that it trains to, ``None`` without one."""

    def resumed(self, step: int, accuracy: float | None) -> None:
        """The run continues from the checkpoint after ``step`` steps. ``accuracy``: of the newest sampled evaluation before it, ``None`` without one."""

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

    def waiting(self, text: str) -> None:
        """Something takes longer than it ever did: ``text`` says who waits for whom, since when, and why if that is known. Called about twice a second, in
        another thread, and with an empty text when it goes on."""

    def health(self, readings: Sequence[Sequence[Any]]) -> None:
        """The newest readings of ranks, links and nodes, each the name of a metric, its labels and its value (``docs/health.md``), at most once a second."""

    def wants_stop(self) -> bool:
        """Returns whether the run is to be saved and stopped. Asked between two steps; ``train`` then raises ``RunError``."""
        return False
