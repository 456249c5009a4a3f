"""The checkpoints of a pod, as its controller journals them: what the trainer loaded, what is under way, and what was committed or written to a tier."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.pod.near_tiers import NearTiers
from tandem.runtime.callback import Callback
from tandem.runtime.records.checkpoint_tiers import Loaded, describe_fetched, record_loaded, record_written
from tandem.runtime.records.journal import Journal


@dataclass
class PodCheckpoints:
    """``near``: the tiers before the run's folder; ``copied_step``: of the newest checkpoint there alone. ``on_committed`` is told of each checkpoint that was
    journalled; those of steps ``in_use`` are not removed.

    ``loaded``: (step, digest) of the checkpoint that the trainer loaded from the run's folder; ``all_damaged``: it loaded none, because no checkpoint is
    whole. ``boundaries``: by step, the newest transition before each checkpoint that is under way."""

    journal: Journal
    callback: Callback
    near: NearTiers = field(default_factory=NearTiers)
    on_committed: Callable[[int, str], None] = lambda step, digest: None
    in_use: Callable[[], Collection[int]] = tuple
    copied_step: int = -1
    loaded: tuple[int, str] | None = None
    all_damaged: bool = False
    boundaries: dict[int, int] = field(default_factory=dict)

    def note_loaded(self, reply: Mapping[str, Any]) -> None:
        """Takes what a trainer that starts has loaded, as its ``reply`` says."""
        step, digest = int(reply["step"]), reply["digest"]
        # Only those of the run's folder count as its checkpoints.
        is_of_folder = digest is not None and reply["tier"]["tier"] in ("folder", "upload")
        self.loaded = (step, str(digest)) if is_of_folder else None
        self.copied_step = step if digest is not None and not is_of_folder else -1
        self.all_damaged, self.boundaries = bool(reply["damaged"]), {}

    def tell_of_loaded(self, reply: Mapping[str, Any], *, is_newest: bool) -> None:
        """Journals and tells what was passed over and fetched for that, and from where it came if it ``is_newest``."""
        for why in reply["passed_over"]:
            self.journal.record_event("checkpoint_damaged", {"reason": why})
            self.callback.message(why)
        if reply["fetched"] is not None:
            self.callback.message(describe_fetched(reply["fetched"], self.near.copies))
        if is_newest and reply["tier"] and (said := record_loaded(self.journal, Loaded(**reply["tier"]))):
            self.callback.message(said)

    def journal_loaded(self) -> None:
        """Journals the checkpoint that was loaded, if the death came before that; after the journal is cut to it."""
        if self.loaded is not None and all(self.loaded[0] != saved.step for saved in self.journal.checkpoints()):
            self.commit({"committed": [self.loaded], "written": []})

    def has_begun(self, step: int) -> bool:
        """Returns whether the checkpoint of ``step`` is under way or committed."""
        return step in self.boundaries or any(saved.step == step for saved in self.journal.checkpoints())

    def begin(self, step: int) -> None:
        """Notes that the checkpoint of ``step`` is under way, behind the newest transition."""
        self.boundaries[step] = self.journal.last_transition()

    def commit(self, reply: Mapping[str, Any]) -> None:
        """Journals the checkpoints that a ``reply`` of the trainer says were committed, and what was written to tiers."""
        for tier, step, size_bytes, seconds, where, trouble in reply["written"]:
            if record_written(self.journal, tier, step, size_bytes, seconds, where, trouble):
                self.callback.message(f"tier {tier} takes no more checkpoints: {trouble}")
            elif tier == "memory":
                self.near.tell_of_nodes(len(where))
        for step, digest in reply["committed"]:
            self.journal.commit_checkpoint(step, digest, self.boundaries.pop(step, None))
            self.on_committed(step, digest)
