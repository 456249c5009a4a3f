"""Writes and reads Megatron's distributed checkpoints (``torch_dist``) with ``megatron.core.dist_checkpointing``, in the sidecar's environment.

``python -m tandem.backends.megatron.dist_checkpoint JSON`` with the keys of ``Task``. One process has the whole model; the format divides tensors by their
places in the whole ones, so that any mesh reads what one process wrote, and one process what any mesh wrote. An error is one line, with exit status 2.
"""

import importlib.util
import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from tandem.backends.megatron.dist_process import Task
from tandem.backends.megatron.groups import connect
from tandem.backends.megatron.model_check import missing_block
from tandem.backends.megatron.network import build_gpt, keep_biases, named_biases, transformer_config
from tandem.backends.megatron.parts import parts_of
from tandem.config.parallel import ParallelConfig
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.model.huggingface.safetensors_file import write_file
from tandem.model.megatron.arguments import arguments_of
from tandem.model.megatron.layout import MegatronMesh, MegatronRank
from tandem.trainer.rank_process import alone
from tandem.types import UserError

WEIGHTS_FILE = "model.safetensors"
FUSED_NORM = "mlp.linear_fc1.layer_norm_"
TIMEOUT_S = 600.0


class WholeModel:
    """A ``GPTModel`` in one process, with the tensors of Hugging Face's names as views of its parameters."""

    def __init__(self, shapes: ModelShapes, dtype: torch.dtype) -> None:
        lacking = missing_block(shapes)
        if lacking is not None:
            raise UserError(f"the model has {lacking}, which Megatron-Core's layers are not built for here; convert with --to megatron")
        ranks = alone("cpu")
        connect(ranks, dist.HashStore(), TIMEOUT_S)
        self.shapes = shapes
        # Norms are made in fp32. Training has them in the dtype of the other weights, and routers' biases in fp32.
        self.network = build_gpt(shapes, transformer_config(shapes, ranks, dtype, ParallelConfig())).to(dtype)
        keep_biases([self.network])
        self._parameters: dict[str, Tensor] = {name: parameter.detach() for name, parameter in self.network.named_parameters()}
        self._parameters |= named_biases([self.network])
        self._parts = parts_of(shapes, MegatronMesh(), MegatronRank(0, 0, 0))

    def views(self) -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
        """Yields views of all weights with their names and places in Hugging Face's tensors."""
        for part in self._parts:
            flat = self._parameters[part.parameter].view(-1)
            yield part.name, part.offsets.slices, flat[part.first : part.first + part.offsets.numel].view(part.offsets.shape)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        for parameter in self._parameters.values():
            parameter.zero_()
        for name, slices, view in self.views():
            view.copy_(tensors[name][slices])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor by its Hugging Face name, one of them in memory at a time."""
        held: dict[str, list[tuple[tuple[slice, ...], Tensor]]] = {}
        for name, slices, view in self.views():
            held.setdefault(name, []).append((slices, view))
        for name, shape in parameters(self.shapes):
            whole = torch.empty(tuple(shape), dtype=held[name][0][1].dtype)
            for slices, view in held[name]:
                whole[slices] = view
            yield name, whole

    def sharded(self, metadata: dict[str, Any] | None = None, fused_expert_norm: bool = False) -> dict[str, Any]:
        """Returns the state as ``dist_checkpointing`` takes it, under the keys of Transformer Engine's layers. The local specification of 0.16 names the norm
        before experts as that before a dense MLP, which is a part of the next linear layer there and not before experts; ``fused_expert_norm``: so too."""
        if not fused_expert_norm:
            for index, layer in enumerate(self.network.decoder.layers):
                if self.shapes.experts_of(index) is not None:
                    renamed = layer.submodules_config.sharded_state_dict_keys_map
                    layer.submodules_config.sharded_state_dict_keys_map = {key: to for key, to in renamed.items() if to != FUSED_NORM}
        state: dict[str, Any] = self.network.sharded_state_dict(metadata=metadata)
        return state


def write(task: Task) -> None:
    """Writes the model to ``task.checkpoint`` in its own dtype."""
    from megatron.core import dist_checkpointing

    tensors, shapes = dict(read_tensors(Path(task.model))), read_shapes(Path(task.model))
    dtype = tensors["model.embed_tokens.weight"].dtype
    whole = WholeModel(shapes, dtype)
    whole.fill(tensors)
    arguments: Namespace = arguments_of(shapes, MegatronMesh(), dtype, task.iteration)
    Path(task.checkpoint).mkdir(parents=True)
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": task.iteration, "model": whole.sharded()}
    dist_checkpointing.save(state, task.checkpoint)


def read(task: Task) -> None:
    """Writes the weights of ``task.checkpoint`` to ``model.safetensors`` in ``task.model``, in the dtype that they have there."""
    from megatron.core import dist_checkpointing

    shapes, held = read_shapes(Path(task.model)), dist_checkpointing.load_tensors_metadata(task.checkpoint)
    if "embedding.word_embeddings.weight" not in held:
        raise UserError(f"'{task.checkpoint}' has no 'embedding.word_embeddings.weight'; it is not the checkpoint of a GPT of Megatron-Core")
    whole = WholeModel(shapes, held["embedding.word_embeddings.weight"].dtype)
    metadata = {"non_homogeneous_layers": any(key.startswith("decoder.layers.0.") for key in held)}
    wanted = whole.sharded(metadata, fused_expert_norm=shapes.experts is not None and not any("pre_mlp_layernorm" in key for key in held))
    # Of layers' further state, of which there is none here, every kind of layers has keys of its own.
    wanted = {key: value for key, value in wanted.items() if not key.endswith("_extra_state")}
    try:
        loaded = dist_checkpointing.load({"model": wanted}, task.checkpoint)
    except (CheckpointException, dist_checkpointing.core.CheckpointingException, RuntimeError, KeyError, ValueError, OSError) as error:
        # Torch's, which is no ``Exception``, has the stacks of the ranks; the reason is their last line.
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
        raise UserError(f"'{task.checkpoint}' is damaged or of another model than its config.json says ({line})") from None
    whole.network.load_state_dict(loaded["model"], strict=False)
    write_file(Path(task.model) / WEIGHTS_FILE, whole.tensors())


def main(task: Task) -> None:
    warnings.filterwarnings("ignore")
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"Megatron-Core needs a CUDA device to read and write distributed checkpoints ({str(error).splitlines()[0]})") from None
    if importlib.util.find_spec("psutil") is None:
        # Without it the processes that write end at once, and Megatron waits for them without end.
        raise UserError("the environment of the megatron sidecar has no psutil; make it again with: tandem sidecar install megatron --force")
    {"write": write, "read": read}[task.action](task)


if __name__ == "__main__":
    try:
        main(Task(**json.loads(sys.argv[1])))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
