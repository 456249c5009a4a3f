"""What a rank of the trainer sidecar holds of the models: the actor on its mesh, its checkpoints, the critic, the frozen reference and reward model."""

import gc
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.config.draft import DraftConfig
from tandem.config.recipe import Recipe
from tandem.config.trainer import TrainerConfig
from tandem.kernels import Kernels
from tandem.layout.residents import RESIDENTS, Phase, Residency, State
from tandem.model.model_source import found_model
from tandem.model.value_folder import make_value_folder
from tandem.pod.prompts import context_tokens
from tandem.pod.residents.trainer import Held, HeldGradients, HeldTensors
from tandem.pod.rl_models import draft_folder
from tandem.runtime.records.tracing import Tracer
from tandem.trainer.backend import TrainedReplica, TrainedState
from tandem.trainer.build import ReplicaSettings, build_draft, build_frozen, build_replica
from tandem.trainer.checkpoint.format.shard import CRITIC, DRAFT
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints, SavedBeside
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.offload.offloader import storage_bytes
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.trainer.rank_process import Rank


class FrozenModel:
    """A model without an optimizer that may be absent: ``build`` makes it."""

    def __init__(self, build: Callable[[], FrozenReplica]) -> None:
        self._build = build
        self._replica: FrozenReplica | None = None
        self._destroyed: weakref.ref[torch.nn.Module] | None = None

    @property
    def replica(self) -> FrozenReplica:
        """The model, which must be there."""
        assert self._replica is not None
        return self._replica

    def tensors(self) -> list[Tensor]:
        """Returns its tensors, also those of a destroyed one that something still refers to."""
        if self._replica is not None:
            return self._replica.weights()
        left = self._destroyed() if self._destroyed is not None else None
        return [] if left is None else list(left.parameters())

    def instantiate(self) -> None:
        """Builds the model. Random numbers of this process go on as if it had not."""
        with torch.random.fork_rng(devices=[]):
            self._replica = self._build()

    def destroy(self) -> int:
        """Frees the model. Returns its bytes."""
        size, self._destroyed = storage_bytes(self.tensors()), weakref.ref(self.replica.model)
        self._replica = None
        gc.collect()
        return size


@dataclass(frozen=True, slots=True)
class TrainedBeside:
    """A model that is trained beside the actor on the same mesh, with its own optimizer and guard. ``trainer``: section ``trainer`` with its learning rate;
    ``start``: the folder that it was loaded from."""

    replica: Replica
    guard: GradScaler
    trainer: TrainerConfig
    start: Path


@dataclass(frozen=True, slots=True)
class Actor:
    """``reference``: the start model or the one of section ``reference`` on the same mesh, frozen unless it ``follows`` the actor (``None``: the loss
    has no KL, or the actor is an adapter of the start model, so that it is the reference too). ``critic``: PPO's (``None``: the actor has a second head
    for it, or the algorithm is another). ``draft``: the draft head of the engine that learns to draft what the actor draws (``None``: it stays as it is).
    ``reward_model``: the one of section ``reward_model`` (``None``: there is none)."""

    replica: TrainedReplica
    guard: GradScaler
    checkpoints: ReplicaCheckpoints
    tracer: Tracer
    reference: FrozenModel | None = None
    critic: TrainedBeside | None = None
    draft: TrainedBeside | None = None
    reward_model: FrozenModel | None = None
    follows: bool = False

    @property
    def native(self) -> Replica:
        """The replica of Tandem's own trainer, for what other backends do not have (adapters, a reference that follows)."""
        assert isinstance(self.replica, Replica)
        return self.replica

    def residents(self) -> dict[str, Held]:
        """Returns what this rank holds from step to step, by the names of ``layout.residents``."""
        held: dict[str, Held] = {
            "actor": HeldTensors(self.replica.weights), "optimizer": HeldTensors(self.replica.moments), "gradients": HeldGradients(self.drop_gradients),
        }  # fmt: skip
        if self.critic is not None:
            held |= {"critic": HeldTensors(self.critic.replica.weights), "critic_optimizer": HeldTensors(self.critic.replica.moments)}
        if self.follows and self.reference is not None:
            held["updated_reference"] = HeldTensors(self.reference.tensors)
        frozen = {"reference": None if self.follows else self.reference, "reward_model": self.reward_model}
        return held | {name: model for name, model in frozen.items() if model is not None}

    def drop_gradients(self) -> int:
        """Drops the gradients of all that is trained. Returns their bytes."""
        beside = [each.replica for each in (self.critic, self.draft) if each is not None]
        return self.replica.drop_gradients() + sum(replica.drop_gradients() for replica in beside)


def build_actor(
    recipe: Recipe, rank: Rank, kernels: Kernels, start: Path, in_use: Callable[[], Collection[int]], residency: Residency
) -> Actor:
    """Builds this rank's part of the model in the folder ``start``, and the frozen models if they are always there by ``residency``; checkpoints of steps
    ``in_use`` are not removed."""
    ranks, directory = rank.ranks, rank.directory
    context = context_tokens(recipe.model, recipe.rollout.max_tokens, start)
    most = max(recipe.trainer.micro_batch_tokens, context)
    settings = ReplicaSettings(
        start, directory, recipe.trainer, recipe.parallel, most, recipe.rollout.engine.kv_cache_dtype, seed=recipe.run.seed, context=context,
        implemented_by=recipe.model.implemented_by,
    )  # fmt: skip
    trained = replace(settings, head_seed=recipe.run.seed) if recipe.has_shared_critic else settings
    state, guard = build_state(trained, rank, kernels), GradScaler(recipe.trainer)
    critic = _build_critic(recipe, rank, kernels, start, most, context) if recipe.has_critic else None
    draft = None if recipe.draft is None else _build_draft(recipe, recipe.draft, state, context)
    beside = {name: SavedBeside(each.replica, each.guard, each.start) for name, each in ((CRITIC, critic), (DRAFT, draft)) if each is not None}

    def frozen(name: str, model: ReplicaSettings) -> FrozenModel:
        made = FrozenModel(lambda: build_frozen(model, ranks, kernels))
        if residency.state(RESIDENTS[name], Phase.TRAIN) is State.DEVICE:
            made.instantiate()
        return made

    follows = recipe.reference.follows
    referred = settings
    if recipe.reference.path:
        referred = ReplicaSettings(
            found_model(recipe.reference.path).resolve(), directory, recipe.trainer, recipe.parallel, most, context=context,
            implemented_by=recipe.model.implemented_by,
        )  # fmt: skip
    reference = frozen("updated_reference" if follows else "reference", referred) if recipe.holds_reference else None
    reward_model = None
    if recipe.reward_model.path:
        folder = found_model(recipe.reward_model.path).resolve()
        reward_model = frozen("reward_model", ReplicaSettings(folder, directory, recipe.trainer, recipe.parallel, most, context=context))
    checkpoints = ReplicaCheckpoints(
        directory / "checkpoints", recipe.checkpoint.keep, start, state, guard, rank.saving,
        asynchronous=recipe.checkpoint.asynchronous, in_use=in_use, fault_point=rank.fault_point,
        beside=beside,
        reference=reference.replica if follows and reference is not None else None,
    )  # fmt: skip
    tracer = Tracer(directory / "traces", ranks.mesh.rank, recipe.run.trace_steps, {"pipeline": ranks.mesh.group("pipeline")[0]})
    ranks.trace(tracer)
    # A checkpoint holds the state of these random numbers: whether models were loaded just now must not show in it.
    torch.manual_seed(recipe.run.seed)
    return Actor(state.replica, guard, checkpoints, tracer, reference, critic, draft, reward_model, follows)


def build_state(settings: ReplicaSettings, rank: Rank, kernels: Kernels) -> TrainedState:
    """Builds this rank's part of the actor with the trainer that ``trainer.backend`` names."""
    if settings.trainer.backend == "megatron":
        # Only the sidecar's environment has it.
        from tandem.backends.megatron.build import build_megatron

        return build_megatron(settings, rank)
    if settings.trainer.backend == "deepspeed":
        from tandem.backends.deepspeed.build import build_deepspeed

        return build_deepspeed(settings, rank, kernels)
    return ReplicaState(build_replica(settings, rank.ranks, kernels))


def _build_critic(recipe: Recipe, rank: Rank, kernels: Kernels, start: Path, most_tokens: int, context: int) -> TrainedBeside:
    """Builds this rank's part of the critic: the model that section ``critic`` names, or ``start`` with a new head."""
    folder = rank.directory / "models" / "critic"
    source = found_model(recipe.critic.path).resolve() if recipe.critic.path else start
    if rank.ranks.is_first:
        make_value_folder(source, "token", recipe.run.seed, folder)
    # No rank reads the model before it is written.
    rank.ranks.world.barrier("the critic's model")
    trainer = replace(recipe.trainer, learning_rate=recipe.critic.learning_rate, lora=None)
    settings = ReplicaSettings(folder if folder.exists() else source, rank.directory, trainer, recipe.parallel, most_tokens, context=context)
    return TrainedBeside(build_replica(settings, rank.ranks, kernels), GradScaler(trainer), trainer, settings.start)


def _build_draft(recipe: Recipe, draft: DraftConfig, actor: TrainedState, context: int) -> TrainedBeside:
    """Builds the draft head that the engine is started with, beside the ``actor``, whose weights are in memory."""
    assert isinstance(actor.replica, Replica)
    folder = draft_folder(recipe)
    # The head is one layer, and stays in memory. Its positions attend to each other as no shared prompt does.
    trainer = replace(
        recipe.trainer, learning_rate=draft.learning_rate, optimizer="adamw", offload="none", offload_activations="none", recompute="none",
        share_prompts=False,
    )  # fmt: skip
    return TrainedBeside(build_draft(actor.replica, folder, draft.draft_steps, trainer, context), GradScaler(trainer), trainer, folder)
