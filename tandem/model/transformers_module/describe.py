"""Describes the module of transformers for a model's folder: its parameters, its layers and what they ask of attention, or why it cannot be used.

As a program (``python -m tandem.model.transformers_module.describe FOLDER TRUST``) it prints the description as JSON, for processes that have not imported
torch."""

import contextlib
import json
import math
import re
import reprlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.layout.transformers_module import TransformersModule
from tandem.model.huggingface.weight_files import read_header
from tandem.model.transformers_module.attention import NAME, attention
from tandem.model.transformers_module.experts import STACKED, experts, is_mixture, observed_experts
from tandem.model.transformers_module.folder_names import Stored, stored_tensors
from tandem.model.transformers_module.kept import kept_names
from tandem.model.transformers_module.logits_form import LogitsForm
from tandem.model.transformers_module.mixtures import InnerSize, expert_names, inner_size, router_names
from tandem.model.transformers_module.one_line import one_line
from tandem.model.transformers_module.probe import PROBE, Call, observe, observed_mask, probe
from tandem.model.transformers_module.read import to_json
from tandem.model.transformers_module.router_loss import NO_LOSS, observe_router_loss
from tandem.types import UserError

_ABOVE_0 = ("rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings")
_DYNAMIC = ("dynamic", "longrope")
"""Scalings of rotary frequencies that depend on the longest sequence of a batch."""

ALL_ATTENTION_FUNCTIONS.register(PROBE, observe)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, observed_mask)
# Without a mask function of this name, transformers makes no masks.
ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_EXPERTS_FUNCTIONS.register(PROBE, observed_experts)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def read_config(folder: str | Path, trust_remote_code: bool) -> Any:
    """Returns the configuration of transformers. Raises ``UserError`` if it cannot be read."""
    try:
        with quiet():
            return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"its config.json is not read by transformers ({one_line(error)})") from None


def new_module(config: Any, function: str, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool) -> Any:
    """Returns the causal language model of ``config`` with uninitialised weights in ``dtype``, whose attention and experts are ``function``."""
    functions = {"attn_implementation": function, "experts_implementation": function}
    with quiet(), torch.device(device), _without_initialisation():
        network = AutoModelForCausalLM.from_config(config, **functions, dtype=dtype, trust_remote_code=trust_remote_code)
    for parameter in network.parameters():
        # Some classes make their routers in fp32.
        parameter.data = parameter.data.to(dtype)
    network.tie_weights()
    return network.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Is a context in which transformers says nothing of a configuration: what is wrong with it is refused in a line."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


def _without_initialisation() -> Any:
    from transformers.initialization import no_init_weights

    return no_init_weights()


def describe(folder: str | Path, trust_remote_code: bool) -> ModelShapes:
    """Returns the shapes of the model in ``folder``, as transformers computes it. Raises ``UserError`` if Tandem cannot train and serve it."""
    _check_code(json.loads((Path(folder) / "config.json").read_bytes()), trust_remote_code)
    config = read_config(folder, trust_remote_code)
    _check_config(config, trust_remote_code)
    try:
        network = new_module(config, PROBE, torch.float32, "meta", trust_remote_code)
    except Exception as error:
        raise UserError(f"transformers cannot make its module ({one_line(error)})") from None
    _check_module(network)
    kept = kept_names(network)
    stored = stored_tensors(network, kept)
    _check_files(Path(folder), {each.name for each in stored}, network)
    try:
        return _shapes(network, config, stored, kept, *probe(network), trust_remote_code)
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_code(config: Any, trust_remote_code: bool) -> None:
    """Raises ``UserError`` if transformers does not have the class, and nothing allows to run the code in the folder."""
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES:
        return
    if not isinstance(config, dict) or not config.get("auto_map"):
        raise UserError(f"transformers {transformers.__version__} has no model_type {reprlib.repr(model_type)}; a newer version may have it")
    if not trust_remote_code:
        raise UserError("its class is code in its own folder, which can do anything on this machine; read it, then set model.trust_remote_code to true")


def _check_config(config: Any, trust_remote_code: bool) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UserError("it is an encoder with a decoder, and only models that are a decoder alone are trained and served")
    if getattr(config, "text_config", None) is not None or getattr(config, "vision_config", None) is not None:
        raise UserError("it has other parts beside a language model; save its language model with transformers, and name that folder")
    if not trust_remote_code and type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"transformers has no causal language model of model_type '{config.model_type}'")
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if not str(kind).endswith("_attention") or str(kind).startswith("linear")]
    if kinds:
        raise UserError(f"it has layers of type '{kinds[0]}', which keep a state in the place of keys and values")
    rotary = getattr(config, "rope_parameters", None) or {}
    for each in (rotary, *(inner for inner in rotary.values() if isinstance(inner, dict))):
        for key, value in each.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf and key in _ABOVE_0:
                raise UserError(f"its rotary embedding has {key} {value}; it must be a number above 0, and finite")
        if each.get("rope_type") in _DYNAMIC:
            raise UserError(f"its rotary embedding is scaled by '{each['rope_type']}', which depends on the longest sequence of a batch")


def _check_module(network: Any) -> None:
    if not (network._supports_attention_backend or network._can_set_attn_implementation()):
        raise UserError(f"{type(network).__name__} does not let other code compute its attention (_supports_attention_backend)")
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear) or network.get_input_embeddings() is None or network.base_model is network:
        raise UserError(f"{type(network).__name__} has no plain head over a base model")
    stacked = {f"{name}.{each}" for name, module in network.named_modules() if is_mixture(module) for each in STACKED}
    for name, parameter in network.named_parameters():
        if parameter.ndim > 2 and name not in stacked:
            raise UserError(f"its '{name}' is no matrix, and {type(network).__name__} does not let other code compute it as experts")


def _check_files(folder: Path, known: set[str], network: Any) -> None:
    """Raises ``UserError`` if the folder has other tensors than the ``known`` ones."""
    ignored = network._keys_to_ignore_on_load_unexpected or ()
    for file in sorted(folder.glob("*.safetensors")):
        for name in read_header(file):
            if name not in known and not name.endswith("rotary_emb.inv_freq") and not any(re.search(pattern, name) for pattern in ignored):
                raise UserError(f"its folder has a tensor '{name}', which {type(network).__name__} in transformers does not have by this name")


def _shapes(
    network: Any, config: Any, stored: list[Stored], kept: tuple[str, ...], calls: list[Call], form: LogitsForm, trust_remote_code: bool
) -> ModelShapes:
    layers = config.num_hidden_layers
    if len(calls) != layers or len({id(call.module) for call in calls}) != layers:
        raise UserError(f"{len(calls)} of its {layers} layers compute attention, and each must once")
    if len({call.heads for call in calls}) != 1 or len({call.cap for call in calls}) != 1:
        raise UserError("its layers have heads of different numbers and sizes, or different caps")
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise UserError("its config.json does not say max_position_embeddings")
    names = {id(module): name for name, module in network.named_modules()}
    attention_names = [names[id(call.module)] for call in calls]
    place = {name: index for index, name in enumerate((*(name for name, _ in network.named_parameters()), *kept))}
    file_name = {each.own: each.name for each in stored}
    # A tied head has the name of its own only beside the parameters.
    listed = sorted((each for each in stored if each.own in place), key=lambda each: (place[each.own], each.start))
    parameters = tuple((each.name, each.shape) for each in listed)
    embedding, head = network.get_input_embeddings().weight, network.get_output_embeddings().weight
    name_of = {id(parameter): name for name, parameter in network.named_parameters()}
    (query_heads, kv_heads, size), hidden = calls[0].heads, int(embedding.shape[1])
    inner = getattr(config, "intermediate_size", None)
    dense = inner if isinstance(inner, int) and inner > 0 else 4 * hidden
    mlp = inner_size(network, hidden, layers, dense) or InnerSize(dense, any("gate" in name for name, _ in parameters))
    head_name, routers, of_experts = names[id(network.get_output_embeddings())], router_names(network), expert_names(network, stored)
    windows = tuple(call.window for call in calls)
    loss = observe_router_loss(network) if of_experts else NO_LOSS
    return ModelShapes(
        architecture=config.model_type,
        vocab_size=int(embedding.shape[0]),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        intermediate_size=mlp.rows,
        max_position_embeddings=positions,
        tie_word_embeddings=head is embedding,
        gated_mlp=mlp.has_gate,
        layer_windows=windows if any(windows) else (),
        score_cap=calls[0].cap,
        logit_cap=form.cap,
        multipliers=Multipliers(logits_scaling=form.scaling),
        transformers=TransformersModule(
            class_name=type(network).__name__,
            parameters=parameters,
            names=tuple(each.own for each in listed),
            starts=tuple(each.start for each in listed),
            embedding=file_name[name_of[id(embedding)]],
            head=file_name[f"{head_name}.weight"],
            attention=tuple(attention_names),
            layers=_common_list(attention_names),
            linears=tuple(
                name for each in listed
                if (name := each.name.removesuffix(".weight")) != each.name == each.own and type(network.get_submodule(name)) is nn.Linear
                and name != head_name and each.own not in routers and name.rpartition(".")[2] not in of_experts
            ),
            head_parameter=f"{head_name}.weight",
            routers=routers,
            expert_names=of_experts,
            loss_routers=loss.routers,
            logits_index=loss.place,
            num_experts=loss.num_experts,
            experts_per_token=loss.each,
            router_loss=loss.asked,
            ignored=tuple(sorted(getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ())),
            trust_remote_code=trust_remote_code,
        ),
    )


def _common_list(names: list[str]) -> str:
    """Returns the name of the list of layers that the modules ``names`` are parts of, one in each layer. Raises ``UserError`` if there is none."""
    parts = [name.split(".") for name in names]
    for place in range(1, len(parts[0])):
        if [name[place : place + 1] for name in parts] == [[str(index)] for index in range(len(names))]:
            return ".".join(parts[0][:place])
    raise UserError("its layers are not one list")


if __name__ == "__main__":
    try:
        print(json.dumps(to_json(describe(sys.argv[1], sys.argv[2] == "true"))))
    except UserError as refused:
        print(json.dumps({"refused": str(refused)}))
