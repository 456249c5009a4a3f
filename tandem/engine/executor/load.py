"""Loads the decoder of an engine: from a model folder, or with random weights in the shapes of one."""

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from tandem.config.engine import AttentionBackend
from tandem.config.implementation import OWN, Implementation
from tandem.config.lora import LoraConfig
from tandem.estimate.model_bytes import weight_bytes
from tandem.kernels import KernelChoice, select, why_reference
from tandem.kernels.mixed import Precision, emulation_note, in_precision
from tandem.layout.shapes import adapted_shapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_config import Heads
from tandem.model.huggingface.model_folder import load_model, read_shapes, unfilled_model
from tandem.model.initialise import initialise
from tandem.model.parallel.tensor_parallel import RankGroup
from tandem.model.quantization.formats import INT4_LAYOUTS, CheckpointFormat, read_format
from tandem.model.quantization.load import load_quantized, scheme_of
from tandem.model.quantization.scheme import scheme_named
from tandem.runtime.machine.available_memory import total_bytes
from tandem.types import UserError

_LOG = logging.getLogger(__name__)
LoadFormat = Literal["auto", "dummy"]


def check_quantization(model: str | Path, quantization: str | None, ranks: int = 1, deterministic: bool = True) -> CheckpointFormat | None:
    """Returns the format of a quantised checkpoint, ``None`` for a plain one; with ``w4a8`` the inputs of one in int4 are rounded. Raises ``UserError``
    for options that cannot be combined."""
    stored = read_format(model)
    if quantization is not None:
        scheme_named(quantization)
    if stored is not None and quantization == "w4a8" and stored.layout in INT4_LAYOUTS:
        stored = replace(stored, rounds_inputs=True)
    elif stored is not None and quantization is not None:
        fix = "leave quantization out, or 'w4a8', which rounds the inputs" if stored.layout in INT4_LAYOUTS else "leave quantization out"
        raise UserError(f"'{model}' is quantised already ({stored.layout}); {fix}, or take the float checkpoint")
    if (stored is not None or quantization is not None) and ranks > 1 and not deterministic:
        # A scale belongs to a row or a part of it, so a rank with a slice of the columns would have different scales than one process.
        raise UserError("quantised weights are cut by rows only, which deterministic=False is not; leave it out or use tensor_parallel_size 1")
    return stored


def load_decoder(
    model: str | Path, kernels: KernelChoice, dtype: torch.dtype, device: torch.device, load_format: LoadFormat, seed: int,
    group: RankGroup | None = None, pack: bool = False, quantization: str | None = None, deterministic: bool = True,
    attention: AttentionBackend = "auto", precision: Precision = "fp32", lora: LoraConfig | None = None, heads: Heads = "language",
    implemented_by: Implementation = OWN,
) -> Decoder:
    """Returns the model in the folder ``model``.

    Args:
        model: A Hugging Face folder.
        kernels: The kernels to use.
        dtype: The dtype of weights and activations.
        device: The device of the weights.
        load_format: ``dummy``: random weights in the shapes of the folder.
        seed: The seed of random weights.
        group: The tensor-parallel group, of which this rank loads its shard.
        pack: Whether the weights of a folder are packed for inference as they are read.
        quantization: How plain matrices are rounded whenever the decoder is packed. A quantised checkpoint has its own format.
        deterministic: Whether kernels keep the same bits for every batch.
        attention: The attention backend of whole prompts, as in ``EngineArgs``.
        precision: The precision of the trainer whose bits the decoder reproduces.
        lora: The adapter that is trained beside the weights; it begins as a new one.
        heads: Those that the model may have.
        implemented_by: Who computes it.

    Raises:
        UserError: Options that cannot be combined.
    """
    plain = select(kernels, dtype, device, deterministic, attention)
    if group is None or group.shard_spec.rank == 0:
        _note_once(emulation_note(precision, device, plain, "here"))
        # Why there are no kernels for fp32 is logged where they are loaded.
        _note_once("" if dtype == torch.float32 else why_reference(kernels, plain, dtype, device))
    chosen = in_precision(plain, precision, device)
    ranks = () if group is None else (group.shard_spec.size, group.shard_spec.deterministic)
    stored = check_quantization(model, quantization, *ranks)
    scheme = scheme_of(stored) if stored is not None else None if quantization is None else scheme_named(quantization)
    if load_format == "auto":
        if stored is not None:
            if lora is not None:
                raise UserError(f"model '{model}' is quantized, which an adapter in training does not support; use the float checkpoint")
            if heads != "language":
                raise UserError(f"model '{model}' is quantized, which engines that embed or score texts do not read; use the float checkpoint")
            return load_quantized(model, stored, chosen, dtype=dtype, device=device, group=group)
        return load_model(
            model, chosen, dtype=dtype, device=device, group=group, pack=pack, quantization=scheme, heads=heads, lora=lora, seed=seed,
            implemented_by=implemented_by,
        )
    shapes = adapted_shapes(read_shapes(model, heads, implemented_by), lora)
    if (size := weight_bytes(shapes, str(dtype).removeprefix("torch."))) > (held := total_bytes()) and torch.device(device).type == "cpu":
        raise UserError(f"model '{model}' has weights of {size / 2**30:,.1f} GiB, and this machine has {held / 2**30:,.1f} GiB; choose a smaller model")
    if implemented_by.is_transformers:
        decoder = unfilled_model(model, chosen, dtype=dtype, device=device, lora=lora, implemented_by=implemented_by)
    else:
        decoder = Decoder(shapes, chosen, dtype=dtype, device=device, group=group)
    initialise(decoder, seed)
    decoder.quantization = scheme
    return decoder


@cache
def _note_once(note: str) -> None:
    if note:
        _LOG.warning("engine %s", note)
