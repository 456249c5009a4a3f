"""What a rank of the trainer sidecar holds of the models: the actor on its mesh, its checkpoints, the critic, the frozen reference and reward model."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.config.recipe import Recipe
from tandem.config.trainer import TrainerConfig
from tandem.kernels import Kernels
from tandem.model.model_source import found_model
from tandem.model.value_folder import make_value_folder
from tandem.pod.prompts import context_tokens
from tandem.runtime.records.tracing import Tracer
from tandem.trainer.build import ReplicaSettings, build_frozen, build_replica
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.trainer.rank_process import Rank


@dataclass(frozen=True, slots=True)
class Critic:
    """PPO's value model on the same mesh, with its own optimizer and guard. ``trainer``: section ``trainer`` with the critic's learning rate."""

    replica: Replica
    guard: GradScaler
    trainer: TrainerConfig


@dataclass(frozen=True, slots=True)
class Actor:
    """``reference``: the frozen start model on the same mesh (``None``: the loss has no KL). ``critic``: PPO's (``None``: another algorithm).
    ``reward_model``: the one of section ``reward_model`` (``None``: there is none)."""

    replica: Replica
    guard: GradScaler
    checkpoints: ReplicaCheckpoints
    tracer: Tracer
    reference: FrozenReplica | None = None
    critic: Critic | None = None
    reward_model: FrozenReplica | None = None

    def state(self) -> list[Tensor]:
        """Everything that is kept from step to step: weights, moments, the critic and the weights of frozen models."""
        return [*self.replica.weights(), *self.moments_and_reference()]

    def moments_and_reference(self) -> list[Tensor]:
        """``state`` without the weights, which are registered first."""
        critic = [] if self.critic is None else [*self.critic.replica.weights(), *self.critic.replica.moments()]
        frozen = [one.weights() for one in (self.reference, self.reward_model) if one is not None]
        return [*self.replica.moments(), *critic, *(tensor for tensors in frozen for tensor in tensors)]

    def drop_gradients(self) -> int:
        """Drops the gradients of actor and critic. Returns their bytes."""
        return self.replica.drop_gradients() + (0 if self.critic is None else self.critic.replica.drop_gradients())


def build_actor(recipe: Recipe, rank: Rank, kernels: Kernels, start: Path, in_use: Callable[[], Collection[int]]) -> Actor:
    """Builds this rank's part of the model in the folder ``start``; checkpoints of steps ``in_use`` are not removed."""
    ranks, directory = rank.ranks, rank.directory
    most = max(recipe.trainer.micro_batch_tokens, context_tokens(recipe.model, recipe.rollout.max_tokens, start))
    settings = ReplicaSettings(start, directory, recipe.trainer, recipe.parallel, most, recipe.rollout.engine.kv_cache_dtype)
    replica, guard = build_replica(settings, ranks, kernels), GradScaler(recipe.trainer)
    critic = _build_critic(recipe, rank, kernels, start, most) if recipe.algorithm.name == "ppo" else None
    checkpoints = ReplicaCheckpoints(
        directory / "checkpoints", recipe.checkpoint.keep, start, replica, guard, rank.saving,
        asynchronous=recipe.checkpoint.asynchronous, in_use=in_use, fault_point=rank.fault_point,
        critic=None if critic is None else (critic.replica, critic.guard),
    )  # fmt: skip
    reference = build_frozen(settings, ranks, kernels) if recipe.algorithm.kl_coef > 0 else None
    reward_model = None
    if recipe.reward_model.path:
        folder = found_model(recipe.reward_model.path).resolve()
        reward_model = build_frozen(ReplicaSettings(folder, directory, recipe.trainer, recipe.parallel, most), ranks, kernels)
    tracer = Tracer(directory / "traces", ranks.mesh.rank, recipe.run.trace_steps, {"pipeline": ranks.mesh.group("pipeline")[0]})
    ranks.trace(tracer)
    # A checkpoint holds the state of these random numbers: whether models were loaded just now must not show in it.
    torch.manual_seed(recipe.run.seed)
    return Actor(replica, guard, checkpoints, tracer, reference, critic, reward_model)


def _build_critic(recipe: Recipe, rank: Rank, kernels: Kernels, start: Path, most_tokens: int) -> Critic:
    """Builds this rank's part of the critic: the model that section ``critic`` names, or ``start`` with a new head."""
    folder = rank.directory / "models" / "critic"
    source = found_model(recipe.critic.path).resolve() if recipe.critic.path else start
    if rank.ranks.is_first:
        make_value_folder(source, "token", recipe.run.seed, folder)
    # No rank reads the model before it is written.
    rank.ranks.world.barrier("the critic's model")
    trainer = replace(recipe.trainer, learning_rate=recipe.critic.learning_rate)
    settings = ReplicaSettings(folder if folder.exists() else source, rank.directory, trainer, recipe.parallel, most_tokens)
    return Critic(build_replica(settings, rank.ranks, kernels), GradScaler(trainer), trainer)
