"""Pods that join a run as ``tandem pod`` does, many in one process and without engines: ``python simulated_pods.py STORE FIRST COUNT LEASE_S SEED``.

Each holds a real lease and a real key in the run's etcd, listens at a port of its own and answers the controller's calls in the real frames, with a heartbeat
every second. A group takes it a random number of seconds. A line on standard input kills one: ``NAME process`` closes its connections and its port, as the
kernel does for a dead process; ``NAME machine`` leaves them open and silent. Either way its lease is renewed no more, and the next life joins when that is
over. Standard output has a JSON line for each event. Imports no torch.
"""

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tandem import __version__
from tandem.runtime.coordination.membership import Member, join
from tandem.runtime.coordination.open import open_store
from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Store
from tandem.types import FinishReason, Prompt, RunError, Sample, WeightVersion
from tandem.types.wire import Frame, decode, encode
from tandem.types.wire_records import decode_prompts, encode_samples

HEARTBEAT_S = 1.0
_GROUP_S = (2.0, 8.0)
_EMPTY: tuple[dict[str, Any], dict[str, bytes]] = ({}, {})


def tell(**event: Any) -> None:
    sys.stdout.write(json.dumps({**event, "at": time.time()}) + "\n")
    sys.stdout.flush()


def sample(prompt: Prompt, index: int, version: tuple[int, int]) -> Sample:
    return Sample(
        f"0/{prompt.id}/{index}", prompt.id, index, prompt.token_ids, (5,), (-1.0,), (-1.0,), (WeightVersion(*version),), FinishReason.STOP, "x"
    )


class Pod:
    """One life after the other of the pod ``name``."""

    def __init__(self, name: str, store: Store, lease_s: float, seed: int) -> None:
        self.name, self._store, self._lease_s, self._random = name, store, lease_s, random.Random(seed)
        self._session: Session | None = None
        self._server: asyncio.Server | None = None
        self._writers = set[asyncio.StreamWriter]()
        self._member: Member | None = None
        self._is_silent = False
        self._held: list[Prompt] = []
        self._version = (0, 0)

    async def live(self) -> None:
        """Begins the next life."""
        self._is_silent, self._held = False, []
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=8)
        port = self._server.sockets[0].getsockname()[1]
        self._member = await asyncio.to_thread(self._join, port)
        tell(event="joined", name=self.name, revision=self._member.revision)

    def _join(self, port: int) -> Member:
        facts = {"host": "127.0.0.1", "port": port, "pid": os.getpid(), "machine": self.name, "agent": self.name, "version": __version__, "tls": False}
        ends = time.monotonic() + 120
        while True:
            self._session = Session(self._store, self._lease_s)
            try:
                return join(self._session, self.name, facts)
            except RunError:
                # The key of the life before is there until its lease ends.
                self._session.close()
                if time.monotonic() > ends:
                    raise
                time.sleep(1.0)

    async def die(self, kind: str) -> None:
        """Ends this life without a word to etcd, and begins the next one when its lease is over."""
        if self._member is None or self._session is None or self._server is None:
            return
        tell(event="killed", name=self.name, revision=self._member.revision, kind=kind)
        session, server, self._member = self._session, self._server, None
        session._ended.set()  # Renewed no more, and not revoked.
        self._is_silent = True
        if kind == "process":
            server.close()
            for writer in [*self._writers]:
                writer.transport.abort()
        await asyncio.sleep(self._lease_s + 3)
        server.close()
        for writer in [*self._writers]:
            writer.transport.abort()
        await self.live()

    # -- calls -------------------------------------------------------------------------------------------------------------

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            call = decode(await reader.readexactly(length))
            if not self._is_silent:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
            work = asyncio.ensure_future(self._do(call))
            while not (await asyncio.wait([work], timeout=HEARTBEAT_S))[0]:
                self._send(writer, encode({}, kind="heartbeat"))
            meta, blobs = work.result()
            self._send(writer, encode(meta, blobs, "result"))
            if self._is_silent:
                await asyncio.sleep(3600)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _send(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        if not self._is_silent:
            writer.write(b"%x\r\n%b\r\n" % (len(frame), frame))

    async def _do(self, call: Frame) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        if call.method == "setup":
            return {"reaches_folder": False}, {}
        if call.method == "start_engine":
            return {"kv_cache_bytes": 1, "base_bytes": 0}, {}
        if call.method == "receive_weights":
            return {"early_bytes": 0}, {}
        if call.method == "update_weight":
            first, second = call.meta["version"]
            self._version, self._held = (first, second), []
            return {"version": [first, second], "rereads": [], "kv_cache_bytes": 1, "base_bytes": 0, "seconds": 0.0, "revision": 0}, {}
        if call.method == "memory":
            return {"rss_bytes": 0, "shm_bytes": 0}, {}
        if call.method == "release":
            return {"left": False}, {}
        return await self._roll_out(call) if call.method == "rollout" else _EMPTY

    async def _roll_out(self, call: Frame) -> tuple[dict[str, Any], dict[str, bytes]]:
        self._held = held = ([] if not call.meta["adds"] else self._held) + decode_prompts(call.blobs["prompts"])
        await asyncio.sleep(self._random.uniform(*_GROUP_S))
        if self._held is not held:
            return {}, {}  # Of the life before, whose answer nobody reads.
        prompt = held.pop(0)
        drawn = [sample(prompt, index, self._version) for index in range(int(call.meta["settings"]["n"]))]
        return {"finished": [prompt.id], "drafts": [0, 0, 0]}, {"samples": encode_samples(drawn)}


async def serve(address: str, first: int, count: int, lease_s: float, seed: int) -> None:
    store, loop = open_store(address), asyncio.get_running_loop()
    pods = {f"sim-{number}": Pod(f"sim-{number}", store, lease_s, seed + number) for number in range(first, first + count)}
    deaths = set[asyncio.Task[None]]()

    def kill(name: str, kind: str) -> None:
        task = loop.create_task(pods[name].die(kind))
        deaths.add(task)
        task.add_done_callback(deaths.discard)

    def listen() -> None:
        for line in sys.stdin:
            name, kind = line.split()
            loop.call_soon_threadsafe(kill, name, kind)
        os._exit(0)  # The parent is gone, or has enough.

    for pod in pods.values():
        await pod.live()
    tell(event="all")
    threading.Thread(target=listen, daemon=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
