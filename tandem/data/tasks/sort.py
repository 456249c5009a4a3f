"""Sorting digits: the answer to ``3142=`` is ``1234``.

There are no separators and no instruction: with spaces, a small character model learned a quarter as much after the same supervised
fine-tuning, in twice the time. A template can add words for a model that reads them.
"""

from random import Random

from tandem.config.task import TaskConfig
from tandem.data.tasks.generated import GeneratedTask

Digits = tuple[int, ...]
PARETO_SHAPE = 1.2


def sort_task(config: TaskConfig, seed: int) -> GeneratedTask[Digits]:
    """Returns the task: lists of ``min_digits`` to ``max_digits`` digits, with lengths distributed as ``digits_distribution`` says."""
    low, high = config.digits()
    is_pareto = config.digits_distribution == "pareto"

    def length(random: Random) -> int:
        return min(high, int(low * random.paretovariate(PARETO_SHAPE))) if is_pareto else random.randint(low, high)

    def draw(random: Random) -> Digits:
        return tuple(random.randrange(10) for _ in range(length(random)))

    return GeneratedTask(
        name="sort",
        seed=seed,
        held_out_share=config.share_held_out,
        fingerprint=f"sort {low}-{high}{' pareto' if is_pareto else ''} {config.share_held_out} {seed}",
        draw=draw,
        question=question,
        answer=answer,
        wrong_answer=wrong_answer,
    )


def question(digits: Digits) -> str:
    return "".join(map(str, digits)) + "="


def answer(digits: Digits) -> str:
    return "".join(map(str, sorted(digits)))


def wrong_answer(digits: Digits, random: Random) -> str:
    """Returns the answer with one mistake: two unequal digits exchanged, or one digit misread."""
    wrong = sorted(digits)
    unequal = [(i, j) for i in range(len(wrong)) for j in range(i) if wrong[i] != wrong[j]]
    if unequal and random.random() < 0.5:
        i, j = random.choice(unequal)
        wrong[i], wrong[j] = wrong[j], wrong[i]
    else:
        i = random.randrange(len(wrong))
        wrong[i] = random.choice([digit for digit in range(10) if digit != wrong[i]])
    return "".join(map(str, wrong))
