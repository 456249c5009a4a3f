"""Compares a completion with the ground truth."""

import logging
import re
from fractions import Fraction
from typing import Any

from tandem.config.rewards import AnswerMatcherConfig
from tandem.rl.rewards.judgement import Judgement, describe, infrastructure_fault, model_fault, number, shortened
from tandem.rl.rewards.scorers import chosen_letter
from tandem.types import UserError

_LAST_NUMBER = re.compile(r"(?<![\w.])(?:[-+])?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d{1,4})?(?:/\d+)?")
_LETTER = re.compile(r"\(?[A-J]\)?\.?|\\boxed\{[A-J]\}")
_PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")


def match_answer(completion: str, ground_truth: Any, config: AnswerMatcherConfig, fault_value: float) -> Judgement:
    """Returns 1.0 if ``completion`` matches the answer, else 0.0; ``fault_value`` and a model fault if it contains nothing to compare.

    ``ground_truth``: a text, a number or a list of accepted ones; anything else is an infrastructure fault, and so is a ground truth
    without the numeric value that ``config.compare`` needs. Of a text that is a whole solution the answer is taken, as ``AnswerMatcherConfig`` says."""
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not truths or any(isinstance(truth, bool) or not isinstance(truth, str | int | float) for truth in truths):
        return infrastructure_fault(f"the ground truth {shortened(ground_truth)} is neither a text nor a number")
    truths = [_answer_of(truth, config) for truth in truths]
    answer = extract_answer(completion, config)
    if answer is None:
        return model_fault(fault_value, f"no answer found ({_sought(config)})")
    if config.compare == "math_verify":
        return _math_verify(answer, truths, config, fault_value)
    if config.compare == "numeric":
        return _numeric(answer, truths, config, fault_value)
    texts = [str(truth).strip() for truth in truths]
    if config.ignore_case:
        answer, texts = answer.casefold(), [text.casefold() for text in texts]
    return number(float(answer in texts), correct=answer in texts)


def _answer_of(truth: Any, config: AnswerMatcherConfig) -> Any:
    if not isinstance(truth, str):
        return truth
    if config.after and config.after in truth:
        truth = truth.rpartition(config.after)[2].strip()
    boxed = last_boxed(truth) if config.extract == "boxed" else None
    return truth if boxed is None else boxed


def extract_answer(completion: str, config: AnswerMatcherConfig) -> str | None:
    """Returns the part of ``completion`` to compare, or ``None`` if there is none."""
    if config.after:
        _, separator, completion = completion.rpartition(config.after)
        if not separator:
            return None
    if config.extract == "boxed":
        found_text = last_boxed(completion)
    elif config.extract == "last_number":
        found_text = last_number(completion)
    else:
        found_text = completion
    return (found_text or "").strip() or None


def last_boxed(text: str) -> str | None:
    """Returns the content of the last complete ``\\boxed{...}`` with balanced braces, or ``None``."""
    at = len(text)
    while (at := text.rfind("\\boxed{", 0, at)) >= 0:
        depth, start = 0, at + len("\\boxed{")
        for i in range(start, len(text)):
            if text[i] == "{" and text[i - 1] != "\\":
                depth += 1
            elif text[i] == "}" and text[i - 1] != "\\":
                if depth == 0:
                    return text[start:i]
                depth -= 1
    return None


def last_number(text: str) -> str | None:
    """Returns the last number in ``text`` (1,000, -3.5, 2e-3, 3/4) as written, or ``None``."""
    last = None
    for match in _LAST_NUMBER.finditer(text):
        if match[0]:
            last = match[0]
    return last


def numeric_value(text: str) -> Fraction | None:
    """Returns the exact value of a number or fraction, or ``None`` if ``text`` is not one. A leading currency sign, thousands separators
    and a final full stop are ignored; a percent sign divides by 100."""
    text = text.strip().removeprefix("$").removesuffix(".").replace("\u2212", "-").strip()
    scale = 1
    if text.endswith(("%", "\\%")):
        text, scale = text.rstrip("%").rstrip("\\").strip(), 100
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?([eE][-+]?\d{1,4})?", text):
        text = text.replace(",", "")
    parts = [part.strip() for part in text.split("/")]
    if len(parts) > 2 or not all(_PLAIN.fullmatch(part) for part in parts):
        return None
    try:
        values = [Fraction(part) for part in parts]
        return (values[0] / values[1] if len(values) == 2 else values[0]) / scale
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, or a fraction over 0
        return None


def check_installed(config: AnswerMatcherConfig) -> None:
    """Raises ``UserError`` if ``math_verify`` is selected but not installed."""
    if config.compare == "math_verify":
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise UserError("'answer.compare: math_verify' needs a package; install it with: pip install 'tandem-rl[math]'") from None


def _numeric(answer: str, truths: list[Any], config: AnswerMatcherConfig, fault_value: float) -> Judgement:
    wanted = [numeric_value(str(truth)) for truth in truths]
    if None in wanted:
        return infrastructure_fault(f"the ground truth {shortened(truths[wanted.index(None)])} is not a number")
    value = numeric_value(answer)
    if value is None:
        return model_fault(fault_value, f"{shortened(answer)} is not a number")
    right = any(abs(value - want) <= Fraction(config.tolerance) * abs(want) for want in wanted if want is not None)
    return number(float(right), correct=right)


def _math_verify(answer: str, truths: list[Any], config: AnswerMatcherConfig, fault_value: float) -> Judgement:
    if all(_LETTER.fullmatch(str(truth).strip()) for truth in truths):
        letter = chosen_letter(answer)
        if letter is None:
            return model_fault(fault_value, "no letter of a choice")
        return _verdict(letter in [chosen_letter(str(truth).strip()) for truth in truths])
    from math_verify import verify

    # Without its timeouts, after which it answers that the sample is wrong: a call that takes too long is ended with its process, and masked.
    try:
        wanted = [_parsed(str(truth)) for truth in truths]
    except Exception as error:
        return infrastructure_fault(f"math-verify failed on the ground truth: {describe(error)}")
    if not all(wanted):
        return infrastructure_fault(f"math-verify cannot read the ground truth {shortened(truths[wanted.index([])])}")
    given = _parsed(answer)
    if not given:
        return model_fault(fault_value, f"math-verify cannot read {shortened(answer)}")
    options = {"float_rounding": config.precision, "allow_set_relation_comp": config.relation_is_set}
    return _verdict(any(verify(want, given, timeout_seconds=None, **options) for want in wanted))


def _parsed(text: str) -> list[Any]:
    """Returns the expressions that math-verify reads in ``text``, or in it as a formula."""
    import math_verify

    # It warns at each call that it has no timeout.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for form in (text, f"${text}$"):
        if found := math_verify.parse(form, parsing_timeout=None):
            return list(found)
    return []


def _verdict(right: bool) -> Judgement:
    return number(float(right), correct=right)


def _sought(config: AnswerMatcherConfig) -> str:
    what = {"whole": "any text", "last_number": "a number", "boxed": "\\boxed{...}"}[config.extract]
    return f"looked for {what}" + (f" after {config.after!r}" if config.after else "")
