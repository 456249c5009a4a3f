"""What the residents of a pod moved and left behind: for the journal, the row of metrics and the user."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal


def engine_moves(held: Mapping[str, int], move: str, seconds: Mapping[str, float]) -> list[list[Any]]:
    """Returns the ``move`` of each of the engine's residents as a sidecar's reply has it. ``held``: bytes by resident."""
    return [[name, move, size, seconds.get(name, 0.0)] for name, size in sorted(held.items())]


@dataclass
class ResidentMoves:
    """``is_shown``: whether the plan moves anything, so that rows have it. ``metrics``: bytes and seconds since they were last taken, by metric.
    ``told``: what was left behind and told already."""

    journal: Journal
    callback: Callback
    is_shown: bool
    metrics: dict[str, float] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def note(self, step: int, reply: dict[str, Any]) -> dict[str, Any]:
        """Counts the moves of a sidecar's ``reply``, and tells of what was left behind. Returns the detail for the journal."""
        moves, residue = reply.pop("moves", []), reply.pop("residue", [])
        if self.is_shown:
            for name, move, size, seconds in moves:
                for metric, value in ((f"memory/moved/{name}/{move}/bytes", float(size)), (f"memory/moved/{name}/{move}/seconds", float(seconds))):
                    self.metrics[metric] = self.metrics.get(metric, 0.0) + value
        for line in residue:
            self.journal.record_event("residue", {"step": step, "what": line})
            if (what := line.split(" holds ")[0]) not in self.told:
                # Its size differs from step to step; the journal has each.
                self.told.add(what)
                self.callback.message(f"step {step}: left behind: {line}")
        named = [{"resident": name, "move": move, "bytes": size, "seconds": round(seconds, 6)} for name, move, size, seconds in moves]
        return {**reply, **({"moves": named} if named else {}), **({"residue": residue} if residue else {})}

    def take(self) -> dict[str, float]:
        """Returns the metrics since this was asked."""
        metrics, self.metrics = self.metrics, {}
        return metrics
