"""Checks whether a completion has the required format."""

import re
from collections.abc import Callable, Sequence

from tandem.config.rewards import FormatCheckerConfig
from tandem.rl.rewards.judgement import Item, Judgement, number


def format_checker(config: FormatCheckerConfig) -> Callable[[Item], Judgement]:
    """Returns the judge function: 1.0 if the completion has the format, else 0.0."""
    pattern = re.compile(config.pattern, re.DOTALL)

    def judge(item: Item) -> Judgement:
        text = item.completion.strip()
        if config.tags:
            right = has_tags(text, config.tags, whole=config.match == "full")
        else:
            right = bool(pattern.fullmatch(text) if config.match == "full" else pattern.search(text))
        return number(float(right), correct=right)

    return judge


def has_tags(text: str, tags: Sequence[str], *, whole: bool) -> bool:
    """Returns whether each ``<tag>...</tag>`` occurs in ``text`` exactly once, in the order of ``tags``, none inside another and, with
    ``whole``, with only white space around and between them."""
    at = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start, end = text.find(opening, at), text.find(closing, at)
        if start < 0 or end < start + len(opening) or (whole and text[at:start].strip()):
            return False
        at = end + len(closing)
    return not (whole and text[at:].strip())
