"""Connects Megatron-Core's process groups on the ranks of a mesh."""

import os
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tandem.backends.collective_errors import collectives_of
from tandem.backends.megatron.device_check import no_device
from tandem.trainer.parallel.ranks import Ranks

SEED = 1234
"""Of Megatron's random states, from which nothing is drawn: there is no dropout, and weights are read from a folder."""


def connect(ranks: Ranks, store: Any, timeout_s: float, virtual_stages: int = 1) -> None:
    """Makes Megatron's process groups, once for this process. ``store``: reaches all ranks; ``timeout_s``: after which a collective ends;
    ``virtual_stages``: of each rank of a pipeline.

    Megatron numbers ranks as ``layout.mesh`` does: tensor innermost, then data, whose neighbours share the experts, and the pipeline outermost. Raises
    ``UserError`` on a machine without CUDA, which Megatron-Core takes for granted."""
    # They are about packages that are not installed on purpose, and about names inside torch.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.c10d_logger")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise no_device(str(error).splitlines()[0]) from None
    if parallel_state.model_parallel_is_initialized():
        return
    shape = ranks.mesh.shape
    if ranks.device.type == "cpu":
        # Gloo would resolve this machine's name, which need not lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if ranks.device.type == "cuda" else "gloo", store=dist.PrefixStore("megatron/", store), rank=ranks.mesh.rank, world_size=shape.world,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    parallel_state.initialize_model_parallel(
        shape.tensor, shape.pipeline, virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
        expert_model_parallel_size=shape.expert, create_gloo_process_groups=False,
        distributed_timeout_minutes=int(timeout_s // 60) + 1,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(SEED)


named = partial(collectives_of, "Megatron-Core")
"""A context for a collective of Megatron's."""
