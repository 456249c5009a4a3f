"""Builds a model that DeepSpeed trains, from a Hugging Face folder."""

from tandem.backends.deepspeed.engine import start_engine
from tandem.backends.deepspeed.network import Network
from tandem.backends.deepspeed.optimizer import DeepSpeedOptimizer
from tandem.backends.deepspeed.replica import DeepSpeedReplica
from tandem.backends.deepspeed.state import DeepSpeedState
from tandem.kernels.api import Kernels
from tandem.trainer.build import ReplicaSettings, load_network
from tandem.trainer.checkpoint.model_state import parts_of
from tandem.trainer.rank_process import Rank


def build_deepspeed(settings: ReplicaSettings, rank: Rank, kernels: Kernels) -> DeepSpeedState:
    """Returns this rank's part of the actor. One rank shards nothing, whatever the stage. Every rank reads the whole model once; DeepSpeed then keeps what it
    owns. Raises ``UserError`` if the folder does not hold the model."""
    stage, ranks = settings.parallel.zero or 1, rank.ranks
    model, _ = load_network(settings, ranks, kernels, is_filled=True)
    model.recompute = settings.trainer.recompute
    parts, network = parts_of(model), Network(model)
    engine = start_engine(network, stage, settings.trainer, rank)
    optimizer = DeepSpeedOptimizer(engine, stage, dict(model.named_parameters()), ranks)
    return DeepSpeedState(DeepSpeedReplica(ranks, model, network, engine, optimizer), parts)
