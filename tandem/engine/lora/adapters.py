"""The LoRA adapters that an engine holds, in slots by name."""

import itertools
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.executor.ranks import Ranks
from tandem.engine.lora.request import LoRARequest
from tandem.model.decoder import Decoder
from tandem.model.huggingface.peft_folder import CONFIG, WEIGHTS, load_adapter
from tandem.model.lora import Adapter, AdapterStacks, LoraBatch, lora_batch, stack
from tandem.types import UserError

Signature = list[tuple[int, int] | None]


class Adapters:
    """Holds up to ``max_loras`` adapters of rank ``max_rank`` or less for ``decoder``, and on the other tensor-parallel ``ranks``."""

    def __init__(self, decoder: Decoder, max_loras: int, max_rank: int, ranks: Ranks | None = None) -> None:
        self.max_loras, self.max_rank = max_loras, max_rank
        self._decoder, self._ranks = decoder, ranks
        self._slots: list[tuple[LoRARequest, Adapter] | None] = [None] * max_loras
        self._used = [0] * max_loras
        self._signatures: dict[str, Signature] = {}
        self._clock = itertools.count(1)
        self._stacks = AdapterStacks([], {})
        self._stack()

    def digests(self) -> dict[str, str]:
        """Returns the digest of each adapter's content by name."""
        return {held[0].lora_name: held[1].digest for held in self._slots if held is not None}

    def key(self, name: str) -> str:
        """Returns the adapter's key in the prefix cache: its name and the digest of its content, so that blocks of an older content cannot
        match. Empty for no adapter."""
        return f"{name}\0{self.digests()[name]}" if name else ""

    def slot(self, name: str) -> int:
        """Returns the slot of the adapter ``name``. Raises ``UserError`` if it is not loaded."""
        for slot, held in enumerate(self._slots):
            if held is not None and held[0].lora_name == name:
                self._used[slot] = next(self._clock)
                return slot
        raise UserError(f"adapter '{name}' is not loaded; load it first (loaded: {', '.join(self.digests()) or 'none'})")

    def holds(self, request: LoRARequest) -> bool:
        """Returns whether the adapter of ``request`` is loaded. Raises ``UserError`` if its id belongs to another name, or its name to another
        id."""
        for held in self._slots:
            if held is not None and (held[0].lora_name == request.lora_name) != (held[0].lora_int_id == request.lora_int_id):
                other = held[0]
                raise UserError(
                    f"LoRARequest '{request.lora_name}' has the id {request.lora_int_id}, and '{other.lora_name}' with the id "
                    f"{other.lora_int_id} is loaded; give each adapter one name and one id"
                )
        return any(held is not None and held[0] == request for held in self._slots)

    def is_current(self, request: LoRARequest) -> bool:
        """Returns whether it is loaded and its folder has not changed since, by modification time and size of its files."""
        return self.holds(request) and self._signatures.get(request.lora_name) == _signature(request.lora_path)

    def read(self, request: LoRARequest) -> Adapter:
        """Loads the adapter from the request's folder. Raises ``UserError`` if it cannot be used."""
        if not self.max_loras:
            raise UserError(f"adapter '{request.lora_name}' is requested and this engine takes none; start it with enable_lora=True")
        signature = _signature(request.lora_path)
        adapter = load_adapter(request.lora_path, self._decoder.shapes, self.max_rank)
        # Taken before the files were read, so that a write in between counts as a change.
        self._signatures[request.lora_name] = signature
        return adapter

    def put(self, request: LoRARequest, adapter: Adapter, in_use: set[str]) -> None:
        """Puts ``adapter`` into the slot of its name, else into a free one, else into that of the least recently used adapter that is not
        ``in_use``. Raises ``UserError``, and changes nothing, if all are in use."""
        self.holds(request)
        names = [None if held is None else held[0].lora_name for held in self._slots]
        if request.lora_name in names:
            slot = names.index(request.lora_name)
        else:
            free = [s for s, name in enumerate(names) if name is None or name not in in_use]
            if not free:
                raise UserError(
                    f"adapter '{request.lora_name}' has no free slot: {self.max_loras} adapters are in use; raise max_loras or wait"
                )
            slot = min(free, key=lambda s: (names[s] is not None, self._used[s]))
        self._fill(slot, (request, adapter))
        self._used[slot] = next(self._clock)

    def remove(self, name: str) -> None:
        """Frees the slot of ``name``."""
        self._fill(self.slot(name), None)

    def batch(self, slots: list[int]) -> LoraBatch | None:
        """Returns the LoRA batch of tokens with these ``slots`` (-1: no adapter), ``None`` if none has an adapter."""
        batch, device = lora_batch(self._stacks, torch.tensor(slots), self.max_loras), self._like.device
        if batch is None or device.type == "cpu":
            return batch
        return batch._replace(rows=batch.rows.to(device), bounds=batch.bounds.to(device))

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
        self._stacks = stack(adapters, decoder.shapes, decoder.kernels, self.max_rank, self._like, decoder.shard_spec)


def _signature(folder: str) -> Signature:
    """Returns modification time and size of the adapter's files, ``None`` for a missing file."""
    signature: Signature = []
    for name in (CONFIG, WEIGHTS):
        try:
            status = (Path(folder) / name).stat()
            signature.append((status.st_mtime_ns, status.st_size))
        except OSError:
            signature.append(None)
    return signature
