"""``config.json`` of a Hugging Face folder, to and from ``ModelShapes``. Imports no torch.

Missing keys take the defaults of transformers 5's configuration classes; both key styles of rotary embedding are read
(``rope_theta`` and ``rope_scaling`` of transformers 4, ``rope_parameters`` of 5). Dropout is not applied.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.layout.shapes import ARCHITECTURES, EXPERT_NAMES, ExpertShapes, ModelShapes, RopeScaling
from tandem.types import UserError

TokenIds = int | Sequence[int] | None
CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_KEY_HEADS = {"qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "mixtral": 8}
_POSITIONS = {"llama": 2048, "mixtral": 131072}
_THETA, _EPS = {"mixtral": 1e6}, {"mixtral": 1e-5}
_EXPERT_COUNTS = {"qwen3_moe": (128, 8), "mixtral": (8, 2)}
_ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "finetuned",
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ``UserError`` where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"'{path.parent}' has no {path.name}; it must be a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"'{path}' holds a JSON {type(content).__name__}; it must hold an object")
    return content


def read_shapes(folder: str | Path) -> ModelShapes:
    """The shapes of the model in ``folder``. Raises ``UserError`` for what is no model or is not supported."""
    path = Path(folder) / "config.json"
    return shapes_of(read_json(path), str(path))


def shapes_of(config: dict[str, Any], where: str = "config.json") -> ModelShapes:
    """The shapes that the content of a ``config.json`` describes; ``where`` names it in errors."""
    read = _Reader(config, where)
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise UserError(f"'{where}' has model_type {architecture!r}; supported are {', '.join(ARCHITECTURES)}")
    read.only("hidden_act", "silu")
    read.only("partial_rotary_factor", 1.0)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    kv_heads = read.integer(
        "num_key_value_heads", heads if "num_key_value_heads" in config else _KEY_HEADS.get(architecture, heads)
    )
    max_position_embeddings = read.integer("max_position_embeddings", _POSITIONS.get(architecture, 32768))
    default_head_dim = 128 if architecture == "qwen3" and "head_dim" not in config else hidden // heads
    bias = True if architecture == "qwen2" else read.boolean("attention_bias", False)
    theta, scaling = _rope(read, max_position_embeddings, _THETA.get(architecture, 10000.0))
    layers = read.integer("num_hidden_layers")
    experts = _experts(read, architecture, layers) if architecture in EXPERT_NAMES else None
    try:
        return ModelShapes(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=read.integer("head_dim", default_head_dim),
            intermediate_size=read.integer("intermediate_size"),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            rms_norm_eps=read.number("rms_norm_eps", _EPS.get(architecture, 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            attention_bias=bias,
            output_bias=bias and architecture != "qwen2",
            mlp_bias=architecture == "llama" and read.boolean("mlp_bias", False),
            qk_norm=architecture in ("qwen3", "qwen3_moe"),
            layer_windows=_windows(read, architecture, layers),
            experts=experts,
        )
    except ValueError as error:
        raise UserError(f"'{where}': {error}") from None


class _Reader:
    """Typed values of a configuration; ``null`` counts as missing."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def fail(self, key: str, value: Any, fix: str) -> UserError:
        return UserError(f"'{self.where}' has {key} {value!r}; {fix}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise UserError(f"'{self.where}' has no {key}; a model needs it")
            return default
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(key, value, "it must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.fail(key, value, "it must be a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, value, "it must be true or false")
        return value

    def only(self, key: str, supported: Any) -> None:
        value = self.config.get(key)
        if value is not None and value != supported:
            raise self.fail(
                key, value, "it is not supported" if supported is None else f"only {supported!r} is supported"
            )


def _experts(read: _Reader, architecture: str, layers: int) -> ExpertShapes:
    """The mixture of experts. Qwen3-MoE's layers without one: those of ``mlp_only_layers``, and all but every
    ``decoder_sparse_step``-th."""
    count, each = _EXPERT_COUNTS[architecture]
    key = "num_experts" if read.config.get("num_experts") is not None else "num_local_experts"
    count, each = read.integer(key, count), read.integer("num_experts_per_tok", each)
    if architecture == "mixtral":
        return ExpertShapes(count, each, read.integer("intermediate_size"))
    step, listed = read.integer("decoder_sparse_step", 1), read.config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise read.fail("mlp_only_layers", listed, "it must be a list of layers")
    dense = tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
    normalised = read.boolean("norm_topk_prob", False)
    return ExpertShapes(count, each, read.integer("moe_intermediate_size", 768), normalised, dense)


def _rope(read: _Reader, max_position_embeddings: int, default_theta: float) -> tuple[float, RopeScaling]:
    """Theta and scaling, from either key style; ``rope_scaling`` goes before ``rope_parameters`` as in transformers."""
    key = "rope_scaling" if read.config.get("rope_scaling") else "rope_parameters"
    given = read.config.get(key) or {}
    if not isinstance(given, dict):
        raise read.fail(key, given, "it must be an object or null")
    rope = _Reader(given, f"{read.where}': '{key}")
    kind = given.get("rope_type", given.get("type", "default"))
    nested = [name for name, value in given.items() if isinstance(value, dict)]
    if nested:
        raise read.fail(key, nested[0], "rotary embedding of its own for a kind of layer is not supported")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise rope.fail("rope_type", kind, "supported are default, linear, llama3 and yarn")
    for name in given.keys() - _ROPE_KEYS:
        raise rope.fail(name, given[name], "it is not supported")
    rope.only("partial_rotary_factor", 1.0)
    theta = rope.number("rope_theta", read.number("rope_theta", default_theta))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", factor=rope.number("factor"))
    # A value outside the rotary keys goes first, as in transformers.
    context = rope.integer("original_max_position_embeddings", max_position_embeddings)
    context = read.integer("original_max_position_embeddings", context)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            raise rope.fail("high_freq_factor", high, f"it must be above low_freq_factor ({low})")
        return theta, RopeScaling(
            "llama3",
            rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=context,
        )
    return theta, RopeScaling(
        "yarn",
        factor=rope.number("factor", max_position_embeddings / context),
        original_max_position_embeddings=context,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=None if given.get("attention_factor") is None else rope.number("attention_factor"),
        mscale=float(given.get("mscale") or 0.0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0.0),
        truncate=rope.boolean("truncate", True),
    )


def _windows(read: _Reader, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's window. Mixtures of experts: all layers alike; Mixtral has no ``use_sliding_window``. Qwen2 and Qwen3:
    by ``layer_types`` where given, else sliding from layer ``max_window_layers`` on."""
    if architecture == "llama":
        return ()
    if architecture == "mixtral":
        return () if read.config.get("sliding_window") is None else (read.integer("sliding_window"),) * layers
    window = read.integer("sliding_window", 4096) if read.boolean("use_sliding_window", False) else None
    # A sliding_window of null turns windows off even where use_sliding_window is true.
    if "sliding_window" in read.config and read.config["sliding_window"] is None:
        window = None
    if architecture == "qwen3_moe":
        return () if window is None else (window,) * layers
    kinds = read.config.get("layer_types")
    if kinds is None:
        first = read.config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise read.fail("max_window_layers", first, "it must be a whole number of at least 0")
        return () if window is None or first >= layers else tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise read.fail("layer_types", kinds, f"it must list the kind of each of {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise read.fail("layer_types", kind, "supported are full_attention and sliding_attention")
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise read.fail("layer_types", "sliding_attention", "that needs use_sliding_window true and a sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def config_json(
    shapes: ModelShapes,
    *,
    eos_token_id: TokenIds = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """The content of a ``config.json`` that transformers 4 and 5 read. Raises ``ValueError`` for shapes that the
    architecture's format has no words for."""
    _check_expressible(shapes)
    scaling = _scaling_json(shapes.rope_scaling)
    content: dict[str, Any] = {
        "architectures": [CLASS_NAMES[shapes.architecture]],
        "model_type": shapes.architecture,
        "vocab_size": shapes.vocab_size,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
        "num_hidden_layers": shapes.num_hidden_layers,
        "num_attention_heads": shapes.num_attention_heads,
        "num_key_value_heads": shapes.num_key_value_heads,
        "head_dim": shapes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shapes.max_position_embeddings,
        "rms_norm_eps": shapes.rms_norm_eps,
        "tie_word_embeddings": shapes.tie_word_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": shapes.rope_theta,
        "rope_scaling": None if shapes.rope_scaling.kind == "default" else scaling,
        "rope_parameters": {**scaling, "rope_theta": shapes.rope_theta},
        "eos_token_id": eos_token_id if eos_token_id is None or isinstance(eos_token_id, int) else list(eos_token_id),
        "bos_token_id": bos_token_id,
        "pad_token_id": pad_token_id,
    }
    if shapes.architecture in ("llama", "qwen3", "qwen3_moe"):
        content["attention_bias"] = shapes.attention_bias
    if shapes.architecture == "llama":
        content["mlp_bias"] = shapes.mlp_bias
    else:
        content |= _windows_json(shapes)
    if shapes.experts is not None:
        content |= _experts_json(shapes.experts, shapes.architecture)
    return content


def _windows_json(shapes: ModelShapes) -> dict[str, Any]:
    windows = shapes.layer_windows or (None,) * shapes.num_hidden_layers
    used = [window for window in windows if window is not None]
    content: dict[str, Any] = {"sliding_window": used[0] if used else None}
    if shapes.architecture != "mixtral":
        content["use_sliding_window"] = bool(used)
    if shapes.architecture in ("qwen2", "qwen3"):
        content["max_window_layers"] = next(
            (i for i, window in enumerate(windows) if window is not None), shapes.num_hidden_layers
        )
        content["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return content


def _experts_json(experts: ExpertShapes, architecture: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "output_router_logits": False,
    }
    if architecture == "mixtral":
        return content
    # transformers 4 knows the count by Qwen's own name, transformers 5 by Mixtral's.
    return content | {
        "num_experts": experts.num_experts,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }


def _scaling_json(scaling: RopeScaling) -> dict[str, Any]:
    content: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.kind == "default":
        return content
    content["factor"] = scaling.factor
    if scaling.kind in ("llama3", "yarn"):
        content["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        content |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        content |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(scaling, name):
                content[name] = getattr(scaling, name)
    return content


def _check_expressible(shapes: ModelShapes) -> None:
    windows = set(shapes.layer_windows)
    expected: dict[str, object] = {
        "output_bias": False if shapes.architecture == "qwen2" else shapes.attention_bias,
        "attention_bias": {"qwen2": True, "mixtral": False}.get(shapes.architecture, shapes.attention_bias),
        "mlp_bias": shapes.mlp_bias if shapes.architecture == "llama" else False,
        "qk_norm": shapes.architecture in ("qwen3", "qwen3_moe"),
    }
    if shapes.experts is not None and shapes.architecture == "mixtral":
        inner = shapes.intermediate_size
        expected["experts"] = ExpertShapes(shapes.experts.num_experts, shapes.experts.num_experts_per_tok, inner)
    for name, value in expected.items():
        if getattr(shapes, name) != value:
            raise ValueError(
                f"a {shapes.architecture} config.json cannot say {name} {getattr(shapes, name)}; it must be {value}"
            )
    most_windows = {"llama": 0, "qwen2": 1, "qwen3": 1, "qwen3_moe": 1, "mixtral": 1}[shapes.architecture]
    sliding = sorted(window for window in windows if window is not None)
    is_mixed = shapes.experts is not None and len(windows) > 1
    if len(sliding) > most_windows or is_mixed:
        raise ValueError(f"a {shapes.architecture} config.json cannot say sliding windows {list(shapes.layer_windows)}")
