"""Single bits that flip in the weights on their way from the trainer to the engines of two pods, and what finds and repairs each.
``benchmarks/weight_flips.py`` writes their table."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from damaged_memory import children, flip_pattern
from pod_runs import recipe_with
from pods_of_a_run import TwoPods
from tcp_proxy import TcpProxy

from tandem.layout.residents import KEEP
from tandem.model.create_model import create_model
from tandem.pod.failures import SidecarDied
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.types import DamagedWeights, WeightVersion
from tandem.types.weights import TensorEntry, WeightManifest
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.transport.endpoints import PREFIX

_HANDSHAKE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class WeightFlip:
    """A flip in ``tensor``, which was ``found`` by the message that names it, or by ``None``. ``wrong``: what was wrong after the repair (empty: nothing)."""

    place: str
    tensor: str
    found: str | None
    wrong: str = ""


class Flipping:
    """Two pods, whose trainer has three sets of weights in turn, because an update reads only what no memory here has. ``digests``: what every engine must
    hold, by set."""

    def __init__(self, folder: Path) -> None:
        recipe = recipe_with(folder, rollout={"prompts_per_step": 4, "max_tokens": 12, "verify_weights_every_steps": 1})
        self.pods = TwoPods(folder, source=recipe)
        self.pods.start()
        self.lives, self.digests = 0, list[list[list[dict[str, str]]]]()
        create = self.pods.recipe.model.create
        assert create is not None
        for seed in (1, 2):
            create_model(create, seed, folder / f"other-{seed}")
        self.sets = (self.pods.model, folder / "other-1", folder / "other-2")
        self.shared, self.own = (EmbeddedStore(Path(path)) for path in (self.pods.store, self.pods.own_store))
        self.register()
        self.pods.trainer.serve_weights(self.pods.store)
        for number in range(3):
            if number:
                self.register()
            self.repair()
            self.digests.append(self.pods.engines[0].weight_digests())
        assert self.digests[0] != self.digests[1]

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.lives, 0)

    def register(self) -> None:
        """Publishes the next version: the same step of another life of the trainer."""
        self.lives += 1
        self.pods.trainer.load(self.sets[(self.lives - 1) % 3], None, KEEP, ())
        self.pods.register(self.version)

    def receive(self) -> dict[str, Any]:
        """The second pod receives the newest version. Returns what it tells of it."""
        return self.pods.engines[1].receive_weights(self.pods.store, self.pods.own_store, self.version)

    def repair(self) -> str:
        """Brings the newest version to both engines, as a run does after it has registered damaged weights again. Returns what is wrong then."""
        self.receive()
        for engine in self.pods.engines:
            engine.update_weight(self.version)
        return "" if len(self.digests) < 3 or self.are_right() else "an engine holds other weights"

    def are_right(self) -> bool:
        return all(engine.weight_digests() == self.digests[(self.lives - 1) % 3] for engine in self.pods.engines)

    def close(self) -> None:
        self.pods.close()
        self.shared.close()
        self.own.close()

    # -- the flips ---------------------------------------------------------------------------------------------------------

    def in_trainers_memory(self, rng: random.Random) -> WeightFlip:
        """In the shared memory of the trainer's pod, before its engine has read it."""
        self.register()
        name = _flip_in_segment(self._manifest(self.shared), rng)
        return self._found("shared memory of the trainer's pod", name, lambda: self.pods.engines[0].update_weight(self.version))

    def in_memory_that_is_served(self, rng: random.Random) -> WeightFlip:
        """In the shared memory of the trainer's pod, before another pod receives it."""
        self.register()
        name = _flip_in_segment(self._manifest(self.shared), rng)
        return self._found("shared memory that another pod receives", name, self.receive)

    def in_receivers_memory(self, rng: random.Random) -> WeightFlip:
        """In the shared memory of the other pod, between its receipt and the update."""
        self.register()
        self.receive()
        name = _flip_in_segment(self._manifest(self.own), rng)
        return self._found("shared memory of the other pod", name, lambda: self.pods.engines[1].update_weight(self.version))

    def on_the_wire(self, rng: random.Random) -> WeightFlip:
        """In the bytes between the pods."""
        total = sum(entry.size_bytes for entry in self._manifest(self.shared).tensors)
        while True:
            self.register()
            with self._through_proxy(rng.randrange(total), rng.randrange(8)) as done:
                told = self.receive()
            if done:
                break
        rereads, found = told["rereads"], None
        if rereads:
            found = f"tensor {rereads[0]} arrived without its digest; it was read again"
        elif told["breaks"]:
            found = "the frame was broken; it was read again over a new connection"
        return WeightFlip("the wire", rereads[0] if rereads else "the head of a frame", found, self.repair())

    def inside_an_engine(self, rng: random.Random) -> WeightFlip:
        """In the memory of an engine's process, after the update."""
        self.register()
        self.repair()
        engine, shim = rng.choice(list(zip(self.pods.engines, self.pods.pids("rollout"), strict=True)))
        manifest, flipped = self._manifest(self.shared), 0
        entry = manifest.tensors[0]
        while not flipped:
            entry = rng.choice(manifest.tensors)
            pattern = _as_held(entry, rng)
            for worker in children(str(shim)):
                flipped += flip_pattern(worker, pattern, rng.randrange(len(pattern)), rng.randrange(8))
        name = entry.name
        try:
            engine.verify_engines(0)
            found = None
        except SidecarDied as death:
            found = death.reason
        engine.channel.stop_worker()
        engine.channel.start()
        engine.start_engine(self.pods.model, self.pods.kernels)
        return WeightFlip("inside an engine", name, found, self.repair())

    def _found(self, place: str, name: str, read: Callable[[], object]) -> WeightFlip:
        """Returns who finds the flip in ``name``, and what the repair leaves."""
        try:
            read()
            found = None
        except DamagedWeights as damage:
            found = str(damage)
        self.pods.register(self.version)
        return WeightFlip(place, name, found, self.repair())

    def _manifest(self, store: EmbeddedStore) -> WeightManifest:
        published = current(store)
        assert published is not None
        return published[0]

    @contextmanager
    def _through_proxy(self, at: int, bit: int) -> Iterator[list[bool]]:
        """Lets the trainer's weights go through a proxy that flips ``bit`` of the ``at``-th byte behind the handshakes, once, and then notes it."""
        (entry,) = self.shared.list(PREFIX)
        port, seen, done = int(entry.value.split(b'"port":')[1].split(b",")[0].rstrip(b"}")), [0], list[bool]()

        def alter(sent: int, block: bytearray) -> bool:
            begin = max(0, _HANDSHAKE_BYTES - sent)
            if not done and seen[0] <= at < seen[0] + len(block) - begin:
                block[at - seen[0] + begin] ^= 1 << bit
                done.append(True)
            seen[0] += max(0, len(block) - begin)
            return True

        proxy = TcpProxy(port, lambda: alter)
        self.shared.put(entry.key, entry.value.replace(f'"port":{port}'.encode(), f'"port":{proxy.port}'.encode()))
        try:
            yield done
        finally:
            self.shared.put(entry.key, entry.value)
            proxy.close()


def _as_held(entry: TensorEntry, rng: random.Random) -> bytes:
    """Returns some bytes of a tensor in fp32 as an engine has them: of a matrix that it multiplies with, parts of 8 rows in one column, which its packed
    layout has one after the other. The matrix as it was read has no such bytes."""
    with Segment.open(entry.segment) as segment:
        whole = bytes(segment.memory[entry.offset_bytes : entry.offset_bytes + entry.size_bytes])
    if len(entry.shape) == 1 or "embed" in entry.name:
        at = rng.randrange(0, len(whole) - 63, 4)
        return whole[at : at + 64]
    rows, columns = entry.shape
    row, column = rng.randrange(0, rows, 8), rng.randrange(columns)
    return b"".join(whole[4 * ((row + place) * columns + column) :][:4] for place in range(8))


def _flip_in_segment(manifest: WeightManifest, rng: random.Random) -> str:
    """Flips a random bit of a random tensor, and returns its name."""
    entry = rng.choice([entry for entry in manifest.tensors if "norm" not in entry.name])  # Norms are the same in all sets.
    with Segment.open(entry.segment, writable=True) as segment:
        segment.memory[entry.offset_bytes + rng.randrange(entry.size_bytes)] ^= 1 << rng.randrange(8)
    return entry.name


PLACES: dict[str, Callable[[Flipping, random.Random], WeightFlip]] = {
    "trainer": Flipping.in_trainers_memory,
    "served": Flipping.in_memory_that_is_served,
    "receiver": Flipping.in_receivers_memory,
    "wire": Flipping.on_the_wire,
    "engine": Flipping.inside_an_engine,
}


def faults_of(flip: WeightFlip) -> list[str]:
    """Returns what is wrong with how ``flip`` ended: nobody found it, its tensor was not named, or an engine holds other weights after the repair."""
    if flip.found is None:
        return ["not found"]
    is_named = flip.tensor in flip.found or flip.place == "the wire" or (flip.place == "inside an engine" and "tensor '" in flip.found)
    return [*([] if is_named else [f"not named: {flip.found}"]), *([flip.wrong] if flip.wrong else [])]
