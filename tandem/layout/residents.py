"""What a pod holds in memory (its *residents*), and in which phase each is where: plans, as data. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

PlanName = Literal["keep", "sleep", "offload", "figure", "terminate"]


class Phase(StrEnum):
    """The phases of a step, in their order. A checkpoint and an export belong to ``TRAIN``."""

    ROLLOUT = "rollout"
    INFERENCE = "inference"
    TRAIN = "train"


class State(StrEnum):
    """Where a resident is. On a CPU the device is the host's memory, so that nothing is ``MEMORY``."""

    ABSENT = "absent"
    DEVICE = "on device"
    MEMORY = "in memory"
    DISK = "on disk"


class Move(StrEnum):
    """``OFFLOAD`` saves the content and frees the device's memory, ``RELOAD`` brings it back; ``DESTROY`` frees what is saved already or is made again,
    ``INSTANTIATE`` makes it."""

    INSTANTIATE = "instantiate"
    OFFLOAD = "offload"
    RELOAD = "reload"
    DESTROY = "destroy"


@dataclass(frozen=True, slots=True)
class Resident:
    """``sidecar`` holds it, ``phases`` need it on the device. Its ``content`` is ``state`` (changes from step to step and must be saved), ``frozen``
    (equal to a folder's, so that one saved copy lasts for ever) or ``made`` (made again for each of its phases: never saved)."""

    name: str
    sidecar: Literal["trainer", "rollout"]
    phases: frozenset[Phase]
    content: Literal["state", "frozen", "made"]


def _resident(name: str, sidecar: Literal["trainer", "rollout"], content: Literal["state", "frozen", "made"], *phases: Phase) -> Resident:
    return Resident(name, sidecar, frozenset(phases), content)


RESIDENTS: Mapping[str, Resident] = {
    resident.name: resident
    for resident in (
        _resident("engine_weights", "rollout", "made", Phase.ROLLOUT),
        _resident("kv_cache", "rollout", "made", Phase.ROLLOUT),
        _resident("actor", "trainer", "state", Phase.TRAIN),
        _resident("optimizer", "trainer", "state", Phase.TRAIN),
        _resident("gradients", "trainer", "made", Phase.TRAIN),
        _resident("critic", "trainer", "state", Phase.INFERENCE, Phase.TRAIN),
        _resident("critic_optimizer", "trainer", "state", Phase.TRAIN),
        _resident("reference", "trainer", "frozen", Phase.INFERENCE),
        _resident("updated_reference", "trainer", "state", Phase.INFERENCE, Phase.TRAIN),
        _resident("reward_model", "trainer", "frozen", Phase.INFERENCE),
    )
}
"""Every resident that a pod can have, in the order in which they are moved. A new one is a line here and its tensors in ``pod.actor``.
``updated_reference``: in place of ``reference`` where it follows the actor, which moves it, and is saved with it, in ``TRAIN``."""


class Plan(NamedTuple):
    """``engine``: what becomes of the engine after a rollout: its process ``stays`` as it is, ``sleeps`` (without weights and KV cache) or ``ends``.
    ``offloads``: each resident of the trainer is on the device in its phases only. ``rebuilds``: frozen ones are destroyed and instantiated from
    their folder instead of saved."""

    engine: Literal["stays", "sleeps", "ends"]
    offloads: bool = False
    rebuilds: bool = False


PLANS: Mapping[PlanName, Plan] = {
    "keep": Plan("stays"),
    "sleep": Plan("sleeps"),
    "offload": Plan("sleeps", offloads=True),
    "figure": Plan("ends", offloads=True),
    "terminate": Plan("ends", offloads=True, rebuilds=True),
}
"""From the loosest, which moves nothing, to the strictest. ``figure``: the order of the design's second figure. ``terminate``: as in Kimi k1.5
(2025): the engine's process ends and starts again with dummy weights, and nothing that can be made again is saved."""


@dataclass(frozen=True, slots=True)
class Residency:
    """A plan with the place that offloaded residents go to."""

    plan: PlanName = "keep"
    to: Literal["memory", "disk"] = "disk"

    @property
    def rule(self) -> Plan:
        return PLANS[self.plan]

    def state(self, resident: Resident, phase: Phase) -> State:
        """Returns where ``resident`` is in ``phase``."""
        rule = self.rule
        if phase in resident.phases:
            return State.DEVICE
        if resident.sidecar == "rollout":
            return State.DEVICE if rule.engine == "stays" else State.ABSENT
        if resident.content == "made":
            return State.ABSENT
        if not rule.offloads:
            return State.DEVICE
        if resident.content == "frozen" and rule.rebuilds:
            return State.ABSENT
        return State.DISK if self.to == "disk" else State.MEMORY

    def on_device(self, phase: Phase, names: Collection[str] = tuple(RESIDENTS)) -> frozenset[str]:
        """Returns those of the residents ``names`` that are on the device in ``phase``."""
        return frozenset(name for name in names if self.state(RESIDENTS[name], phase) is State.DEVICE)

    def in_memory(self, phase: Phase, names: Collection[str] = tuple(RESIDENTS)) -> frozenset[str]:
        """Returns those of ``names`` that wait in the host's memory in ``phase``."""
        return frozenset(name for name in names if self.state(RESIDENTS[name], phase) is State.MEMORY)

    def saved(self, names: Collection[str] = tuple(RESIDENTS)) -> frozenset[str]:
        """Returns those of ``names`` that are ever saved: in memory or on the disk in some phase."""
        away = (State.MEMORY, State.DISK)
        return frozenset(name for name in names if any(self.state(RESIDENTS[name], phase) in away for phase in Phase))


KEEP = Residency()
