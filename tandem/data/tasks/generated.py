"""Tasks with randomly drawn instances: the stream of any split, and demonstrations, some with wrong answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar

from tandem.data.counter import counter_random
from tandem.data.split import Split, split_of
from tandem.data.tasks.base import Demonstration, TaskItem
from tandem.types import UserError

Instance = TypeVar("Instance")
MOST_DRAWS = 10_000


@dataclass(frozen=True)
class GeneratedTask(Generic[Instance]):
    """``draw`` makes an instance, ``question`` and ``answer`` format it as text, ``wrong_answer`` draws a text that is not its answer.
    Draws that fall into another split are rejected, so a split's instances follow ``draw``'s distribution."""

    name: str
    seed: int
    held_out_share: float
    fingerprint: str
    draw: Callable[[Random], Instance]
    question: Callable[[Instance], str]
    answer: Callable[[Instance], str]
    wrong_answer: Callable[[Instance, Random], str]
    size: int | None = None
    has_messages: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    call: Callable[[Instance], Mapping[str, Any]] | None = None
    """The call of a tool that gives the answer, as ``function`` of a message; demonstrations make it, wrong ones do not."""
    ground_truth: Callable[[Instance], Any] | None = None
    """What completions are judged with, where it is not the answer's text."""

    def train_prompt(self, index: int) -> TaskItem:
        return self._item(self._instance("train", index, self.seed), f"{self.name}, training prompt {index}")

    def eval_prompts(self, split: Split, count: int, seed: int) -> list[TaskItem]:
        return [self._item(self._instance(split, i, seed), f"{self.name}, {split} prompt {i}") for i in range(count)]

    def demonstration(self, index: int, seed: int, corrupted_share: float) -> Demonstration:
        # A separate stream, so that demonstrations use other draws than the reinforcement learning after them.
        instance = self._instance("train", index, seed, purpose="demonstration")
        item = self._item(instance, f"{self.name}, demonstration {index}")
        random = counter_random("corruption", self.name, seed, index)
        corrupted = random.random() < corrupted_share
        answer = self.wrong_answer(instance, random) if corrupted else self.answer(instance)
        turns = () if self.call is None else _turns(answer, None if corrupted else self.call(instance))
        return Demonstration(item, answer, not corrupted, turns)

    def close(self) -> None:
        pass

    def _instance(self, split: Split, index: int, seed: int, purpose: str = "prompt") -> Instance:
        random = counter_random(purpose, self.name, split, seed, index)
        for _ in range(MOST_DRAWS):
            instance = self.draw(random)
            if split_of(self.question(instance), self.held_out_share) == split:
                return instance
        raise UserError(
            f"task '{self.name}' has too few distinct instances for a '{split}' split; raise task.max_digits or task.held_out_share"
        )

    def _item(self, instance: Instance, where: str) -> TaskItem:
        return TaskItem(self.question(instance), where, (self.ground_truth or self.answer)(instance))


def _turns(answer: str, function: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    """Returns the turns of an episode: the call and its result, which is the answer, where there is one, and the answer."""
    last = {"role": "assistant", "content": answer}
    if function is None:
        return (last,)
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call00001", "function": function}]}
    return (calling, {"role": "tool", "name": function["name"], "tool_call_id": "call00001", "content": answer}, last)
