"""Sorting digits: ``3142=`` asks for ``1234``.

Nothing stands between the digits, and no word in front: with spaces, a small character model had learned a quarter as
much after the same warm-up, at twice the time. A template can say more to a model that reads words.
"""

from random import Random

from tandem.config.task import TaskConfig
from tandem.data.tasks.generated import GeneratedTask

Digits = tuple[int, ...]


def sort_task(config: TaskConfig, seed: int) -> GeneratedTask[Digits]:
    """Lists of ``min_digits`` to ``max_digits`` digits, every length as likely as any other."""
    low, high = config.digits()

    def draw(random: Random) -> Digits:
        return tuple(random.randrange(10) for _ in range(random.randint(low, high)))

    return GeneratedTask(
        name="sort",
        seed=seed,
        held_out_share=config.share_held_out,
        fingerprint=f"sort {low}-{high} {config.share_held_out} {seed}",
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
    """The answer with one slip: two unequal digits exchanged, or one digit misread."""
    wrong = sorted(digits)
    unequal = [(i, j) for i in range(len(wrong)) for j in range(i) if wrong[i] != wrong[j]]
    if unequal and random.random() < 0.5:
        i, j = random.choice(unequal)
        wrong[i], wrong[j] = wrong[j], wrong[i]
    else:
        i = random.randrange(len(wrong))
        wrong[i] = random.choice([digit for digit in range(10) if digit != wrong[i]])
    return "".join(map(str, wrong))
