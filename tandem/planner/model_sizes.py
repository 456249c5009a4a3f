"""The sizes of a model from a Hugging Face ``config.json``, of families that Tandem trains and of others. Imports no torch.

A family that Tandem trains is read as the trainer reads it. Of another, only sizes matter. Keys that may change a size and are not understood
(``config_keys``) are refused by name, because a plan that overlooks them would be wrong.
"""

from pathlib import Path
from typing import Any

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.family import Trait, family_of_config
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.model_config import read_json, shapes_of
from tandem.planner.config_keys import LINEAR_ATTENTION, SIZES, refuse_unknown
from tandem.planner.family_traits import OTHER, TRAITS, FamilyTraits
from tandem.types.errors import UserError

LAYER_KINDS = ("full_attention", "sliding_attention")


def read_model_sizes(path: str | Path, ignored: tuple[str, ...] = (), *, as_trained: bool = False) -> ModelShapes:
    """Returns the sizes that the ``config.json`` at ``path``, or in that folder, describes. ``ignored``: keys that the caller knows to change no size.
    ``as_trained``: the sizes that a run of Tandem has, which reads the keys of its families alone. Raises ``UserError`` for keys that are not understood, by
    name."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    return model_sizes(read_json(file), str(file), ignored, as_trained=as_trained)


def model_sizes(config: dict[str, Any], where: str, ignored: tuple[str, ...] = (), *, as_trained: bool = False) -> ModelShapes:
    """Returns the sizes that the content of a ``config.json`` describes."""
    if isinstance(config.get("text_config"), dict):
        outer = {key: value for key, value in config.items() if key != "text_config"}
        config = {**outer, **config["text_config"]}
    try:
        family_of_config(config, where)
    except UserError:
        refuse_unknown(config, where, ignored)
        return _of_other_family(ConfigReader(config, where))
    if not as_trained:
        # A family that does not have linear attention refuses it by name.
        refuse_unknown(config, where, (*ignored, *LINEAR_ATTENTION))
    shapes = shapes_of(config, where)
    hidden, heads = shapes.hidden_size, shapes.num_attention_heads
    if not config.get("head_dim") and shapes.latent is None and shapes.head_dim == hidden // heads and hidden % heads:
        raise ConfigReader(config, where).fail("hidden_size", hidden, f"it must be a multiple of num_attention_heads ({heads}) where head_dim is not given")
    return shapes


def _of_other_family(read: ConfigReader) -> ModelShapes:
    config, where = read.config, read.where
    traits = TRAITS.get(str(config.get("model_type")), OTHER)
    hidden, layers, heads = (_size(read, name, None) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    latent = _latent(read)
    head_dim = latent.head_dim if latent is not None else _size(read, "head_dim", traits.head_dim or max(1, hidden // heads))
    if hidden % heads and latent is None and not (traits.head_dim or config.get("head_dim")):
        raise read.fail("hidden_size", hidden, f"it must be a multiple of num_attention_heads ({heads}) where head_dim is not given")
    inner = _size(read, "intermediate_size", 4 * hidden)
    kv_heads = 1 if config.get("multi_query") is True else heads if latent is not None else _size(read, "num_key_value_heads", heads)
    is_on = lambda trait: _is_on(read, trait)
    try:
        return ModelShapes(
            str(config.get("model_type", "model")), read.integer("vocab_size"), hidden, layers, heads, kv_heads, head_dim, inner,
            _size(read, "max_position_embeddings", 4096), read.boolean("tie_word_embeddings", traits.ties), attention_bias=is_on(traits.attention_bias),
            output_bias=is_on(traits.output_bias), mlp_bias=is_on(traits.mlp_bias), qk_norm=is_on(traits.qk_norm), gated_mlp=traits.gated_mlp,
            layer_windows=_windows(read, layers, traits), experts=_experts(read, layers, inner, traits), latent=latent, post_norms=traits.post_norms,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"'{where}': {error}") from None


def _is_on(read: ConfigReader, trait: Trait) -> bool:
    return trait if isinstance(trait, bool) else read.boolean(trait.name, trait.default)


def _size(read: ConfigReader, name: str, default: int | None) -> int:
    key = next((key for key in SIZES[name] if read.config.get(key) is not None), SIZES[name][0])
    return read.integer(key, default)


def _latent(read: ConfigReader) -> LatentAttention | None:
    if not read.config.get("kv_lora_rank"):
        return None
    sizes = {name: read.integer(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    return LatentAttention(**sizes, q_lora_rank=read.integer("q_lora_rank") if read.config.get("q_lora_rank") else 0)


def _experts(read: ConfigReader, layers: int, inner: int, traits: FamilyTraits) -> ExpertShapes | None:
    count = _size(read, "num_experts", 1)
    if count == 1:
        return None
    each, shared = _size(read, "moe_intermediate_size", inner), 0
    if read.config.get("shared_expert_intermediate_size"):
        shared = read.integer("shared_expert_intermediate_size")
    for key in ("n_shared_experts", "num_shared_experts"):
        if read.config.get(key):
            shared = each * read.integer(key)
    return ExpertShapes(
        count, _size(read, "num_experts_per_tok", None), each, dense_layers=_dense_layers(read, layers), shared_intermediate_size=shared,
    )


def _dense_layers(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """Returns the layers with a plain MLP: the first ones, those that are listed, and all but every ``step``-th."""
    kinds = read.config.get("mlp_layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
            raise read.fail("mlp_layer_types", kinds, f"it must list 'dense' or 'sparse' for each of {layers} layers")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    first = read.integer("first_k_dense_replace") if read.config.get("first_k_dense_replace") else 0
    listed = read.config.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise read.fail("mlp_only_layers", listed, "it must be a list of layers")
    step = read.integer("decoder_sparse_step" if "decoder_sparse_step" in read.config else "moe_layer_freq", 1)
    return tuple(layer for layer in range(layers) if layer < first or layer in listed or (layer + 1) % step)


def _windows(read: ConfigReader, layers: int, traits: FamilyTraits) -> tuple[int | None, ...]:
    config, kinds = read.config, read.config.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise read.fail("layer_types", kinds, f"it must list the kind of each of {layers} layers")
        for kind in kinds:
            if kind not in LAYER_KINDS:
                raise read.fail("layer_types", kind, f"the planner knows {' and '.join(LAYER_KINDS)}")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ()
    window = read.integer("sliding_window")
    if isinstance(kinds, list):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    pattern = "sliding_window_pattern" if config.get("sliding_window_pattern") is not None else "_sliding_window_pattern"
    if config.get(pattern) is not None:
        # Every so many layers one has full attention.
        every = read.integer(pattern)
        return tuple(None if (layer + 1) % every == 0 else window for layer in range(layers))
    return (window,) * layers
