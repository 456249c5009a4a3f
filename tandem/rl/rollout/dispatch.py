"""Which requests a step's rollout makes of the engine, and under which keys their random numbers stand."""

import hashlib


def request_key(step: int, prompt_id: str, purpose: str = "rollout") -> int:
    """A 63-bit key, the same in every process: random numbers of a request follow from it, the run's seed, the place in the
    group and the position alone, so a rollout that is repeated after a fault draws the same tokens."""
    text = f"{purpose}\0{step}\0{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def sample_id(step: int, prompt_id: str, index: int) -> str:
    """The name of one sample: unique in a run and the same after a restart."""
    return f"{step}/{prompt_id}/{index}"
