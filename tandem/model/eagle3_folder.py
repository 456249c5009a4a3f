"""Reads and writes the folder of an EAGLE-3 head, in the format of SpecForge, vLLM and SGLang.

    config.json         LlamaForCausalLMEagle3 (see huggingface.eagle3_config)
    model.safetensors   fc, midlayer.*, norm, lm_head; t2d[V] bool: the tokens that the head can propose; d2t[Vd] int64: the id of each in the target's
                        vocabulary, less its own, both only where it cannot propose every token; embed_tokens where the head has a table of its own
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.layout.eagle3 import EMBEDDING, eagle3_parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.drawn import generator_of
from tandem.model.eagle3 import Eagle3Head
from tandem.model.huggingface.eagle3_config import eagle3_config_json, read_eagle3_of
from tandem.model.huggingface.hub import WEIGHTS
from tandem.model.huggingface.model_folder import read_tensors
from tandem.model.huggingface.safetensors_file import write_file
from tandem.runtime.process.temporary import whole_folder
from tandem.storage.folder_manifest import write_manifest
from tandem.types import RunError, UserError

DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"


def eagle3_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """Returns a view of every parameter of a plain ``head`` by its name in the folder, in the order of ``layout.eagle3.eagle3_parameters``."""
    layer, mid, shapes = head.shapes.layer, "midlayer.", head.midlayer
    assert not head.is_packed and shapes.qkv_proj is not None and shapes.gate_up_proj is not None and shapes.down_proj is not None
    attention = (layer.query_size, layer.key_value_size, layer.key_value_size)
    linears = (
        (head.fc, ("fc",), (head.fc.rows,)),
        (shapes.qkv_proj, tuple(f"{mid}self_attn.{part}_proj" for part in "qkv"), attention),
        (shapes.o_proj, (f"{mid}self_attn.o_proj",), (shapes.o_proj.rows,)),
        (shapes.gate_up_proj, (f"{mid}mlp.gate_proj", f"{mid}mlp.up_proj"), (layer.intermediate_size,) * 2),
        (shapes.down_proj, (f"{mid}mlp.down_proj",), (layer.hidden_size,)),
        (head.lm_head, ("lm_head",), (head.lm_head.rows,)),
    )
    tensors = {f"{mid}{name}.weight": weight.detach() for name, weight in shapes.norms().items()}
    tensors |= {f"{mid}hidden_norm.weight": head.hidden_norm.weight.detach(), "norm.weight": head.norm.weight.detach()}
    if head.shapes.own_embedding:
        tensors[EMBEDDING] = head.embed_tokens.detach()
    for linear, names, rows in linears:
        for kind, stacked in (("weight", linear.weight), ("bias", linear.bias)):
            if stacked is not None:
                tensors |= {f"{name}.{kind}": part for name, part in zip(names, stacked.detach().split(rows), strict=True)}
    return {name: tensors[name] for name, _ in eagle3_parameters(head.shapes)}


def load_eagle3(
    folder: str | Path, kernels: Kernels, target: ModelShapes, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    embedding: Callable[[Tensor], Tensor] | None = None, pack: bool = False,
) -> Eagle3Head:  # fmt: skip
    """Returns the head in ``folder`` for a model of the shapes ``target``. ``embedding``: as of ``Eagle3Head``. ``pack``: for inference. Raises
    ``UserError`` if it has none, a broken one, or that of another model."""
    tensors = dict(read_tensors(folder, stacked=False))
    shapes = read_eagle3_of(folder, target, own_embedding=EMBEDDING in tensors)
    head = Eagle3Head(shapes, kernels, dtype=dtype, device=device, embedding=embedding)
    try:
        head.target_ids = _target_ids(tensors.pop(DRAFT_TO_TARGET, None), shapes.draft_vocab_size, target.vocab_size).to(device)
        tensors.pop(TARGET_TO_DRAFT, None)
        fill_eagle3(head, tensors)
    except UserError as error:
        raise UserError(f"draft head '{folder}': {error}") from None
    if pack:
        head.pack()
    return head


@torch.no_grad()
def fill_eagle3(head: Eagle3Head, tensors: dict[str, Tensor]) -> None:
    """Copies ``tensors`` into every parameter by its name in the folder. Raises ``UserError`` for one that is missing, unknown or of another shape."""
    own = eagle3_tensors(head)
    for name in (*own, *tensors):
        if name not in tensors:
            raise UserError(f"tensor '{name}' is missing from the weights; config.json requires it")
        if name not in own:
            raise UserError(f"tensor '{name}' is not a parameter of an EAGLE-3 head with one layer; check config.json")
        if tensors[name].shape != own[name].shape:
            raise UserError(f"tensor '{name}' has shape {list(tensors[name].shape)}; config.json requires {list(own[name].shape)}")
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


@torch.no_grad()
def initialise_eagle3(head: Eagle3Head, seed: int, standard_deviation: float = 0.02) -> None:
    """Fills every parameter: norms with 1, biases with 0, matrices from a normal distribution of ``standard_deviation``, each by the generator of ``seed`` and
    its name."""
    for name, tensor in eagle3_tensors(head).items():
        if tensor.dim() == 1:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            drawn = torch.empty(tensor.shape, dtype=torch.float32)
            tensor.copy_(drawn.normal_(0.0, standard_deviation, generator=generator_of(seed, f"eagle3/{name}")))


def save_eagle3(head: Eagle3Head, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Writes a plain ``head`` to ``folder``, with the digests of its files. ``dtype``: of the weights in the file, by default the head's. Raises ``UserError``
    if ``folder`` exists and ``RunError`` if it cannot be written."""
    folder, dtype = Path(folder), dtype or head.dtype
    if folder.exists():
        raise UserError(f"'{folder}' already exists; choose another folder or remove it")
    name_of_dtype = str(dtype).removeprefix("torch.")
    config = eagle3_config_json(head.shapes) | {"dtype": name_of_dtype, "torch_dtype": name_of_dtype}
    try:
        with whole_folder(folder) as written:
            write_file(written / WEIGHTS, [*_vocabulary_maps(head), *((name, tensor.to(dtype)) for name, tensor in eagle3_tensors(head).items())])
            (written / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            write_manifest(written)
    except OSError as error:
        raise RunError(f"the draft head cannot be saved to '{folder}': {error}") from None


def _vocabulary_maps(head: Eagle3Head) -> Iterator[tuple[str, Tensor]]:
    ids = head.target_ids.cpu()
    if torch.equal(ids, torch.arange(head.shapes.layer.vocab_size)):
        # vLLM refuses a map of a head with the target's vocabulary.
        return
    yield DRAFT_TO_TARGET, ids - torch.arange(len(ids))
    yield TARGET_TO_DRAFT, torch.zeros(head.shapes.layer.vocab_size, dtype=torch.bool).index_fill(0, ids, True)


def _target_ids(offsets: Tensor | None, count: int, vocab_size: int) -> Tensor:
    """Returns the target's ids of the head's ``count`` tokens. Raises ``UserError`` for a map that is none."""
    if offsets is None:
        if count != vocab_size:
            raise UserError(f"there is no tensor '{DRAFT_TO_TARGET}' and draft_vocab_size is {count}, of a vocabulary of {vocab_size}; a smaller one needs it")
        return torch.arange(count)
    if offsets.shape != (count,) or offsets.is_floating_point():
        raise UserError(f"tensor '{DRAFT_TO_TARGET}' is {offsets.dtype} {list(offsets.shape)}; draft_vocab_size requires whole numbers [{count}]")
    ids = offsets.long() + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != count:
        raise UserError(f"tensor '{DRAFT_TO_TARGET}' names tokens twice, or outside the target's {vocab_size}")
    return ids
