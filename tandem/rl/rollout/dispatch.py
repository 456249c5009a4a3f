"""The requests of a step's rollout, and the keys of their random numbers."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tandem.config.rollout import RolloutConfig


def request_key(step: int, prompt_id: str, purpose: str = "rollout", turn: int = 0) -> int:
    """Returns a 63-bit key, the same in every process. A request's random numbers depend only on it, the run's seed, the index in the group
    and the position, so that a rollout repeated after a fault draws the same tokens. ``turn``: of an episode."""
    turned = (str(turn),) if turn else ()
    text = "\0".join((purpose, str(step), prompt_id, *turned)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def model_call_key(step: int, prompt_id: str, purpose: str, tokens: Sequence[int], repeat: int) -> int:
    """Returns the 63-bit key of a call of the model by an agent. Instead of its number, which depends on time where an agent makes calls at once, it has what
    the model reads, ``tokens``, and how many earlier calls of the episode read the same (``repeat``)."""
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()
    return request_key(step, prompt_id, f"{purpose}\0{digest}", repeat)


def sample_id(step: int, prompt_id: str, index: int) -> str:
    """Returns the name of one sample, unique in a run and the same after a restart."""
    return f"{step}/{prompt_id}/{index}"


def step_of(sample_id: str) -> int:
    """Returns the step in which the sample with this name was begun."""
    return int(sample_id.partition("/")[0])


def sampling_settings(rollout: RolloutConfig, group_size: int, seed: int) -> dict[str, Any]:
    """Returns the sampling settings for training: the recipe's ``rollout`` section as plain values."""
    return {
        "n": group_size,
        "temperature": rollout.temperature,
        "top_k": rollout.top_k,
        "top_p": rollout.top_p,
        "min_p": rollout.min_p,
        "max_tokens": rollout.max_tokens,
        "budget_tokens": rollout.budget_tokens,
        "stop": list(rollout.stop),
        "repetition_detection": asdict(rollout.repetition_detection) if rollout.repetition_detection is not None else None,
        "seed": seed,
        "purpose": "rollout",
    }


def evaluation_settings(rollout: RolloutConfig, seed: int, *, greedy: bool, purpose: str) -> dict[str, Any]:
    """Returns ``sampling_settings`` for one completion per prompt: greedy, or sampled at temperature 1 without filters."""
    return {
        "n": 1,
        "temperature": 0.0 if greedy else 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_tokens": rollout.max_tokens,
        "budget_tokens": 0,
        "stop": list(rollout.stop),
        "repetition_detection": None,
        "seed": seed,
        "purpose": purpose,
    }
