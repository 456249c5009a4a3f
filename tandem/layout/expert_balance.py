"""Checks whether a recipe's settings for experts fit the model. Imports no torch."""

from tandem.config.trainer import TrainerConfig
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError


def check_balance(shapes: ModelShapes, config: TrainerConfig) -> None:
    """Raises ``UserError`` if ``config`` balances the experts of a model without experts, or of one whose router is balanced by a bias of its own."""
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
