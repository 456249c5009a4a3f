"""``truncate_prompt_tokens``: the last tokens of a prompt."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T", bound=Sequence[int])


def truncate_prompt(tokens: T, truncate_prompt_tokens: int | None, max_tokens: int | None, max_model_len: int) -> T:
    """Returns the last ``truncate_prompt_tokens`` of ``tokens``: -1 for as many as leave room for ``max_tokens`` (``None``: for one) in the context,
    ``None`` for all."""
    limit = truncate_prompt_tokens
    if limit is None:
        return tokens
    if limit < 0:
        limit = max(1, max_model_len - (1 if max_tokens is None else max_tokens))
    return tokens[-limit:]  # type: ignore[return-value]
