"""One rank of a mesh of Megatron-Core that loads a distributed checkpoint and saves it as its own: ``python megatron_dist_ranks.py JSON``.

What it loads are the whole checkpoint's tensors by Megatron's own ``sharded_state_dict``. ``out`` gets this rank's parts of them under Hugging Face's names.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from trained_steps import make_rank, published

from tandem.backends.megatron.build import build_megatron
from tandem.backends.megatron.network import gpt_of
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.layout.mesh import Mesh, MeshShape
from tandem.trainer.build import ReplicaSettings


def main(given: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing

    torch.set_num_threads(1)
    rank = make_rank(Mesh(MeshShape(**given["shape"]), given["rank"]), given)
    parallel = ParallelConfig(**given["shape"], sequence_parallel=given["shape"]["tensor"] > 1)
    state = build_megatron(ReplicaSettings(Path(given["model"]), rank.directory, TrainerConfig(backend="megatron"), parallel, 100), rank)
    gpt = gpt_of(state.replica.network[0])
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.fill_(7.0)
    maps = [layer.submodules_config.sharded_state_dict_keys_map for layer in gpt.decoder.layers]
    if given["experts"]:
        # The keys of Transformer Engine's layers, in which the norm before experts is a layer of its own.
        for layer in gpt.decoder.layers:
            if hasattr(layer.mlp, "experts"):
                renamed = layer.submodules_config.sharded_state_dict_keys_map
                layer.submodules_config.sharded_state_dict_keys_map = {key: to for key, to in renamed.items() if "linear_fc1" not in to}
    loaded = dist_checkpointing.load({"model": gpt.sharded_state_dict()}, given["read"])
    gpt.load_state_dict(loaded["model"], strict=False)
    for layer, renamed in zip(gpt.decoder.layers, maps, strict=True):
        layer.submodules_config.sharded_state_dict_keys_map = renamed
    dist_checkpointing.save({"args": loaded["args"], "iteration": 7, "model": gpt.sharded_state_dict()}, given["write"])
    assert isinstance(loaded["args"], Namespace)
    torch.save(published(state), given["out"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    # Threads of the process groups may still wait for ranks that have ended.
    os._exit(0)
