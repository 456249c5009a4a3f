"""Addition of two numbers: the answer to ``12+34=`` is ``46``."""

from random import Random
from typing import Any

from tandem.config.task import TaskConfig
from tandem.data.tasks.generated import GeneratedTask

Operands = tuple[int, int]


def addition_task(config: TaskConfig, seed: int) -> GeneratedTask[Operands]:
    """Returns the task: two operands of ``min_digits`` to ``max_digits`` digits, drawn independently, with uniformly distributed
    lengths."""
    low, high = config.digits()

    def operand(random: Random) -> int:
        length = random.randint(low, high)
        return random.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)

    return GeneratedTask(
        name="addition",
        seed=seed,
        held_out_share=config.share_held_out,
        fingerprint=f"addition {low}-{high} {config.share_held_out} {seed}",
        call=calculator_call if any(tool.rpartition(":")[2] == "calculator" for tool in config.tools) else None,
        draw=lambda random: (operand(random), operand(random)),
        question=question,
        answer=answer,
        wrong_answer=wrong_answer,
    )


def question(operands: Operands) -> str:
    return f"{operands[0]}+{operands[1]}="


def calculator_call(operands: Operands) -> dict[str, Any]:
    """Returns the call of the calculator that gives the answer."""
    return {"name": "calculator", "arguments": {"expression": f"{operands[0]}+{operands[1]}"}}


def answer(operands: Operands) -> str:
    return str(sum(operands))


def wrong_answer(operands: Operands, random: Random) -> str:
    """Returns the sum with one mistake: a misread digit, or a wrong carry."""
    right = sum(operands)
    if random.random() < 0.5:
        place = 10 ** random.randint(1, max(len(str(right)) - 1, 1))
        return str(right - place if right >= place and random.random() < 0.5 else right + place)
    digits = list(str(right))
    i = random.randrange(len(digits))
    lowest = 1 if i == 0 and len(digits) > 1 else 0
    digits[i] = random.choice([d for d in "0123456789"[lowest:] if d != digits[i]])
    return "".join(digits)
