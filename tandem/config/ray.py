"""Section ``ray``: what a run asks Ray for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.config.limits import MOST_GIB, check_at_least_one
from tandem.types.errors import UserError

_BUILT_IN = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory_gib"}
_MOST_NODES = 10_000


@dataclass(frozen=True, slots=True)
class RayConfig:
    """What `--on ray` asks Ray for, under Ray's names; no other launcher reads it. See `cluster/ray.md`."""

    address: str = ""
    """Address of a Ray cluster that exists, as `10.0.0.1:6379`; this machine must be one of its nodes. Empty: a cluster on this machine is started for the run
    and ends with it."""
    nodes: int = 1
    """Placement groups, each on one node (strict pack). The first has the controller, the trainer and an engine; every further one is a pod that joins the
    run."""
    max_nodes: int = 0
    """The most that `tandem scale` may set `nodes` to. 0: `nodes`."""
    num_cpus: float = 0.0
    """Cores of each placement group. 0: whole nodes, as many as the smallest node has that is large enough for the rest."""
    num_gpus: int = 0
    """GPUs of each placement group."""
    memory_gib: float = 0.0
    """Memory of each placement group, in GiB. 0: not asked for."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other resources of each placement group, such as `{spot: 1}` on nodes started with `--resources='{"spot": 1}'`."""

    @property
    def most_nodes(self) -> int:
        """Returns how many placement groups the run may have at once."""
        return max(self.nodes, self.max_nodes)

    def check(self) -> None:
        """Raises ``UserError`` for an invalid amount, and for resources that have a key of their own."""
        check_at_least_one("ray", self, "nodes")
        if self.max_nodes and self.max_nodes < self.nodes:
            raise UserError(f"'ray.max_nodes' is {self.max_nodes} and ray.nodes {self.nodes}; raise max_nodes or leave it out")
        if self.most_nodes > _MOST_NODES:
            name = "nodes" if self.nodes > _MOST_NODES else "max_nodes"
            raise UserError(f"'ray.{name}' is {self.most_nodes}; it must be at most {_MOST_NODES}")
        for name in ("num_cpus", "num_gpus", "memory_gib"):
            if not 0 <= getattr(self, name) <= MOST_GIB:
                raise UserError(f"'ray.{name}' is {getattr(self, name)}; it must be 0 (not asked for) or more, at most {MOST_GIB}")
        if any(character.isspace() or not character.isprintable() for character in self.address) or "://" in self.address:
            raise UserError(f"'ray.address' is {self.address!r}; give HOST:PORT of the cluster's head node, on one of its nodes")
        if self.address and not self._has_port():
            raise UserError(f"'ray.address' is '{self.address}', which has no port; give HOST:PORT of the cluster's head node, whose port is 6379 by default")
        for name, amount in self.resources.items():
            if name in _BUILT_IN:
                raise UserError(f"'ray.resources' has '{name}'; set ray.{_BUILT_IN[name]} instead")
            if not (math.isfinite(amount) and 0 < amount <= MOST_GIB):
                raise UserError(f"'ray.resources.{name}' is {amount}; it must be above 0, at most {MOST_GIB}")

    def _has_port(self) -> bool:
        host, _, port = self.address.rpartition(":")
        return bool(host) and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535
