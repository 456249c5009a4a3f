"""Quantizes a float model folder, layer by layer."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tandem.kernels import Kernels
from tandem.kernels.quantized import QuantizedWeight, plain_weight
from tandem.layout.parameters import parameters
from tandem.layout.quantizable import cannot
from tandem.model.decoder import Decoder
from tandem.model.huggingface.hub import WEIGHTS
from tandem.model.huggingface.model_config import read_json
from tandem.model.huggingface.model_folder import load_model, to_huggingface
from tandem.model.huggingface.safetensors_file import write_file
from tandem.model.huggingface.stacked_matrices import MatrixStacks
from tandem.model.quantization import calibration
from tandem.model.quantization.awq import clip
from tandem.model.quantization.awq_layer import clip_experts, is_of_queries, sampled_inputs, scale_layer
from tandem.model.quantization.experts import gptq_experts, replace_experts, round_experts
from tandem.model.quantization.gptq import Hessian, gptq
from tandem.model.quantization.load import projections_of
from tandem.model.quantization.scheme import GROUP_SIZES, Scheme, Stored, joined_rows, round_to_nearest, split_rows
from tandem.model.quantization.writing import CALIBRATED, Method, left_plain, quantization_config, stored_tensors
from tandem.storage.folder_manifest import write_manifest
from tandem.text.tokenizer import TOKENIZER_FILES
from tandem.types import RunError, UserError

METHODS: tuple[Method, ...] = ("int8", "fp8", "rtn", "gptq", "awq")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """``bits`` and ``group_size`` (0: one scale per row) are for int4. ``damping``, ``act_order``: see ``gptq.gptq``."""

    method: Method
    bits: int = 4
    group_size: int = 128
    damping: float = 0.01
    act_order: bool = False

    def check(self) -> None:
        """Raises ``UserError`` for invalid options."""
        if self.method not in METHODS:
            raise UserError(f"--method is '{self.method}'; it must be one of {', '.join(METHODS)}")
        if self.bits != 4 and self.method not in ("int8", "fp8"):
            raise UserError(f"--bits is {self.bits}; {self.method} stores 4 (int8 and fp8 store 8)")
        if self.group_size not in (0, *GROUP_SIZES):
            raise UserError(f"--group-size is {self.group_size}; it must be one of {', '.join(map(str, GROUP_SIZES))}, or 0 for whole rows")
        if not 0 < self.damping < 1:
            raise UserError(f"--damping is {self.damping}; it must be above 0 and below 1")

    def scheme(self, dtype: torch.dtype) -> Scheme:
        if self.method == "int8":
            return Scheme("int8", inputs="int8")
        if self.method == "fp8":
            return Scheme("float8_e4m3", inputs="float8_e4m3")
        half = self.method in CALIBRATED or dtype == torch.float16
        return Scheme("int4", self.group_size, symmetric=self.method != "awq", half_scales=half)


def quantize_folder(
    source: str | Path, target: str | Path, options: QuantizeOptions, kernels: Kernels, sequences: list[Tensor], progress: Progress
) -> list[str]:
    """Writes ``target``, which loads in this engine and, if the format's package is installed, in transformers. Returns the modules of experts that gptq
    rounded to nearest, because too few calibration tokens were routed to them.

    ``sequences``: calibration tokens, for gptq and awq. ``progress`` is called with the finished and the total number of layers. The folder
    is written atomically: an interrupted run leaves ``.NAME.partial`` next to it, which the next run removes. Raises ``UserError`` before
    any work if it is not possible.
    """
    source, target = Path(source), Path(target)
    options.check()
    if target.exists():
        raise UserError(f"'{target}' already exists; choose another folder or remove it")
    if options.method in CALIBRATED and not sequences:
        raise UserError(f"--method {options.method} needs calibration text; give --calibration FILE")
    decoder = load_model(source, kernels)
    if (reason := cannot(decoder.shapes, options.method)) is not None:
        raise UserError(f"'{source}' has {reason}; choose another method")
    dtype = _dtype(source)
    partial = target.with_name(f".{target.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        quantized, rounded = _quantize(decoder, options, dtype, sequences, progress)
        write_file(partial / WEIGHTS, _all_tensors(decoder, quantized, options.method, dtype))
        config = {key: value for key, value in read_json(source / "config.json").items() if key != "quantization_config"}
        plain = left_plain(decoder.shapes)
        if options.method == "awq":
            plain = tuple(module for each in parameters(decoder.shapes) if (module := each.name.removesuffix(".weight")).endswith(plain))
        config["quantization_config"] = quantization_config(options.method, options.group_size, options.act_order, options.damping, plain)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        write_manifest(partial)
        partial.rename(target)
        return rounded
    except OSError as error:
        raise RunError(f"the quantized model cannot be saved to '{target}': {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _dtype(source: Path) -> torch.dtype:
    config = read_json(source / "config.json")
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def _all_tensors(decoder: Decoder, quantized: dict[str, QuantizedWeight], method: Method, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    tensors: list[tuple[str, Tensor]] = []
    each: Iterator[tuple[str, Stored]] = ((name, quantized.get(name.removesuffix(".weight"), tensor)) for name, tensor in to_huggingface(decoder))
    # A mixture whose folder stacks its experts is written with each of them apart, as the formats have them.
    for name, parts in MatrixStacks(decoder.shapes).grouped(each):
        plain = [part for part in parts if isinstance(part, Tensor)]
        if plain:
            tensors.append((name, torch.cat(plain).to(dtype) if len(plain) > 1 else plain[0].to(dtype)))
        else:
            whole = joined_rows(parts)
            assert whole is not None, "the parts of a stack are quantized together"
            tensors += stored_tensors(method, name.removesuffix(".weight"), whole)
    return tensors


@torch.no_grad()
def _quantize(
    decoder: Decoder, options: QuantizeOptions, dtype: torch.dtype, sequences: list[Tensor], progress: Progress
) -> tuple[dict[str, QuantizedWeight], list[str]]:
    """Returns the quantized weights by module, and the modules of experts that ``gptq_experts`` rounded to nearest. If the method is calibrated, replaces the
    decoder's own matrices by their dequantized values, so that every layer is calibrated on the inputs it has at inference."""
    scheme, layers, plain = options.scheme(dtype), decoder.shapes.num_hidden_layers, left_plain(decoder.shapes)
    weights: dict[str, QuantizedWeight] = {}
    rounded: list[str] = []
    rows = {parameter.name.removesuffix(".weight"): parameter.shape[0] for parameter in parameters(decoder.shapes)}
    is_calibrated = options.method in CALIBRATED
    chunks = list(calibration.chunks_of(decoder, sequences)) if is_calibrated else []
    for index in range(layers):
        if options.method == "awq":
            scale_layer(decoder, index, chunks, scheme, dtype)
        for linear, modules in projections_of(decoder, index):
            if modules[0].endswith(plain):
                continue
            assert linear.weight is not None
            weight, inputs = linear.weight.detach(), partial(calibration.inputs_of, decoder, index, linear.weight)
            if options.method == "gptq":
                hessian = Hessian(linear.columns)
                for chunk in chunks:
                    hessian.add(inputs(chunk))
                quantised = gptq(weight, hessian.mean(), scheme, damping=options.damping, act_order=options.act_order)
            else:
                if options.method == "awq" and not is_of_queries(modules[0]):
                    weight = clip(weight, sampled_inputs(chunks, inputs), scheme)
                quantised = round_to_nearest(weight, scheme)
            if is_calibrated:
                linear.weight = nn.Parameter(plain_weight(quantised).to(weight.dtype), requires_grad=False)
            weights |= dict(zip(modules, split_rows(quantised, [rows[module] for module in modules]), strict=True))
        if options.method == "gptq":
            of_experts, few = gptq_experts(decoder, index, chunks, scheme, damping=options.damping, act_order=options.act_order)
            weights |= of_experts
            rounded += few
        else:
            if options.method == "awq":
                clip_experts(decoder, index, chunks, scheme)
            of_experts = round_experts(decoder, index, scheme)
            weights |= of_experts
            if is_calibrated:
                replace_experts(decoder, index, of_experts)
        chunks = [calibration.after_layer(decoder, index, chunk) for chunk in chunks]
        progress(index + 1, layers)
    return weights, rounded
