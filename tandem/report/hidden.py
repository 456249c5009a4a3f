"""The values of a recipe and of events as pages show them: without passwords, tokens and keys."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tandem.config.addresses import has_secret

_SECRET_NAMES = re.compile(
    r"(?i)^token$|(^|[_-])(password|passwd|secret|credentials?|signature|authorization|bearer|(api|access|private|secret)[_-]?key|(access|auth|api|hf)[_-]token)$"
)
_SECRET_VALUES = re.compile(r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|AKIA[A-Z0-9]{12,}|Bearer \S{8,})")
HIDDEN = "(hidden)"


def shown_values(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of a recipe by dotted key, as YAML would write them, without secrets."""
    return {key: _shown(key, value) for key, value in recipe.items()}


def _shown(key: str, value: Any) -> str:
    return json.dumps(without_secrets(key.rpartition(".")[2], value), default=str, ensure_ascii=False).removeprefix('"').removesuffix('"')


def without_secrets(name: str, value: Any) -> Any:
    """Returns ``value`` of the key ``name`` with passwords, tokens and keys hidden, however deep they are."""
    if isinstance(value, Mapping):
        return {key: without_secrets(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(name, inner) for inner in value]
    if isinstance(value, str) and value and (_SECRET_NAMES.search(name) or has_secret(value)):
        return HIDDEN
    return _SECRET_VALUES.sub(HIDDEN, value) if isinstance(value, str) else value
