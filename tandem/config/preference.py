"""The loss on preference pairs (DPO): keys that recipes on data and of reinforcement learning share, and their checks."""

from typing import Literal, Protocol

from tandem.config.limits import check_float32
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "robust"]


class PreferenceKeys(Protocol):
    """A section ``algorithm`` with the keys of a preference loss."""

    @property
    def name(self) -> str: ...
    @property
    def loss_type(self) -> PreferenceLoss: ...
    @property
    def beta(self) -> float: ...
    @property
    def label_smoothing(self) -> float: ...


def check_preference(section: PreferenceKeys, *names: str) -> None:
    """Raises ``UserError`` for a value that is invalid or not read; ``names``: the algorithms that read them."""
    if section.name not in names:
        reason, fix = f"algorithm.name is '{section.name}'", f"set algorithm.name to {' or '.join(names)}"
        refuse_unread("algorithm", section, reason, "loss_type", "beta", "label_smoothing", fix=fix)
        return
    if not 0 < section.beta < float("inf"):
        raise UserError(f"'algorithm.beta' is {section.beta}; it must be above 0, and finite (0.1 is usual)")
    check_float32("algorithm", section, "beta")
    if not 0 <= section.label_smoothing < 0.5:
        raise UserError(
            f"'algorithm.label_smoothing' is {section.label_smoothing}, the share of the pairs that are labelled the wrong way; it must be at least 0 and "
            "below 0.5"
        )
    if section.loss_type in ("ipo", "hinge"):
        reason = f"algorithm.loss_type is '{section.loss_type}'"
        refuse_unread("algorithm", section, reason, "label_smoothing", fix="set algorithm.loss_type to sigmoid or robust")
