"""Random initialisation of weights."""

import math

import torch
from torch import Tensor

from tandem.layout.expert_shapes import CHOICE_BIAS
from tandem.layout.linear_attention import OUTPUT
from tandem.layout.parameters import is_of_adapter, parameters
from tandem.model.decoder import Decoder
from tandem.model.drawn import generator_of, new_adapter
from tandem.model.huggingface.model_folder import load_adapter_tensors, part_of, to_huggingface


@torch.no_grad()
def initialise(decoder: Decoder, seed: int, standard_deviation: float = 0.02) -> None:
    """Fills every parameter: norms to multiply with 1, biases with 0 (of the decay of linear attention with 1), matrices and
    sinks from a normal distribution of ``standard_deviation``, divided by
    sqrt(2 layers) for matrices that write to the residual stream (Radford et al., 2019, section 2.3).

    Each matrix is drawn in fp32 on one CPU thread by a generator seeded with ``seed`` and its Hugging Face name, so that the values do not
    depend on fusing, order, device or thread count, and a rank's shard has the values of the whole matrix.
    """
    whole = dict(parameters(decoder.shapes))
    residual = standard_deviation / math.sqrt(2 * decoder.shapes.num_hidden_layers)
    experts = decoder.shapes.experts
    to_residual = ("o_proj.weight", f"{OUTPUT}.weight", "down_proj.weight", *([f"{experts.names.down.rpartition('{}')[2]}.weight"] if experts else []))
    for name, tensor in to_huggingface(decoder):
        if name.endswith("norm.weight"):
            tensor.fill_(0.0 if decoder.shapes.norms_from_one and ".linear_attn." not in name else 1.0)
        elif name.endswith("dt_bias"):
            tensor.fill_(1.0)
        elif name.endswith("A_log"):
            # Decays of all lengths from the start: A uniform between 0.01 and 16, as in transformers.
            drawn = torch.empty(whole[name]).uniform_(0.01, 16.0, generator=generator_of(seed, name)).log_()
            tensor.copy_(part_of(decoder, name, drawn))
        elif name.endswith((".bias", CHOICE_BIAS)):
            tensor.fill_(0.0)
        elif is_of_adapter(name):
            continue
        else:
            deviation = residual if name.endswith(to_residual) else standard_deviation
            tensor.copy_(part_of(decoder, name, drawn_matrix(seed, name, whole[name], deviation)))
    if decoder.shapes.lora is not None:
        load_adapter_tensors(decoder, {name: part_of(decoder, name, tensor) for name, tensor in new_adapter(decoder.shapes, seed)})


def drawn_matrix(seed: int, name: str, shape: tuple[int, ...], standard_deviation: float) -> Tensor:
    """Returns the fp32 matrix that the generator of ``seed`` and ``name`` draws."""
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, standard_deviation, generator=generator_of(seed, name))
