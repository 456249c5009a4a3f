"""Chooses the plan of a pod's residents before anything starts: the loosest one that fits in the budgets of device, memory and disk."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.machine import MachineConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.residents import ResidentsConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.trainer import TrainerConfig
from tandem.engine.spec_decode.draft_size import DraftSize
from tandem.estimate.count_bytes import running_state_bytes
from tandem.estimate.draft_bytes import DraftBytes, draft_bytes
from tandem.estimate.memory import PodMemory, predict, predict_beside_gpus, saved_bytes_on_disk
from tandem.estimate.pod_gpu import GpuParts, predict_gpu, with_draft
from tandem.estimate.processes import FORKED_ENGINE, VLLM_ENGINE
from tandem.estimate.training.layout import DraftTraining
from tandem.estimate.training_bytes import SEQUENCE_BYTES, TOKEN_BYTES
from tandem.layout.residents import PLANS, Phase, PlanName, Residency
from tandem.layout.shapes import ModelShapes
from tandem.runtime.machine.available_memory import available_bytes
from tandem.runtime.machine.gpus import describe_gpus, least_room, pod_device
from tandem.storage.disk_space import free_bytes
from tandem.types import RunError

GIB, MIB = 2**30, 2**20
NO_DRAFT = DraftSize()
FIX = (
    "lower pods.count, rollout.workers, rollout.engine.kv_cache_tokens or trainer.micro_batch_tokens, set trainer.recompute to full, or shard the model with "
    "section 'parallel'"
)


class Budget(NamedTuple):
    """Bytes that a pod may take: of each GPU (``None``: there are none), of the host's memory, and of the disk for residents."""

    device: int | None
    memory: int
    disk: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """The bytes that ``residency`` is predicted to need: of the host's memory, of the GPU that needs most (``None``: the pod is on the CPU), and on
    the disk. ``gpu_parts``: what they are on that GPU."""

    residency: Residency
    host: PodMemory
    gpu: PodMemory | None
    disk: int
    gpu_parts: GpuParts | None = None

    @property
    def name(self) -> str:
        """The plan as the recipe names it, with the place that residents are moved to."""
        residency = self.residency
        return f"{residency.plan} (to {residency.to})" if residency.rule.offloads else residency.plan

    @property
    def device(self) -> PodMemory:
        """The phases of the memory that the models compute in."""
        return self.host if self.gpu is None else self.gpu

    def with_draft(self, head: DraftBytes, draft: DraftSize, cache_tokens: int, pods: int = 1) -> "Candidate":
        """Returns a candidate on GPUs with a draft ``head`` that is trained, which all ``pods`` have in their weight buffers, and the ``draft`` of an engine
        with a cache of ``cache_tokens``."""
        assert self.gpu_parts is not None
        parts = with_draft(self.gpu_parts, head, engine_parts(draft, cache_tokens))
        return replace(self, host=_beside(self.host, DraftBytes(head.staged, published=head.published), buffers=2 * pods), gpu=parts.memory, gpu_parts=parts)

    def lacks(self, budget: Budget) -> str:
        """Returns what does not fit in ``budget``; empty if all of it fits."""
        if self.gpu is not None and budget.device is not None and self.gpu.largest_phase > budget.device:
            return f"{self.gpu.largest_phase / GIB:.2f} GiB of each GPU at its worst moment and may take {max(budget.device, 0) / GIB:.2f} GiB"
        if self.host.largest_phase > budget.memory:
            return f"{self.host.largest_phase / GIB:.2f} GiB at its worst moment and may take {budget.memory / GIB:.2f} GiB of memory"
        if self.disk > budget.disk:
            return f"{self.disk / GIB:.2f} GiB of disk and may take {budget.disk / GIB:.2f} GiB"
        return ""

    def prefetches(self, budget: Budget) -> frozenset[Phase]:
        """Returns the phases at whose end the next phase's residents fit beside those that are there."""
        if not self.residency.rule.offloads:
            return frozenset()
        limit = budget.memory if self.gpu is None or budget.device is None else budget.device
        memory, found = self.device, set()
        after_rollout = memory.inference if memory.inference else memory.trainer
        if memory.rollout + max(memory.trainer_idle, after_rollout) + memory.segments <= limit:
            found.add(Phase.ROLLOUT)
        if memory.inference and memory.engine_idle + memory.inference + memory.trainer + memory.segments <= limit:
            found.add(Phase.INFERENCE)
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class PodPlan:
    """The plan that was chosen, and ``why``: one line for each looser plan that does not fit. ``gpus``: their number. ``prefetch``: the phases at
    whose end the next phase's residents are read."""

    chosen: Candidate
    gpus: int
    why: tuple[str, ...] = ()
    prefetch: frozenset[Phase] = frozenset()

    @property
    def host(self) -> PodMemory:
        return self.chosen.host

    @property
    def gpu(self) -> PodMemory | None:
        return self.chosen.gpu

    @property
    def residency(self) -> Residency:
        return self.chosen.residency

    def describe(self) -> list[str]:
        """Returns lines on the plan for a person: what it is and why, what it moves, and the GPUs."""
        lines = [f"residents: plan {self.chosen.name}", *(f"residents: {line}" for line in self.why)]
        if self.prefetch:
            lines.append("residents: read ahead at the end of " + " and ".join(phase for phase in Phase if phase in self.prefetch))
        if self.residency.rule.offloads and self.residency.to == "memory" and self.gpu is None:
            lines.append("residents: on a CPU nothing moves to memory, because it is there already")
        gpu = self.gpu
        if gpu is not None:
            parts = {"trainer": gpu.trainer, "inference": gpu.inference, "trainer during the rollout": gpu.trainer_idle, "rollout": gpu.rollout}
            lines.append(describe_gpus(self.gpus, gpu.largest_phase))
            lines.append("of them: " + ", ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in parts.items() if size))
        return lines


def kv_cache_tokens(rollout: RolloutConfig, algorithm: AlgorithmConfig, max_length: int) -> int:
    """Returns the tokens of the KV cache of one worker: as configured, or what the sequences that run at once can fill."""
    engine = rollout.engine
    return engine.kv_cache_tokens or running_sequences(rollout, algorithm) * (max_length + 16)


def running_sequences(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> int:
    """Returns the most sequences that run at once in one worker."""
    prompts = algorithm.prompts_per_round(rollout.prompts_per_step)
    if rollout.budget_tokens:
        # A sample may be in flight in as many steps as it has budgets.
        prompts *= -(-rollout.max_tokens // rollout.budget_tokens)
    sequences = -(-prompts // rollout.workers) * algorithm.group_size
    return min(rollout.engine.max_num_seqs, max(sequences, 1))


class MicroBatchTokens(NamedTuple):
    """``tokens`` that go through the network in a micro-batch, and, where prompts are shared, the tokens that its sequences have with their prompts,
    ``attended`` (0: they are not shared)."""

    tokens: int
    attended: int


def largest_micro_batch(rollout: RolloutConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig, max_length: int) -> MicroBatchTokens:
    """Returns the largest micro-batch of sequences of at most ``max_length`` tokens, of which one longer than ``micro_batch_tokens`` is a micro-batch
    by itself. Prompts that are shared are the longest beside completions of ``rollout.max_tokens``."""
    most, group = max(trainer.micro_batch_tokens, max_length), algorithm.group_size
    if not trainer.share_prompts:
        return MicroBatchTokens(min(most, rollout.prompts_per_step * group * max_length), 0)
    completion = min(rollout.max_tokens, max_length)
    prompt = max_length - completion
    # Samples of a group that fit in one micro-batch with their prompt.
    together = min(group, max(1, (most - prompt) // completion))
    tokens = min(most, rollout.prompts_per_step * (prompt + group * completion))
    attended = tokens * together * max_length // (prompt + together * completion)
    return MicroBatchTokens(tokens, min(attended, rollout.prompts_per_step * group * max_length))


def plan(
    residents: ResidentsConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig, parallel: ParallelConfig,
    machine: MachineConfig, shapes: ModelShapes, max_length: int, rollout_precision: str, folder: Path,
    reward_model: ModelShapes | None = None, critic: ModelShapes | None = None, reference: bool = False, follows: bool = False,
    teacher: ModelShapes | None = None, pods: int = 1, ranks: int = 0, shares_weights: bool = False, kept: int = 0,
    experts_in_mxfp4: bool = False, draft: DraftTraining | None = None, engine_draft: DraftSize = NO_DRAFT,
) -> PodPlan:
    """Returns the plan of the residents with its predicted bytes, over all ranks. ``rollout_precision``: what the engine multiplies in. ``folder``: on
    the disk of residents. ``reward_model``: its shapes, if there is one; ``critic``: those of one of its own; ``reference``: there is a reference model,
    which ``follows`` the actor or has the shapes of a ``teacher``, if they are not the actor's. ``pods``: on this machine, each with its rollout
    workers; ``ranks``: of the trainer there (0: all); ``shares_weights``: engines compute with the weight buffers;
    ``kept``: bytes of the keeper of checkpoints there; ``experts_in_mxfp4``: engines on CPUs keep the experts in 4 bits; ``draft``: a head that is
    trained beside the actor, and stays where it is; ``engine_draft``: what an engine has of its draft.
    Raises ``RunError`` where nothing fits."""
    engine = rollout.engine
    engine.check_length(max_length)
    sequences = algorithm.rounds * algorithm.prompts_per_round(rollout.prompts_per_step) * algorithm.group_size
    available, batch = available_bytes(machine.memory_gib), sequences * (SEQUENCE_BYTES + rollout.max_tokens * TOKEN_BYTES)
    if batch > available:
        raise RunError(
            f"the samples of one step need {batch / GIB:.2f} GiB and {available / GIB:.2f} GiB are available; lower rollout.prompts_per_step or "
            "rollout.max_tokens"
        )
    tokens, attended = largest_micro_batch(rollout, algorithm, trainer, max_length)
    cache_tokens = kv_cache_tokens(rollout, algorithm, max_length)
    models: dict[str, Any] = {"reference": reference, "critic": critic, "reward_model": reward_model, "follows": follows, "teacher": teacher}
    swap, on_gpu = int(engine.swap_space * GIB), pod_device(machine) != "cpu"
    # Rows of states that no sequence has had take no memory.
    states = running_state_bytes(shapes, replace(engine, max_num_seqs=running_sequences(rollout, algorithm))) if rollout.backend == "tandem" else 0
    of_draft = draft_bytes(shapes, draft, trainer, parallel, tokens, max_length, on_cpu=not on_gpu)
    gpus, drafts = max(ranks or parallel.world, rollout.engine_ranks), engine_parts(engine_draft, cache_tokens)

    def needs(residency: Residency) -> Candidate:
        if not on_gpu:
            disk = saved_bytes_on_disk(shapes, trainer, parallel, residency, **models, ranks=ranks)
            host = predict(
                shapes, trainer, parallel, tokens=tokens, attended=attended, kv_cache_tokens=cache_tokens, kv_cache_dtype=engine.kv_cache_dtype,
                swap_bytes=swap, engine_processes=FORKED_ENGINE if rollout.backend == "tandem" else VLLM_ENGINE,
                engine_ranks=engine.tensor_parallel_size, engines=pods * rollout.workers, pods=pods, **models, residency=residency,
                reads_base=algorithm.needs_reference and not reference, ranks=ranks, shares_weights=shares_weights,
                experts_in_mxfp4=experts_in_mxfp4,
                engine_bytes=drafts.get("draft_cache", 0) + states, draft_weights=drafts.get("draft_weights", 0),
                cpu_kernels=machine.pods_have_cpu_kernels,
            )  # fmt: skip
            # One rank of each replica has the head.
            replicas = -(-(ranks or parallel.world) * parallel.data // parallel.world)
            return Candidate(residency, replace(_beside(host, of_draft, replicas, buffers=2 * pods), kept=kept), None, disk)
        on_gpus = gpu_candidate(
            residency, rollout, trainer, parallel, shapes, MicroBatchTokens(tokens, attended), cache_tokens, rollout_precision, models, rollout.workers, ranks
        )
        drafted = on_gpus.with_draft(of_draft, engine_draft, cache_tokens, pods)
        return replace(drafted, host=replace(drafted.host, kept=kept))

    device = None
    if on_gpu:
        device = min([least_room(gpus)] + ([int(residents.device_gib * GIB)] if residents.device_gib else []))
    budget = Budget(device, available, int(residents.disk_gib * GIB) if residents.disk_gib else free_bytes(folder))
    at_once = rollout.max_staleness > 0
    sleeps = engine.tensor_parallel_size == 1 and rollout.backend == "tandem"
    allowed = candidates(residents, on_gpu=on_gpu, sleeps=sleeps, at_once=at_once, moves_trainer=trainer.backend == "tandem")
    chosen, why = choose(allowed, needs, budget, "rollout.max_staleness 0 with another residents.plan" if at_once else "another residents.plan")
    return PodPlan(chosen, gpus, tuple(why), chosen.prefetches(budget) if residents.prefetch else frozenset())


def engine_parts(draft: DraftSize, cache_tokens: int) -> dict[str, int]:
    """Returns the bytes of an engine's ``draft`` by what they hold, with a cache of ``cache_tokens``; none without one."""
    return {"draft_weights": draft.weights, "draft_cache": cache_tokens * draft.token} if draft.weights else {}


def _beside(memory: PodMemory, draft: DraftBytes, ranks: int = 1, buffers: int = 0) -> PodMemory:
    """Returns ``memory`` with a ``draft`` head on each of ``ranks`` in all phases of the trainer, and in so many weight ``buffers``."""
    held, inference = ranks * draft.held, memory.inference
    trainer = memory.trainer + held + ranks * draft.working
    segments = memory.segments + buffers * draft.published
    return replace(memory, trainer=trainer, trainer_idle=memory.trainer_idle + held, inference=inference + held if inference else 0, segments=segments)


def gpu_candidate(
    residency: Residency, rollout: RolloutConfig, trainer: TrainerConfig, parallel: ParallelConfig, shapes: ModelShapes, micro_batch: MicroBatchTokens,
    cache_tokens: int, rollout_precision: str, models: Mapping[str, Any], engines: int, ranks: int = 0,
) -> Candidate:
    """Returns what ``residency`` needs of a pod on GPUs. ``cache_tokens``: of the KV cache of one engine. ``models``: the arguments of
    ``predict_gpu`` on models beside the actor. ``engines`` and ``ranks`` (0: all): of one machine."""
    engine = rollout.engine
    host = predict_beside_gpus(
        shapes, trainer, parallel, **models, swap_bytes=int(engine.swap_space * GIB), engine_ranks=engine.tensor_parallel_size, engines=engines,
        residency=residency, ranks=ranks,
    )  # fmt: skip
    parts = predict_gpu(
        shapes, trainer, parallel, engine, tokens=micro_batch.tokens, attended=micro_batch.attended, kv_cache_tokens=cache_tokens, **models,
        precision=rollout_precision, residency=residency,
    )  # fmt: skip
    disk = saved_bytes_on_disk(shapes, trainer, parallel, residency, **models, ranks=ranks)
    return Candidate(residency, host, parts.memory, disk, parts)


def candidates(
    residents: ResidentsConfig, *, on_gpu: bool, sleeps: bool, at_once: bool = False, moves_trainer: bool = True
) -> Iterator[Residency]:
    """Yields what the recipe allows, from the loosest to the strictest plan. ``sleeps``: the engine can free its memory without ending. ``at_once``: trainer
    and rollout work at the same time, so that nothing moves. ``moves_trainer``: what the trainer holds can be moved away."""
    names: list[PlanName] = ["keep"] if at_once else list(PLANS) if residents.plan == "auto" else [residents.plan]
    to: list[Literal["memory", "disk"]] = ["memory", "disk"] if on_gpu else ["disk"]
    for name in names:
        rule = PLANS[name]
        if rule.offloads and not moves_trainer:
            continue
        if rule.engine == "sleeps" and not sleeps:
            if residents.plan != "auto":
                raise RunError(
                    f"'residents.plan' is '{name}' and an engine with tensor-parallel ranks cannot sleep; set residents.plan to figure or terminate, or "
                    "rollout.engine.tensor_parallel_size to 1"
                )
            continue
        if not rule.offloads:
            yield Residency(name)
            continue
        for place in to if residents.to == "auto" else [residents.to]:
            yield Residency(name, place)


def choose(
    allowed: Iterator[Residency], needs: Callable[[Residency], Candidate], budget: Budget, instead: str = "another residents.plan"
) -> tuple[Candidate, list[str]]:
    """Returns the first of ``allowed`` whose ``needs`` fit in ``budget``, and a line for each before it. Raises ``RunError`` where none fits, which says
    what would, or what may be set ``instead``."""
    tried: list[tuple[Candidate, str]] = []
    for residency in allowed:
        candidate = needs(residency)
        lacking = candidate.lacks(budget)
        if not lacking:
            return candidate, [f"{each.name} needs {lack}" for each, lack in tried]
        tried.append((candidate, lacking))
    least, lacking = min(tried, key=lambda one: (one[0].device.largest_phase, one[0].disk))
    wanted = []
    if least.gpu is not None and budget.device is not None and least.gpu.largest_phase > budget.device:
        wanted.append(f"{least.gpu.largest_phase / GIB:.2f} GiB of each GPU (residents.device_gib)")
    if least.host.largest_phase > budget.memory:
        wanted.append(f"{least.host.largest_phase / GIB:.2f} GiB of memory (machine.memory_gib)")
    if least.disk > budget.disk:
        wanted.append(f"{least.disk / GIB:.2f} GiB of disk (residents.disk_gib)")
    other = f" or {instead}" if len({each.residency.plan for each, _ in tried}) < len(PLANS) else ""
    raise RunError(
        f"this run needs {lacking}, under plan {least.name}, the one that needs least; what would fit: {' and '.join(wanted)}{other}, "
        f"or {FIX}"
    )
