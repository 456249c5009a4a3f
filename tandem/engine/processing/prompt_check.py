"""What every engine checks of a prompt."""

from collections.abc import Sequence

from tandem.types import UserError


def check_prompt(tokens: Sequence[int], max_model_len: int, vocab_size: int, *, max_tokens: int | None = None, draws: bool = True) -> None:
    """Raises ``UserError`` for a prompt that is empty, does not fit with a completion of ``max_tokens`` (0: nothing is drawn after it), or has a token id that
    the model has not. ``draws``: the request asks for tokens."""
    length = len(tokens)
    if not length:
        raise UserError("the prompt is empty; give it at least one token")
    if not draws and length > max_model_len:
        raise UserError(f"the prompt has {length} tokens, more than max_model_len ({max_model_len}); shorten the prompt or raise max_model_len")
    if draws and length + (max_tokens != 0) > max_model_len:
        raise UserError(
            f"the prompt has {length} tokens, which leaves no room for a completion in max_model_len "
            f"({max_model_len}); shorten the prompt or raise max_model_len"
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise UserError(f"the prompt holds token id {wrong}; the model's vocabulary has the ids 0 to {vocab_size - 1}")
