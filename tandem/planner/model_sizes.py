"""The sizes of a model from a Hugging Face ``config.json``, of families that Tandem trains and of others. Imports no torch.

A family that Tandem trains is read as the trainer reads it. Of another, only sizes matter: the keys below are understood, those that change no size are left
out, and any other key with a number in it is refused by name, because a plan that overlooks it would be wrong.
"""

from pathlib import Path
from typing import Any

from tandem.layout.shapes import ExpertShapes, ModelShapes
from tandem.model.family import family_of_config
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.model_config import read_json, shapes_of
from tandem.types.errors import UserError

SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "moe_top_k", "moe_topk"),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "first_dense": ("first_k_dense_replace",),
    "sliding_window": ("sliding_window",),
}
"""Of each size, the keys of ``config.json`` that name it."""
OTHER_KEYS = (
    "vocab_size", "layer_types", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "mlp_only_layers", "decoder_sparse_step",
    "moe_layer_freq", "tie_word_embeddings",
)  # fmt: skip
UNIMPORTANT = (
    "rope", "token_id", "dropout", "drop", "eps", "epsilon", "init", "label", "norm_topk_prob", "router_", "routed_scaling_factor", "scoring_func",
    "topk_method", "topk_group", "n_group", "aux_loss", "coef", "softcapping", "scal", "cap", "summary", "beam", "temperature",
    "task_specific_params",
    "quantization_config", "pretraining_tp", "transformers_version", "auto_map", "original_max", "query_pre_attn_scalar", "generation", "ep_size", "clip_qkv",
    "tokenizer",
)  # fmt: skip
"""Parts of keys that change no size."""
TWO_MATRICES = ("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "starcoder2", "opt", "bloom", "falcon", "phi", "mpt", "nemotron")
"""Types of models whose MLP has no gate."""


def read_model_sizes(path: str | Path, ignored: tuple[str, ...] = ()) -> ModelShapes:
    """Returns the sizes that the ``config.json`` at ``path``, or in that folder, describes. ``ignored``: keys that the caller knows to change no size. Raises
    ``UserError`` for keys that are not understood, by name."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    return model_sizes(read_json(file), str(file), ignored)


def model_sizes(config: dict[str, Any], where: str, ignored: tuple[str, ...] = ()) -> ModelShapes:
    """Returns the sizes that the content of a ``config.json`` describes."""
    if isinstance(config.get("text_config"), dict):
        config = {"model_type": config.get("model_type"), **config["text_config"]}
    try:
        family_of_config(config, where)
    except UserError:
        return _of_other_family(config, where, ignored)
    return shapes_of(config, where)


def _of_other_family(config: dict[str, Any], where: str, ignored: tuple[str, ...]) -> ModelShapes:
    _refuse_unknown(config, where, ignored)
    read = ConfigReader(config, where)
    size = lambda name, default=None: _size(read, name, default)
    hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    if hidden % heads and not config.get("head_dim"):
        raise read.fail("hidden_size", hidden, f"it must be a multiple of num_attention_heads ({heads}) where head_dim is not given")
    inner = size("intermediate_size", 4 * hidden)
    count, experts = size("num_experts", 1), None
    if count > 1:
        experts = ExpertShapes(count, size("num_experts_per_tok"), size("moe_intermediate_size", inner), dense_layers=_dense_layers(read, layers))
    kv_heads = 1 if config.get("multi_query") is True else size("num_key_value_heads", heads)
    try:
        return ModelShapes(
            str(config.get("model_type", "model")), read.integer("vocab_size"), hidden, layers, heads, kv_heads, size("head_dim", hidden // heads), inner,
            size("max_position_embeddings", 4096), read.boolean("tie_word_embeddings", False), layer_windows=_windows(read, layers), experts=experts,
            gated_mlp=config.get("model_type") not in TWO_MATRICES,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"'{where}': {error}") from None


def _size(read: ConfigReader, name: str, default: int | None) -> int:
    key = next((key for key in SIZES[name] if read.config.get(key) is not None), SIZES[name][0])
    return read.integer(key, default)


def _dense_layers(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """Returns the layers with a plain MLP: the first ones, those that are listed, and all but every ``step``-th."""
    first = read.config.get("first_k_dense_replace") or 0
    listed = read.config.get("mlp_only_layers") or []
    step = read.integer("decoder_sparse_step" if "decoder_sparse_step" in read.config else "moe_layer_freq", 1)
    return tuple(layer for layer in range(layers) if layer < first or layer in listed or (layer + 1) % step)


def _windows(read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    config = read.config
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ()
    window, kinds, pattern = read.integer("sliding_window"), config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise read.fail("layer_types", kinds, f"it must list the kind of each of {layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if pattern is not None:
        # Every pattern-th layer has full attention.
        every = read.integer("sliding_window_pattern")
        return tuple(None if (layer + 1) % every == 0 else window for layer in range(layers))
    return (window,) * layers


def _refuse_unknown(config: dict[str, Any], where: str, ignored: tuple[str, ...]) -> None:
    understood = {key for keys in SIZES.values() for key in keys} | set(OTHER_KEYS) | set(ignored) | {"architectures", "model_type"}
    unknown = sorted(
        key for key, value in config.items()
        if key not in understood and not any(part in key for part in UNIMPORTANT) and _has_number(value)
    )  # fmt: skip
    if unknown:
        raise UserError(
            f"'{where}' has fields that the planner does not understand: {', '.join(unknown[:8])}; name those that change no size with "
            f"--ignore-fields {','.join(unknown[:8])}, or give the sizes by flag"
        )


def _has_number(value: Any) -> bool:
    """Returns whether a value may be a size: a whole number of 2 or more, or something with one inside."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return value > 1
    if isinstance(value, dict):
        return any(_has_number(each) for each in value.values())
    return isinstance(value, list) and any(_has_number(each) for each in value)
