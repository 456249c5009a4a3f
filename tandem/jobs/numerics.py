"""What the bits of a run depend on, recorded when it begins and compared when it continues."""

from dataclasses import asdict
from typing import Any

from tandem.layout.mesh import MeshShape
from tandem.runtime.callback import Callback
from tandem.runtime.journal import Journal
from tandem.runtime.numerics import check_numerics


def check_run_numerics(
    journal: Journal, now: dict[str, str | int], shape: MeshShape, device: str, step: int, callback: Callback
) -> None:
    """Refuse to continue from ``step`` with other bits, unless the mesh or the device was changed, which changes them by intent.
    Raises ``UserError``."""
    saved, mesh = journal.get("numerics"), asdict(shape)
    before, on = journal.get("mesh", asdict(MeshShape())), journal.get("device", "cpu")
    if saved is not None and before == mesh and on == device:
        check_numerics(saved, now)
        return
    if saved is not None and on != device:
        callback.message(f"Resuming on {device} at step {step}. Results will not be bit-identical to the {on} run.")
    if saved is not None:
        detail: dict[str, Any] = {"step": step, "before": before, "now": mesh, **({"device": device} if on != device else {})}
        journal.record_event("mesh", detail)
    journal.set("numerics", now)
    journal.set("mesh", mesh)
    journal.set("device", device)
