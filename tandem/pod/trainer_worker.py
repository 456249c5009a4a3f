"""One rank of the trainer sidecar: the calls that the pod makes of it.

Every rank answers the same call with the same arguments; rank 0's reply is the sidecar's. Every call takes plain values and named byte
strings and returns the same, so that it can cross a process boundary or not, and may be made again for the same step.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tandem.config.load import build, read_yaml
from tandem.config.recipe import Recipe
from tandem.kernels import select, why_reference
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.kernels.measure import measure, reduced_dtype
from tandem.kernels.mixed import in_precision
from tandem.layout.residents import Phase, Residency
from tandem.layout.shapes import ModelShapes
from tandem.model.adopted import packed_layout
from tandem.model.create_model import create_model
from tandem.model.decoder import Decoder
from tandem.model.export_dtype import export_dtype
from tandem.pod.actor import build_actor
from tandem.pod.calls import TRAINER_CALLS
from tandem.pod.inference import Inferred, infer, reward_scores
from tandem.pod.policy_step import mismatch_metrics, policy_step
from tandem.pod.rank_models import RankModels, hold
from tandem.pod.release import release
from tandem.runtime.collectives.agreement import check_same_kernels, gather_values
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.coordination.store import Guard
from tandem.runtime.machine.heap import small_steps_keep_memory
from tandem.runtime.process.faults import FaultPoint
from tandem.runtime.process.rank_settings import RankSettings
from tandem.runtime.records.tracing import CALL, NO_TRACE
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.runtime.rpc.pod_tls import PodTls, tls_of
from tandem.trainer.checkpoint.export_draft import export_draft
from tandem.trainer.checkpoint.format.shard import DRAFT
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.tiers.disks_tier import Node
from tandem.trainer.checkpoint.tiers.upload_tier import fetch_copy
from tandem.trainer.corruption.check import CorruptionCheck, corruption_check
from tandem.trainer.corruption.finding import SilentCorruption
from tandem.trainer.corruption.injected_flips import inject_flips
from tandem.trainer.device_speed import DeviceSpeed, device_notes
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.rank_process import Rank, start
from tandem.trainer.step import Progress as Counts
from tandem.trainer.tensor_record import tensor_record
from tandem.types import RunError, WeightVersion
from tandem.types.token_entropies import encode_entropies
from tandem.types.weights import Layout
from tandem.types.wire_records import decode_samples, decode_scores
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.sharing import can_share

CALLS = TRAINER_CALLS
FIRST_OF_A_STEP = ("offload", "inference", "train")
"""The first call of a step is one of these; a checkpoint belongs to the step before it."""


class TrainerWorker:
    """The state of a rank between calls. ``inferred``: what the inference phase of a step has left for its update."""

    def __init__(self, recipe: Recipe, rank: Rank) -> None:
        self.recipe, self.rank = recipe, rank
        device, machine = rank.ranks.device, recipe.machine
        # The engine's kernels, so that both have the same bits.
        dtype: torch.dtype = getattr(torch, recipe.trainer.dtype)
        self.kernels = select(machine.kernels, dtype, device, attention=machine.attention)
        check_same_kernels(rank.ranks.world, self.kernels.name)
        self.kernel_note = why_reference(machine.kernels, self.kernels, dtype, device)
        self.speed = DeviceSpeed(device, recipe.trainer.multiplies_in)
        self.store = open_store(store_address(recipe.coordination, rank.directory), on_wait=rank.beat)
        self.writer: WeightWriter | None = None
        self.models: RankModels | None = None
        self.inferred: Inferred | None = None
        self.in_use: frozenset[int] = frozenset()
        self.check: CorruptionCheck | None = None
        self.tls: PodTls | None = None
        self.record = tensor_record(rank.directory, rank.ranks.mesh.rank)

    def methods(self) -> dict[str, Method]:
        """Returns every call by its name."""
        return {name: self._shown(name) for name in CALLS}

    def _shown(self, name: str) -> Method:
        """Returns the call ``name``, whose beginning the rank's heartbeat shows."""
        method: Method = getattr(self, name)

        def call(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
            steps, tracer = (0, NO_TRACE) if self.models is None else (self.models.steps, self.models.actor.tracer)
            step = meta.get("step")
            self.rank.enter(name, steps if step is None else int(step))
            if name in FIRST_OF_A_STEP:
                tracer.enter(steps)
            with tracer.span(name, CALL):
                try:
                    return method(meta, blobs, self._beating(progress))
                finally:
                    self.rank.rest()

        return call

    def _beating(self, progress: Progress) -> Progress:
        """Returns ``progress`` of rank 0; every rank's heartbeat shows it."""

        def report(meta: dict[str, object]) -> None:
            self.rank.beat()
            if self.rank.ranks.is_first:
                progress(meta)

        return report

    def _held(self) -> RankModels:
        if self.models is None:
            raise RunError("the trainer's worker has no model yet; this is a fault of the pod's order of calls")
        return self.models

    # -- before reinforcement learning, and after it -----------------------------------------------------------------

    def create_model(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Makes the model that the recipe describes as ``folder``, once."""
        if self.rank.ranks.is_first:
            assert self.recipe.model.create is not None
            create_model(self.recipe.model.create, self.recipe.run.seed, Path(meta["folder"]))
        self.rank.ranks.world.barrier("the model to start from")
        return {}, {}

    def export(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Writes the actor as a Hugging Face folder, whole or not at all, once, after a critic of its own as ``critic`` and a draft head that was trained as
        ``draft``."""
        actor, dtype = self._held().enter(Phase.TRAIN), export_dtype(self.recipe.model, self.recipe.trainer.dtype)
        checkpoints = actor.checkpoints
        checkpoints.wait(self.rank.beat)
        checkpoints.export_critic(Path(meta["critic"]), dtype)
        trained = checkpoints.state_of(DRAFT)
        if actor.draft is not None and trained is not None:
            export_draft(checkpoints, trained, actor.native.model.shapes, actor.draft.start, Path(meta["draft"]), dtype, of=DRAFT)
        checkpoints.export(Path(meta["folder"]), dtype)
        self.rank.ranks.world.barrier("the exported model")
        return {}, {}

    # -- the state ---------------------------------------------------------------------------------------------------

    def load(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Loads checkpoint ``step`` of the run's folder or the newest before it (``None``: the newest of the nearest of ``tiers`` that has it whole), or the
        model ``start`` if there is none that is whole. ``may_fetch``: one that is fetched from the copies in ``checkpoint.upload`` if there is no other.
        The reply names the ``step``, its ``digest``, the ``kernels`` and why checkpoints were passed over (``damaged``), and has ``notes`` on the
        device for the user. ``tier``: what was loaded and read, as of ``Loaded``; ``fetched``: the step of a copy."""
        recipe, residency = self.recipe, Residency(meta["plan"], meta["to"])
        if self.models is not None:
            self.models.close()
        self.models = self.inferred = None
        actor = build_actor(recipe, self.rank, self.kernels, Path(meta["start"]), lambda: self.in_use, residency)
        if self.record is not None:
            if isinstance(actor.replica.model, Decoder):
                # The layers of another library's network are not recorded, its weights and gradients are.
                self.record.watch(actor.replica.model, "actor")
            if actor.critic is not None:
                self.record.watch(actor.critic.replica.model, "critic")
        began = perf_counter()
        self._use_tiers(actor.checkpoints, meta["tiers"])
        loaded, damaged, fetched = actor.checkpoints.load(meta["step"]), list(actor.checkpoints.damaged), None
        read_bytes = dict(actor.checkpoints.read_bytes)
        if loaded is None and meta["step"] is None and meta["may_fetch"]:
            fetched = self._fetch_copy(actor.checkpoints.folder)
            if fetched is not None:
                loaded = actor.checkpoints.load()
                damaged += actor.checkpoints.damaged
        step = 0 if loaded is None else loaded.step
        tier = {} if loaded is None else self._of_tier(actor.checkpoints, perf_counter() - began, read_bytes, fetched)
        self.check = None
        if isinstance(actor.replica, Replica):
            # Those who repeat recorded steps compare with the record.
            self.check = corruption_check(actor.replica, recipe.trainer.corruption_check, recipe.run.seed) if self.record is None else None
            if self.rank.flips is not None:
                inject_flips(actor.replica.model, self.rank.flips)
        self.models = hold(recipe, self.rank, actor, step, residency, list(map(Phase, meta["prefetch"])))
        is_same = recipe.rollout_precision == recipe.trainer.precision
        notes = device_notes(self.rank.ranks.device, recipe.trainer, self.kernels, "in trainer and rollout" if is_same else "in the trainer")
        notes += [self.kernel_note] if self.kernel_note else []
        return {
            "step": step, "notes": notes, "digest": None if loaded is None else loaded.digest, "kernels": self.kernels.name,
            "damaged": list(damaged) if loaded is None else [], "passed_over": list(damaged),
            "tier": tier, "fetched": fetched,
        }, {}  # fmt: skip

    def _use_tiers(self, checkpoints: ReplicaCheckpoints, tiers: Mapping[str, Any]) -> None:
        """Lets ``checkpoints`` use the keepers and the local folder of ``tiers``, as of ``NearTiers.describe``."""
        memory, local = tiers["memory"], tiers["local"]
        checkpoints.recorded = tiers["recorded"]
        checkpoints.local = None if local is None else Path(local["folder"])
        is_spread = local is not None and local["is_spread"]
        if self.tls is None and (is_spread or any(keeper["is_encrypted"] for keeper in (memory or {"keepers": ()})["keepers"])):
            self.tls = tls_of(self.recipe.pods)
        checkpoints.node = Node(local["node"], local["credential"], self.tls) if is_spread else None
        if memory is None:
            checkpoints.memory = None
            return
        checkpoints.memory = Keepers.of(memory, self.rank.ranks.world.rank, self.tls)

    def forget_local(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Removes the checkpoints on the disk of this rank's node, for a run that has finished."""
        checkpoints = self._held().actor.checkpoints
        checkpoints.wait(self.rank.beat)
        self.rank.ranks.world.barrier("the last checkpoint")
        if checkpoints.local is not None:
            shutil.rmtree(checkpoints.local, ignore_errors=True)
        return {}, {}

    def _fetch_copy(self, folder: Path) -> int | None:
        """Fetches the newest whole copy of ``checkpoint.upload``. Returns its step, on every rank."""
        fetched = fetch_copy(self.recipe.checkpoint.upload, folder, self.rank.beat) if self.rank.ranks.is_first else None
        step, *_ = gather_values(self.rank.ranks.world, fetched, "the copy that is fetched")
        return None if step is None else int(step)

    def _of_tier(self, checkpoints: ReplicaCheckpoints, seconds: float, read_bytes: dict[str, int], fetched: int | None) -> dict[str, Any]:
        """Returns the fields of ``Loaded`` for the checkpoint that was loaded."""
        opened = checkpoints.opened
        assert opened is not None
        if fetched is not None:
            read_bytes = {**read_bytes, "upload": opened.size_bytes}
        tier = opened.tier if fetched is None else "upload"
        return {
            "step": opened.checkpoint.step, "tier": tier, "size_bytes": opened.size_bytes, "seconds": seconds, "read_bytes": read_bytes,
            "where": dict(opened.where),
        }  # fmt: skip

    def measure(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Measures the ``products`` of the models on all ranks at once, as they compute them in a step. The reply is what ``kernels.measure`` returns on the
        first."""
        dtype = getattr(torch, reduced_dtype(self.recipe.trainer, self.rank.ranks.device.type))
        device = self.rank.ranks.device
        kernels = in_precision(self.kernels, self.recipe.trainer.precision, device) if device.type == "cpu" else self.kernels
        speed = measure(kernels, meta["products"], dtype, device, quick=True)
        release(device)
        return speed._asdict(), {}

    def save(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Begins the checkpoint of ``step``, for which those of steps ``in_use`` are not removed; the reply has those that were ``committed``
        meanwhile, this one too if it is not asynchronous."""
        models = self._held()
        models.expect(int(meta["step"]))
        models.enter(Phase.TRAIN).checkpoints.wait(self.rank.beat)
        self.in_use = frozenset(meta["in_use"])
        before = models.take_committed()
        self._use_tiers(models.actor.checkpoints, meta["tiers"])
        models.save()
        return {"committed": before + models.take_committed(), "written": models.take_written()}, {}

    def copy_checkpoint(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Begins the checkpoint of ``step`` in the tiers ``only``, before the run's folder, unless another one is being written. The reply says whether it
        ``begun``, and has the checkpoints that were ``committed`` and ``written`` meanwhile."""
        models = self._held()
        models.expect(int(meta["step"]))
        checkpoints = models.enter(Phase.TRAIN).checkpoints
        committed = models.take_committed()
        self._use_tiers(checkpoints, meta["tiers"])
        begun = models.copy_checkpoint(meta["only"])
        return {"begun": begun, "committed": committed, "written": models.take_written()}, {}

    def finish_save(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Waits for the checkpoint that is under way; the reply has those that were ``committed``."""
        models = self._held()
        models.actor.checkpoints.wait(self.rank.beat)
        return {"committed": models.take_committed(), "written": models.take_written()}, {}

    # -- the cycle ---------------------------------------------------------------------------------------------------

    def offload(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Drops what the next step computes again, gradients and saved inference, and begins to move away what a rollout does not need;
        ``register`` waits for it, and moves the actor when it is registered. With ``release``, freed memory goes back to the machine. The reply has the
        ``moves`` that ended."""
        models, self.inferred = self._held(), None
        models.begin_offload(returns_memory=bool(meta["release"]))
        return {"moves": models.take_moves()}, {}

    def prefetch(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Begins to bring back what ``phase`` needs, while the engine still generates."""
        self._held().prefetch(Phase(meta["phase"]))
        return {}, {}

    def onload(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Brings what ``phase`` needs. The reply has the ``moves``."""
        models = self._held()
        models.enter(Phase(meta["phase"]))
        return {"moves": models.take_moves()}, {}

    def convert(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Names and places this rank's parts of the actor's weights under Hugging Face's names, once for the life of the actor: the values are
        read when they are registered. Matrices go in the layout of engines that compute with them in the shared memory."""
        models = self._held()
        return {"tensors": len(models.convert(self._engine_layout(models.actor.replica.model.shapes)).tensors)}, {}

    def _engine_layout(self, shapes: ModelShapes) -> Layout | None:
        """Returns the layout of the matrices of engines that compute with the published weights where they are; ``None`` if they copy them."""
        recipe = self.recipe
        return packed_layout(self.kernels) if recipe.shares_weights and can_share(shapes, recipe.trainer.dtype, recipe.rollout.weights) else None

    def register(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Writes this rank's converted parts to the free segment of its pod; the pod's first rank publishes the manifest of all as ``version`` in ``store``,
        that of the run if it is not given, if the ``guard`` holds. Then the actor moves too. ``announces``: other pods read the parts as they are written.
        The reply has the ``moves`` that ended, and the ``residue``."""
        models, version = self._held(), WeightVersion(*meta["version"])
        models.expect(version.step)
        if self.writer is None:
            first, second = meta["buffers"]
            store = open_store(meta["store"], on_wait=self.rank.beat) if "store" in meta else self.store
            self.writer = WeightWriter(WeightBuffers.open((first, second)), store, kernels=self.kernels if isinstance(self.kernels, CpuKernels) else None)
        guard = Guard(*meta["guard"]) if meta["guard"] is not None else None
        manifest = models.publish(self.writer, version, guard, announces=bool(meta.get("announces")))
        moves, residue = models.take_moves(), models.find_residue(Phase.ROLLOUT)
        return {"bytes": manifest.size_bytes, "digest": manifest.digest, "moves": moves, "residue": residue}, {}

    def inference(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Computes what ``part`` says. For the update: the reference model's log-probabilities of the samples and the critic's values, kept for ``train``.
        For the rewards: the reply has the ``scores`` of the reward model, one for each sample, if there is one, and with ``returns_reference`` the
        ``reference_logprobs`` of each sample's tokens."""
        models, part, samples = self._held(), meta["part"], decode_samples(blobs["samples"])
        needs_passes = part != "rewards" or meta["returns_reference"]
        inferred = infer(models, int(meta["step"]), samples, _counts(progress), part) if needs_passes else None
        if part != "rewards":
            self.inferred = inferred
        scores = reward_scores(models, samples, _counts(progress)) if part != "update" else None
        logprobs = inferred.logprobs_of_completions() if inferred is not None and meta["returns_reference"] else None
        moves, residue = models.take_moves(), models.find_residue(Phase.INFERENCE)
        return {"scores": scores, "reference_logprobs": logprobs, "moves": moves, "residue": residue}, {}

    def compare(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Compares the recorded log-probabilities of samples that the actor's weights drew with the actor's own. The reply has the ``metrics``."""
        return {"metrics": mismatch_metrics(self._held(), decode_samples(blobs["samples"]))}, {}

    def train(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Takes the optimizer step (or steps, with several mini-batches) of ``step``. The reply is that of ``policy_step``, with the checkpoints that were
        ``committed`` meanwhile, the ``moves`` that ended, and the ``residue``, and from the first rank the ``entropies`` of tokens; or it has the
        ``corruption`` that was found."""
        models, step = self._held(), int(meta["step"])
        models.expect(step)
        if self.record is not None:
            self.record.step = step
            self.record.weights(models.enter(Phase.TRAIN).replica, "before the step")
        inferred = self.inferred if self.inferred is not None and self.inferred.step == step else None
        inferred = inferred or infer(models, step, decode_samples(blobs["samples"]), _counts(progress))
        try:
            learned, entropies = policy_step(models, inferred, decode_scores(blobs["scores"]), _counts(progress), self.speed, self.record, self.check)
        except SilentCorruption as corruption:
            # Every rank raises it.
            models.close()
            self.models = self.inferred = None
            return {"corruption": corruption.finding.to_json()}, {}
        self.inferred = None
        committed, moves, residue = models.take_committed(), models.take_moves(), models.find_residue(Phase.TRAIN)
        blobs = {"entropies": encode_entropies(entropies)} if entropies else {}
        return {**learned, "committed": committed, "written": models.take_written(), "moves": moves, "residue": residue}, blobs


def _counts(progress: Progress) -> Counts:
    """Returns what tells ``progress`` how much is ``done`` of a ``total``."""
    return lambda done, total: progress({"done": done, "total": total})


def make(settings: RankSettings) -> tuple[Mapping[str, Method], FaultPoint]:
    """Returns the calls of the rank of ``settings``. Tensor-parallel ranks of a pod keep the bits of one process unless the recipe says otherwise."""
    recipe = build(Recipe, read_yaml(Path(settings.directory) / "config.yaml"))
    parallel = recipe.parallel
    deterministic = True if parallel.deterministic is None else parallel.deterministic
    rank = start(settings, deterministic, parallel.sequence_parallel)
    small_steps_keep_memory()
    return TrainerWorker(recipe, rank).methods(), rank.fault_point
