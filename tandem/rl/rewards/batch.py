"""Scores one batch on one worker: retries failed calls sample by sample and assigns faults."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.config.rewards import RewardsConfig
from tandem.rl.function_process import CallDied, CallHung
from tandem.rl.rewards.judgement import Item, Judgement, infrastructure_fault
from tandem.rl.rewards.worker_process import JudgeRaised
from tandem.runtime.process.deadline import Deadline
from tandem.types import ScoreState, UserError

Call = Callable[[Sequence[int], Sequence[Item], float], list[list[Judgement] | JudgeRaised]]
"""Takes the indices of judges, items and a deadline in seconds, and returns for each judge its judgements or what it raised:
``WorkerProcess.judge`` of a live worker, which is replaced if it died."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Judges, by index, and items, by index in the batch, of one call; ``deaths``: workers that ended during it."""

    judges: tuple[int, ...]
    places: tuple[int, ...]
    deaths: int = 0

    @property
    def is_alone(self) -> bool:
        return len(self.judges) == len(self.places) == 1

    def split(self, groups: Sequence[str]) -> list["_Unit"]:
        """Returns one unit per judge, of a single judge one per group, and of a single group one per item; ``groups``: by place. A death during a shared
        call blames none of them, so each unit starts with no deaths of its own."""
        if len(self.judges) > 1:
            return [_Unit((judge,), self.places) for judge in self.judges]
        of_group: dict[str, list[int]] = {}
        for place in self.places:
            of_group.setdefault(groups[place], []).append(place)
        if len(of_group) > 1:
            return [_Unit(self.judges, tuple(places)) for places in of_group.values()]
        return [_Unit(self.judges, (place,)) for place in self.places]


def judge_batch(
    items: Sequence[Item], judges: Sequence[int], batched: Sequence[bool], is_async: Sequence[bool], call: Call, config: RewardsConfig,
    left_s: Callable[[], float] = lambda: math.inf,
) -> list[dict[str, Judgement]]:  # fmt: skip
    """Returns the judgement on every item of the functions of ``config.composition`` with the indices ``judges``, by label.

    Asynchronous functions are called together, in the place of the first of them. A call for many items that fails (it raises, hangs or ends its process
    twice) is repeated for each function alone, then for each group and then one by one, so that a bad sample does not affect its neighbours. A sample
    whose own call raises or hangs, or ends the process twice, is an infrastructure fault and is not passed to further functions; so is a sample not
    judged within ``rewards.deadline_s`` or ``left_s``. A call for many items may take half of the remaining time, which leaves the other half for single
    calls, and not more than these would take.
    """
    deadline = Deadline(config.deadline_s)
    groups = [item.group for item in items]
    labels = [function.label for function in config.composition]
    said: list[dict[str, Judgement]] = [{} for _ in items]
    broken: set[int] = set()
    delay = ""

    def fault(unit: _Unit, problem: str) -> None:
        for place in unit.places:
            for judge in unit.judges:
                said[place][labels[judge]] = infrastructure_fault(f"reward function '{labels[judge]}' on sample '{items[place].sample_id}': {problem}")
            broken.add(place)

    for group in _groups(judges, batched, is_async):
        places = tuple(place for place in range(len(items)) if place not in broken)
        together = _Unit(group, places)
        units = deque([together] if batched[group[0]] and places else [_Unit(group, (place,)) for place in places])
        while units:
            unit = units.popleft()
            left = min(deadline.left_s(), left_s())
            if left <= 0:
                fault(unit, f"not judged within rewards.deadline_s ({config.deadline_s:g} s){delay}")
                continue
            most = config.sample_deadline_s * len(unit.judges) * len(unit.places)
            limit = min(most, left if unit.is_alone else left / 2)
            try:
                results = call(unit.judges, [items[place] for place in unit.places], limit)
            except CallHung:
                if unit.is_alone:
                    delay = f"; '{labels[unit.judges[0]]}' hung before, on sample '{items[unit.places[0]].sample_id}'"
                    fault(unit, f"no answer within {limit:.3g} s, and its process was ended")
                else:
                    units.extendleft(reversed(unit.split(groups)))
            except CallDied as death:
                if unit.deaths == 0:
                    units.appendleft(_Unit(unit.judges, unit.places, 1))
                elif unit.is_alone:
                    fault(unit, f"it ended its process twice ({death})")
                else:
                    units.extendleft(reversed(unit.split(groups)))
            except UserError as error:  # the worker cannot be replaced
                for waiting in (unit, *units):
                    fault(waiting, str(error))
                units.clear()
            else:
                for judge, result in zip(unit.judges, results, strict=True):
                    own = _Unit((judge,), unit.places)
                    if isinstance(result, JudgeRaised) and own.is_alone:
                        fault(own, f"it raised {result}")
                    elif isinstance(result, JudgeRaised):
                        units.extendleft(reversed(own.split(groups)))
                    else:
                        for place, judgement in zip(unit.places, result, strict=True):
                            said[place][labels[judge]] = judgement
                            if judgement.state is ScoreState.INFRASTRUCTURE_FAULT:
                                fault(_Unit((judge,), (place,)), judgement.reason)
    return said


def _groups(judges: Sequence[int], batched: Sequence[bool], is_async: Sequence[bool]) -> list[tuple[int, ...]]:
    """Returns the judges of each call in order: the asynchronous ones that take many items together, every other one alone."""
    together = tuple(judge for judge in judges if batched[judge] and is_async[judge])
    return [together if judge in together else (judge,) for judge in judges if judge not in together[1:]]
