"""Writing programs: the answer to ``tail double sum:`` is a Python function ``f`` that does these operations to a list, one after another.

The ground truth is tests, for ``code_executor``: arguments and the values that a right ``f`` returns. Any program that passes them is right, whatever its text.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from tandem.config.task import TaskConfig
from tandem.data.counter import counter_random
from tandem.data.tasks.generated import GeneratedTask

TESTS = 4
LENGTHS = (3, 6)
"""Least and most numbers of the lists that programs are tested with."""
NUMBERS = (0, 9)
"""The smallest and the largest."""


class Operation(NamedTuple):
    """``code``: an expression over the list ``x``, in which ``N`` is the operation's constant; ``apply``: what it returns for a list and the constant.
    ``ends``: it returns a number, so that no operation can follow."""

    code: str
    apply: Callable[[list[int], int], Any]
    ends: bool = False

    @property
    def has_constant(self) -> bool:
        return "N" in self.code


OPERATIONS = {
    "sort": Operation("sorted(x)", lambda x, _: sorted(x)),
    "reverse": Operation("x[::-1]", lambda x, _: list(reversed(x))),
    "tail": Operation("x[1:]", lambda x, _: x[1:]),
    "init": Operation("x[:-1]", lambda x, _: x[:-1]),
    "double": Operation("[v*2 for v in x]", lambda x, _: [v + v for v in x]),
    "negate": Operation("[-v for v in x]", lambda x, _: [0 - v for v in x]),
    "even": Operation("[v for v in x if v%2==0]", lambda x, _: list(filter(lambda v: not v & 1, x))),
    "add": Operation("[v+N for v in x]", lambda x, n: [n + v for v in x]),
    "above": Operation("[v for v in x if v>N]", lambda x, n: list(filter(lambda v: n < v, x))),
    "sum": Operation("sum(x)", lambda x, _: sum(x), ends=True),
    "count": Operation("len(x)", lambda x, _: len(x), ends=True),
}

Steps = tuple[tuple[str, int], ...]
"""The names of the operations in their order, each with its constant; 0 if it has none."""


def programs_task(config: TaskConfig, seed: int) -> GeneratedTask[Steps]:
    """Returns the task: two to ``max_operations`` operations, with uniformly distributed numbers of them. Of single ones there are too few to hold some out."""
    most = config.operations

    def draw(random: Random) -> Steps:
        count = random.randint(2, most)
        return tuple(step(random, is_last=place == count - 1) for place in range(count))

    return GeneratedTask(
        name="programs",
        seed=seed,
        held_out_share=config.share_held_out,
        fingerprint=f"programs {most} {config.share_held_out} {seed}",
        draw=draw,
        question=question,
        answer=program,
        wrong_answer=wrong_program,
        ground_truth=tests,
    )


def step(random: Random, *, is_last: bool) -> tuple[str, int]:
    """Returns a random operation."""
    name = random.choice([name for name, operation in OPERATIONS.items() if is_last or not operation.ends])
    return name, random.randint(1, 9) if OPERATIONS[name].has_constant else 0


def question(steps: Steps) -> str:
    return " ".join(f"{name} {constant}" if constant else name for name, constant in steps) + ":"


def program(steps: Steps) -> str:
    """Returns a function with a line for each operation."""
    lines = [f" x={OPERATIONS[name].code.replace('N', str(constant))}" for name, constant in steps]
    return "\n".join(["def f(x):", *lines, " return x"])


def tests(steps: Steps) -> dict[str, Any]:
    """Returns the tests, in the form of APPS: lists that depend on the question alone, and what the operations make of them."""
    random = counter_random("tests of a program", question(steps))
    lists = [[random.randint(*NUMBERS) for _ in range(random.randint(*LENGTHS))] for _ in range(TESTS)]
    return {"fn_name": "f", "inputs": [[numbers] for numbers in lists], "outputs": [value(steps, numbers) for numbers in lists]}


def value(steps: Steps, numbers: list[int]) -> Any:
    """Returns what the operations make of ``numbers``."""
    result: Any = numbers
    for name, constant in steps:
        result = OPERATIONS[name].apply(result, constant)
    return result


def wrong_program(steps: Steps, random: Random) -> str:
    """Returns a program with one mistake that fails a test: another operation in place of one, or another constant."""
    truth = tests(steps)
    while True:
        place = random.randrange(len(steps))
        wrong = (*steps[:place], step(random, is_last=place == len(steps) - 1), *steps[place + 1 :])
        if any(value(wrong, numbers) != wanted for [numbers], wanted in zip(truth["inputs"], truth["outputs"], strict=True)):
            return program(wrong)
