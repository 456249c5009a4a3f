"""What a verification of a run finds."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a run's folder that is not as it was written.

    Args:
        what: the thing and what is wrong with it.
        depends: what depends on it.
        fix: what to do.
        stops: whether a resume would use it, so that it is refused.
    """

    what: str
    depends: str
    fix: str
    stops: bool

    def line(self) -> str:
        """Returns the finding in one line."""
        return f"{self.what}; {self.depends}; {self.fix}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
