"""A reward that differs between samples of an untrained model, so that every step of the tiny run changes the weights."""


def digits(completions: list[str], **_: object) -> list[float]:
    """Returns the share of digits in each completion."""
    return [sum(character.isdigit() for character in text) / (len(text) or 1) for text in completions]


def nothing(completions: list[str], **_: object) -> list[float]:
    """Returns 0 for each completion."""
    return [0.0] * len(completions)
