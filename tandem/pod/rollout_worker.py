"""The rollout sidecar's worker: the engine, and the calls that the pod makes of it."""

import logging
from collections.abc import Mapping
from dataclasses import astuple, replace
from itertools import chain
from pathlib import Path
from time import perf_counter

from tandem.config.load import build, read_yaml
from tandem.config.recipe import Recipe
from tandem.engine.kv_cache.kv_cache_manager import DUMMY_VERSION
from tandem.engine.llm import LLM
from tandem.estimate.model_bytes import weight_bytes
from tandem.model.adopted import packed_layout
from tandem.model.drawn import new_adapter
from tandem.model.huggingface.model_folder import load_tensors, read_held
from tandem.model.huggingface.peft_folder import read_adapter
from tandem.pod.calls import ROLLOUT_CALLS
from tandem.pod.prompts import context_tokens
from tandem.pod.release import release
from tandem.pod.residents.plan import kv_cache_tokens
from tandem.pod.rollout_groups import RolloutGroups
from tandem.runtime.coordination.open import store_address
from tandem.runtime.machine.gpus import pod_device
from tandem.runtime.process.faults import FaultPoint
from tandem.runtime.process.rank_settings import RankSettings
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.trainer.rank_process import start
from tandem.types import EngineDied, RunError, WeightSource, WeightVersion
from tandem.weight_transfer.sharing import packed_privately

logger = logging.getLogger(__name__)
CALLS = ROLLOUT_CALLS


class RolloutWorker:
    """The state of the worker between calls: an engine, which keeps what it reads weights with. ``given``: by rank, the digests of what the engine held right
    after the newest update, if they are verified later."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.recipe = recipe
        self.source = WeightSource(store_address(recipe.coordination, directory))
        self.llm: LLM | None = None
        self.groups = RolloutGroups(recipe, directory)
        self.given: list[dict[str, str]] = []

    def methods(self) -> dict[str, Method]:
        """Every call by its name."""
        return {name: getattr(self, name) for name in CALLS}

    def start_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Starts the recipe's engine with dummy weights for the model in ``folder``: shapes and tokenizer are read, weights are not, unless only an
        adapter of them is trained: the reply has the ``base_bytes`` that were read. ``kernels``: those of the trainer, so that both have the same bits.
        With ``reads_weights`` the engine holds the weights of the folder, and with ``adapter`` those of this PEFT folder beside them."""
        folder, recipe, machine = Path(meta["folder"]), self.recipe, self.recipe.machine
        if self.llm is not None:
            self.llm.close()
            self.llm = None
        length, lora = context_tokens(recipe.model, recipe.rollout.max_tokens, folder), recipe.trainer.lora
        args = replace(
            recipe.rollout.engine,
            model=str(folder),
            model_impl=recipe.model.implementation,
            trust_remote_code=recipe.model.trust_remote_code,
            load_format="dummy" if lora is None and not meta.get("reads_weights") else "auto",
            generation_config="vllm",
            seed=recipe.run.seed,
            max_model_len=length,
            kv_cache_tokens=kv_cache_tokens(recipe.rollout, recipe.algorithm, length),
            dtype=recipe.trainer.dtype,
            precision=recipe.rollout_precision,
            device=pod_device(machine),
            kernels=meta["kernels"],
            attention=machine.attention,
        )
        self.groups.forget()
        self.llm = LLM.from_engine_args(args, trained_lora=lora, weight_version=DUMMY_VERSION)
        if meta.get("adapter"):
            self.llm.engine.update_weights(read_adapter(Path(meta["adapter"])), self.llm.weight_version)
        self.groups.open(folder)
        return {"kv_cache_bytes": self.llm.engine.kv_cache_bytes, "base_bytes": self._base_bytes()}, {}

    def _base_bytes(self) -> int:
        """The bytes of the weights that the engine reads from its folder, and no update holds."""
        shapes, dtype = self._engine().engine.shapes, self.recipe.trainer.dtype
        return 0 if shapes.lora is None else weight_bytes(shapes.exported, dtype)

    def sleep_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Frees the engine's KV cache, and at ``level`` 2 (if the call does not say) its weights, until the next ``update_weight``; the reply has the
        ``left_bytes`` of the cache."""
        engine = self._engine().engine
        self.groups.forget()
        engine.sleep(level=int(meta.get("level", 2)))
        release(engine.decoder.device)
        return {"left_bytes": engine.kv_cache_bytes}, {}

    def weight_digests(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The reply has the ``digests`` of what the engine holds: for each worker, here one, and each of its ranks, by name."""
        return {"digests": [self._engine().engine.held_digests()]}, {}

    def verify_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Raises ``EngineDied`` if a tensor that the engine holds is not what it was after the update."""
        for rank, (now, given) in enumerate(zip(self._engine().engine.held_digests(), self.given, strict=True)):
            if changed := [name for name, digest in given.items() if now.get(name) != digest]:
                raise EngineDied(
                    f"tensor '{changed[0]}' and {len(changed) - 1} more of the engine's rank {rank} have changed in its memory since they were updated to the "
                    f"weights of step {self._engine().weight_version.step}"
                )
        return {}, {}

    def stage_weight(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Begins to read, verify and pack the published ``version`` beside the weights that the engine has, and returns; ``update_weight`` then takes it. The
        reply says whether the engine ``stages`` it: where memory has no room for it ``update_weight`` reads it, as for an engine that sleeps."""
        engine, version = self._engine().engine, WeightVersion(*meta["version"])
        stages = not engine.is_sleeping and engine.weight_version != version
        if stages:
            logger.info("the weights of step %d are read beside those in use", version.step)
            engine.stage_weights_from(self._source(), version)
        return {"stages": stages}, {}

    def _source(self, *, verifies: bool = True) -> WeightSource:
        return replace(self.source, verifies=verifies, shares=self.recipe.shares_weights)

    def update_weight(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Copy out, verify and apply the published ``version``; nothing is applied unless every tensor verifies. ``rereads``: names of
        tensors that were damaged when they were first read. A sleeping engine then allocates its KV cache again, in ``seconds``. ``unverified``: the
        weights are taken from the shared memory without a copy, and the engine holds ``version`` only after ``confirm_weight``. ``revision``: of the
        publication that was read; ``None``: the engine held it before."""
        llm, version, rereads = self._engine(), WeightVersion(*meta["version"]), tuple[str, ...]()
        base_bytes, revision = 0, None
        if llm.engine.is_sleeping and llm.engine.shapes.lora is not None:
            # Its weights were freed, and the update holds the adapter alone.
            decoder, seed = llm.engine.decoder, self.recipe.run.seed
            load_tensors(decoder, chain(read_held(llm.model_folder, decoder), new_adapter(decoder.shapes, seed)), pack=True)
            base_bytes = self._base_bytes()
        had_own = not llm.engine.shares_weights
        if llm.weight_version != version or llm.engine.is_sleeping:
            updated = llm.update_weights_from(self._source(verifies=not meta.get("unverified", False)), version)
            rereads, revision = updated.rereads, updated.revision
            if had_own and llm.engine.shares_weights:
                logger.info("the engine computes with the published weights in shared memory, and has no copy")
                self._log_private()
                release(llm.engine.decoder.device)
        began = perf_counter()
        llm.engine.wake_up()
        if self.recipe.rollout.verify_weights_every_steps:
            self.given = llm.engine.held_digests()
        return {
            "version": list(llm.weight_version), "rereads": list(rereads), "base_bytes": base_bytes,
            "kv_cache_bytes": llm.engine.kv_cache_bytes, "seconds": perf_counter() - began, "revision": revision,
        }, {}  # fmt: skip

    def _log_private(self) -> None:
        """Logs which matrices the engine packs to memory of its own although it shares the weights."""
        engine = self._engine().engine
        if packed_layout(engine.decoder.kernels) == "panels" and (private := packed_privately(engine.shapes, engine.decoder.shard_spec.size)):
            name, reason = next(iter(private.items()))
            logger.info("it packs %d of the matrices to memory of its own; '%s': %s", len(private), name, reason)

    def confirm_weight(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The shim has verified the weights of ``version``, which the engine took unverified."""
        self._engine().engine.confirm_weights(WeightVersion(*meta["version"]))
        return {"version": list(self._engine().weight_version)}, {}

    def rollout(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Draws samples of the prompts for ``step`` under the weights that the engine holds, which must be those after ``weights`` steps, as
        ``RolloutGroups.draw`` says. The reply has what that returns, and ``drafts``: the number of proposals of draft tokens, and of tokens proposed and
        accepted."""
        llm, weights = self._engine(), int(meta["weights"])
        before = llm.engine.cumulative_stats().speculation
        if llm.weight_version.step != weights:
            raise RunError(f"the engine holds the weights of step {llm.weight_version.step} and was asked for samples of those of step {weights}")
        drawn, samples = self.groups.draw(llm.engine, llm.engine.settings.max_model_len, meta, blobs, progress)
        drafts = [now - then for now, then in zip(astuple(llm.engine.cumulative_stats().speculation), astuple(before), strict=True)]
        return {**drawn, "drafts": drafts}, samples

    def _engine(self) -> LLM:
        if self.llm is None:
            raise RunError("the rollout's worker has no engine yet; this is a fault of the pod's order of calls")
        return self.llm


def make(settings: RankSettings) -> tuple[Mapping[str, Method], FaultPoint]:
    """The calls of the process of ``settings``, which is alone; the engine starts its own ranks."""
    recipe = build(Recipe, read_yaml(Path(settings.directory) / "config.yaml"))
    rank = start(settings)
    return RolloutWorker(recipe, rank.directory).methods(), rank.fault_point
