"""Makes the configured load balancing of a model's experts."""

from tandem.config.trainer import TrainerConfig
from tandem.layout.expert_balance import balance_loss
from tandem.model.decoder import Decoder
from tandem.model.joint_balance import JointBalance
from tandem.model.router_balance import RouterBalance
from tandem.trainer.parallel.ranks import Ranks


def make_balance(model: Decoder, config: TrainerConfig, ranks: Ranks) -> RouterBalance | None:
    """Returns the load balancing, or ``None`` for a model without experts or without balancing."""
    loss, groups = balance_loss(model.shapes, config), ranks.groups
    module = model.shapes.transformers
    if module is not None:
        if not loss or not module.loss_routers:
            return None
        return JointBalance(module.num_experts, len(module.loss_routers), module.experts_per_token, loss, groups["tokens"], model.device)
    experts = model.shapes.experts
    if experts is None or not (loss or config.router_bias_rate):
        return None
    layers = [i for i in model.layer_numbers if model.shapes.experts_of(i) is not None]
    return RouterBalance(
        experts.num_experts, layers, loss, config.router_bias_rate, groups["tokens"], groups["tensor"].size, groups["context"].size, groups["pipeline"],
        model.device,
    )
