"""Scores one batch on one worker: retries failed calls sample by sample and assigns faults."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.judgement import Item, Judgement, infrastructure_fault
from tandem.rl.rewards.worker_process import JudgeDied, JudgeHung, JudgeRaised
from tandem.runtime.process.deadline import Deadline
from tandem.types import ScoreState, UserError

Call = Callable[[int, Sequence[Item], float], list[Judgement]]
"""Takes the index of a judge, items and a deadline in seconds: ``WorkerProcess.judge`` of a live worker, which is replaced if it died."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Items, by index in the batch, for one call; ``deaths``: workers that ended during it."""

    places: tuple[int, ...]
    deaths: int = 0

    def split(self) -> list["_Unit"]:
        """Returns one unit per item. A death during a shared call blames no single sample, so each unit starts with no deaths of its
        own."""
        return [_Unit((place,)) for place in self.places]


def judge_batch(items: Sequence[Item], batched: Sequence[bool], call: Call, config: RewardsConfig) -> list[dict[str, Judgement]]:
    """Returns the judgement of every function of ``config.composition`` on every item, by label.

    A call for many items that fails (it raises, hangs or ends its process twice) is repeated one by one, so that a bad sample does not
    affect its neighbours. A sample whose own call raises or hangs, or ends the process twice, is an infrastructure fault and is not passed
    to further functions; so is a sample not judged within the batch's deadline. A call for many items may take half of the remaining time,
    which leaves the other half for single calls.
    """
    deadline = Deadline(config.deadline_s)
    said: list[dict[str, Judgement]] = [{} for _ in items]
    broken: set[int] = set()
    delay = ""

    def fault(places: Sequence[int], problem: str) -> None:
        for place in places:
            reason = f"reward function '{label}' on sample '{items[place].sample_id}': {problem}"
            said[place][label] = infrastructure_fault(reason)
            broken.add(place)

    for judge, function in enumerate(config.composition):
        label = function.label
        places = [place for place in range(len(items)) if place not in broken]
        together = _Unit(tuple(places))
        units = deque([together] if batched[judge] and places else together.split())
        while units:
            unit = units.popleft()
            left = deadline.left_s()
            if left <= 0:
                fault(unit.places, f"not judged within rewards.deadline_s ({config.deadline_s:g} s){delay}")
                continue
            alone = len(unit.places) == 1
            limit = min(config.sample_deadline_s, left) if alone else left / 2
            try:
                judgements = call(judge, [items[place] for place in unit.places], limit)
            except JudgeRaised as error:
                if alone:
                    fault(unit.places, f"it raised {error}")
                else:
                    units.extendleft(reversed(unit.split()))
            except JudgeHung:
                delay = f"; '{label}' hung before, on sample '{items[unit.places[0]].sample_id}'" if alone else delay
                if alone:
                    fault(unit.places, f"no answer within {limit:.3g} s, and its process was ended")
                else:
                    units.extendleft(reversed(unit.split()))
            except JudgeDied as death:
                if unit.deaths == 0:
                    units.appendleft(_Unit(unit.places, 1))
                elif alone:
                    fault(unit.places, f"it ended its process twice ({death})")
                else:
                    units.extendleft(reversed(unit.split()))
            except UserError as error:  # the worker cannot be replaced
                fault([place for waiting in (unit, *units) for place in waiting.places], str(error))
                units.clear()
            else:
                for place, judgement in zip(unit.places, judgements, strict=True):
                    said[place][label] = judgement
                    if judgement.state is ScoreState.INFRASTRUCTURE_FAULT:
                        fault([place], judgement.reason)
    return said
