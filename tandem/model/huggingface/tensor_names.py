"""The names of the tensors of a Hugging Face folder, from the headers of its files. Imports no torch."""

import json
from pathlib import Path

from tandem.model.huggingface.hub import INDEX, WEIGHTS
from tandem.model.huggingface.model_config import read_json
from tandem.types import UserError

MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as its library allows."""


def tensor_names(folder: str | Path) -> set[str]:
    """Returns the names of all tensors of ``folder``, whose weights are one file or have an index. Raises ``UserError`` for another folder."""
    folder = Path(folder)
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise UserError(f"'{folder}' has neither {WEIGHTS} nor {INDEX}; only safetensors weights are read")
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise UserError(f"'{folder / INDEX}' has no usable weight_map; download the folder again")
        return set(listed)
    try:
        with (folder / WEIGHTS).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= MOST_HEADER_BYTES else None
    except (OSError, ValueError) as error:
        raise UserError(f"'{folder / WEIGHTS}' is broken or truncated ({error}); download it again") from None
    if not isinstance(header, dict):
        raise UserError(f"'{folder / WEIGHTS}' is broken or truncated; download it again")
    return set(header) - {"__metadata__"}
