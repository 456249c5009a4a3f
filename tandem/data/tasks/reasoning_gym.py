"""Tasks of the ``reasoning_gym`` package by name, in a separate process.

Some of its generators depend on the order of Python's sets, and hence on the process. The host process runs with a fixed hash seed, so that
a prompt is the same after a restart, and keeps the package's many imports out of this process.
"""

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tandem.config.task import REASONING_GYM, TaskConfig
from tandem.data.counter import counter_seed
from tandem.data.split import Split, split_of
from tandem.data.tasks.base import Demonstration, TaskItem
from tandem.data.tasks.reasoning_gym_host import BLOCK_INSTANCES, Dataset, Instance, InstanceRequest
from tandem.runtime.import_path import path_for_children
from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import RpcTimeout, WorkerDied, message_from, message_meta
from tandem.types import RunError, UserError

DEADLINE_S = 120.0
MOST_DRAWS = 300


class ReasoningGymTask:
    """A dataset of ``reasoning_gym``. Its seeds are this task's own; ``columns`` contain what is needed to generate an instance again
    (``dataset``, ``settings``, ``seed``, ``index``) and its ``metadata`` as far as JSON can represent it."""

    size: int | None = None
    has_messages = False
    files: Mapping[str, str] = MappingProxyType({})

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self.name = config.name
        self.dataset = config.name.removeprefix(REASONING_GYM)
        self.settings = dict(config.settings)
        self.held_out_share = config.share_held_out
        self.seed = seed
        self._host = Worker(
            f"the process that makes prompts of '{self.name}'",
            "tandem.data.tasks.reasoning_gym_host",
            threads=Threads(),
            output=Path(os.devnull),
            environment={"PYTHONHASHSEED": "0", "PYTHONPATH": path_for_children()},
        )
        self._end = weakref.finalize(self, self._host.stop, 0.0)
        try:
            version = self._ask("open", Dataset(self.dataset, dict(self.settings)))["version"]
        except BaseException:
            self.close()
            raise
        self.fingerprint = f"{self.name} {version} {json.dumps(self.settings, sort_keys=True)} {self.held_out_share} {seed}"

    def train_prompt(self, index: int) -> TaskItem:
        return self._item("train", self.seed, index, f"{self.name}, training prompt {index}")

    def eval_prompts(self, split: Split, count: int, seed: int) -> list[TaskItem]:
        return [self._item(split, seed, i, f"{self.name}, {split} prompt {i}") for i in range(count)]

    def demonstration(self, index: int, seed: int, corrupted_share: float) -> Demonstration:
        if corrupted_share:
            raise UserError(
                f"task '{self.name}' cannot make wrong answers, and 'sft.corrupted_share' is {corrupted_share}; set it to 0"
            )
        item = self._item("train", seed, index, f"{self.name}, demonstration {index}", purpose="demonstration")
        if item.ground_truth is None:
            raise UserError(f"{item.where}: the dataset has no answer for supervised fine-tuning; train without a section 'sft'")
        return Demonstration(item, f" {item.ground_truth}", True)

    def close(self) -> None:
        self._end()

    def _item(self, split: Split, seed: int, index: int, where: str, purpose: str = "prompt") -> TaskItem:
        for attempt in range(MOST_DRAWS):
            # In blocks, because some datasets take long to build; with 31-bit seeds, because some pass the seed to numpy.
            block, at = divmod(index, BLOCK_INSTANCES)
            drawn = counter_seed(purpose, self.name, split, seed, block, attempt) >> 33
            entry = message_from(Instance, self._ask("instance", InstanceRequest(drawn, at)))
            if split_of(entry.question, self.held_out_share) == split:
                columns = {
                    "dataset": self.dataset,
                    "settings": self.settings,
                    "seed": drawn,
                    "index": at,
                    "metadata": entry.metadata,
                }
                return TaskItem(entry.question, where, entry.answer, columns)
        raise UserError(
            f"task '{self.name}' has too few distinct questions for a '{split}' split; make it harder in 'task.settings' or raise "
            "task.held_out_share"
        )

    def _ask(self, name: str, request: Dataset | InstanceRequest) -> dict[str, Any]:
        try:
            return self._host.call(name, message_meta(request), deadline_s=DEADLINE_S).meta
        except RpcTimeout:
            raise RunError(f"'{self.name}' made no prompt within {DEADLINE_S:.0f} s; choose easier 'task.settings'") from None
        except WorkerDied:
            raise RunError(f"the process that makes prompts of '{self.name}' ended; start the run again") from None
