"""Sends a micro-batch to the data-parallel rank that computes it again."""

import json
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tandem.model.shared_prompts import SharedPrompts
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.machine.tensor_bytes import bytes_view
from tandem.trainer.micro_batch import MicroBatch, on_device


def shifted(micro_batch: MicroBatch, ranks: Communicator, places: int, device: torch.device) -> MicroBatch:
    """Sends ``micro_batch`` to the rank ``places`` after this one and returns that of the rank as many before it. Every rank of ``ranks``, which exchange
    values in host memory, calls it."""
    places %= ranks.size
    if places == 0:
        return micro_batch
    own = encode(micro_batch)
    sizes = ranks.all_gather(torch.tensor([own.numel()]), "the sizes of micro-batches").view(-1).tolist()
    source, name = (ranks.rank - places) % ranks.size, "a micro-batch that is computed twice"
    arriving = ranks.receive(torch.empty(int(sizes[source]), dtype=torch.uint8), source, name)
    sent = ranks.send(own, (ranks.rank + places) % ranks.size, name)
    received = arriving.wait()
    sent.wait()
    return decode(received, device)


def encode(micro_batch: MicroBatch) -> Tensor:
    """Returns ``micro_batch`` as uint8 [bytes]: the length of a header, the header (JSON) and the tensors' elements."""
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
        if isinstance(value, SharedPrompts):
            return {"prompts": [plain(value.rows), plain(value.query_start)]}
        return value

    header = json.dumps({field.name: plain(getattr(micro_batch, field.name)) for field in fields(micro_batch)}).encode()
    content = len(header).to_bytes(8, "little") + header + b"".join(bytes(bytes_view(tensor)) for tensor in tensors)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def decode(content: Tensor, device: torch.device) -> MicroBatch:
    """Returns the micro-batch that ``encode`` made ``content`` of."""
    data = bytes(bytes_view(content))
    length = int.from_bytes(data[:8], "little")
    at = 8 + length

    def value_of(plain: Any) -> Any:
        nonlocal at
        if isinstance(plain, dict) and "tensor" in plain:
            name, shape = plain["tensor"]
            tensor = torch.empty(shape, dtype=getattr(torch, name))
            size = tensor.nbytes
            if size:
                tensor = torch.frombuffer(bytearray(data[at : at + size]), dtype=tensor.dtype).view(shape)
            at += size
            return on_device(tensor, device)
        if isinstance(plain, dict):
            return SharedPrompts(*map(value_of, plain["prompts"]))
        return tuple(plain) if isinstance(plain, list) else plain

    return MicroBatch(**{name: value_of(plain) for name, plain in json.loads(data[8 : 8 + length]).items()})
