"""Starts DeepSpeed's engine over our network on this rank."""

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tandem.backends.deepspeed.network import LayerModule, Network
from tandem.config.trainer import TrainerConfig
from tandem.estimate.training.own_trainer import DEEPSPEED_BUCKET
from tandem.trainer.optimizers.adamw import names_to_decay
from tandem.trainer.rank_process import Rank


def start_engine(network: Network, stage: int, trainer: TrainerConfig, rank: Rank) -> Any:
    """Returns DeepSpeed's engine for ``network`` with ZeRO ``stage`` over all ranks. Every rank calls it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import logger as chatter

    chatter.setLevel(logging.WARNING)
    _connect(rank)
    if stage == 3:
        deepspeed.utils.set_z3_leaf_modules(network, [LayerModule])
    engine, *_ = deepspeed.initialize(model=network, optimizer=_optimizer(network, trainer), config=_settings(network, stage, trainer))
    if stage == 3:
        for parameter in network.ends():
            deepspeed.zero.register_external_parameter(network, parameter)
    return engine


def _connect(rank: Rank) -> None:
    """Makes torch's default process group, which DeepSpeed communicates over, once in a process."""
    if dist.is_initialized():
        return
    # Gloo would resolve this machine's name, which need not lead anywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world, store = rank.ranks.world, dist.PrefixStore("deepspeed/", rank.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=rank.timeout_s))
    # As DeepSpeed's own launcher sets it.
    os.environ["LOCAL_RANK"] = str(world.rank)


def _settings(network: Network, stage: int, trainer: TrainerConfig) -> dict[str, Any]:
    """Returns DeepSpeed's configuration. It divides gradients by the number of ranks and not by that of micro-batches, of which every step has its own
    number: two say that there may be several."""
    elements = sum(parameter.numel() for parameter in network.parameters())
    zero: dict[str, Any] = {
        "stage": stage, "reduce_bucket_size": min(DEEPSPEED_BUCKET, elements), "overlap_comm": False, "stage3_param_persistence_threshold": 0,
    }  # fmt: skip
    if trainer.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": trainer.max_grad_norm, "zero_optimization": zero,
        "steps_per_print": None,
    }  # fmt: skip


def _optimizer(network: Network, trainer: TrainerConfig) -> torch.optim.Optimizer:
    """Returns AdamW with the recipe's settings: torch's, or DeepSpeed's own with ``offload: cpu``."""
    parameters: dict[str, nn.Parameter] = dict(network.decoder.named_parameters())
    decayed = names_to_decay(parameters)
    groups = [
        {"params": [p for name, p in parameters.items() if (name in decayed) is decays], "weight_decay": trainer.weight_decay if decays else 0.0}
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": trainer.learning_rate, "betas": (trainer.beta1, trainer.beta2), "eps": trainer.epsilon}
    if trainer.offload == "cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        updated: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        return updated
    return torch.optim.AdamW(groups, fused=True, **options)
