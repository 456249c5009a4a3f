"""A reward that even an untrained model gets different amounts of, so that every step of the tiny run moves the weights."""


def digits(completions: list[str], **_: object) -> list[float]:
    """The share of digits in each completion."""
    return [sum(character.isdigit() for character in text) / (len(text) or 1) for text in completions]
