"""Predicts the bytes of every phase of a pod before anything is started. Imports no torch.

The run measures the same phases, and the report shows both figures side by side.
"""

from dataclasses import dataclass, replace

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import (
    cached_bytes_per_token,
    held_outside_layers,
    mxfp4_engine_bytes,
    mxfp4_load_bytes,
    optimizer_bytes,
    trained_bytes,
    weight_bytes,
)
from tandem.estimate.processes import (
    CONTROLLER_BYTES,
    FORK_SERVER_BYTES,
    FORKED_ENGINE,
    SHARED_BYTES,
    SHIM_BYTES,
    EngineProcesses,
    forks,
    rank_process_bytes,
    share_fork_server,
)
from tandem.estimate.resident_bytes import gradient_bytes, inference_bytes, resident_bytes
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.own_trainer import KEPT_SHARE, staging_bytes
from tandem.estimate.training.rank_memory import RankMemory, predict_rank_memory
from tandem.estimate.training_bytes import checkpoint_bytes
from tandem.layout.equal_beginnings import MOST_DISTINCT, computes_beginnings_once
from tandem.layout.residents import KEEP, Phase, Residency
from tandem.layout.shapes import ModelShapes
from tandem.runtime.machine.heap import KEPT_BYTES
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.kv_cache import KVCacheDtype


@dataclass(frozen=True, slots=True)
class PodMemory:
    """Predicted bytes of each phase: resident bytes summed over the processes of a sidecar, or those of a GPU. ``trainer``: while it trains;
    ``inference``: during the frozen models' passes; ``trainer_idle``: during the rollout; ``rollout``: the engine while it generates; ``engine_idle``:
    the engine in the other phases; ``segments``: the two shared weight buffers, which the others do not count; ``beside``: of the processes that compute
    nothing (controller, shims, fork servers), less what the ranks of the trainer share with their server; ``engines_share``: what engines share with theirs;
    ``engines_begin``: weights of their own that engines have until their first update, where they then compute with the buffers; ``kept``: of the keeper with
    its checkpoints."""

    trainer: int
    trainer_idle: int
    rollout: int
    segments: int = 0
    inference: int = 0
    engine_idle: int = 0
    beside: int = 0
    engines_share: int = 0
    engines_begin: int = 0
    kept: int = 0

    @property
    def largest_phase(self) -> int:
        """Bytes at the worst moment."""
        return max(self.rollout_phase, self.inference_phase, self.train_phase)

    @property
    def rollout_phase(self) -> int:
        return self.trainer_idle + self.rollout + self.segments + self.beside + self.kept - self.engines_share + self.engines_begin

    @property
    def inference_phase(self) -> int:
        return self.inference + self._beside_trainer

    @property
    def train_phase(self) -> int:
        return self.trainer + self._beside_trainer

    @property
    def _beside_trainer(self) -> int:
        return self.segments + self.beside + self.kept + (self.engine_idle - self.engines_share if self.engine_idle else 0)


def predict(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, *, tokens: int, kv_cache_tokens: int, reference: bool,
    kv_cache_dtype: KVCacheDtype = "auto", swap_bytes: int = 0, engine_ranks: int = 1, engines: int = 1,
    critic: ModelShapes | None = None, reward_model: ModelShapes | None = None, follows: bool = False,
    teacher: ModelShapes | None = None, reads_base: bool = False, residency: Residency = KEEP, attended: int = 0, pods: int = 1,
    engine_processes: EngineProcesses = FORKED_ENGINE, ranks: int = 0, shares_weights: bool = False,
    experts_in_mxfp4: bool = False, engine_bytes: int = 0, draft_weights: int = 0, cpu_kernels: bool = False,
) -> PodMemory:
    """Returns the memory of a run on the CPUs of one machine, which has so many ``ranks`` of the trainer (0: all).

    ``tokens``: of the largest micro-batch. ``reference``: every rank holds its part of a copy of the weights beside the actor, which is frozen or
    ``follows`` it and is saved with it; ``critic``: and of a model of these shapes that is trained and saved with it; ``reward_model``: and of a frozen one
    of these; ``reads_base``: the actor is the reference too, without its adapter. ``attended``: as in ``TrainingLayout``. ``swap_bytes``: an engine's swap
    space. ``engine_ranks``: its tensor-parallel processes, which divide weights and cache. ``engines``: rollout workers, of which each has
    ``kv_cache_tokens`` and ``engine_processes`` besides. ``residency``: what is where when. ``pods``: which of them have two weight buffers
    each. ``shares_weights``: engines compute with those, and have weights of their own, the dummy ones, only until their first update.
    ``experts_in_mxfp4``: engines keep the experts in 4 bits, as their folder has them, beside an adapter; nothing replaces them. ``engine_bytes``: what an
    engine has besides while it generates: states of linear attention, and its draft's cache. ``draft_weights``: of its draft, which it keeps while it
    sleeps. ``cpu_kernels``: the C++ kernels may compute updates."""
    weights, world = weight_bytes(shapes, trainer.dtype), parallel.world
    ranks = ranks or world
    held = resident_bytes(shapes, trainer, parallel, reference=reference, critic=critic, reward_model=reward_model, follows=follows, teacher=teacher)
    kv_cache_bytes = kv_cache_tokens * cached_bytes_per_token(shapes, trainer.dtype, kv_cache_dtype)
    # Under ZeRO 3 the ranks' parts are not whole panels of matrices, so that engines that share the buffers pack weights of their own.
    copies = 0 if shares_weights and parallel.zero < 3 else 2
    own = mxfp4_engine_bytes(shapes, trainer.dtype) + mxfp4_load_bytes(shapes, trainer.dtype) if experts_in_mxfp4 else copies * weights
    engine = engines * (engine_processes.total(engine_ranks) + own + kv_cache_bytes + swap_bytes + engine_bytes + draft_weights)
    # The embedding table and the norms of an engine that sleeps.
    kept = sum(held_outside_layers(shapes)) * DTYPE_BYTES[trainer.dtype] + draft_weights
    asleep = engines * (engine_processes.total(engine_ranks) + kept + swap_bytes)

    trained = [each for each in (shapes, critic) if each is not None]
    staged = sum(staging_bytes(each, trainer, parallel) for each in trained) + (weights // world if follows and trainer.offload != "nvme" else 0)

    def resting(phase: Phase) -> int:
        """One rank that computes nothing: what it holds, and the staged copy of a checkpoint."""
        stays = sum(held[name] for name in residency.on_device(phase, held) | residency.in_memory(phase, held))
        return rank_process_bytes(trainer) + int((1 + KEPT_SHARE) * stays) + staged

    there = residency.on_device(Phase.TRAIN, held) | residency.in_memory(Phase.TRAIN, held)

    def update(model: ModelShapes, *own: str) -> int:
        """One rank that trains ``model``, whose residents are ``own``, beside all others."""
        beside = sum(held[name] for name in there - set(own)) + staged - staging_bytes(model, trainer, parallel)
        memory = training_memory(model, trainer, parallel, tokens, attended, kv_cache_dtype if cpu_kernels else None)
        freed.append(memory.activations + memory.logits + memory.gathered + memory.gradients)
        return memory.total + beside

    freed = list[int]()
    training = update(shapes, "actor", "optimizer")
    if critic is not None:
        # The critic learns first; its gradients stay while the actor learns.
        training = max(update(critic, "critic", "critic_optimizer"), training + gradient_bytes(critic, trainer, parallel))
    # Passes without gradient share what sequences begin with, whatever the setting; attention then gathers up to the tokens of a pass.
    passes = inference_bytes((teacher or shapes if reference or reads_base else None, critic, reward_model), tokens, parallel, attended or tokens)
    rest = max(map(resting, (Phase.INFERENCE, Phase.TRAIN) if reads_base else (Phase.INFERENCE,)))
    # Beside an engine that stays, a rank gives nothing back of what an update has freed; passes without gradient take it again.
    heap = min(KEPT_BYTES, max(freed)) if residency.rule.engine == "stays" else 0
    return PodMemory(
        trainer=ranks * training,
        trainer_idle=ranks * (resting(Phase.ROLLOUT) + heap),
        rollout=engine,
        segments=2 * pods * trained_bytes(shapes, trainer.dtype),
        inference=ranks * (rest + max(passes, heap)) if passes else 0,
        engine_idle={"stays": engine, "sleeps": asleep, "ends": 0}[residency.rule.engine],
        beside=processes_beside(trainer, ranks, pods, engines if engine_processes is FORKED_ENGINE and world == 1 else 0),
        engines_share=engines * engine_processes.shared,
        engines_begin=engines * weights if shares_weights and not copies else 0,
    )


def training_memory(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, tokens: int, attended: int = 0, kv_cache_dtype: KVCacheDtype | None = None
) -> RankMemory:
    """Returns the memory of a rank on a CPU that takes micro-batches of up to ``tokens`` tokens. ``kv_cache_dtype``: the engine's, where the C++ kernels may
    compute what sequences begin with in common once. How much that is depends on the samples: it is the more of an update that computes every token, and of one
    in which as many are distinct as may be."""
    layout = layout_of_trainer(trainer, parallel, tokens, attended=attended)
    every = predict_rank_memory(shapes, layout)
    if kv_cache_dtype is None or not computes_beginnings_once(shapes, trainer, parallel, kv_cache_dtype):
        return every
    return max(every, predict_rank_memory(shapes, replace(layout, distinct=MOST_DISTINCT)), key=lambda memory: memory.total)


def processes_beside(trainer: TrainerConfig, ranks: int, pods: int = 1, engines: int = 0) -> int:
    """Returns the bytes of a run's processes that compute nothing: its controller, and in each pod the shims of both sidecars with their fork servers; less
    what ``ranks`` of the trainer share with their server. ``engines``: of Tandem's own beside a trainer of one rank, of which a
    single one may have its server."""
    servers = pods * (1 + forks(trainer)) - share_fork_server(trainer, ranks, engines, pods)
    return CONTROLLER_BYTES + 2 * pods * SHIM_BYTES + servers * FORK_SERVER_BYTES - (ranks * SHARED_BYTES if forks(trainer) else 0)


def host_bytes_beside_gpu(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Returns the pinned memory of all ranks together: the staged copy of a checkpoint, and moments offloaded to the host."""
    return checkpoint_bytes(shapes, trainer) + (optimizer_bytes(shapes, trainer.optimizer, trainer.dtype) if trainer.offload == "cpu" else 0)


def predict_beside_gpus(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, *, reference: bool, swap_bytes: int = 0, engine_ranks: int = 1,
    engines: int = 1, critic: ModelShapes | None = None, reward_model: ModelShapes | None = None, follows: bool = False,
    teacher: ModelShapes | None = None, residency: Residency = KEEP, ranks: int = 0,
) -> PodMemory:
    """Returns the host memory of a pod on GPUs: processes, what is staged and pinned, and the segments. Arguments as in ``predict``."""
    weights = weight_bytes(shapes, trainer.dtype)
    held = resident_bytes(shapes, trainer, parallel, reference=reference, critic=critic, reward_model=reward_model, follows=follows, teacher=teacher)
    # Pinned memory is kept for the next rollout.
    pinned = sum(held[name] for name in residency.saved(held)) if residency.to == "memory" else 0
    training = (ranks or parallel.world) * (rank_process_bytes(trainer) + pinned)
    training += sum(host_bytes_beside_gpu(each, trainer) for each in (shapes, critic) if each is not None)
    engine = engines * (FORKED_ENGINE.total(engine_ranks) + weights + swap_bytes)
    return PodMemory(
        trainer=training, trainer_idle=training, rollout=engine, segments=2 * trained_bytes(shapes, trainer.dtype),
        inference=training if reference or critic or reward_model else 0,
        engine_idle=0 if residency.rule.engine == "ends" else engine,
        beside=processes_beside(trainer, ranks or parallel.world, engines=engines if parallel.world == 1 else 0),
        engines_share=engines * FORKED_ENGINE.shared,
    )


def saved_bytes_on_disk(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, residency: Residency, *, reference: bool,
    critic: ModelShapes | None = None, reward_model: ModelShapes | None = None, follows: bool = False, teacher: ModelShapes | None = None, ranks: int = 0,
) -> int:
    """Returns the bytes that the residents of all ``ranks`` take in files. These, ``reference`` and ``critic``: as in ``predict``."""
    if residency.to != "disk":
        return 0
    held = resident_bytes(shapes, trainer, parallel, reference=reference, critic=critic, reward_model=reward_model, follows=follows, teacher=teacher)
    return (ranks or parallel.world) * sum(held[name] for name in residency.saved(held))
