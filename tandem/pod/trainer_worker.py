"""One rank of the trainer sidecar: the actor on its mesh, its optimizer and the reference, and the calls that the pod makes of them.

Every rank answers the same call with the same arguments; rank 0's reply is the sidecar's. Every call takes plain values and named byte
strings and returns the same, so that it can cross a process boundary or not, and may be made again for the same step.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from tandem.config.load import build, read_yaml
from tandem.config.recipe import Recipe
from tandem.kernels import select, why_reference
from tandem.layout.flops import step_flops
from tandem.layout.residents import Phase, Residency
from tandem.model.create_model import create_model
from tandem.model.export_dtype import export_dtype
from tandem.model.huggingface.model_config import read_json
from tandem.model.model_source import found_model
from tandem.pod.actor import Actor, Critic, build_actor
from tandem.pod.calls import TRAINER_CALLS, InferencePart
from tandem.pod.release import release
from tandem.pod.residents.residue import ResidueCheck
from tandem.pod.residents.trainer import TrainerResidents
from tandem.rl.algorithms.batch import make_batch, train_sequence
from tandem.rl.algorithms.critic import critic_metrics, update_critic
from tandem.rl.algorithms.minibatches import worst
from tandem.rl.algorithms.update import update_policy
from tandem.runtime.collectives.agreement import check_same_kernels
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.faults import FaultPoint
from tandem.runtime.process.processes import memory_of
from tandem.runtime.process.rank_settings import RankSettings
from tandem.runtime.records.tracing import NO_TRACE
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.trainer.device_speed import DeviceSpeed, device_notes
from tandem.trainer.logprobs import sequence_logprobs, sequence_values
from tandem.trainer.micro_batch import forward_tokens
from tandem.trainer.offload.offloader import Offloader
from tandem.trainer.offload.places import make_place
from tandem.trainer.optimizers.make import offload_folder
from tandem.trainer.parallel.follow import follow
from tandem.trainer.rank_process import Rank, start
from tandem.trainer.sequence_scores import scored_sequence, sequence_scores
from tandem.trainer.step import StepResult
from tandem.trainer.tensor_record import tensor_record
from tandem.types import Batch, RunError, Sample, TrainSequence, WeightVersion
from tandem.types.wire_records import decode_samples, decode_scores
from tandem.weight_transfer.convert import ConvertedWeights, convert
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers

logger = logging.getLogger(__name__)

CALLS = TRAINER_CALLS
FIRST_OF_A_STEP = ("offload", "inference", "train")
"""The first call of a step is one of these; a checkpoint belongs to the step before it."""


@dataclass(frozen=True, slots=True)
class Inferred:
    """The samples of ``step``, which are drawn once, the reference's log-probabilities of them and the critic's values, by sample id (``None``: there is no
    such model)."""

    step: int
    samples: list[Sample]
    reference_logprobs: dict[str, tuple[float, ...]] | None = None
    values: dict[str, tuple[float, ...]] | None = None


class TrainerWorker:
    """The state of a rank between calls. ``steps``: optimizer steps that the actor has taken since the start model."""

    def __init__(self, recipe: Recipe, rank: Rank) -> None:
        self.recipe, self.rank, self.directory = recipe, rank, rank.directory
        self.device, machine = rank.ranks.device, recipe.machine
        # The engine's kernels, so that both have the same bits.
        dtype: torch.dtype = getattr(torch, recipe.trainer.dtype)
        self.kernels = select(machine.kernels, dtype, self.device, attention=machine.attention)
        check_same_kernels(rank.ranks.world, self.kernels.name)
        self.kernel_note = why_reference(machine.kernels, self.kernels, dtype, self.device)
        self.speed = DeviceSpeed(self.device, recipe.trainer.multiplies_in)
        self.store = EmbeddedStore(self.directory / "pod" / "store.sqlite")
        self.writer: WeightWriter | None = None
        self.actor: Actor | None = None
        self.steps = 0
        self.inferred: Inferred | None = None
        self.converted: ConvertedWeights | None = None
        self.offloader: Offloader | None = None
        self.residents: TrainerResidents | None = None
        self.prefetch_after: frozenset[Phase] = frozenset()
        self.residue, self.has_released, self.has_staged_moments = ResidueCheck(), False, False
        self.in_use: frozenset[int] = frozenset()
        self.record = tensor_record(rank.directory, rank.ranks.mesh.rank)

    def methods(self) -> dict[str, Method]:
        """Every call by its name."""
        return {name: self._shown(name) for name in CALLS}

    def _shown(self, name: str) -> Method:
        """The call ``name``, whose beginning the rank's heartbeat shows."""
        method: Method = getattr(self, name)

        def call(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
            step = meta.get("step")
            self.rank.enter(name, self.steps if step is None else int(step))
            tracer = NO_TRACE if self.actor is None else self.actor.tracer
            if name in FIRST_OF_A_STEP:
                tracer.enter(self.steps)
            with tracer.span(name, "call"):
                return method(meta, blobs, self._beating(progress))

        return call

    # -- before reinforcement learning -------------------------------------------------------------------------------

    def create_model(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Make the model that the recipe describes as ``folder``, once."""
        if self.rank.ranks.is_first:
            assert self.recipe.model.create is not None
            create_model(self.recipe.model.create, self.recipe.run.seed, Path(meta["folder"]))
        self.rank.ranks.world.barrier("the model to start from")
        return {}, {}

    def export(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The actor as a Hugging Face folder, written whole or not at all, once, after a critic of its own as ``critic``."""
        actor, dtype = self._in_phase(Phase.TRAIN), export_dtype(self.recipe.model, self.recipe.trainer.dtype)
        actor.checkpoints.wait(self.rank.beat)
        actor.checkpoints.export_critic(Path(meta["critic"]), dtype)
        actor.checkpoints.export(Path(meta["folder"]), dtype)
        self.rank.ranks.world.barrier("the exported model")
        return {}, {}

    # -- the state ---------------------------------------------------------------------------------------------------

    def load(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Load checkpoint ``step`` or the newest before it (``None``: the newest), or the model ``start`` if there is none that is whole.
        The reply names the ``step``, its ``digest``, the ``kernels`` and why checkpoints were passed over (``damaged``), and has ``notes`` on the
        device for the user."""
        recipe = self.recipe
        if self.actor is not None:
            self.actor.checkpoints.close()
        residency = Residency(meta["plan"], meta["to"])
        self.actor = actor = build_actor(recipe, self.rank, self.kernels, Path(meta["start"]), lambda: self.in_use, residency)
        for model, label in ((actor.replica, "actor"), (actor.critic.replica if actor.critic is not None else None, "critic")):
            if self.record is not None and model is not None:
                self.record.watch(model.model, label)
        checkpoints = actor.checkpoints
        loaded = checkpoints.load(meta["step"])
        self._hold(actor, residency, frozenset(map(Phase, meta["prefetch"])))
        self.steps = 0 if loaded is None else loaded.step
        self.inferred = self.converted = None
        is_same = recipe.rollout_precision == recipe.trainer.precision
        notes = device_notes(self.device, recipe.trainer, "in trainer and rollout" if is_same else "in the trainer")
        notes += [self.kernel_note] if self.kernel_note else []
        return {
            "step": self.steps, "notes": notes, "digest": None if loaded is None else loaded.digest, "kernels": self.kernels.name,
            "damaged": list(checkpoints.damaged) if loaded is None else [], "passed_over": list(checkpoints.damaged),
        }, {}  # fmt: skip

    def save(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Begin the checkpoint of ``step``, for which those of steps ``in_use`` are not removed; the reply has those that were ``committed``
        meanwhile, this one too if it is not asynchronous."""
        actor = self._in_phase(Phase.TRAIN)
        self._expect(int(meta["step"]))
        actor.checkpoints.wait(self.rank.beat)
        self.in_use = frozenset(meta["in_use"])
        if not self.has_staged_moments:
            # The memory that a checkpoint is staged in is kept, and grows with the first one that has moments.
            self.residue, self.has_staged_moments = ResidueCheck(), self.steps > 0
        before = self._committed()
        actor.checkpoints.save(self.steps, {"steps": self.steps}, actor.tracer.span("checkpoint write", step=self.steps), self.rank.beat)
        return {"committed": before + self._committed()}, {}

    def finish_save(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Wait for the checkpoint that is under way; those that were ``committed``."""
        self._actor().checkpoints.wait(self.rank.beat)
        return {"committed": self._committed()}, {}

    # -- the cycle ---------------------------------------------------------------------------------------------------

    def offload(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Drops what the next step computes again, gradients and saved inference, and begins to move away what a rollout does not need;
        ``register`` waits for it, and moves the actor when it is registered.

        With ``release``, where something moves, and on a GPU, freed memory goes back to the machine. On a CPU this costs the next step its page
        faults, which is not worth it where the engine has room anyway. The reply has the ``moves`` that ended."""
        residents = self._residents()
        self.inferred = None
        residents.leave(Phase.ROLLOUT, self.steps, but=("actor",))
        self.has_released = bool(meta["release"]) or self.offloader is not None or self.device.type == "cuda"
        if self.has_released:
            release(self.device)
        return {"moves": self._moves()}, {}

    def prefetch(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Begins to bring back what ``phase`` needs, while the engine still generates."""
        self._residents().prefetch(Phase(meta["phase"]), self.steps)
        return {}, {}

    def onload(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Brings what ``phase`` needs. The reply has the ``moves``."""
        self._in_phase(Phase(meta["phase"]))
        return {"moves": self._moves()}, {}

    def convert(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Name and place this rank's parts of the actor's weights under Hugging Face's names, once for the life of the actor: the values are
        read when they are registered."""
        if self.converted is None:
            self.converted = convert(self._actor().checkpoints.state)
        return {"tensors": len(self.converted.tensors)}, {}

    def register(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Write this rank's converted parts to the free segment; rank 0 publishes the manifest of all as ``version``. Then the actor moves too. The
        reply has the ``moves`` that ended, and the ``residue``."""
        version = WeightVersion(*meta["version"])
        self._expect(version.step)
        if self.converted is None:
            raise RunError("register was asked for before convert")
        if self.writer is None:
            first, second = meta["buffers"]
            self.writer = WeightWriter(WeightBuffers.open((first, second)), self.store)
        # Where they are registered again, they have left already.
        residents = self._residents()
        if self.offloader is not None and self.offloader.is_away("actor"):
            residents.enter(Phase.TRAIN, self.steps)
        manifest = self.writer.publish(self.converted, version)
        residents.leave(Phase.ROLLOUT, self.steps)
        residents.settle()
        if self.offloader is not None:
            release(self.device)
        return {"bytes": manifest.size_bytes, "digest": manifest.digest, "moves": self._moves(), "residue": self._residue(Phase.ROLLOUT)}, {}

    def inference(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """For the update: the reference model's log-probabilities of the samples and the critic's values, kept for ``train``. For the rewards: the reply has
        the ``scores`` of the reward model, one for each sample, if there is one, and with ``returns_reference`` the ``reference_logprobs`` of each sample's
        tokens. ``part`` says for which of the two."""
        part, samples = meta["part"], decode_samples(blobs["samples"])
        inferred = self._infer(int(meta["step"]), samples, progress, part) if part != "rewards" or meta["returns_reference"] else None
        if part != "rewards":
            self.inferred = inferred
        scores, logprobs = self._score(samples, progress) if part != "update" else None, None
        if meta["returns_reference"] and inferred is not None and (known := inferred.reference_logprobs) is not None:
            logprobs = [list(known[sample.id][len(sample.prompt_token_ids) :]) for sample in samples]
        return {"scores": scores, "reference_logprobs": logprobs, "moves": self._moves(), "residue": self._residue(Phase.INFERENCE)}, {}

    def compare(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Compares the recorded log-probabilities of samples that the actor's weights drew with the actor's own. The reply has the ``metrics``."""
        actor, recipe = self._in_phase(Phase.TRAIN), self.recipe
        sequences = tuple(train_sequence(each) for sample in decode_samples(blobs["samples"]) for each in sample.sequences)
        batch = Batch(self.steps, sequences, recipe.rollout.max_tokens)
        result = update_policy(actor.replica, batch, recipe.algorithm, recipe.trainer, temperature=recipe.rollout.temperature, is_frozen=True)
        return {"metrics": {name: value for name, value in result.metrics.items() if name.startswith("mismatch")}}, {}

    def train(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The optimizer step (or steps, with several mini-batches) of ``step``."""
        step, recipe, actor = int(meta["step"]), self.recipe, self._actor()
        self._expect(step)
        if self.record is not None:
            self.record.step = step
            self._in_phase(Phase.TRAIN)
            self.record.weights(actor.replica, "before the step")
        inferred = self.inferred if self.inferred is not None and self.inferred.step == step else None
        samples = inferred.samples if inferred is not None else decode_samples(blobs["samples"])
        inferred = inferred or self._infer(step, samples, progress)
        self._in_phase(Phase.TRAIN)
        values, shared = inferred.values, recipe.critic if recipe.has_shared_critic else None
        if shared is not None:
            with actor.tracer.span("values"):
                sequences, trainer = [train_sequence(each) for sample in samples for each in sample.sequences], recipe.trainer
                values = sequence_values(actor.replica, sequences, trainer.micro_batch_tokens, share_prompts=trainer.share_prompts)
        with actor.tracer.span("load the batch"):
            scores, known = decode_scores(blobs["scores"]), (inferred.reference_logprobs, values)
            masks = recipe.rollout.mask_off_policy
            batch = make_batch(step, samples, scores, recipe.algorithm, recipe.rollout.max_tokens, *known, mask_off_policy=masks)
        began, critic, record = perf_counter(), actor.critic, self.record
        if record is not None:
            record.batch(batch.sequences)
        learned = self._update_critic(critic, batch, progress) if critic is not None else None
        result = update_policy(
            actor.replica, batch, recipe.algorithm, recipe.trainer, total_steps=recipe.run.max_steps,
            temperature=recipe.rollout.temperature, guard=actor.guard,
            on_progress=lambda done, total: progress({"done": done, "total": total}),
            on_phase=lambda phase: self.rank.enter(phase, step), tracer=actor.tracer,
            is_frozen=critic is not None and step < recipe.critic.warmup_steps, shared_critic=shared, record=record,
        )  # fmt: skip
        if record is not None:
            record.weights(actor.replica, "after the step")
        self.steps += 1
        self._update_reference(actor)
        self.inferred = None
        guards = [actor.guard] if critic is None else [actor.guard, critic.guard]
        exhausted = max(guard.skipped_in_a_row if guard.is_exhausted else 0 for guard in guards)
        metrics, verdicts = result.metrics, [result.verdict]
        if learned is not None:
            metrics, verdicts = metrics | learned.metrics, [result.verdict, learned.verdict]
        elif shared is not None:
            metrics = metrics | critic_metrics(batch.sequences)
        return {
            "metrics": metrics, "device": self._speed(batch.sequences, perf_counter() - began) | dict(result.packing), "tokens": result.tokens,
            "verdict": worst(verdicts), "exhausted": exhausted, "committed": self._committed(), "moves": self._moves(), "residue": self._residue(Phase.TRAIN),
        }, {}  # fmt: skip

    # -- parts -------------------------------------------------------------------------------------------------------

    def _infer(self, step: int, samples: list[Sample], progress: Progress, part: InferencePart = "update") -> Inferred:
        actor, most, share = self._actor(), self.recipe.trainer.micro_batch_tokens, self.recipe.trainer.share_prompts
        reads_base = self.recipe.algorithm.needs_reference and not self.recipe.holds_reference
        if actor.reference is None and actor.critic is None and not reads_base:
            return Inferred(step, samples)
        sequences, last = [train_sequence(each) for sample in samples for each in sample.sequences], "reference" if actor.critic is None else "values"
        if part == "rewards" or (part == "all" and actor.reward_model is not None):
            last = ""  # The next phase is a rollout, or passes of the reward model follow.

        def report(done: int, total: int, of: str) -> None:
            progress({"done": done, "total": total})
            if of == last and done >= total - 1 and Phase.INFERENCE in self.prefetch_after:
                self._residents().prefetch(Phase.TRAIN, self.steps)

        logprobs = values = None
        if reads_base:
            self._in_phase(Phase.TRAIN)
            with actor.tracer.span("reference"), actor.replica.model.without_adapter():
                logprobs = sequence_logprobs(actor.replica, sequences, most, on_progress=partial(report, of="reference"), share_prompts=share)
        if actor.reference is not None or actor.critic is not None:
            self._in_phase(Phase.INFERENCE)
        if actor.reference is not None:
            with actor.tracer.span("reference"):
                logprobs = sequence_logprobs(actor.reference.replica, sequences, most, on_progress=partial(report, of="reference"), share_prompts=share)
        if actor.critic is not None and part != "rewards":
            with actor.tracer.span("values"):
                values = sequence_values(actor.critic.replica, sequences, most, partial(report, of="values"), share)
        return Inferred(step, samples, logprobs, values)

    def _score(self, samples: list[Sample], progress: Progress) -> list[float] | None:
        actor = self._actor()
        if actor.reward_model is None:
            return None
        self._in_phase(Phase.INFERENCE)
        pad = read_json(found_model(self.recipe.reward_model.path) / "config.json").get("pad_token_id")
        sequences = [scored_sequence(sample.id, sample.prompt_token_ids + sample.token_ids, pad) for sample in samples]
        with actor.tracer.span("reward model"):
            return sequence_scores(
                actor.reward_model.replica, sequences, self.recipe.trainer.micro_batch_tokens,
                on_progress=lambda done, total: progress({"done": done, "total": total}),
            )  # fmt: skip

    def _update_critic(self, critic: Critic, batch: Batch, progress: Progress) -> StepResult:
        recipe = self.recipe
        return update_critic(
            critic.replica, batch, recipe.algorithm, recipe.critic, critic.trainer, total_steps=recipe.run.max_steps, guard=critic.guard,
            on_progress=lambda done, total: progress({"done": done, "total": total}),
            on_phase=lambda phase: self.rank.enter(phase, batch.step), tracer=self._actor().tracer,
        )  # fmt: skip

    def _update_reference(self, actor: Actor) -> None:
        """Moves a reference that follows the actor, if it is due after ``steps`` steps."""
        config = self.recipe.reference
        if actor.follows and actor.reference is not None and self.steps % config.every_steps == 0:
            with actor.tracer.span("update the reference"):
                follow(actor.reference.replica, actor.replica, config.mixup_alpha if config.update == "ema" else 1.0)

    def _speed(self, sequences: Sequence[TrainSequence], seconds: float) -> dict[str, float]:
        """This rank's share of the model's operations in a policy update of ``seconds``, and the peak memory of its GPU."""
        actor = self._actor()
        trained = [actor.replica] if actor.critic is None else [actor.replica, actor.critic.replica]
        flops = self.recipe.algorithm.epochs * sum(step_flops(one.model.shapes, map(forward_tokens, sequences)) for one in trained)
        return {**self.speed.memory(), **self.speed.rates(flops / self.rank.ranks.world.size, seconds)}

    def _committed(self) -> list[list[int | str]]:
        """(step, digest) of the checkpoint that was committed since this was asked, in a list of at most one."""
        done = self._actor().checkpoints.take_committed()
        return [] if done is None else [[done.step, done.digest]]

    def _beating(self, progress: Progress) -> Progress:
        """``progress`` of rank 0; every rank's heartbeat shows it."""

        def report(meta: dict[str, object]) -> None:
            self.rank.beat()
            if self.rank.ranks.is_first:
                progress(meta)

        return report

    def _actor(self) -> Actor:
        if self.actor is None:
            raise RunError("the trainer's worker has no model yet; this is a fault of the pod's order of calls")
        return self.actor

    def _in_phase(self, phase: Phase) -> Actor:
        """The actor, with what ``phase`` needs on the device and the rest where the plan says."""
        self._residents().enter(phase, self.steps)
        return self._actor()

    def _hold(self, actor: Actor, residency: Residency, prefetch_after: frozenset[Phase]) -> None:
        if self.offloader is not None:
            self.offloader.close()
        place = make_place(residency.to, self.device, offload_folder(self.recipe.trainer, self.directory)) if residency.rule.offloads else None
        self.offloader = Offloader(place, self.device) if place is not None else None
        self.residents = TrainerResidents(residency, actor.residents(), self.offloader, self.rank.fault_point)
        self.prefetch_after, self.residue, self.has_staged_moments = prefetch_after, ResidueCheck(), False

    def _residents(self) -> TrainerResidents:
        if self.residents is None:
            raise RunError("the trainer's worker has no model yet; this is a fault of the pod's order of calls")
        return self.residents

    def _moves(self) -> list[list[object]]:
        """The moves that ended since this was asked: resident, move, bytes of all ranks and seconds of the slowest. Every rank makes the same."""
        moves = self._residents().take_moves()
        every = self.rank.ranks.all_values([value for each in moves for value in (float(each.size_bytes), each.seconds)], "moved bytes")
        columns = list(zip(*every, strict=True))
        pairs = zip(moves, columns[::2], columns[1::2], strict=True)
        return [[each.resident, str(each.move), int(sum(size)), max(seconds)] for each, size, seconds in pairs if sum(size)]

    def _residue(self, phase: Phase) -> list[str]:
        """What is left at the end of ``phase`` that should not be, on this rank."""
        residents = self._residents()
        held, found = residents.held_bytes(), list[str]()
        if self.offloader is not None or residents.residency.rule.rebuilds:
            found += self.residue.of_residents(residents.states, held)
        if self.has_released:
            if self.device.type == "cuda":
                own = torch.cuda.memory_allocated(self.device)
            else:
                memory = memory_of(os.getpid())
                own = memory.rss_bytes - memory.shm_bytes
            found += self.residue.of_process(phase, own, held)
        for line in found:
            logger.warning("left behind after %s: %s", phase, line)
        return found

    def _expect(self, step: int) -> None:
        if step != self.steps:
            raise RunError(f"the trainer is at step {self.steps} and was asked for step {step}")


def make(settings: RankSettings) -> tuple[Mapping[str, Method], FaultPoint]:
    """The calls of the rank of ``settings``. Tensor-parallel ranks of a pod keep the bits of one process unless the recipe says otherwise."""
    recipe = build(Recipe, read_yaml(Path(settings.directory) / "config.yaml"))
    parallel = recipe.parallel
    deterministic = True if parallel.deterministic is None else parallel.deterministic
    rank = start(settings, deterministic, parallel.sequence_parallel)
    return TrainerWorker(recipe, rank).methods(), rank.fault_point
