"""The checks of recipes that train on tokens of older weights: a rollout beside the training, and partial rollouts."""

from typing import TYPE_CHECKING

from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe


def check_one_step_off(recipe: "Recipe") -> None:
    """Checks what a rollout beside the training cannot be combined with."""
    given = f"'rollout.max_staleness' is {recipe.rollout.max_staleness}"
    if not recipe.rollout.max_staleness:
        return
    if recipe.rollout.budget_tokens:
        raise UserError(
            f"{given} with rollout.budget_tokens: the tokens of a sample that waits in the replay buffer grow older than that; remove one of the two"
        )
    if recipe.residents.plan not in ("auto", "keep"):
        raise UserError(
            f"{given} and residents.plan is '{recipe.residents.plan}': trainer and rollout work at the same time, so both stay in memory; set "
            "residents.plan to keep or auto, or rollout.max_staleness to 0"
        )
    if recipe.has_rounds and recipe.rewards_need_models:
        raise UserError(
            f"{given} with algorithm.filter_groups and rewards that other models give (section 'reward_model', or 'needs' of a reward function): a round "
            "that is drawn beside the training cannot wait for the trainer's models; remove one of the three"
        )
    _check_old_tokens(recipe, "rollout.max_staleness")


def check_partial(recipe: "Recipe") -> None:
    """Checks what partial rollouts cannot be combined with."""
    rollout, algorithm = recipe.rollout, recipe.algorithm
    if not rollout.budget_tokens:
        return
    if algorithm.filter_groups is not None:
        reason = "with rollout.budget_tokens a round begins as many groups as the step lacks"
        refuse_unread("algorithm.filter_groups", algorithm.filter_groups, reason, "gen_batch_size")
    if algorithm.learns_from_pairs:
        reason = "algorithm.name is 'online_dpo', whose loss does not depend on the policy that drew the tokens"
        refuse_unread("rollout", rollout, reason, "mask_off_policy")
    _check_old_tokens(recipe, "rollout.budget_tokens")


def _check_old_tokens(recipe: "Recipe", key: str) -> None:
    """Checks that tokens of older weights, which setting ``key`` brings, count with the probability that they were drawn with."""
    algorithm = recipe.algorithm
    if algorithm.old_logprobs == "recompute" and algorithm.tis_cap is None and not recipe.rollout.mask_off_policy:
        mask = ", rollout.mask_off_policy to true," if recipe.rollout.budget_tokens else ""
        raise UserError(
            f"'{key}' with algorithm.old_logprobs recompute: tokens of older weights would count as if the newest had drawn them; set "
            f"algorithm.tis_cap (2.0 is usual){mask} or algorithm.old_logprobs to rollout"
        )
