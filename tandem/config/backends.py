"""What a trainer or an engine of another library cannot be combined with."""

from typing import TYPE_CHECKING

from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe


def check_backends(recipe: "Recipe") -> None:
    """Raises ``UserError`` for the first key of ``recipe`` that ``trainer.backend`` or ``rollout.backend`` does not take."""
    if recipe.trainer.backend == "megatron":
        _check_megatron(recipe)
    if recipe.trainer.backend == "deepspeed":
        _check_deepspeed(recipe)
    if recipe.rollout.backend == "vllm":
        _check_vllm(recipe)


def _check_megatron(recipe: "Recipe") -> None:
    raise UserError("'trainer.backend' is 'megatron', which this version can install and not yet drive; set it to tandem")


def _check_deepspeed(recipe: "Recipe") -> None:
    raise UserError("'trainer.backend' is 'deepspeed', which this version can install and not yet drive; set it to tandem")


def _check_vllm(recipe: "Recipe") -> None:
    raise UserError("'rollout.backend' is 'vllm', which this version can install and not yet drive; set it to tandem")
