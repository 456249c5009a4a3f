"""The optimizer that a recipe names, over a decoder's parameters."""

from collections.abc import Collection, Sequence
from pathlib import Path

from torch import nn

from tandem.config.trainer import TrainerConfig
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.trainer.adamw_8bit import AdamW8bit
from tandem.trainer.adamw_host import HostAdamW
from tandem.trainer.adamw_paged import PagedAdamW
from tandem.trainer.muon import Muon, Stacked
from tandem.trainer.optimizer import AdamW, Optimizer


def make_optimizer(model: Decoder, config: TrainerConfig, directory: Path | None = None, is_filled: bool = True) -> Optimizer:
    """The optimizer ``config.optimizer`` over ``model``. ``directory``: the run's, for what is offloaded to no other folder. ``is_filled``: the
    model has its weights."""
    parameters = list(model.named_parameters())
    if config.offload == "nvme":
        layers_of = model if config.offload_parameters == "nvme" else None
        return PagedAdamW(parameters, config, offload_folder(config, directory), layers_of, is_filled)
    if config.optimizer == "muon":
        names = [name for name, p in parameters if name.startswith("layers.") and p.ndim >= 2 and not name.endswith("router")]
        return Muon(parameters, config, names, stacked_parts(names, model.local))
    if config.optimizer == "adamw8bit":
        return AdamW8bit(parameters, config, whole=[name for name, _ in parameters if name.endswith(("embed_tokens", "lm_head.weight", "router"))])
    return plain_adamw(parameters, config)


def plain_adamw(parameters: Sequence[tuple[str, nn.Parameter]], config: TrainerConfig, decayed: Collection[str] | None = None) -> AdamW | HostAdamW:
    """``AdamW``, with its moments in the host's memory where that is asked for and the parameters are on a GPU."""
    is_on_gpu = any(parameter.is_cuda for _, parameter in parameters)
    return (HostAdamW if config.offload == "cpu" and is_on_gpu else AdamW)(parameters, config, decayed)


def offload_folder(config: TrainerConfig, directory: Path | None) -> Path:
    """Where the files are that nothing leads to; ``directory``: the run's."""
    if config.offload_folder:
        return Path(config.offload_folder)
    assert directory is not None
    return directory / "offload"


def stacked_parts(names: list[str], shapes: ModelShapes) -> Stacked:
    """The rows of each matrix in the parameters that stack several: q, k and v; gate and up."""
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        if "qkv_proj" in name:
            found[name] = (shapes.query_size, shapes.key_value_size, shapes.key_value_size)
        elif "experts.gate_up_proj" in name:
            assert shapes.experts is not None
            found[name] = (shapes.experts.intermediate_size,) * 2
        elif "gate_up_proj" in name:
            found[name] = (shapes.intermediate_size,) * 2
    return found
