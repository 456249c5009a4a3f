"""Builds one rank's part of a model that Megatron-Core trains, from a Hugging Face folder."""

import torch

from tandem.backends.library_sums import LibrarySums
from tandem.backends.megatron.groups import connect
from tandem.backends.megatron.model_check import check_model
from tandem.backends.megatron.network import build_network, build_optimizer
from tandem.backends.megatron.optimizer import MegatronOptimizer
from tandem.backends.megatron.replica import MegatronModel, MegatronReplica
from tandem.backends.megatron.state import MegatronState
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.trainer.build import ReplicaSettings
from tandem.trainer.rank_process import Rank
from tandem.types import UserError


def build_megatron(settings: ReplicaSettings, rank: Rank) -> MegatronState:
    """Returns this rank's part of the actor with its optimizer. Raises ``UserError`` if the folder does not hold the model, or a model that is not built
    here."""
    ranks, parallel, shapes = rank.ranks, settings.parallel, read_shapes(settings.start, "any")
    check_model(shapes, parallel)
    connect(ranks, rank.store, rank.timeout_s, parallel.virtual_stages)
    network = build_network(shapes, ranks, settings.trainer, parallel)
    optimizer = MegatronOptimizer(network, build_optimizer(network, settings.trainer, is_sharded=parallel.zero == 1), ranks)
    model = MegatronModel(shapes, torch.float32, ranks.device)
    state = MegatronState(MegatronReplica(ranks, model, network, optimizer, None if ranks.world.size == 1 else LibrarySums(ranks)))
    try:
        state.fill(read_tensors(settings.start))
    except UserError as error:
        raise UserError(f"model '{settings.start}': {error}") from None
    return state
