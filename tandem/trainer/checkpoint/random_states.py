"""The states of torch's random number generators, as text."""

import base64
from collections.abc import Mapping
from typing import Any

import torch


def random_states() -> dict[str, str]:
    """Of the CPU, and of this process's GPU where there is one."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(bytes(state.tolist())).decode("ascii") for name, state in found.items()}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Go on where ``states`` were taken."""
    for name, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
