"""Makes the configured optimizer over a decoder's parameters."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from tandem.config.trainer import TrainerConfig
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.trainer.optimizers.adamw import AdamW, Optimizer, PieceOptimizer, matrices_among
from tandem.trainer.optimizers.adamw_8bit import FEWEST_CODED, AdamW8bit
from tandem.trainer.optimizers.adamw_host import HostAdamW
from tandem.trainer.optimizers.adamw_paged import PagedAdamW
from tandem.trainer.optimizers.matrices import ALONE, COLUMNS, ROWS, Matrices, Stack
from tandem.trainer.optimizers.muon import Muon
from tandem.trainer.parallel.flat_buffer import FlatBuffer


def make_optimizer(model: Decoder, config: TrainerConfig, directory: Path | None = None, is_filled: bool = True) -> Optimizer:
    """Returns the optimizer ``config.optimizer`` over ``model``. ``directory``: the run's folder, the default for offloaded state.
    ``is_filled``: the model has its weights."""
    parameters = list(model.named_parameters())
    if config.offload == "nvme":
        layers_of = model if config.offload_parameters == "nvme" else None
        return PagedAdamW(parameters, config, offload_folder(config, directory), layers_of, is_filled)
    return make_piece_optimizer(model, config, dict(parameters))


def make_piece_optimizer(
    model: Decoder, config: TrainerConfig, pieces: Mapping[str, nn.Parameter], paged: Sequence[Sequence[str]] = (), *,
    buckets: Sequence[FlatBuffer] = (), directory: Path | None = None,
) -> PieceOptimizer:  # fmt: skip
    """Returns the optimizer ``config.optimizer`` over ``pieces`` of the parameters of ``model``: this rank's pieces of ``buckets`` under
    ZeRO, or the whole parameters without buckets. ``paged``: groups of names whose weights are in the offload file."""
    parameters = dict(model.named_parameters())
    matrices = matrices_among(parameters)
    if config.offload == "nvme":
        return PagedAdamW(pieces.items(), config, offload_folder(config, directory), paged=paged, decayed=matrices)
    if config.optimizer == "muon":
        others: tuple[str, ...] = ("router", "shared_gate", "convolution")
        hidden = [
            name for name, parameter in parameters.items()
            if name in matrices and name.startswith("layers.") and not name.endswith(others) and is_hidden(model, name, parameter)
        ]  # fmt: skip
        return Muon(pieces.items(), config, hidden, matrices=matrices_of(model, hidden, buckets), decayed=matrices)
    if config.optimizer == "adamw8bit":
        others = ("embed_tokens", "lm_head.weight", "router", "shared_gate", "convolution")
        whole = [name for name, parameter in parameters.items() if name.endswith(others) or not is_hidden(model, name, parameter)]
        # The sizes of the whole model decide, so that what is coded does not depend on the mesh.
        shard_spec = model.shard_spec
        ranks_of = lambda name: shard_spec.size * (shard_spec.expert_size if ".experts." in name else 1)
        coded = {name for name in matrices if parameters[name].numel() * ranks_of(name) >= FEWEST_CODED}
        return AdamW8bit(pieces.items(), config, whole, matrices, coded)
    # Offloading to host memory makes sense for parameters on a GPU only.
    is_offloaded_from_gpu = config.offload == "cpu" and any(piece.is_cuda for piece in pieces.values())
    return (HostAdamW if is_offloaded_from_gpu else AdamW)(pieces.items(), config, matrices)


def is_hidden(model: Decoder, name: str, parameter: nn.Parameter) -> bool:
    """Returns whether the parameter ``name`` of a module of transformers is no router and no head, which have other names there; of other networks ``True``."""
    module = model.shapes.transformers
    return module is None or module.is_hidden(name, parameter.shape[-2] if parameter.ndim > 1 else 1)


def matrices_of(model: Decoder, names: Sequence[str], buckets: Sequence[FlatBuffer] = ()) -> Matrices:
    """Describes how the parameters ``names`` of ``model`` consist of matrices and are sharded over ranks."""
    parameters, rows = dict(model.named_parameters()), stacked_parts(names, model.local)
    tensor = model.parallel.tensor if model.parallel is not None else None
    stacks = {}
    for name in names:
        shape, axis = parameters[name].shape, None
        if tensor is not None and tensor.size > 1 and not re.search(r"\.latent\.(q|kv)_a_proj", name):
            is_by_rows = re.search(r"(qkv|gate_up|latent\.(q|q_b|kv_b)|linear_attention\.in)_proj", name) is not None
            axis = ROWS if model.shard_spec.deterministic or is_by_rows else COLUMNS
        module = model.shapes.transformers
        own_rows = (shape[-2],) if module is None else module.rows_of(name, shape)
        stacks[name] = Stack(shape, rows.get(name, own_rows), axis)
    return Matrices(stacks, tensor or ALONE, buckets)


def offload_folder(config: TrainerConfig, directory: Path | None) -> Path:
    """Returns the folder of the unnamed offload files. ``directory``: the run's folder."""
    if config.offload_folder:
        return Path(config.offload_folder)
    assert directory is not None
    return directory / "offload"


def stacked_parts(names: Sequence[str], shapes: ModelShapes) -> dict[str, tuple[int, ...]]:
    """Returns the rows of each matrix in the parameters that stack several (q, k and v; gate and up)."""
    rows: dict[str, tuple[int, ...]] = {}
    for name in names:
        if "qkv_proj" in name:
            rows[name] = (shapes.query_rows, shapes.key_value_size, shapes.key_value_size)
        elif "experts.gate_up_proj" in name and shapes.experts is not None:
            rows[name] = (shapes.experts.intermediate_size,) * 2
        elif "gate_up_proj" in name and shapes.transformers is None:
            experts = shapes.experts_of(int(name.split(".")[1]))
            rows[name] = (shapes.intermediate_size if experts is None else experts.shared_intermediate_size,) * 2
    return rows
