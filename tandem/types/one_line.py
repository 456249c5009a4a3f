"""Values and exceptions as one line of a message."""

from typing import Any


def shortened(value: Any) -> str:
    """Returns ``repr(value)``, truncated if it is long."""
    try:
        text = repr(value)
    except Exception as error:
        return f"<repr failed: {type(error).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(text: str) -> str:
    """Returns ``text`` on one line of at most 400 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else line[:397] + "..."


def describe(error: BaseException) -> str:
    """Returns an exception's type and message in one line."""
    try:
        text = str(error)
    except Exception:
        text = "<message not available>"
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)
