"""Text from tokens as they come, never showing half a character."""

from tandem.text.tokenizer import Tokenizer

REPLACEMENT = "�"


class IncrementalDetokenizer:
    """The pieces that ``push`` and ``finish`` return, joined, are the text of all tokens.

    Only a short window is decoded each time: the tokens that are not settled and the piece before them, because a
    token's text can depend on its left neighbour.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._settled = 0
        self._shown = ""

    def push(self, token: int) -> str:
        """The text that ``token`` settles; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        # Replacement characters at the end may be bytes of a character that is not complete yet.
        stable = text.rstrip(REPLACEMENT)
        piece = stable[len(self._shown) :]
        if piece and stable == text:
            self._settle()
        elif piece:
            self._shown = stable
        return piece

    def finish(self) -> str:
        """The rest, with replacement characters for bytes that never became a character."""
        piece = self._decode(self._window)[len(self._shown) :]
        self._window, self._settled, self._shown = [], 0, ""
        return piece

    def _settle(self) -> None:
        """Drops the tokens before the piece just completed, and keeps that piece as the left context of the next."""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._shown = self._decode(self._window)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip_special_tokens)
