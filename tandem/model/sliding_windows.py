"""The attention masks of model families: how a ``config.json`` gives each layer's sliding window. Imports no torch.

A window is counted in tokens, the token itself included; ``None`` is full causal attention. Trainer and engine apply it alike.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tandem.model.huggingface.config_reader import ConfigReader

Windows = tuple[int | None, ...]
"""One entry per layer."""


class Mask(NamedTuple):
    """``read(reader, layers)`` returns the window of each of ``layers`` layers, ``()`` if all attention is full; ``write(windows)`` returns
    the keys of ``config.json`` for one window per layer."""

    read: Callable[[ConfigReader, int], Windows]
    write: Callable[[Windows], dict[str, Any]]


def sliding_window(default: int | None) -> Mask:
    """Returns the mask of a family whose layers all have the window of the key ``sliding_window``: null means full attention,
    a missing key means ``default``."""

    def read(reader: ConfigReader, layers: int) -> Windows:
        kinds = reader.config.get("layer_types")
        if isinstance(kinds, list) and len(set(map(str, kinds))) > 1:
            raise reader.fail("layer_types", kinds, "layers with windows of their own are not supported for this model_type")
        window = reader.config.get("sliding_window", default)
        return () if window is None else (reader.integer("sliding_window", default),) * layers

    return Mask(read, lambda windows: {"sliding_window": _first(windows)})


def _read_switched_window(reader: ConfigReader) -> int | None:
    """Returns the window of the keys ``use_sliding_window`` and ``sliding_window``; null turns it off even if the switch is on."""
    if not reader.boolean("use_sliding_window", False) or reader.config.get("sliding_window", 0) is None:
        return None
    return reader.integer("sliding_window", 4096)


def _read_switched(reader: ConfigReader, layers: int) -> Windows:
    window = _read_switched_window(reader)
    return () if window is None else (window,) * layers


def _layer_types(reader: ConfigReader, layers: int) -> list[str] | None:
    """Returns the kind of each layer, ``None`` if there is no such key."""
    kinds = reader.config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise reader.fail("layer_types", kinds, f"it must list the kind of each of {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.fail("layer_types", kind, "supported are full_attention and sliding_attention")
    return kinds


def _types(windows: Windows) -> dict[str, Any]:
    return {"layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows]}


def _read_by_layer(reader: ConfigReader, layers: int) -> Windows:
    window, kinds = _read_switched_window(reader), _layer_types(reader, layers)
    if kinds is None:
        first = reader.config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise reader.fail("max_window_layers", first, "it must be a whole number of at least 0")
        return () if window is None or first >= layers else tuple(window if i >= first else None for i in range(layers))
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise reader.fail("layer_types", "sliding_attention", "it needs use_sliding_window true and a sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _first(windows: Windows) -> int | None:
    return next((window for window in windows if window is not None), None)


def _write_switched(windows: Windows) -> dict[str, Any]:
    return {"sliding_window": _first(windows), "use_sliding_window": _first(windows) is not None}


def _write_by_layer(windows: Windows) -> dict[str, Any]:
    return _write_switched(windows) | {
        "max_window_layers": next((i for i, window in enumerate(windows) if window is not None), len(windows)),
        **_types(windows),
    }


def windows_by_type(default: int, full_every: int, pattern: str = "") -> Mask:
    """Returns the mask of a family whose ``layer_types`` names the layers with the window ``sliding_window`` (a missing key: ``default``; null: none). Without
    ``layer_types`` every ``full_every``-th layer has full attention, or as often as the key ``pattern`` says."""

    def read(reader: ConfigReader, layers: int) -> Windows:
        if reader.config.get("sliding_window", default) is None:
            return ()
        window = reader.integer("sliding_window", default)
        every = reader.integer(pattern, full_every) if pattern else full_every
        kinds = _layer_types(reader, layers) or ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds) if "sliding_attention" in kinds else ()

    return Mask(read, lambda windows: {"sliding_window": _first(windows), **_types(windows)})


FULL_ATTENTION = Mask(lambda reader, layers: (), lambda windows: {})
SWITCHED_WINDOW = Mask(_read_switched, _write_switched)
"""``use_sliding_window`` turns on ``sliding_window`` in every layer."""
WINDOW_BY_LAYER = Mask(_read_by_layer, _write_by_layer)
"""``use_sliding_window`` turns on ``sliding_window`` in the layers that ``layer_types`` names, or without it in those from
``max_window_layers`` on."""
