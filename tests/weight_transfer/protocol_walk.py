"""Walks every state that the weights' protocol can reach, breadth first: ``python protocol_walk.py``."""

from collections import deque
from typing import NamedTuple

from protocol_states import ALL, Limits, Protection, first_state, is_goal, moves


class Walk(NamedTuple):
    """``mixture``: what was reached that must not be (empty: nothing), by the shortest way, whose actions are ``way``. ``stuck``: the number of states
    from which no way without another fault leads to engines that hold what is published; ``stuck_way``: the actions to the first."""

    states: int
    steps: int
    goals: int
    mixture: str
    way: tuple[str, ...]
    stuck: int = 0
    stuck_way: tuple[str, ...] = ()


def walk(limits: Limits, protection: Protection = ALL) -> Walk:
    """Returns what is reachable. Ends at the first mixture."""
    start = first_state(limits)
    numbers, states = {start: 0}, [start]
    came: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]
    waiting, steps = deque([0]), 0

    def way_to(number: int) -> tuple[str, ...]:
        actions = list[str]()
        while number > 0:
            number, action = came[number]
            actions.append(action)
        return tuple(reversed(actions))

    while waiting:
        at = waiting.popleft()
        for action, state, is_fault, mixture in moves(states[at], limits, protection):
            steps += 1
            if mixture:
                return Walk(len(states), steps, 0, mixture, (*way_to(at), action))
            to = numbers.get(state)
            if to is None:
                to = numbers[state] = len(states)
                states.append(state)
                came.append((at, action))
                back.append([])
                waiting.append(to)
            if not is_fault:
                back[to].append(at)
    goals = [number for number, state in enumerate(states) if is_goal(state)]
    ends = _leading_to(goals, back)
    stuck = [number for number in range(len(states)) if number not in ends]
    return Walk(len(states), steps, len(goals), "", (), len(stuck), way_to(stuck[0]) if stuck else ())


def _leading_to(goals: list[int], back: list[list[int]]) -> set[int]:
    """Returns the states from which a goal can be reached without a fault."""
    seen, waiting = set(goals), deque(goals)
    while waiting:
        for before in back[waiting.popleft()]:
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    return seen


if __name__ == "__main__":
    import sys
    import time

    given = Limits(*map(int, sys.argv[1:]))
    began = time.monotonic()
    print(given, walk(given), f"{time.monotonic() - began:.1f} s")
    for off in Protection._fields:
        print(off, walk(given, ALL._replace(**{off: False})))
