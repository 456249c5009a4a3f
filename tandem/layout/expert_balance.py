"""Checks whether a recipe's settings for experts fit the model. Imports no torch."""

from tandem.config.trainer import TrainerConfig
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError


def balance_loss(shapes: ModelShapes, config: TrainerConfig) -> float:
    """Returns the coefficient of the load-balancing loss: that of the recipe, or of the folder's ``config.json`` where a module of transformers reads it."""
    asked = 0.0 if shapes.transformers is None else shapes.transformers.router_loss
    return asked if config.router_balance_loss is None else config.router_balance_loss


def check_balance(shapes: ModelShapes, config: TrainerConfig) -> None:
    """Raises ``UserError`` if ``config`` balances the experts of a model without experts, or of one whose router is balanced by a bias of its own."""
    if shapes.transformers is not None:
        _check_module(shapes, config)
        return
    if config.router_balance_loss and config.lora is not None:
        raise UserError(
            f"'trainer.router_balance_loss' is {config.router_balance_loss} and trainer.lora leaves routers as they are; set trainer.router_balance_loss to 0"
        )
    for name in ("router_balance_loss", "router_bias_rate"):
        if getattr(config, name) and shapes.experts is None:
            raise UserError(f"'trainer.{name}' is {getattr(config, name)}; this {shapes.architecture} model has no experts: leave it at 0")
        if getattr(config, name) and shapes.experts is not None and shapes.experts.sigmoid is not None:
            raise UserError(
                f"'trainer.{name}' is {getattr(config, name)}; this {shapes.architecture} model chooses experts by sigmoid scores and a bias of its own, which "
                "stays as it is: leave it at 0"
            )
    if config.router_bias_rate and shapes.experts is not None and shapes.experts.softmax is not None:
        raise UserError(
            f"'trainer.router_bias_rate' is {config.router_bias_rate}; this {shapes.architecture} model chooses experts by groups, or scales their gates, "
            "without a bias: leave it at 0, or set trainer.router_balance_loss"
        )


def _check_module(shapes: ModelShapes, config: TrainerConfig) -> None:
    module, loss = shapes.transformers, balance_loss(shapes, config)
    assert module is not None
    if loss and not module.loss_routers and config.router_balance_loss is None:
        raise UserError(
            f"config.json has 'output_router_logits', with which transformers adds a load-balancing loss; that of {module.class_name} cannot be added here; "
            "set trainer.router_balance_loss to 0 to train without it"
        )
    if loss and not module.loss_routers:
        raise UserError(
            f"'trainer.router_balance_loss' is {loss}, and {module.class_name} has no load-balancing loss in transformers, or none that can be added here; "
            "leave it out"
        )
    if loss and config.share_prompts:
        raise UserError(
            f"'trainer.share_prompts' is true, so that a prompt's tokens count once in the load-balancing loss, whose coefficient is {loss} "
            f"({'config.json' if config.router_balance_loss is None else 'trainer.router_balance_loss'}); set trainer.share_prompts to false, or "
            "trainer.router_balance_loss to 0"
        )
