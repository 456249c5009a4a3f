"""Which weights drew an answer: in its header and its body."""

from collections.abc import Iterable

from tandem.engine.processing.outputs import RequestOutput
from tandem.types import WeightVersion

HEADER = "X-Tandem-Weight-Version"
"""``INCARNATION.STEP``, with a comma between two; of a stream, those of its first event."""


class WeightVersions:
    """The weights that drew the tokens of an answer so far, in order; more than one only where requests were continued over an update."""

    def __init__(self) -> None:
        self._seen: dict[WeightVersion, None] = {}

    def note(self, versions: Iterable[WeightVersion]) -> None:
        """Counts ``versions``."""
        self._seen.update(dict.fromkeys(versions))

    def take(self, output: RequestOutput, held: WeightVersion) -> None:
        """Counts the tokens of ``output``; an answer without any has the weights that are ``held`` now."""
        drawn = [version for completion in output.outputs for version in completion.weight_versions]
        if drawn:
            self.note(drawn)
        elif output.finished and not self._seen:
            self._seen[held] = None

    @property
    def header(self) -> dict[str, str]:
        """The header, nothing before the first token."""
        text = ",".join(f"{version.incarnation}.{version.step}" for version in self._seen)
        return {HEADER: text} if text else {}

    @property
    def body(self) -> list[list[int]]:
        """Each as [incarnation, step]."""
        return [list(version) for version in self._seen]
