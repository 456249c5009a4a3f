"""Who computes a model: Tandem's own network, or the module of transformers."""

from typing import Literal, NamedTuple

ImplementationName = Literal["auto", "tandem", "transformers"]


class Implementation(NamedTuple):
    """``name``: ``auto`` and ``tandem`` are Tandem's own network, for the families that it declares; ``transformers`` is the module of transformers.
    ``trust_remote_code``: such a module may be code in the model's folder."""

    name: ImplementationName = "auto"
    trust_remote_code: bool = False

    @property
    def is_transformers(self) -> bool:
        return self.name == "transformers"


OWN = Implementation()
