"""The sampling defaults that a model's authors recommend in ``generation_config.json``, with vLLM's rules. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.model.huggingface.model_config import read_json
from tandem.types import UserError

NAMES = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}  # fmt: skip
"""The keys of transformers that are read, and the fields of ``SamplingParams`` that they set, as in vLLM."""
FILE = "generation_config.json"


def default_sampling(folder: Path, source: str = "auto", override: Mapping[str, Any] | None = None) -> dict[str, float | int]:
    """Returns the fields of ``SamplingParams`` that a request does not give and the model does.

    Args:
        folder: The model's folder.
        source: ``auto``: the file of ``folder``; ``vllm``: none; else another folder.
        override: Values that replace those of the file, by the keys of transformers; ``None`` removes one.

    Raises:
        UserError: A value that no request could have, a key that is not read, or a folder without the file.
    """
    values: dict[str, Any] = {}
    place = Path(folder if source == "auto" else source)
    if source not in ("auto", "vllm") and not (place / FILE).is_file():
        raise UserError(f"engine generation_config is '{source}', which has no {FILE}; give auto (the model's), vllm (none) or a folder that has one")
    if source != "vllm" and (place / FILE).is_file():
        given = read_json(place / FILE)
        values = {key: given[key] for key in NAMES if given.get(key) is not None}
    where = dict.fromkeys(values, f"'{place / FILE}' has")
    for key, value in (override or {}).items():
        if key not in NAMES:
            raise UserError(f"engine override_generation_config has '{key}'; it may set {', '.join(NAMES)}")
        values[key], where[key] = value, "engine override_generation_config has"
    return {NAMES[key]: _checked(key, value, where[key]) for key, value in values.items() if value is not None}


def _checked(key: str, value: Any, where: str) -> float | int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and key in ("top_k", "max_new_tokens") and value == int(value) and (value >= -1 if key == "top_k" else value >= 1):
        return int(value)
    limits = {"temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0, 100)}
    if is_number and key in limits:
        low, high = limits[key]
        if low <= value <= high and not (value == 0 and key in ("top_p", "repetition_penalty")):
            return float(value)
    raise UserError(f"{where} {key} {value!r}, which no request may have; correct it, or set generation_config to vllm")
