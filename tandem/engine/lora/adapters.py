"""The adapters that an engine holds: slots, names, and what may replace what."""

import itertools
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.executor.ranks import Ranks
from tandem.engine.lora.request import LoRARequest
from tandem.model.decoder import Decoder
from tandem.model.lora import CONFIG, WEIGHTS, Adapter, LoraBatch, LoraLayer, load_adapter, lora_batch, stack
from tandem.types import UserError

Signature = list[tuple[int, int] | None]


class Adapters:
    """Up to ``max_loras`` adapters of up to ``max_rank`` for ``decoder``, and for the other ``ranks`` of its model."""

    def __init__(self, decoder: Decoder, max_loras: int, max_rank: int, ranks: Ranks | None = None) -> None:
        self.max_loras, self.max_rank = max_loras, max_rank
        self._decoder, self._ranks = decoder, ranks
        self._slots: list[tuple[LoRARequest, Adapter] | None] = [None] * max_loras
        self._used = [0] * max_loras
        self._signatures: dict[str, Signature] = {}
        self._clock = itertools.count(1)
        self._layers: list[LoraLayer] = []
        self._stack()

    def digests(self) -> dict[str, str]:
        """The digest of each adapter's content by name."""
        return {held[0].lora_name: held[1].digest for held in self._slots if held is not None}

    def key(self, name: str) -> str:
        """What the prefix cache knows the adapter by: its name and its content, so that a block of an older content
        cannot match. Empty for no adapter."""
        return f"{name}\0{self.digests()[name]}" if name else ""

    def slot(self, name: str) -> int:
        """The slot of the adapter ``name``. Raises ``UserError`` where there is none."""
        for slot, held in enumerate(self._slots):
            if held is not None and held[0].lora_name == name:
                self._used[slot] = next(self._clock)
                return slot
        raise UserError(f"adapter '{name}' is not loaded; load it first (loaded: {', '.join(self.digests()) or 'none'})")

    def holds(self, request: LoRARequest) -> bool:
        """Whether this very adapter is loaded. Raises ``UserError`` for an id that another name has, and the other way
        round."""
        for held in self._slots:
            if held is not None and (held[0].lora_name == request.lora_name) != (held[0].lora_int_id == request.lora_int_id):
                other = held[0]
                raise UserError(
                    f"LoRARequest '{request.lora_name}' has the id {request.lora_int_id}, and '{other.lora_name}' with the id "
                    f"{other.lora_int_id} is loaded; give each adapter one name and one id"
                )
        return any(held is not None and held[0] == request for held in self._slots)

    def is_current(self, request: LoRARequest) -> bool:
        """Whether it is loaded and its folder has not changed since, by the time and size of its files."""
        return self.holds(request) and self._signatures.get(request.lora_name) == _signature(request.lora_path)

    def read(self, request: LoRARequest) -> Adapter:
        """The adapter in the request's folder. Raises ``UserError`` where it cannot be used."""
        if not self.max_loras:
            raise UserError(f"adapter '{request.lora_name}' is asked for and this engine takes none; start it with enable_lora=True")
        signature = _signature(request.lora_path)
        adapter = load_adapter(request.lora_path, self._decoder.shapes, self.max_rank)
        # Taken before the files were read: what is written meanwhile counts as a change.
        self._signatures[request.lora_name] = signature
        return adapter

    def put(self, request: LoRARequest, adapter: Adapter, in_use: set[str]) -> None:
        """Take ``adapter`` into the slot of its name, a free one, or that of the adapter used least recently that is not
        ``in_use``. Raises ``UserError`` where all are, and changes nothing then."""
        self.holds(request)
        names = [None if held is None else held[0].lora_name for held in self._slots]
        if request.lora_name in names:
            slot = names.index(request.lora_name)
        else:
            free = [s for s, name in enumerate(names) if name is None or name not in in_use]
            if not free:
                raise UserError(
                    f"adapter '{request.lora_name}' has no place: {self.max_loras} adapters are in use; raise max_loras or wait"
                )
            slot = min(free, key=lambda s: (names[s] is not None, self._used[s]))
        self._fill(slot, (request, adapter))
        self._used[slot] = next(self._clock)

    def remove(self, name: str) -> None:
        """Free the slot of ``name``."""
        self._fill(self.slot(name), None)

    def batch(self, slots: list[int]) -> LoraBatch | None:
        """For a flat batch whose tokens have these ``slots`` (-1: no adapter)."""
        found = lora_batch(self._layers, torch.tensor(slots), self.max_loras)
        if found is None or self._like.device.type == "cpu":
            return found
        return found._replace(rows=found.rows.to(self._like.device), bounds=found.bounds.to(self._like.device))

    @property
    def _like(self) -> Tensor:
        return self._decoder.embed_tokens.detach()

    def _fill(self, slot: int, held: tuple[LoRARequest, Adapter] | None) -> None:
        self._slots[slot] = held
        if self._ranks is None:
            self._stack()
        else:
            self._ranks.fill_slot(slot, None if held is None else held[1], self.max_loras, self.max_rank, self._stack)

    def _stack(self) -> None:
        adapters, decoder = [None if held is None else held[1] for held in self._slots], self._decoder
        self._layers = stack(adapters, decoder.shapes, decoder.kernels, self.max_rank, self._like, decoder.shard_spec)


def _signature(folder: str) -> Signature:
    found: Signature = []
    for name in (CONFIG, WEIGHTS):
        try:
            status = (Path(folder) / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return found
