"""How large a request can be: what follows from the context of the model and from its tokenizer."""

from dataclasses import dataclass

from tandem.serving.errors import invalid, overloaded
from tandem.text.token_bytes import max_bytes_per_token
from tandem.text.tokenizer import Tokenizer

MIB = 2**20
JSON_BYTES_PER_BYTE = 6
"""The most bytes of JSON for one byte of text: ``\\u0041`` is ``A``. A character of more bytes takes at most 3 for each of them: ``\\u00e9`` has
2, a pair of surrogates (12 bytes) stands for a character of 4."""
JSON_BYTES_PER_TOKEN_ID = 24
"""The most bytes of JSON for one token id: ten digits, a comma, and white space of an indented list."""
JSON_BYTES_PER_VOCABULARY_ENTRY = 56
"""An entry of ``logit_bias`` (a quoted id and a number of 24 characters) and of ``allowed_token_ids``."""
OTHER_FIELDS_BYTES = MIB
"""For all other fields, and for the structure of a conversation."""
MAX_LOGPROBS = 20
"""Log-probabilities of a position that a request may ask for by default."""
UNBOUNDED_BODY_BYTES = 10 * MIB
"""The limit of a body if the tokenizer sets none."""
BEFORE_LOAD_BYTES = 2**16
"""The limit of a body for a path that needs none, or before the model is loaded."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request.

    Args:
        max_prompt_tokens: the context.
        max_text_bytes: the most bytes of text (UTF-8) that can fit the context; ``None`` if the tokenizer can remove text, so that length alone
            decides nothing.
        max_body_bytes: the most bytes of a body.
        max_prompts: the most prompts of one request, as the queue holds no more.
        vocab_size: the ids of the model.
        max_logprobs: the most likely tokens that a request may ask for at each position; -1: all of the vocabulary.
    """

    max_prompt_tokens: int
    max_text_bytes: int | None
    max_body_bytes: int
    max_prompts: int
    vocab_size: int
    max_logprobs: int = MAX_LOGPROBS

    @property
    def max_unfinished_bytes(self) -> int:
        """The most bytes of all bodies that are being received."""
        return max(64 * MIB, 2 * self.max_body_bytes)

    @property
    def max_unfinished_bytes_per_client(self) -> int:
        return max(32 * MIB, self.max_body_bytes)

    def check_text(self, text: str, param: str) -> None:
        """Raises ``ApiError`` for a text that is too long for the context whatever its tokens are."""
        limit = self.max_text_bytes
        if limit is None or 4 * len(text) <= limit:
            return
        if len(text) > limit or len(text.encode("utf-8", "surrogatepass")) > limit:
            raise invalid(
                f"the prompt has more than {limit} bytes of text, the most that a context of {self.max_prompt_tokens} tokens holds with this "
                "tokenizer; shorten it, or set truncate_prompt_tokens",
                param,
            )

    def check_tokens(self, count: int, param: str) -> None:
        """Raises ``ApiError`` for a prompt of more tokens than the context has."""
        if count > self.max_prompt_tokens:
            raise invalid(f"'{param}' has {count} tokens; the context has {self.max_prompt_tokens}, so shorten it or set truncate_prompt_tokens", param)

    def check_logprobs(self, count: int | None, param: str) -> int | None:
        """Returns how many most likely tokens the field ``param`` asks for, where -1 is all of the vocabulary. Raises ``ApiError`` for more than the server
        returns."""
        most = self.vocab_size if self.max_logprobs < 0 else self.max_logprobs
        wanted = self.vocab_size if count == -1 else count
        if wanted is not None and wanted > most:
            raise invalid(f"'{param}' is {count}; this server returns the log-probabilities of at most {most} tokens (--max-logprobs)", param)
        return wanted

    def check_prompts(self, count: int) -> None:
        """Raises ``ApiError`` for more prompts than the queue holds when it is empty."""
        if count > self.max_prompts:
            raise overloaded(f"the request has {count} prompts and the queue holds {self.max_prompts} requests; send fewer at once")


def make_limits(
    tokenizer: Tokenizer, max_model_len: int, vocab_size: int, max_prompts: int, max_body_bytes: int | None, max_logprobs: int = MAX_LOGPROBS
) -> Limits:
    """Returns the limits of a model with a context of ``max_model_len`` tokens. ``max_body_bytes``: the limit that an operator has set.

    The default limit of a body holds every prompt that fits the context, as a text in the longest form that JSON has for it or as token ids,
    beside a bias for every token.
    """
    per_token = max_bytes_per_token(tokenizer.backend)
    text_bytes = None if per_token is None else int(per_token * max_model_len)
    prompt_bytes = UNBOUNDED_BODY_BYTES if text_bytes is None else JSON_BYTES_PER_BYTE * text_bytes
    largest = OTHER_FIELDS_BYTES + JSON_BYTES_PER_VOCABULARY_ENTRY * vocab_size + max(prompt_bytes, JSON_BYTES_PER_TOKEN_ID * max_model_len)
    return Limits(max_model_len, text_bytes, largest if max_body_bytes is None else max_body_bytes, max_prompts, vocab_size, max_logprobs)
