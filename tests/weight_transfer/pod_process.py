"""A pod as a process of its own: ``python pod_process.py ROLE FOLDER PROTOCOLS PORT``, driven by a line on its standard input for each answer.

``serve``: publishes weights and serves them; a line ``INCARNATION STEP ROWS`` is a version. ``receive``: a line ``INCARNATION STEP ROWS`` brings that version
and compares it with the tensors that the other side made, ``early INCARNATION STEP ROWS`` begins to read it before it is published; ``PORT`` other than 0 is
where plain TCP is reached in the place of the published one.
"""

import json
import sys
import uuid
from pathlib import Path

import torch
from torch import Tensor
from whole_tensors import converted

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import CallError
from tandem.types import UserError, WeightVersion
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer, check_protocols
from tandem.weight_transfer.transport.mirror import WeightMirror
from tandem.weight_transfer.transport.mooncake import MooncakeSource
from tandem.weight_transfer.transport.pieces import Source
from tandem.weight_transfer.transport.service import WeightService
from tandem.weight_transfer.transport.tcp_source import TcpSource
from tandem.weight_transfer.update import WeightReader

CREDENTIAL = "a credential of the tests"


def tensors(step: int, rows: int) -> list[tuple[str, Tensor]]:
    """Returns the weights of ``step``: 12 matrices with a norm after each."""
    generator = torch.Generator().manual_seed(step)
    shapes = [(f"layer{i}.{name}", shape) for i in range(12) for name, shape in (("matrix", (rows, 64)), ("norm", (64,)))]
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def serve(folder: Path, protocols: tuple[str, ...]) -> None:
    store, pod = EmbeddedStore(folder / "shared.sqlite"), "test" + uuid.uuid4().hex[:8]
    buffers: WeightBuffers | None = None
    for line in sys.stdin:
        incarnation, step, rows = map(int, line.split())
        if buffers is None:
            buffers = WeightBuffers.create(pod, 12 * 2 * (rows * 64 * 4 + 64 * 4))
            writer = WeightWriter(buffers, store, 1)
            service = WeightService(pod, buffers.segments, store, CREDENTIAL, check_protocols(protocols))
        writer.publish(converted(tensors(step, rows)), WeightVersion(incarnation, step))
        say(ports={offer.protocol: offer.port for offer in service.endpoint.offers})


def receive(folder: Path, protocols: tuple[str, ...], port: int) -> None:
    def open_source(endpoint: Endpoint, offer: Offer) -> Source:
        if offer.protocol != "tcp":
            return MooncakeSource(endpoint, offer)
        return TcpSource(f"pod {endpoint.pod}", offer.host, port or offer.port, CREDENTIAL, silent_s=5.0)

    own, pod = EmbeddedStore(folder / "own.sqlite"), "test" + uuid.uuid4().hex[:8]
    mirror = WeightMirror(EmbeddedStore(folder / "shared.sqlite"), own, lambda size: WeightBuffers.create(pod, size), open_source, patience_s=2.0)
    reader = WeightReader(own)
    say(ready=True)
    for line in sys.stdin:
        *how, incarnation, step, rows = (int(word) if word.isdigit() else word for word in line.split())
        version = WeightVersion(int(incarnation), int(step))
        if how:
            mirror.begin_early(version, check_protocols(protocols), Deadline(60.0))
            say(begun=True)
            continue
        try:
            got = mirror.bring(version, check_protocols(protocols), Deadline(60.0))
        except (UserError, CallError, TimeoutError) as error:
            say(error=type(error).__name__, text=str(error))
            continue
        pairs = zip(reader.read(version).tensors, tensors(int(step), int(rows)), strict=True)
        is_equal = all(name == same and torch.equal(mine, theirs) for (name, mine), (same, theirs) in pairs)
        say(protocol=got.protocol, rereads=got.fetched.rereads, breaks=got.fetched.breaks, equal=is_equal)


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, where, names, at = sys.argv[1:]
    if role == "serve":
        serve(Path(where), tuple(names.split(",")))
    else:
        receive(Path(where), tuple(names.split(",")), int(at))
