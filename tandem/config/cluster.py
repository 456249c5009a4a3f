"""Section ``cluster``: what is measured of the nodes of a run before it, and what becomes of one that fails."""

from dataclasses import dataclass

from tandem.config.limits import MOST_GIB, MOST_SECONDS, check_at_least_one, check_seconds
from tandem.types.errors import UserError

MOST_SPARES = 2**20


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The preflight of the nodes of a run, spares, and when a node is cordoned. Read where pods are started on several nodes. See `health.md`."""

    spares: int = 0
    """Nodes, of those that the launcher has, that are held back: each has a pod that waits, and takes the place of one that fails or leaves. With spares a node
    that fails is cordoned: no pod on it takes part any more."""
    max_failures: int = 1
    """With `spares`: a node is cordoned when its pod was lost so many times. A process that dies and is replaced by its pod does not count."""
    preflight: bool = True
    """Every node is measured before the run begins on several."""
    preflight_timeout_s: float = 300.0
    """Seconds that all measurements may take together. A node that has not answered by then has failed them."""
    min_speed: float = 0.7
    """A node is cordoned whose matrix products, memory, disk or link have less than this share of the median of all nodes. Not for fewer than 3."""
    max_clock_offset_s: float = 1.0
    """The most seconds by which the clock of a node may differ from that of the first one."""
    min_disk_gib: float = 1.0
    """Free space in GiB that a node needs in its folder for temporary files."""
    min_shm_gib: float = 0.0625
    """Free space in GiB that a node needs in /dev/shm, through which a pod moves weights."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if not 0 <= self.spares <= MOST_SPARES:
            raise UserError(f"'cluster.spares' is {self.spares}; give a number of nodes from 0 to {MOST_SPARES}")
        check_at_least_one("cluster", self, "max_failures")
        check_seconds("cluster", self, "preflight_timeout_s")
        if not 0 <= self.min_speed <= 1:
            raise UserError(f"'cluster.min_speed' is {self.min_speed:g}; it is a share of the median, from 0 to 1")
        if not 0 < self.max_clock_offset_s <= MOST_SECONDS:
            raise UserError(f"'cluster.max_clock_offset_s' is {self.max_clock_offset_s:g}; it must be above 0 seconds, at most {MOST_SECONDS}")
        for name in ("min_disk_gib", "min_shm_gib"):
            if not 0 <= getattr(self, name) <= MOST_GIB:
                raise UserError(f"'cluster.{name}' is {getattr(self, name):g}; it must be from 0 to {MOST_GIB}")
