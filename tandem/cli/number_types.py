"""Types of numbers on the command line."""

import argparse
import re


def whole_number(text: str) -> int:
    """Returns a whole number of 63 bits, as those of a recipe."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number below 2^63")
    return value


def token_count(text: str) -> int:
    """Returns a number of tokens, which may have a unit as vLLM takes it: ``8k`` is 8,000, ``8K`` 8,192."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([kKmM])", text)
    if match is None:
        return whole_number(text)
    return int(float(match[1]) * {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]])
