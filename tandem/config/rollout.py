"""Section ``rollout``: how samples are drawn, and what becomes of the engine between two steps."""

from dataclasses import dataclass
from typing import Literal

from tandem.types.errors import UserError
from tandem.types.kv_cache import KVCacheDtype


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """``prompts_per_step`` prompts, each sampled ``algorithm.group_size`` times with up to ``max_tokens`` new tokens.

    ``sleep_mode``: ``keep`` leaves the engine in memory, ``terminate`` ends its process after every rollout and starts
    it again with dummy weights, ``auto`` keeps it where the memory plan says that trainer and engine fit together.
    ``kv_cache_tokens``: size of the KV cache; 0 takes what one step can use at most. ``kv_cache_dtype``: what keys and values are kept in,
    and what the trainer rounds them to. ``max_batched_tokens``: the token budget of one engine step. ``stop``: texts that end a
    completion. ``quantization``: the engine rounds the trainer's weights to 8 bits as they arrive, and its inputs with them: faster
    rollouts from another distribution than the trainer's, which the recipe must correct for.
    """

    prompts_per_step: int = 32
    max_tokens: int = 32
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    sleep_mode: Literal["auto", "keep", "terminate"] = "auto"
    kv_cache_tokens: int = 0
    kv_cache_dtype: KVCacheDtype = "auto"
    max_sequences: int = 256
    max_batched_tokens: int = 4096
    prefix_cache: bool = True
    quantization: Literal["none", "int8", "fp8"] = "none"

    def check(self) -> None:
        for name in ("prompts_per_step", "max_tokens", "max_sequences", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"'rollout.{name}' is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.temperature <= 100:
            raise UserError(f"'rollout.temperature' is {self.temperature}; training needs samples, so it must be above 0 (and at most 100)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"'rollout.top_p' is {self.top_p}; it must be above 0 and at most 1 (1 turns it off)")
        if not 0 <= self.min_p < 1:
            raise UserError(f"'rollout.min_p' is {self.min_p}; it must be at least 0 and below 1 (0 turns it off)")
        if self.top_k < 0:
            raise UserError(f"'rollout.top_k' is {self.top_k}; it must be 0 (off) or more")
        if self.kv_cache_tokens < 0:
            raise UserError(f"'rollout.kv_cache_tokens' is {self.kv_cache_tokens}; it must be 0 (automatic) or more")
        if any(not text for text in self.stop):
            raise UserError("'rollout.stop' holds an empty text, which would end every completion at once; remove it")
