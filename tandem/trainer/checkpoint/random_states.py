"""The states of torch's random number generators, as base64 text."""

import base64
from collections.abc import Mapping
from typing import Any

import torch


def random_states() -> dict[str, str]:
    """Returns the state of the CPU generator, and of this process's GPU if it has one."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(bytes(state.tolist())).decode("ascii") for name, state in states.items()}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restores the generators to ``states``."""
    for name, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
