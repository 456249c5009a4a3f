"""The rollout sidecar's worker on vLLM: a light process that owns the server of vLLM and answers the pod's calls by HTTP calls of it."""

import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

from tandem.backends.vllm.arguments import environment, kv_cache_bytes, serve_arguments
from tandem.backends.vllm.engine import VllmEngine
from tandem.backends.vllm.server import VllmServer
from tandem.config.load import build, read_yaml
from tandem.config.recipe import Recipe
from tandem.estimate.pod_gpu import COMPUTE_DTYPE
from tandem.model.huggingface.model_config import read_shapes
from tandem.pod.calls import ROLLOUT_CALLS
from tandem.pod.prompts import context_tokens
from tandem.pod.residents.plan import kv_cache_tokens
from tandem.pod.rollout_groups import RolloutGroups
from tandem.runtime.coordination.open import store_address
from tandem.runtime.machine.gpus import pod_device
from tandem.runtime.process.faults import FaultPoint
from tandem.runtime.process.rank_settings import RankSettings
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.text.tokenizer import Tokenizer
from tandem.trainer.rank_process import start
from tandem.types import RunError, WeightVersion

logger = logging.getLogger(__name__)
CALLS = ROLLOUT_CALLS


class VllmWorker:
    """The state of the worker between calls. ``folder``: for the server's socket and temporary files; ``log``: its output. ``threads``: that vLLM computes
    with."""

    def __init__(self, recipe: Recipe, directory: Path, folder: Path, log: Path, threads: int) -> None:
        self.recipe, self.directory, self.folder, self.log, self.threads = recipe, directory, folder, log, threads
        self.server: VllmServer | None = None
        self.engine: VllmEngine | None = None
        self.groups = RolloutGroups(recipe, directory)
        self.kv_cache_bytes = 0

    def methods(self) -> dict[str, Method]:
        """Every call by its name."""
        return {name: getattr(self, name) for name in CALLS}

    def stage_weight(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Does nothing: vLLM's server has one set of weights, which an update changes in place."""
        return {"stages": False}, {}

    def start_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Starts a server with dummy weights for the model in ``folder``, in place of the one that runs; with ``reads_weights`` it holds those of the folder.
        Raises ``RunError`` if vLLM does not take the model."""
        self._end()
        # The server works in a folder of its own.
        folder, recipe, device = Path(meta["folder"]).resolve(), self.recipe, pod_device(self.recipe.machine)
        shapes, engine = read_shapes(folder), recipe.rollout.engine
        dtype = COMPUTE_DTYPE.get(recipe.trainer.precision, recipe.trainer.dtype)
        length = context_tokens(recipe.model, recipe.rollout.max_tokens, folder)
        tokens = kv_cache_tokens(recipe.rollout, recipe.algorithm, length)
        self.kv_cache_bytes = kv_cache_bytes(shapes, dtype, tokens, engine.max_num_seqs, device)
        replays = recipe.replays_routing(shapes.experts is not None)
        arguments = serve_arguments(
            engine, dtype=dtype, seed=recipe.run.seed, max_model_len=length, cache_bytes=self.kv_cache_bytes, device=device,
            reads_weights=bool(meta.get("reads_weights")), returns_routing=replays, returns_times=recipe.traces is not None,
        )  # fmt: skip
        self.server = VllmServer(
            folder, arguments, self.folder, self.log, store_address(recipe.coordination, self.directory),
            max(1, self.threads // engine.tensor_parallel_size),
            environment(device, engine.tensor_parallel_size), replays, recipe.trainer.lora,
        )  # fmt: skip
        weakref.finalize(self, self.server.close)
        self.server.start()
        self.engine = VllmEngine(
            self.server, Tokenizer.from_folder(folder), max_model_len=length, vocab_size=shapes.vocab_size, most=engine.max_num_seqs
        )
        self.groups.open(folder)
        return {"kv_cache_bytes": self.kv_cache_bytes, "base_bytes": 0}, {}

    def _end(self) -> None:
        self.groups.forget()
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if self.server is not None:
            self.server.close()
            self.server = None

    def sleep_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """vLLM frees nothing on a CPU when it is told to sleep, so no plan of residents lets it sleep."""
        raise RunError("vLLM was told to sleep, which frees nothing; this is a fault of the pod's plan")

    def weight_digests(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The reply has the ``digests`` of what vLLM computes with now: for each worker, here one, and each of its ranks, by name."""
        return {"digests": [self._running().held_digests()]}, {}

    def verify_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Raises ``EngineDied`` if what vLLM computes with is not what it was after the update."""
        self._running().check_held()
        return {}, {}

    def update_weight(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Lets vLLM copy out, verify and apply the published ``version``; nothing is applied unless every rank has verified every tensor."""
        server, version, began = self._running(), WeightVersion(*meta["version"]), perf_counter()
        rereads, revision = tuple[str, ...](), None
        if server.version != version:
            self.groups.drop()
            updated = server.update(version)
            rereads, revision = updated.rereads, updated.revision
            logger.info("weights %s in %.3f s", tuple(version), perf_counter() - began)
        return {
            "version": list(version), "rereads": list(rereads), "base_bytes": 0, "kv_cache_bytes": self.kv_cache_bytes, "seconds": 0.0, "revision": revision,
        }, {}  # fmt: skip

    def confirm_weight(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The shim has verified the weights in shared memory once more; each rank had verified its own copy before it applied them."""
        version = self._running().version
        assert version is not None
        return {"version": list(version)}, {}

    def rollout(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Draws samples of the prompts, as ``RolloutWorker.rollout``."""
        server, weights = self._running(), int(meta["weights"])
        if server.version is None or server.version.step != weights:
            held = "dummy weights" if server.version is None else f"the weights of step {server.version.step}"
            raise RunError(f"vLLM holds {held} and was asked for samples of those of step {weights}")
        assert self.engine is not None
        drawn, samples = self.groups.draw(self.engine, self.engine.max_model_len, meta, blobs, progress)
        return {**drawn, "drafts": [0, 0, 0]}, samples

    def _running(self) -> VllmServer:
        if self.server is None:
            raise RunError("the rollout's worker has no server of vLLM yet; this is a fault of the pod's order of calls")
        return self.server


def make(settings: RankSettings) -> tuple[Mapping[str, Method], FaultPoint]:
    """The calls of the process of ``settings``, which is alone; vLLM starts its own ranks."""
    recipe = build(Recipe, read_yaml(Path(settings.directory) / "config.yaml"))
    rank = start(settings)
    log = rank.directory / "logs" / f"{settings.log.replace('rollout_worker', 'vllm')}.log"
    worker = VllmWorker(recipe, rank.directory, Path(settings.heartbeats).resolve().parent / "vllm", log, settings.threads)
    return worker.methods(), rank.fault_point
