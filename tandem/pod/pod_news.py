"""What a pod journals and tells of its members and its weights."""

from dataclasses import dataclass, field
from typing import Any

from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal


@dataclass
class PodNews:
    """``told``: the notes that were told already."""

    journal: Journal
    callback: Callback
    told: set[str] = field(default_factory=set)

    def tell_once(self, note: str | None) -> None:
        if note is not None and note not in self.told:
            self.told.add(note)
            self.callback.message(note)

    def note_member(self, step: int, news: dict[str, Any]) -> None:
        """Journals and tells that a pod of another machine ``joined``, ``left`` or was ``refused``, or that a ``node`` has another state."""
        if "node" in news:
            is_cordoned = news["state"] == "cordoned"
            self.journal.record_event("cordon" if is_cordoned else "node", {"step": step, **news})
            if is_cordoned:
                self.callback.message(f"step {step}: node {news['node']} is cordoned: {news['reason']}")
            return
        self.journal.record_event("membership", {"step": step, **news})
        what, why = next(key for key in ("joined", "left", "refused") if key in news), f": {news['reason']}" if news.get("reason") else ""
        did = {"joined": "joined the run", "left": "left the run", "refused": "could not join the run"}[what]
        self.callback.message(f"step {step}: pod {news[what]} ({news['name']}) {did}{why}")

    def note_damage(self, step: int, what: str, repair: str) -> None:
        """Journals and tells that weights were damaged on their way to an engine."""
        self.journal.record_event("weights_damaged", {"step": step, "what": what, "repair": repair})
        self.callback.message(f"step {step}: {what}; {repair}")
