"""Makes the configured load balancing of a model's experts."""

from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.model.router_balance import RouterBalance
from tandem.trainer.parallel.ranks import Ranks


def make_balance(model: Decoder, config: TrainerConfig, ranks: Ranks) -> RouterBalance | None:
    """Returns the load balancing, or ``None`` for a model without experts or without balancing."""
    experts = model.shapes.experts
    if experts is None or not (config.router_balance_loss or config.router_bias_rate):
        return None
    layers = [i for i in model.layer_numbers if model.shapes.experts_of(i) is not None]
    groups = ranks.groups
    return RouterBalance(
        experts.num_experts, layers, config.router_balance_loss, config.router_bias_rate, groups["tokens"], groups["tensor"].size,
        groups["context"].size, groups["pipeline"], model.device,
    )
