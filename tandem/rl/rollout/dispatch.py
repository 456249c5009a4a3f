"""Which requests a step's rollout makes of the engine, and under which keys their random numbers stand."""

import hashlib
from typing import Any

from tandem.config.rollout import RolloutConfig


def request_key(step: int, prompt_id: str, purpose: str = "rollout") -> int:
    """A 63-bit key, the same in every process: random numbers of a request follow from it, the run's seed, the place in the
    group and the position alone, so a rollout that is repeated after a fault draws the same tokens."""
    text = f"{purpose}\0{step}\0{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def sample_id(step: int, prompt_id: str, index: int) -> str:
    """The name of one sample: unique in a run and the same after a restart."""
    return f"{step}/{prompt_id}/{index}"


def sampling_settings(rollout: RolloutConfig, group_size: int, seed: int) -> dict[str, Any]:
    """What the engine is asked for in training: the recipe's ``rollout`` section as plain values."""
    return {
        "n": group_size,
        "temperature": rollout.temperature,
        "top_k": rollout.top_k,
        "top_p": rollout.top_p,
        "min_p": rollout.min_p,
        "max_tokens": rollout.max_tokens,
        "stop": list(rollout.stop),
        "seed": seed,
        "purpose": "rollout",
    }


def evaluation_settings(rollout: RolloutConfig, seed: int, *, greedy: bool, purpose: str) -> dict[str, Any]:
    """As ``sampling_settings`` for one completion a prompt: greedy, or sampled at temperature 1 with nothing filtered."""
    return {
        "n": 1,
        "temperature": 0.0 if greedy else 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_tokens": rollout.max_tokens,
        "stop": list(rollout.stop),
        "seed": seed,
        "purpose": purpose,
    }
