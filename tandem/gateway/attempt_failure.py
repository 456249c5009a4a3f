"""Why an attempt brought no answer."""

from tandem.gateway.breaker import Outcome


class BackendFailed(Exception):
    """An attempt that brought no answer. ``is_lost``: the connection could not be made or broke before anything came, so that the same backend may be
    tried again. ``is_paid``: the budget has been charged for a retry."""

    def __init__(self, message: str, *, is_lost: bool = False, is_paid: bool = False) -> None:
        super().__init__(message)
        self.is_lost, self.is_paid = is_lost, is_paid


class StatusRetried(BackendFailed):
    """An answer whose status is not passed on, as another backend may do better. ``outcome``: what it says about the backend."""

    def __init__(self, message: str, outcome: Outcome, *, is_paid: bool = True) -> None:
        super().__init__(message, is_paid=is_paid)
        self.outcome = outcome


class UpstreamFailed(BackendFailed):
    """The connection to a backend failed, or what came on it is no answer. The message has no address, which is the operator's business."""
