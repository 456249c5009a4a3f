"""Section ``reference``: the model that the KL divergence is measured to, and how it follows the actor."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tandem.config.limits import check_at_least_one
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """The reference model: the one that reinforcement learning starts from, which may follow the actor, or another one, such as the teacher of
    `distillation`."""

    path: str = ""
    """A Hugging Face folder, or a model of the Hub: a causal language model with the actor's tokenizer, of any size. Empty: the model that reinforcement
    learning starts from."""
    update: Literal["never", "copy", "ema"] = "never"
    """What becomes of it every `every_steps` steps. `never`: it stays the model that reinforcement learning starts from. `copy`: it becomes the actor
    (Liu et al., 2025, "ProRL"). `ema`: `mixup_alpha` x actor + (1 - `mixup_alpha`) x reference (TR-DPO; Gorbatovski et al., 2024)."""
    every_steps: int = 1
    """Steps between two updates; the reference of a step is the one after the last update before it. TRL: `ref_model_sync_steps`;
    slime: `--ref-update-interval`."""
    mixup_alpha: float = 0.6
    """For `ema`: the weight of the actor. TRL: `ref_model_mixup_alpha`."""

    @property
    def follows(self) -> bool:
        """Whether the reference changes during a run, so that its weights are part of the run's state."""
        return self.update != "never"

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if not self.follows:
            reason = "reference.update is 'never'"
            refuse_unread("reference", self, reason, "every_steps", "mixup_alpha", fix="set reference.update to copy or ema")
        if self.update != "ema":
            refuse_unread("reference", self, f"reference.update is '{self.update}'", "mixup_alpha", fix="set reference.update to ema")
        if self.path and self.follows:
            raise UserError(
                f"'reference.update' is '{self.update}' with reference.path '{self.path}': only the model that reinforcement learning starts from can follow "
                "the actor; set reference.update to never, or remove reference.path"
            )
        check_at_least_one("reference", self, "every_steps")
        if not 0 < self.mixup_alpha < 1:
            raise UserError(f"'reference.mixup_alpha' is {self.mixup_alpha}; it must be above 0 and below 1 (1 is reference.update copy)")


def check_reference(recipe: "Recipe") -> None:
    """Checks that a reference that follows the actor is there, changes, and holds what it is given."""
    reference, algorithm, trainer = recipe.reference, recipe.algorithm, recipe.trainer
    if algorithm.name == "distillation" and not reference.path:
        raise UserError("'algorithm.name' is 'distillation' and there is no teacher; name its folder in 'reference.path'")
    if reference.path and not algorithm.needs_reference:
        raise UserError(
            f"'reference.path' is '{reference.path}' and algorithm.kl_coef is 0, so there is no reference; set it above 0, algorithm.name to "
            "distillation, or remove section 'reference'"
        )
    if not reference.follows:
        return
    given = f"'reference.update' is '{reference.update}'"
    if not algorithm.needs_reference:
        raise UserError(f"{given} and algorithm.kl_coef is 0, so there is no reference; set it above 0, or remove section 'reference'")
    if reference.every_steps >= recipe.run.max_steps:
        raise UserError(
            f"'reference.every_steps' is {reference.every_steps} and run.max_steps {recipe.run.max_steps}, so that no step has an updated reference; "
            "lower it, or set reference.update to never"
        )
    is_one_update = algorithm.minibatches * algorithm.epochs == 1
    if (reference.update, reference.every_steps, is_one_update, algorithm.learns_from_pairs) == ("copy", 1, True, False):
        raise UserError(
            f"{given} with reference.every_steps 1: each step would begin with a reference that equals the actor, and its only update has a KL of 0; "
            "raise reference.every_steps, algorithm.minibatches or algorithm.epochs"
        )
    if reference.update == "ema" and trainer.dtype not in ("float32", "float64"):
        raise UserError(
            f"{given} and trainer.dtype '{trainer.dtype}', in which a small step of a mean is rounded away; set trainer.dtype to float32, or "
            "reference.update to copy"
        )
    if trainer.router_bias_rate:
        raise UserError(
            f"{given} and trainer.router_bias_rate is {trainer.router_bias_rate:g}: the biases of a router are no weights, so the reference would not "
            "have them; set it to 0, or reference.update to never"
        )
