"""What errors of other packages say, in one line."""


def one_line(error: Exception) -> str:
    """Returns the first line of what ``error`` says."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:160]
