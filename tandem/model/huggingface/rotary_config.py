"""Reads and writes the rotary embeddings of a ``config.json``: both key styles of transformers, ``rope_theta`` and ``rope_scaling`` of 4 and
``rope_parameters`` of 5. Imports no torch."""

from typing import Any

from tandem.layout.rotary import RopeScaling, Rotary
from tandem.layout.shapes import ModelShapes
from tandem.model.family import Family
from tandem.model.huggingface.config_reader import ConfigReader

LAYER_KINDS = ("full_attention", "sliding_attention")
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
    "short_factor",
    "long_factor",
}


def read_rotaries(read: ConfigReader, max_position_embeddings: int, family: Family) -> tuple[Rotary, Rotary]:
    """Returns the rotary embedding of layers with full attention and that of layers with a window, which in most families are the same. transformers 4 has the
    scaling of the first alone, transformers 5 both by the kind of layer."""
    given = read.config.get("rope_parameters")
    if not family.rotary_by_window:
        inside, beside = given.get("rope_theta") if isinstance(given, dict) else None, read.config.get("rope_theta")
        if inside is not None and beside is not None and inside != beside:
            raise read.fail("rope_theta", beside, f"rope_parameters has rope_theta {inside!r}; remove one of them")
        rotary = Rotary(*_rope(read, max_position_embeddings, family.rope_theta, family.rope_scaling))
        return rotary, rotary
    is_by_kind = isinstance(given, dict) and any(isinstance(value, dict) for value in given.values())
    if family.window_rope_theta is not None and given and not is_by_kind:
        raise read.fail("rope_parameters", given, f"it must have an object for each of {' and '.join(LAYER_KINDS)}")
    by_kind: dict[str, Any] = given if given is not None and is_by_kind else dict.fromkeys(LAYER_KINDS, given)
    for kind in by_kind.keys() - set(LAYER_KINDS):
        raise read.fail("rope_parameters", kind, f"the kinds of layers are {' and '.join(LAYER_KINDS)}")
    full, window = (
        ConfigReader({**read.config, "rope_parameters": by_kind.get(kind), "rope_scaling": scaling}, read.where)
        for kind, scaling in zip(LAYER_KINDS, (None if by_kind.get(LAYER_KINDS[0]) else read.config.get("rope_scaling"), None), strict=True)
    )
    window_theta = family.rope_theta
    if family.window_rope_theta is not None:
        window_theta = read.number("rope_local_base_freq", family.window_rope_theta)
        window = ConfigReader({key: value for key, value in window.config.items() if key != "rope_theta"}, read.where)
    return Rotary(*_rope(full, max_position_embeddings, family.rope_theta)), Rotary(*_rope(window, max_position_embeddings, window_theta))


def read_rotary_fraction(read: ConfigReader, family: Family) -> float:
    """Returns the part of each head that is rotated, of a family that has one: from either key style, or beside them."""
    given = read.config.get("rope_scaling") or read.config.get("rope_parameters") or {}
    inside = ConfigReader(given if isinstance(given, dict) else {}, read.where)
    if family.rotary_fraction is None:
        read.only("partial_rotary_factor", 1.0)
        inside.only("partial_rotary_factor", 1.0)
        return 1.0
    fraction = inside.number("partial_rotary_factor", read.number("partial_rotary_factor", family.rotary_fraction))
    if fraction > 1:
        raise read.fail("partial_rotary_factor", fraction, "it must be at most 1")
    return fraction


def _rope(read: ConfigReader, max_position_embeddings: int, default_theta: float, default_scaling: RopeScaling | None = None) -> tuple[float, RopeScaling]:
    """Returns theta and scaling from either key style; ``rope_scaling`` takes precedence over ``rope_parameters`` as in transformers. ``default_scaling``:
    without either."""
    key = "rope_scaling" if read.config.get("rope_scaling") else "rope_parameters"
    given = read.config.get(key) or {}
    if not isinstance(given, dict):
        raise read.fail(key, given, "it must be an object or null")
    rope = ConfigReader(given, f"{read.where}': '{key}")
    kind = given.get("rope_type", given.get("type", "default"))
    nested = [name for name, value in given.items() if isinstance(value, dict)]
    if nested:
        raise read.fail(key, nested[0], "a separate rotary embedding per layer type is not supported")
    # The names of the first Phi-3 folders.
    kind = "longrope" if kind in ("su", "yarn") and "short_factor" in given else kind
    if kind not in ("default", "linear", "llama3", "yarn", "longrope"):
        raise rope.fail("rope_type", kind, "supported are default, linear, llama3, yarn and longrope")
    if kind != "longrope":
        for name in ("short_factor", "long_factor"):
            rope.only(name, None)
    for name in given.keys() - _ROPE_KEYS:
        raise rope.fail(name, given[name], "it is not supported")
    theta = rope.number("rope_theta", read.number("rope_theta", default_theta))
    if not given:
        return theta, default_scaling or RopeScaling()
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", factor=rope.number("factor"))
    # A value outside the rotary keys takes precedence, as in transformers.
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
    if kind == "longrope":
        return theta, RopeScaling(
            "longrope",
            factor=rope.number("factor", max_position_embeddings / context),
            original_max_position_embeddings=context,
            attention_factor=None if given.get("attention_factor") is None else rope.number("attention_factor"),
            short_factors=_factors(rope, "short_factor"),
            long_factors=_factors(rope, "long_factor"),
        )
    return theta, RopeScaling(
        "yarn",
        factor=rope.number("factor", max_position_embeddings / context),
        original_max_position_embeddings=context,
        beta_fast=rope.number("beta_fast") if given.get("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow") if given.get("beta_slow") else 1.0,
        attention_factor=None if given.get("attention_factor") is None else rope.number("attention_factor"),
        mscale=rope.number("mscale") if given.get("mscale") else 0.0,
        mscale_all_dim=rope.number("mscale_all_dim") if given.get("mscale_all_dim") else 0.0,
        truncate=rope.boolean("truncate", True),
    )


def _factors(rope: ConfigReader, key: str) -> tuple[float, ...]:
    given = rope.config.get(key)
    if not isinstance(given, list) or not all(isinstance(each, int | float) and not isinstance(each, bool) and 0 < each < 2**63 for each in given):
        raise rope.fail(key, given, "it must be a list of numbers above 0, one for each pair of components that is rotated")
    return tuple(map(float, given))


def rotary_keys(shapes: ModelShapes, family: Family) -> dict[str, Any]:
    """Returns the keys that describe the rotary embeddings of ``shapes`` in both styles."""
    scaling = _scaling_json(shapes.rope_scaling)
    own = {**scaling, "rope_theta": shapes.rope_theta}
    fraction = {} if family.rotary_fraction is None else {"partial_rotary_factor": shapes.rotary_fraction}
    own |= fraction
    beside: dict[str, Any] = {}
    if shapes.rope_scaling.kind == "longrope":
        # transformers 4 reads exactly these from Phi-3's rope_scaling, and the context from beside it.
        derived = shapes.max_position_embeddings / shapes.rope_scaling.original_max_position_embeddings
        if (shapes.rope_scaling.factor, shapes.rope_scaling.attention_factor) == (derived, None):
            scaling = {"type": "longrope", "short_factor": scaling["short_factor"], "long_factor": scaling["long_factor"]}
        beside["original_max_position_embeddings"] = shapes.rope_scaling.original_max_position_embeddings
    elif fraction and shapes.rope_scaling.kind != "default":
        scaling |= fraction
    of_windows = shapes.window_rotary
    other = own if of_windows is None else {**_scaling_json(of_windows.scaling), "rope_theta": of_windows.theta}
    return {
        "rope_theta": shapes.rope_theta,
        "rope_scaling": None if shapes.rope_scaling.kind == "default" else scaling,
        **fraction,
        **beside,
        "rope_parameters": dict(zip(LAYER_KINDS, (own, other), strict=True)) if family.rotary_by_window else own,
    }


def _scaling_json(scaling: RopeScaling) -> dict[str, Any]:
    content: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.kind == "default":
        return content
    content["factor"] = scaling.factor
    if scaling.kind in ("llama3", "yarn", "longrope"):
        content["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        content |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "longrope":
        content |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        content |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    if scaling.kind == "yarn":
        content |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(scaling, name):
                content[name] = getattr(scaling, name)
    return content
