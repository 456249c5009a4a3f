"""The result of a run of any job, with its report and the commands to try the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.jobs.metrics_table import MetricsTable
from tandem.report.phases import PhaseFigures, phase_figures, phase_lines, to_json
from tandem.report.run_facts import PHASES_KEY, PREDICTION_KEY, REPORT, RESULT_KEY, predicted_memory
from tandem.runtime.records.elastic import describe_fewer_ranks, fewer_ranks
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows


@dataclass(frozen=True, slots=True)
class Figure:
    """A measurement of a run's first and last model (``None``: not measured)."""

    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Args:
        steps: optimizer steps taken.
        figures: by name: ``loss`` on the held-out data, in nats per token, of preference pairs or of a draft head; ``pair_accuracy``, the share of the
            held-out pairs whose chosen answer is preferred; ``acceptance_length``, the tokens of a step of speculative decoding; ``accuracy``, sampled,
            before on the held-out prompts of step 0 and after on the final ones; ``greedy_accuracy`` on the final prompts.
        model: the trained model's folder.
        commands: shell commands to try the model.
        reached: whether the target is reached (``None``: the job has no target).
        phases: predicted beside measured seconds and bytes of each phase of a step.
        note: the last line of the summary, about how the run differs from its recipe (empty: it does not).
    """

    directory: Path
    steps: int
    figures: Mapping[str, Figure]
    model: Path
    report: Path
    commands: tuple[str, ...]
    reached: bool | None = None
    note: str = ""
    phases: tuple[PhaseFigures, ...] = ()

    @property
    def metrics(self) -> MetricsTable:
        """The metrics of every step, read from ``metrics.jsonl``."""
        return MetricsTable(self.directory / "metrics.jsonl")

    def __repr__(self) -> str:
        return f"RunResult({self._headline()}; model='{self.model}', report='{self.report}')"

    def summary(self) -> str:
        """Returns the text that is printed at the end of the run."""
        lines = [self._headline(), *phase_lines(self.phases), f"report: {self.report}", "try the model:", *(f"  {command}" for command in self.commands)]
        lines += [self.note] if self.note else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, which ``from_json`` reads."""
        return {**asdict(self), "directory": str(self.directory), "model": str(self.model), "report": str(self.report)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RunResult":
        paths = {name: Path(data[name]) for name in ("directory", "model", "report")}
        figures = {name: Figure(**figure) for name, figure in data["figures"].items()}
        phases = tuple(PhaseFigures(**each) for each in data.get("phases", ()))
        return cls(**{**data, **paths, "figures": figures, "commands": tuple(data["commands"]), "phases": phases})

    def _headline(self) -> str:
        loss = self.figures.get("loss")
        if loss is not None and loss.before is not None and loss.after is not None:
            pairs, drafts = self.figures.get("pair_accuracy"), self.figures.get("acceptance_length")
            more = f"perplexity {math.exp(min(loss.after, 700.0)):.2f}" if pairs is None else f"accuracy of pairs {pairs.before:.3f} -> {pairs.after:.3f}"
            more = more if drafts is None else f"acceptance length {drafts.before:.2f} -> {drafts.after:.2f}"
            return f"{self.steps} steps: held-out loss {loss.before:.4f} -> {loss.after:.4f} ({more})"
        if self.reached is None:
            return f"{self.steps} steps"
        sampled, greedy = (_after_and_before(self.figures[name]) for name in ("accuracy", "greedy_accuracy"))
        verdict = "target reached" if self.reached else "target NOT reached"
        return f"{verdict} after {self.steps} steps: sampled accuracy {sampled}, greedy {greedy} on fresh prompts"


def held_out_figures(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Returns the figures of the held-out evaluations of a run on data, in their order."""
    names = {"loss": "loss", "accuracy": "pair_accuracy", "acceptance_length": "acceptance_length"}
    return {figure: Figure(evaluations[0][name], evaluations[-1][name]) for name, figure in names.items() if evaluations and name in evaluations[0]}


def finish_run(
    directory: Path, journal: Journal, model: Path, steps: int, figures: Mapping[str, Figure], commands: Sequence[str], reached: bool | None = None
) -> RunResult:
    """Journals the result, writes the report and returns the result."""
    note = describe_fewer_ranks(fewer_ranks(journal.events()))
    rows = read_rows(directory / "metrics.jsonl")
    phases = phase_figures(rows, predicted_memory(journal), journal.get(PREDICTION_KEY) or {})
    result = RunResult(directory, steps, figures, model, directory / REPORT, tuple(commands), reached, note, tuple(phases))
    journal.set(PHASES_KEY, to_json(phases))
    journal.set("commands", list(commands))
    journal.set(RESULT_KEY, result.to_json())
    # Of the end of a run: its start does not wait for it.
    from tandem.dashboard.report import write_report

    write_report([directory], directory / REPORT)
    return result


def _after_and_before(figure: Figure) -> str:
    before = "" if figure.before is None else f" (before: {figure.before:.3f})"
    return "-" if figure.after is None else f"{figure.after:.3f}{before}"
