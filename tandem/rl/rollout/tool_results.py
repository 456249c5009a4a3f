"""The results of tools as the model reads them: of limited length, and without the special tokens of the chat template."""

from typing import Literal

from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

_LEFT_OUT = "..."


class ToolResults:
    """``most``: tokens of a result; ``side``: which part of a longer one is left out."""

    def __init__(self, tokenizer: Tokenizer, most: int, side: Literal["left", "middle", "right"]) -> None:
        self._tokenizer, self._most, self._side = tokenizer, most, side
        added = (token.content for token in tokenizer.backend.get_added_tokens_decoder().values())
        self._special = sorted((text for text in added if len(text) > 1), key=len, reverse=True)

    def shown(self, result: str) -> str:
        """Returns ``result`` without characters that the tokenizer lacks, shortened, and with a space inside what spells an added token, so that a result
        cannot end its own message."""
        result = result.encode("utf-8", "replace").decode()
        for text in self._special:
            result = result.replace(text, f"{text[0]} {text[1:]}")
        try:
            ids = self._tokenizer.encode(result)
        except UserError:  # A tokenizer of characters, without a token for unknown ones.
            unknown = [character for character in set(result) if self._tokenizer.backend.token_to_id(character) is None]
            result = result.translate({ord(character): "?" for character in unknown})
            ids = self._tokenizer.encode(result)
        if len(ids) <= self._most:
            return result
        before = {"left": 0, "middle": self._most // 2, "right": self._most}[self._side]
        after = self._most - before
        first, last = self._tokenizer.decode(ids[:before]), self._tokenizer.decode(ids[len(ids) - after :])
        return f"{first}{_LEFT_OUT}{last}"
