"""Speculative decoding: draft tokens are proposed cheaply, and the model verifies all of them in one forward pass.

Leviathan et al. (2023) and Chen et al. (2023) accept a draft token with a probability. Here the model draws every position with that
position's own random number, as it does without speculation, and a draft token is accepted where it is the token drawn. So tokens
and log-probabilities have the same bits with and without speculation, and drafts affect speed alone. A draft model
draws with the same numbers, which makes near distributions draw equal tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.kernels.api import KVLayer
from tandem.types import UserError

METHODS = ("ngram", "draft")


@dataclass(frozen=True, slots=True)
class SpeculativeSettings:
    """``method``: ``draft`` proposes with the small ``model`` (a folder), ``ngram`` with what followed the last ``prompt_lookup_max`` to
    ``prompt_lookup_min`` tokens where they stood before, in the prompt or the completion (Saxena, 2023).
    ``num_speculative_tokens``: draft tokens of one step at most; where ``adaptive``, as many as were accepted lately.
    ``disable_by_batch_size``: no draft tokens are proposed while more sequences than this decode, since a full batch leaves no arithmetic to spare;
    ``None`` is 4 on a CPU, where eight rows cost nearly twice four, and 64 elsewhere."""

    method: str
    model: str | Path | None = None
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    adaptive: bool = True
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"speculative method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"):
            value = getattr(self, name)
            if name == "disable_by_batch_size" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"speculative {name} is {value!r}; it must be a whole number of at least 1")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise UserError(
                f"speculative prompt_lookup_min is {self.prompt_lookup_min}; it must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if not isinstance(self.adaptive, bool):
            raise UserError(f"speculative adaptive is {self.adaptive!r}; it must be True or False")
        if self.method == "draft" and self.model is None:
            raise UserError("speculative method is 'draft' and no model is given; name the folder of a small model of the same vocabulary")
        if self.method == "ngram" and self.model is not None:
            raise UserError(f"speculative model is '{self.model}' and method 'ngram' uses none; leave it out or choose method 'draft'")

    def batch_limit(self, device: str) -> int:
        """Returns the largest batch in which draft tokens are proposed, on a device of that type."""
        if self.disable_by_batch_size is not None:
            return self.disable_by_batch_size
        return 4 if device == "cpu" else 64

    @property
    def worth(self) -> float:
        """How often a first draft token must be accepted to pay: a draft model's costs a forward pass, one that is looked up only its place in the
        model's."""
        return 0.4 if self.method == "draft" else 0.15


def speculative_settings(given: Mapping[str, Any]) -> SpeculativeSettings:
    """The settings that ``given``, vLLM's ``speculative_config``, asks for. Raises ``UserError`` for what is unknown."""
    known = [field.name for field in fields(SpeculativeSettings)]
    for name in given:
        if name not in known:
            raise UserError(f"speculative has the key {name!r}; known are {', '.join(known)}")
    if "method" not in given:
        raise UserError(f"speculative names no method; it must be one of {', '.join(METHODS)}")
    return SpeculativeSettings(**given)


class Proposer(Protocol):
    """Proposes draft tokens. ``caches``: its own keys and values, in the same blocks as the model's; none where it keeps none."""

    caches: list[KVLayer]

    def read(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Take in the tokens of a prefill, which the model computes in this step."""
        ...

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """Returns at most ``counts[i]`` draft tokens that follow ``sequences[i]``, which have rows."""
        ...
