"""The declaration of a model family, and how a model's family is looked up. Imports no torch.

A family is one module of ``tandem.model.families`` with a constant ``FAMILY``. All families are decoders with norms without biases, rotary
embedding, grouped-query attention and a gated MLP or a mixture of them; the declaration says what differs. It is read when a folder is
opened, written or created. The network is built from the resulting ``ModelShapes`` alone.
"""

import difflib
import importlib
import pkgutil
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import Activation, ModelShapes
from tandem.model import families
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.sliding_windows import FULL_ATTENTION, Mask
from tandem.types import UserError


class ConfigFlag(NamedTuple):
    """A trait that the key ``name`` of ``config.json`` turns on or off; ``default`` applies if the key is missing."""

    name: str
    default: bool = False


Trait = bool | ConfigFlag
"""A trait of all models of a family, or one that each ``config.json`` sets."""


class Biases(NamedTuple):
    """Which linear layers of a model have biases: q, k and v; the attention's output; the MLP."""

    attention: bool
    output: bool
    mlp: bool


class Mixture(NamedTuple):
    """The mixture of experts of a family. ``names``: of its matrices in the folder; ``read(reader, layers)`` and ``write(experts)``
    translate from and to the keys of ``config.json``; ``new(inner)`` returns further fields of ``ExpertShapes`` for a model that is created, whose experts have
    the inner size ``inner``. ``stacked``: the folder has the matrices of all experts of a layer as one (``huggingface.stacked_experts``)."""

    names: ExpertNames
    read: Callable[[ConfigReader, int], ExpertShapes]
    write: Callable[[ExpertShapes], dict[str, Any]]
    new: Callable[[int], dict[str, Any]] = lambda inner: {}
    stacked: bool = False


class Terms(NamedTuple):
    """Further terms of a family's arithmetic, which its ``config.json`` sets. ``read(reader, layers, head_dim)`` returns fields of ``ModelShapes``;
    ``write(shapes)`` the keys that describe them; ``new(layers)`` those fields of a model that is created that are not the defaults."""

    read: Callable[[ConfigReader, int, int], dict[str, Any]]
    write: Callable[[ModelShapes], dict[str, Any]]
    new: Callable[[int], dict[str, Any]] = lambda layers: {}


def read_expert_count(reader: ConfigReader, default: int) -> int:
    """Returns the number of experts per layer, which transformers 4 writes as ``num_experts`` and transformers 5 as
    ``num_local_experts``."""
    return reader.integer("num_experts" if reader.config.get("num_experts") is not None else "num_local_experts", default)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. ``model_type`` and ``class_name`` are those of transformers.

    ``attention_bias`` (of q, k and v), ``output_bias`` (of the attention's output), ``mlp_bias``: which linear layers have biases.
    ``qk_norm``: queries and keys of each head are normalised before the rotation; ``qk_norm_all_heads``: those of all heads together.
    ``pre_norms``, ``post_norms``: attention and MLP read a norm; their outputs are normalised.
    ``rotary_fraction``: the part of each head that is rotated, where ``partial_rotary_factor`` does not say (``None``: all, and there is no such key).
    ``rotary_interleaved``: neighbouring components are rotated together. ``centred_norms``: norms subtract the mean first (LayerNorm without a bias).
    ``parallel_blocks``: attention and MLP read the same norm. ``norm_eps_key``: names what norms add to the variance.
    ``activation``: of the MLP's gate, which ``config.json`` names in ``activation_key``, by this name or by ``activation_alias``. ``norms_from_one``: norms
    multiply with 1 plus their weights. ``scaled_embedding``: the embedding's rows are multiplied with sqrt(hidden_size).
    ``terms``: further terms, which each ``config.json`` sets. ``stacked``: matrices of a layer that the folder has as one, each with the names that its
    parts have here, in the order of their rows and of ``layout.shapes.parameters``. One with a single part has another name in the folder.
    ``latent``: reads the sizes of multi-head latent attention, of a family that has it; ``new_latent(head_dim)``: those of a model that is created, whose heads
    have ``head_dim`` numbers without rotation.
    ``rotary_by_window``: layers with a window have a rotary embedding of their own; ``window_rope_theta``: its base, which ``rope_local_base_freq`` sets
    (``None``: the same key as the others').
    ``other_classes``: what the names of transformers' classes with another head than a language model's begin with (empty: as ``class_name`` does).
    ``mask``: the sliding windows. ``experts``: the mixture of experts in place of the MLP.
    The rest are the values of keys that a ``config.json`` leaves out: the defaults of transformers' configuration class.
    ``num_key_value_heads`` ``None``: as many as attention heads; ``head_dim`` ``None``: ``hidden_size`` over attention heads.
    """

    model_type: str
    class_name: str
    attention_bias: Trait = False
    output_bias: Trait = False
    mlp_bias: Trait = False
    qk_norm: bool = False
    qk_norm_all_heads: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    rotary_fraction: float | None = None
    rotary_interleaved: bool = False
    activation: Activation = "silu"
    activation_key: Literal["hidden_act", "hidden_activation"] = "hidden_act"
    activation_alias: str = ""
    norms_from_one: bool = False
    scaled_embedding: bool = False
    terms: Terms | None = None
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rotary_by_window: bool = False
    window_rope_theta: float | None = None
    other_classes: str = ""
    mask: Mask = FULL_ATTENTION
    experts: Mixture | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    centred_norms: bool = False
    parallel_blocks: bool = False
    norm_eps_key: Literal["rms_norm_eps", "layer_norm_eps"] = "rms_norm_eps"
    latent: Callable[[ConfigReader], LatentAttention] | None = None
    new_latent: Callable[[int], LatentAttention] | None = None

    @property
    def constants(self) -> dict[str, Any]:
        """The traits of all models of the family as fields of ``ModelShapes``."""
        names = (
            "qk_norm", "qk_norm_all_heads", "pre_norms", "post_norms", "activation", "norms_from_one", "scaled_embedding", "rotary_interleaved",
            "centred_norms", "parallel_blocks",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def biases(self, reader: ConfigReader) -> Biases:
        """Returns which linear layers have biases according to a ``config.json``."""

        def is_on(trait: Trait) -> bool:
            return trait if isinstance(trait, bool) else reader.boolean(trait.name, trait.default)

        return Biases(is_on(self.attention_bias), is_on(self.output_bias), is_on(self.mlp_bias))

    def bias_keys(self, shapes: ModelShapes) -> dict[str, bool]:
        """Returns the keys of ``config.json`` that say which linear layers of ``shapes`` have biases."""
        # The last trait takes precedence if two share a key.
        traits = (
            (self.mlp_bias, shapes.mlp_bias), (self.output_bias, shapes.output_bias), (self.attention_bias, shapes.attention_bias)
        )  # fmt: skip
        return {trait.name: value for trait, value in traits if isinstance(trait, ConfigFlag)}


OTHERS = "; other decoders of transformers are computed, slower, with model.implementation: transformers (--model-impl transformers)"
"""The end of a message about a family that is not declared."""


def all_families() -> dict[str, Family]:
    """Returns every family by its ``model_type``: one for each module of ``tandem.model.families``."""
    modules = (importlib.import_module(f"{families.__name__}.{module.name}") for module in pkgutil.iter_modules(families.__path__))
    return {module.FAMILY.model_type: module.FAMILY for module in modules}


def family_named(model_type: str) -> Family:
    """Returns the family of ``model_type``. Raises ``KeyError`` if there is none."""
    return all_families()[model_type]


def family_of_config(config: Mapping[str, Any], where: str, others: str = OTHERS) -> Family:
    """Returns the family of a ``config.json``: by ``model_type`` or, if that is missing, by the class in ``architectures``. Raises
    ``UserError`` for a family that is not supported; ``where`` names the file, and ``others`` says what computes a family that is not declared."""
    known, model_type = all_families(), config.get("model_type")
    if model_type is None:
        classes = config.get("architectures")
        for family in known.values():
            base = family.class_name.removesuffix("CausalLM")
            if isinstance(classes, list) and any(isinstance(name, str) and name.startswith(base) for name in classes):
                return family
    elif isinstance(model_type, str) and model_type in known:
        return known[model_type]
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and inner.get("model_type") in known:
        raise UserError(
            f"'{where}' has model_type {reprlib.repr(model_type)}, whose language model of model_type '{inner['model_type']}' is supported only in a folder of "
            f"its own: load it with transformers as {known[inner['model_type']].class_name}, and save that"
        )
    raise UserError(f"'{where}' has model_type {reprlib.repr(model_type)}; supported are {', '.join(known)}{others}{_nearest(model_type, known)}")


def family_to_create(name: str) -> Family:
    """Returns the family of ``model.create.architecture``. Raises ``UserError`` if there is none."""
    known = all_families()
    if name not in known:
        raise UserError(f"'model.create.architecture' is {name!r}; it must be one of {', '.join(known)}{_nearest(name, known)}")
    return known[name]


def _nearest(name: object, known: Mapping[str, Family]) -> str:
    """Returns the end of a message about ``name``: the family whose name is nearest, if one is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if isinstance(name, str) else []
    return f". Did you mean '{near[0]}'?" if near else ""
