"""Reads and writes Hugging Face folders: names, fused matrices, files."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tandem.config.implementation import OWN, Implementation
from tandem.config.lora import LoraConfig
from tandem.kernels.api import Kernels
from tandem.layout.expert_shapes import CHOICE_BIAS, SHARED_GATE, ExpertNames
from tandem.layout.linear_attention import OUTPUT
from tandem.layout.parameters import SINKS, is_of_adapter, linear_name, matrix_name, parameters, trained_parameters
from tandem.layout.pipeline_stages import Span, layer_of
from tandem.layout.shapes import ValueHead, adapted_shapes
from tandem.layout.sharding import ShardSpec, is_held, local_parameters, shard_slices
from tandem.model.decoder import Decoder, Layer, Linear
from tandem.model.described import DescribedModel
from tandem.model.drawn import new_adapter
from tandem.model.family import all_families
from tandem.model.huggingface.hub import WEIGHTS
from tandem.model.huggingface.model_config import Heads, TokenIds, config_json, read_json, read_shapes
from tandem.model.huggingface.safetensors_file import Form, read_file, write_file
from tandem.model.huggingface.stacked_experts import ExpertStacks, stacks_of_folder
from tandem.model.huggingface.stacked_matrices import MatrixStacks
from tandem.model.huggingface.weight_files import FURTHER_TOKENS, check_tied_head, check_weights, weight_files
from tandem.model.moe import Experts
from tandem.model.parallel.model_parallel import ModelParallel
from tandem.model.parallel.tensor_parallel import RankGroup
from tandem.model.quantization.formats import decoded_blocks, has_mxfp4, is_packed_config
from tandem.model.quantization.fp8_blocks import decoded, wanted_with_scales
from tandem.model.quantization.scheme import Scheme
from tandem.runtime.process.temporary import whole_folder
from tandem.storage.folder_manifest import write_manifest
from tandem.text.tokenizer import TOKENIZER_FILES, Tokenizer
from tandem.types import RunError, UserError

__all__ = [
    "config_json",
    "load_model",
    "load_tensors",
    "read_shapes",
    "read_tensors",
    "save_model",
    "to_huggingface",
]

_HEADS = ("lm_head.", "score.")


def read_tensors(folder: str | Path, is_wanted: Callable[[str], bool] | None = None, *, stacked: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the folder by its Hugging Face name, or those that ``is_wanted`` selects, from one file or from shards; matrices that the
    family's folder stacks one by one, unless they are not ``stacked`` for the reader, and those in blocks of fp8 in fp32. Raises ``UserError`` before the
    first tensor if a file is missing, and while reading if one is broken."""
    folder = Path(folder)
    stacks = _stacks_of(folder) if stacked else None
    shards = weight_files(folder)
    wanted, blocks = is_wanted if stacks is None else stacks.wanted(is_wanted), _blocks_of(folder)
    wanted = wanted if blocks is None else wanted_with_scales(wanted)
    tensors: Iterator[tuple[str, Tensor]] = chain.from_iterable(read_file(folder / shard, listed, wanted) for shard, listed in shards.items())
    tensors = tensors if blocks is None else decoded(tensors, blocks)
    yield from tensors if stacks is None else stacks.split(tensors)


def _blocks_of(folder: Path) -> tuple[int, int] | None:
    path = folder / "config.json"
    return decoded_blocks(read_json(path), str(path)) if path.is_file() else None


def _stacks_of(folder: Path) -> MatrixStacks | ExpertStacks | None:
    """Returns the stacks of a folder; ``None`` if its family has none, or it has no ``config.json`` of a family."""
    if not (folder / "config.json").is_file():
        return None
    family = all_families().get(str(read_json(folder / "config.json").get("model_type")))
    is_stacked = family is not None and (family.stacked or (family.experts is not None and family.experts.stacked))
    return stacks_of_folder(read_shapes(folder, "labels")) if is_stacked else None


def read_held(folder: str | Path, decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the folder that ``decoder`` holds, and those of layers that its model does not have, for which ``load_tensors`` refuses it, but for
    layers of multi-token prediction. Raises ``UserError`` as ``read_tensors``."""
    return read_tensors(folder, wanted_of(folder, decoder), stacked=decoder.shapes.transformers is None)


def wanted_of(folder: str | Path, decoder: Decoder) -> Callable[[str], bool]:
    """Returns which tensors of the folder ``read_held`` yields."""
    further = read_json(Path(folder) / "config.json").get("num_nextn_predict_layers")
    layers = decoder.shapes.num_hidden_layers + (further if isinstance(further, int) else 0)
    return lambda name: not name.startswith(FURTHER_TOKENS) and (decoder.holds(name) or (layer_of(name) or 0) >= layers)


def trunk_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the folder's model but those of its heads. A model that was saved without a head has names without ``model.``, which they
    get here. Raises ``UserError`` as ``read_tensors``."""
    for name, tensor in read_tensors(folder, lambda name: not name.startswith(_HEADS)):
        yield name if name.startswith("model.") else f"model.{name}", tensor


def _parameters_of(decoder: Decoder) -> dict[str, Tensor]:
    """Returns a view of every parameter by its Hugging Face name, in the order of ``layout.shapes.parameters``."""
    if decoder.shapes.transformers is not None or decoder.shapes.own_parameters:
        return cast("dict[str, Tensor]", cast("Any", decoder).huggingface_parameters())
    if decoder.is_packed or decoder.is_frozen:
        raise RuntimeError("a packed decoder has no plain weights; call unpack() and load weights first")
    shapes = decoder.local
    held = [name for name, _ in local_parameters(decoder.shapes, decoder.shard_spec) if decoder.holds(name)]
    tensors: dict[str, Tensor] = {}
    if "model.embed_tokens.weight" in held:
        tensors["model.embed_tokens.weight"] = decoder.embed_tokens
    if "model.norm.weight" in held:
        tensors["model.norm.weight"] = decoder.norm.weight
    if decoder.lm_head is not None:
        tensors["lm_head.weight"] = decoder.head_weight
    if decoder.score is not None:
        tensors |= _unfused(decoder.score, ["score"], (decoder.shapes.num_labels,))
    projections = (shapes.query_rows, shapes.key_value_size, shapes.key_value_size)
    for index, layer in zip(decoder.layer_numbers, decoder.layers, strict=True):
        assert isinstance(layer, Layer)
        at = f"model.layers.{index}."
        if layer.qkv_proj is not None:
            tensors |= _unfused(layer.qkv_proj, [f"{at}self_attn.{name}_proj" for name in "qkv"], projections)
        if layer.latent is not None:
            for linear, name in zip(layer.latent.linears(), layer.latent.names, strict=True):
                tensors |= _unfused(linear, [f"{at}self_attn.{name}"], (linear.rows,))
            tensors |= {f"{at}self_attn.{name}.weight": weight for name, weight in layer.latent.norms().items()}
        if layer.linear_attention is not None:
            for linear, (name,) in zip(layer.linear_attention.linears(), layer.stacks(), strict=False):
                tensors |= _unfused(linear, [matrix_name(index, name)], (linear.rows,))
            tensors |= {f"{at}linear_attn.{name}": own for name, own in layer.linear_attention.vectors().items()}
        output = matrix_name(index, "o_proj" if layer.linear_attention is None else OUTPUT)
        tensors |= _unfused(layer.o_proj, [output], (layer.o_proj.rows,))
        if layer.sinks is not None:
            tensors[f"{at}{SINKS}"] = layer.sinks
        if layer.experts is not None:
            tensors |= _experts_of(layer.experts, layer.experts.shapes.names, at, decoder.shard_spec.expert_rank * layer.experts.held)
        if layer.gate_up_proj is not None and layer.down_proj is not None:
            gate, up, down = (linear_name(shapes, index, module) for module in ("gate_proj", "up_proj", "down_proj"))
            tensors |= _unfused(layer.gate_up_proj, [gate, up], (layer.gate_up_proj.rows // 2,) * 2)
            tensors |= _unfused(layer.down_proj, [down], (layer.down_proj.rows,))
        if layer.q_norm is not None and layer.k_norm is not None:
            tensors[f"{at}self_attn.q_norm.weight"] = layer.q_norm.weight
            tensors[f"{at}self_attn.k_norm.weight"] = layer.k_norm.weight
        tensors |= {f"{at}{name}.weight": weight for name, weight in layer.norms().items()}
    return {name: tensors[name] for name in held}


def _experts_of(experts: Experts, names: ExpertNames, at: str, first: int) -> dict[str, Tensor]:
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    tensors: dict[str, Tensor] = {f"{at}{names.router}.weight": experts.router}
    if experts.choice_bias is not None:
        tensors[f"{at}{CHOICE_BIAS}"] = experts.choice_bias
    if experts.shared_gate is not None:
        tensors[f"{at}{SHARED_GATE}"] = experts.shared_gate
    gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
    for kind, stacked in ((names.gate, gate), (names.up, up), (names.down, experts.down_proj.detach())):
        tensors |= {f"{at}{kind.format(expert)}.weight": own for expert, own in enumerate(stacked, first)}
    if experts.router_bias is not None and experts.gate_up_bias is not None and experts.down_bias is not None:
        tensors[f"{at}{names.router}.bias"] = experts.router_bias
        gate_bias, up_bias = experts.gate_up_bias.detach().chunk(2, dim=1)
        for kind, stacked in ((names.gate, gate_bias), (names.up, up_bias), (names.down, experts.down_bias.detach())):
            tensors |= {f"{at}{kind.format(expert)}.bias": own for expert, own in enumerate(stacked, first)}
    return tensors


def _unfused(linear: Linear, names: list[str], rows: tuple[int, ...]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {} if linear.adapter is None else linear.adapter.named(names)
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            tensors |= {f"{name}.{kind}": part for name, part in zip(names, fused.detach().split(rows), strict=True)}
    return tensors


def to_huggingface(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, view of the decoder's own memory) for every parameter it holds, in the order of
    ``layout.shapes.parameters``. A tied head is not listed. No gradient."""
    for name, tensor in _parameters_of(decoder).items():
        yield name, tensor.detach()


def load_tensors(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]], *, pack: bool = False) -> None:
    """Fills every parameter from ``tensors`` by Hugging Face name, casting to the decoder's dtype. A decoder that holds one rank's shard
    takes whole tensors and slices them; a pipeline stage ignores parameters of other stages.

    Strict: each exactly once, each with its shape; a model with an adapter takes all or the adapter's alone, which leave the rest as it is. Raises
    ``UserError`` naming the tensor; nothing is changed then. A packed decoder is
    unpacked; call ``pack`` again before inference, or set ``pack`` here, which needs the plain matrices of one layer at a time.
    ``inv_freq`` buffers of old checkpoints are skipped, and a tied head that is also listed must equal the embedding.
    """
    given = checked_tensors(decoder, tensors)
    held = {name: tensor for name, tensor in given.items() if is_held(decoder.shapes, name, decoder.shard_spec)}
    load_parts(decoder, {name: part_of(decoder, name, tensor) for name, tensor in held.items()}, pack=pack)


def load_parts(decoder: Decoder, parts: Mapping[str, Tensor], *, pack: bool = False) -> None:
    """Does ``load_tensors`` for the results of ``part_of``, without checks. Parts of an adapter alone change nothing else. A decoder that trains an
    adapter beside quantized weights keeps them quantized."""
    if decoder.shapes.lora is not None and all(map(is_of_adapter, parts)):
        load_adapter_tensors(decoder, parts)
        return
    lora = decoder.shapes.lora
    freezes = not pack and lora is not None and lora.quantization != "none"
    decoder.unpack(in_one_layer=pack or freezes)
    by_layer: dict[int | None, dict[str, Tensor]] = {}
    for name, parameter in _parameters_of(decoder).items():
        by_layer.setdefault(_layer_of(name), {})[name] = parameter

    @torch.no_grad()
    def fill(layer: int | None) -> None:
        for name, parameter in by_layer.get(layer, {}).items():
            parameter.copy_(parts[name])

    fill(None)
    if pack:
        decoder.pack(fill)
    elif freezes:
        decoder.freeze(fill)
    else:
        for index in decoder.layer_numbers:
            fill(index)


@torch.no_grad()
def load_adapter_tensors(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Copies the adapter's ``tensors`` by name, the results of ``part_of``, into ``decoder``, and packs them if it is packed; its weights stay as they
    are."""
    for name, parameter in adapter_of(decoder).items():
        parameter.copy_(tensors[name])
    if decoder.is_packed:
        decoder.pack_adapter()


def adapter_of(decoder: Decoder) -> dict[str, Tensor]:
    """Returns a view of every parameter of the decoder's adapter by name, in the order of ``layout.shapes.parameters``; also of a packed decoder."""
    if decoder.shapes.transformers is not None:
        return cast("dict[str, Tensor]", cast("Any", decoder).adapter_parameters())
    tensors: dict[str, Tensor] = {}
    for index, layer in zip(decoder.layer_numbers, decoder.layers, strict=True):
        assert isinstance(layer, Layer)
        for linear, stacked in zip(layer.linears(), layer.stacks(), strict=True):
            if linear.adapter is not None:
                names = [matrix_name(index, module) for module in stacked]
                tensors |= linear.adapter.named(names)
    return {name: tensors[name] for name, _ in parameters(decoder.shapes) if name in tensors}


def _layer_of(name: str) -> int | None:
    """Returns the layer of a parameter, ``None`` for parameters outside the layers."""
    _, _, rest = name.partition(".layers.")
    return int(rest.partition(".")[0]) if rest else None


def part_of(decoder: Decoder, name: str, tensor: Tensor, shard_spec: ShardSpec | None = None) -> Tensor:
    """Returns the shard of a whole tensor that the rank of ``shard_spec`` (``None``: the decoder's own) holds."""
    shard_spec = shard_spec or decoder.shard_spec
    return tensor if shard_spec.size == 1 else tensor[shard_slices(decoder.shapes, name, tuple(tensor.shape), shard_spec)]


def checked_tensors(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns ``tensors`` by name if ``load_tensors`` accepts them. Raises ``UserError``."""
    shapes = dict(parameters(decoder.shapes))
    given: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in given:
            raise UserError(f"tensor '{name}' is given twice; a checkpoint must contain each tensor once")
        if not name.endswith("rotary_emb.inv_freq"):
            given[name] = tensor
    embedding, head, module = "model.embed_tokens.weight", "lm_head.weight", decoder.shapes.transformers
    if module is not None:
        embedding, head = module.embedding, module.head
        given = {name: tensor for name, tensor in given.items() if name in shapes or name == head or not module.ignores(name)}
    tied_head = given.pop(head, None) if decoder.shapes.tie_word_embeddings else None
    for name, tensor in given.items():
        if name not in shapes:
            raise UserError(
                f"tensor '{name}' is not a parameter of this {decoder.shapes.architecture} model; check config.json"
            )
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise UserError(
                f"tensor '{name}' has shape {list(tensor.shape)}; config.json requires {list(shapes[name])}"
            )
        if not tensor.is_floating_point():
            raise UserError(
                f"tensor '{name}' is {tensor.dtype}; quantized weights are not supported here; use the float checkpoint"
            )
    for name in [name for name in given if name in shapes and not decoder.holds(name)]:
        del given[name]
    wanted = trained_parameters(decoder.shapes) if given and all(map(is_of_adapter, given)) else parameters(decoder.shapes)
    for name, _ in wanted:
        if name not in given and decoder.holds(name):
            raise UserError(f"tensor '{name}' is missing from the weights; config.json requires it")
    if tied_head is not None and embedding in given:
        check_tied_head(not torch.equal(tied_head, given[embedding]), head, embedding)
    return given


def load_model(
    folder: str | Path, kernels: Kernels, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    group: RankGroup | None = None, pack: bool = False, quantization: Scheme | None = None, spans: Sequence[Span] = (),
    parallel: ModelParallel | None = None, heads: Heads = "language", lora: LoraConfig | None = None, seed: int = 0, implemented_by: Implementation = OWN,
) -> Decoder:
    """Returns the model of a Hugging Face folder, one rank's shard of it or its pipeline stages; with ``pack`` packed for inference,
    rounded as ``quantization`` says. ``heads``: those that it may have. ``lora``: a new adapter beside the weights, drawn from
    ``seed``. ``implemented_by``: who computes it. Raises ``UserError`` if the folder is not a model, is broken or is not supported."""
    check_weights(Path(folder), read_shapes(folder, heads, implemented_by))
    decoder = unfilled_model(
        folder, kernels, dtype=dtype, device=device, group=group, spans=spans, parallel=parallel, heads=heads, lora=lora, implemented_by=implemented_by
    )
    decoder.quantization = quantization or decoder.quantization
    decoder.experts_in_mxfp4 = has_mxfp4(read_json(Path(folder) / "config.json"))
    try:
        tensors = trunk_tensors(folder) if heads == "none" else read_held(folder, decoder)
        load_tensors(decoder, chain(tensors, new_adapter(decoder.shapes, seed)), pack=pack)
    except UserError as error:
        raise UserError(f"model '{folder}': {error}") from None
    return decoder


def unfilled_model(
    folder: str | Path, kernels: Kernels, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    group: RankGroup | None = None, spans: Sequence[Span] = (), parallel: ModelParallel | None = None, heads: Heads = "language",
    value_head: ValueHead = "none", lora: LoraConfig | None = None, implemented_by: Implementation = OWN,
) -> Decoder:
    """Does ``load_model`` without the weights: the parameters are uninitialised. ``value_head``: one beside the language-model head. ``lora``: the
    adapter that is trained beside the weights. ``implemented_by``: who computes it."""
    shapes = adapted_shapes(read_shapes(folder, heads, implemented_by), lora)
    shapes = shapes if value_head == "none" else replace(shapes, value_head=value_head)
    if is_packed_config(read_json(Path(folder) / "config.json")):
        raise UserError(f"model '{folder}' is quantized, which only the engine supports; use the float checkpoint")
    if shapes.transformers is not None:
        # Imported here, because transformers is not needed for models of Tandem's own.
        from tandem.model.transformers_module.decoder import new_decoder

        assert group is None and parallel is None and len(spans) < 2 and shapes.value_head == "none"
        return new_decoder(shapes, kernels, folder, dtype, device)
    return Decoder(shapes, kernels, dtype=dtype, device=device, group=group, parallel=parallel, spans=spans)


def save_model(
    decoder: DescribedModel,
    folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    *,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
    eos_token_id: TokenIds = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> None:
    """Writes a Hugging Face folder: weights, ``config.json``, ``generation_config.json``, the tokenizer's files and ``manifest.json``, their digests.

    ``tensors``: the weights by Hugging Face name if the decoder does not hold them, all of its dtype and in the order of
    ``layout.shapes.parameters``; one is in memory at a time. ``like``: the folder that the model was trained from, whose ``config.json`` and
    ``generation_config.json`` are kept; without it, special ids default to those of ``tokenizer_folder``. ``dtype``: of the weights in the file, by
    default the decoder's. Everything is written to a temporary folder that is renamed at the end. Raises ``UserError`` if ``folder`` exists and
    ``RunError`` if it cannot be written, or if a weight has no finite value in ``dtype``.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"'{folder}' already exists; choose another folder or remove it")
    if tokenizer_folder is not None:
        tokenizer = Tokenizer.from_folder(tokenizer_folder)
        eos_token_id = tokenizer.eos_token_ids if eos_token_id is None else eos_token_id
        bos_token_id = tokenizer.bos_token_id if bos_token_id is None else bos_token_id
        pad_token_id = tokenizer.pad_token_id if pad_token_id is None else pad_token_id
    if not isinstance(eos_token_id, int | None) and len(eos_token_id) < 2:
        eos_token_id = next(iter(eos_token_id), None)
    if like is not None:
        special = read_json(like / "config.json")
        if not is_packed_config(special):
            # What was decoded is written as it is now.
            special.pop("quantization_config", None)
    else:
        special = config_json(decoder.shapes.exported, eos_token_id=eos_token_id, bos_token_id=bos_token_id, pad_token_id=pad_token_id)
    dtype = dtype or decoder.dtype
    if tensors is None:
        assert isinstance(decoder, Decoder)
        tensors = to_huggingface(decoder)
    name_of_dtype = str(dtype).removeprefix("torch.")
    generation = {
        key: special[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id") if special.get(key) is not None
    }
    try:
        with whole_folder(folder) as written:
            stacks, known = stacks_of_folder(decoder.shapes), dict(parameters(decoder.shapes.exported))
            forms = [Form(name, dtype, tuple(shape)) for name, shape in stacks.join_shapes(known.items())]
            own = _rounded(((name, tensor) for name, tensor in tensors if name in known), dtype)
            write_file(written / WEIGHTS, stacks.join(own), forms)
            _write_json(written / "config.json", {**special, "dtype": name_of_dtype, "torch_dtype": name_of_dtype})
            if like is not None and (like / "generation_config.json").is_file():
                shutil.copyfile(like / "generation_config.json", written / "generation_config.json")
            else:
                _write_json(written / "generation_config.json", generation)
            if tokenizer_folder is not None:
                for name in TOKENIZER_FILES:
                    if (Path(tokenizer_folder) / name).is_file():
                        shutil.copyfile(Path(tokenizer_folder) / name, written / name)
            write_manifest(written)
    except OSError as error:
        raise RunError(f"the model cannot be saved to '{folder}': {error}") from None


def _rounded(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        rounded = tensor.to(dtype)
        if dtype != tensor.dtype and not rounded.isfinite().all() and tensor.isfinite().all():
            raise RunError(f"tensor '{name}' has a value that {dtype} cannot represent; set model.export_dtype to bfloat16 or float32")
        yield name, rounded


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
