"""The end of a bracketed value in text that comes in pieces."""

import re


class Nesting:
    """Follows brackets and quotes from the first bracket on. ``quotes``: the characters that open and close strings, whose brackets do not count; a
    backslash hides the character after it. ``is_over``: the first bracket is closed."""

    def __init__(self, quotes: str = '"', brackets: tuple[str, str] = ("{[", "}]")) -> None:
        self._opening, self._closing = brackets
        self._outside = re.compile(f"[{re.escape(quotes + self._opening + self._closing)}]")
        self._inside = {quote: re.compile(f"[{re.escape(quote)}\\\\]") for quote in quotes}
        self._quote = ""
        self._is_escaped = False
        self._depth = 0
        self.is_over = False

    def take(self, text: str) -> int:
        """Returns how many characters of ``text``, which goes on where the last one ended, belong to the value."""
        at = int(self._is_escaped and bool(text))
        self._is_escaped &= not text
        while not self.is_over and at < len(text):
            match = (self._inside[self._quote] if self._quote else self._outside).search(text, at)
            if match is None:
                return len(text)
            at = match.end()
            character = match[0]
            if character == "\\":
                self._is_escaped = at == len(text)
                at = min(at + 1, len(text))
            elif character in self._inside:
                self._quote = "" if self._quote else character
            else:
                self._depth += 1 if character in self._opening else -1
                self.is_over = self._depth <= 0
        return at
