"""What the KV blocks of this server's engines are, asked of each engine once for each version of the weights."""

from dataclasses import dataclass
from typing import Any

from tandem.serving.engines.instance import Instance
from tandem.serving.engines.pool import Pool
from tandem.serving.engines.slot import Weights
from tandem.types import UserError, WeightVersion


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """``fields``: of the engine's ``KVLayout``. ``version``: of its weights."""

    fields: dict[str, Any]
    version: WeightVersion
    block_bytes: int

    @property
    def block_tokens(self) -> int:
        return int(self.fields["block_tokens"])

    def check(self, layout: dict[str, Any], version: WeightVersion) -> None:
        """Raises ``UserError`` that names why blocks of another server cannot be used here."""
        for name, ours in self.fields.items():
            if layout.get(name) != ours:
                raise UserError(f"KV blocks of another server cannot be used: {name} is {layout.get(name)} there and {ours} here; start both with the same")
        if version != self.version:
            raise UserError(f"KV blocks of weights {list(version)} cannot be used: this server has weights {list(self.version)}")


class Layouts:
    """The layouts of the engines of ``pool``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[int, tuple[Instance, Weights, EngineLayout]] = {}

    async def of(self, instance: Instance) -> EngineLayout:
        """Returns the layout of an engine. Raises ``UserError`` if its blocks are of no use to others, or it sleeps."""
        weights, known = self._pool.weights, self._known.get(instance.process.pid)
        if known is not None and known[:2] == (instance, weights):
            return known[2]
        told = await instance.call("kv_layout")
        layout = EngineLayout(told["layout"], WeightVersion(*told["version"]), told["block_bytes"])
        if layout.version == weights.version:
            self._known = {pid: each for pid, each in self._known.items() if each[0] in [slot.instance for slot in self._pool.slots]}
            self._known[instance.process.pid] = (instance, weights, layout)
        return layout
