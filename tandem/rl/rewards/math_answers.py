"""Final answers in LaTeX, compared as the MATH benchmark compares them (Hendrycks et al. 2021, https://github.com/hendrycks/math): as texts, after
differences of notation are removed. verl's scorer of MATH follows the same rules."""

_NOTATION = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""),
    ("\\$", ""),
)  # fmt: skip
"""Replaced in this order: line breaks, thin spaces, doubled backslashes, sizes of fractions and brackets, degrees, dollar signs."""
_UNIT = "\\text{ "
_LONGEST_NAME = 2


def are_equivalent(answer: str, truth: str) -> bool:
    """Returns whether both texts are the same in one notation. A text that cannot be brought to it is compared as it is."""
    try:
        return in_one_notation(answer) == in_one_notation(truth)
    except (ValueError, IndexError):
        return answer == truth


def in_one_notation(text: str) -> str:
    r"""Returns ``text`` without units, percent and dollar signs, degrees, spaces and a name before an equals sign, with braces around the arguments of
    ``\frac`` and ``\sqrt`` and with simple fractions as ``\frac``. Raises ``ValueError`` or ``IndexError`` where the rules do not say how."""
    for found, instead in _NOTATION:
        text = text.replace(found, instead)
    before, *units = text.split(_UNIT)
    if len(units) > 1:
        raise ValueError("more than one unit")
    text = before.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = f"0{text}"
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= _LONGEST_NAME:
        text = value
    text = _with_fraction_braces(_with_root_braces(text).replace(" ", ""))
    return "\\frac{1}{2}" if text == "0.5" else _as_fraction(text)


def final_box(text: str) -> str | None:
    r"""Returns what the last ``\boxed`` of ``text`` holds: up to the matching brace, or up to a dollar sign for ``\boxed 5``. ``None`` without one, or if it
    is not closed."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    _, box, rest = text.rpartition("\\boxed")
    if not box or not rest.startswith("{"):
        return None
    depth = 0
    for at, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:at]
    return None


def _with_root_braces(text: str) -> str:
    first, *roots = text.split("\\sqrt")
    return first + "".join(f"\\sqrt{root}" if root[0] == "{" else f"\\sqrt{{{root[0]}}}{root[1:]}" for root in roots)


def _with_fraction_braces(text: str) -> str:
    first, *fractions = text.split("\\frac")
    done = first
    for fraction in fractions:
        if fraction[0] == "{":
            done += f"\\frac{fraction}"
        elif len(fraction) < 2:
            return text
        elif fraction[1] == "{":
            done += f"\\frac{{{fraction[0]}}}{fraction[1:]}"
        else:
            done += f"\\frac{{{fraction[0]}}}{{{fraction[1]}}}{fraction[2:]}"
    return done


def _as_fraction(text: str) -> str:
    above, slash, below = text.partition("/")
    try:
        is_simple = bool(slash) and text == f"{int(above)}/{int(below)}"
    except ValueError:
        return text
    return f"\\frac{{{int(above)}}}{{{int(below)}}}" if is_simple else text
