"""The figures at the top of a run's page, and its memory by phase."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandem.report.columns import Columns
from tandem.report.run_facts import RunFacts

MEMORY, MEASURED = "memory/", "/measured"


@dataclass(frozen=True, slots=True)
class Card:
    """A figure: ``value`` with its ``name``, after the value ``before`` or out of ``limit``, which are empty where there is none. ``state``: ``good``, ``bad``
    or empty."""

    name: str
    value: str
    before: str = ""
    limit: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Of all rows: optimizer ``steps`` taken, ``seconds`` of them, the median of tokens per second, and the largest mismatch; ``None`` without one."""

    steps: int
    seconds: float
    speed: float | None
    mismatch: float | None


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes that a phase was predicted to need, and the most that it had; ``None``: not known."""

    phase: str
    predicted: float | None
    measured: float | None


def totals_of_columns(columns: Columns) -> Totals:
    steps = columns.steps[-1] + 1 if columns.steps else 0
    mismatch = max(map(abs, columns.extremes("mismatch_kl"))) if "mismatch_kl" in columns.keys else None
    speeds = sorted(columns.finite("perf/tokens_per_s"))
    return Totals(steps, columns.seconds[-1] if columns.seconds else 0.0, speeds[len(speeds) // 2] if speeds else None, mismatch)


def cards(run: RunFacts, totals: Totals) -> list[Card]:
    """Returns the figures at the top of the page of ``run``."""
    shown: list[Card] = []
    for name, kinds, after_kind in (("held-out accuracy, sampled", ("sampled",), "final"), ("held-out accuracy, greedy", ("greedy",), "final_greedy")):
        before = [e["accuracy"] for e in run.evaluations if e["kind"] in kinds]
        after = [e["accuracy"] for e in run.evaluations if e["kind"] == after_kind] or before[1:]
        if before:
            shown.append(_change(name, before[0], after[-1] if after else None, ".3f"))
    losses = [e["loss"] for e in run.evaluations if e["kind"] in ("held_out", "held_out_drafts")]
    drafts = [e["acceptance_length"] for e in run.evaluations if "acceptance_length" in e]
    pairs = [e["accuracy"] for e in run.evaluations if e["kind"] == "held_out_pairs"]
    if pairs:
        shown.append(_change("held-out pairs preferred rightly", pairs[0], pairs[-1] if len(pairs) > 1 else None, ".3f"))
    if drafts:
        shown.append(_change("held-out acceptance length, tokens", drafts[0], drafts[-1] if len(drafts) > 1 else None, ".2f"))
    if losses:
        shown.append(_change("held-out loss, nats per token", losses[0], losses[-1] if len(losses) > 1 else None, ".4f"))
    asked = None if run.recipe is None else run.recipe.get("run.max_steps")
    shown.append(Card("optimizer steps", f"{totals.steps:,}", limit=f"{asked:,}" if asked else ""))
    shown.append(Card("time of these steps", duration(totals.seconds)))
    if totals.speed is not None:
        shown.append(Card("tokens per second (median)", f"{totals.speed:,.0f}"))
    if totals.mismatch is not None:
        equal = totals.mismatch == 0
        shown.append(Card("mismatch_kl, largest", "exactly 0" if equal else f"{totals.mismatch:.2g}", state="good" if equal else "bad"))
    return shown


def status(run: RunFacts) -> tuple[str, str]:
    """Returns how the run stands, in words, and whether that is ``good`` or ``quiet``."""
    if run.ended is None:
        return "not finished", "quiet"
    if run.reached is None:
        return "finished", "good"
    return ("target reached", "good") if run.reached else ("finished, target not reached", "quiet")


def memory_of_phases(largest: Iterable[tuple[str, float]], predicted: Mapping[str, float]) -> list[PhaseMemory]:
    """Returns the memory of each phase. ``largest``: (metric, largest value), of all metrics or those of memory."""
    measured = {key.split("/")[1]: value for key, value in largest if key.startswith(MEMORY) and key.endswith(MEASURED)}
    return [PhaseMemory(phase, predicted.get(phase), measured.get(phase)) for phase in sorted(set(measured) | set(predicted))]


def _change(name: str, before: float, after: float | None, form: str) -> Card:
    return Card(name, f"{before:{form}}") if after is None else Card(name, f"{after:{form}}", before=f"{before:{form}}")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
