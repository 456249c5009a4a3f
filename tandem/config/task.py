"""Section ``task``: the task that the model learns."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

BUILT_IN_TASKS = ("sort", "addition", "jsonl")
REASONING_GYM = "reasoning_gym:"


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """The task that the model learns."""

    name: str
    """`sort`, `addition`, `jsonl`, or `reasoning_gym:DATASET` (needs `pip install 'tandem-rl[reasoning-gym]'`)."""
    min_digits: int | None = None
    """For `sort`: minimum digits of a list (default 3). For `addition`: minimum digits of an operand (default 1)."""
    max_digits: int | None = None
    """The maximum (default 6; 2)."""
    path: str | None = None
    """For `jsonl`: the file, one JSON object per line. All of it is checked before work begins."""
    eval_path: str | None = None
    """For `jsonl`: a second file for evaluations and the final accuracy."""
    prompt_key: str = "prompt"
    """For `jsonl`: the key of the prompt."""
    answer_key: str = "answer"
    """For `jsonl`: the key of the ground truth; empty: none. Every other key is passed to reward functions as a column."""
    held_out_share: float | None = None
    """Without `eval_path`, the share of all instances held out for evaluations, and as many again for the final accuracy, by a hash of the
    instance. Default 0.1, or 1/3 for a `reasoning_gym` dataset."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For `reasoning_gym`: the dataset's own settings."""
    prompt_template: str = "{prompt}"
    """The text that the model reads, with `{prompt}` in place of the task's text."""
    chat: bool = False
    """Apply the tokenizer's chat template to the prompt (needs `pip install 'tandem-rl[chat]'`)."""
    system_prompt: str = ""
    """With `chat`: the system message."""

    def check(self) -> None:
        """Raises ``UserError`` for an unknown task, a value out of range or a key that belongs to another task."""
        if self.name not in BUILT_IN_TASKS and not self.name.removeprefix(REASONING_GYM).strip():
            raise UserError(f"'task.name' is '{self.name}'; name the dataset behind it, for example reasoning_gym:chain_sum")
        if self.name not in BUILT_IN_TASKS and not self.name.startswith(REASONING_GYM):
            near = difflib.get_close_matches(self.name, BUILT_IN_TASKS, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else "use sort, addition, jsonl or reasoning_gym:DATASET"
            raise UserError(f"'task.name' is '{self.name}'; {hint}")
        self._check_foreign_keys()
        self._check_digits()
        if self.eval_path:
            reason = "the prompts of task.eval_path are held out"
            refuse_unread("task", self, reason, "held_out_share", fix="leave task.eval_path empty")
        if self.name != "jsonl":
            refuse_unread("task", self, f"task.name is '{self.name}'", "prompt_key", "answer_key", fix="set task.name to jsonl")
        if self.name == "jsonl" and not self.path:
            raise UserError("'task.path' is missing; task 'jsonl' needs the file to read")
        if self.name == "jsonl" and not self.prompt_key:
            raise UserError("'task.prompt_key' is empty; name the key that holds the prompt")
        if not 0 < self.share_held_out < 0.5:
            raise UserError(
                f"'task.held_out_share' is {self.held_out_share}; it must be above 0 and below 0.5 (it is held out twice: "
                "for the evaluations of a run and for its final accuracy)"
            )
        if "{prompt}" not in self.prompt_template:
            raise UserError(f"'task.prompt_template' is {self.prompt_template!r}; it must contain {{prompt}} where the task's text goes")
        if self.system_prompt and not self.chat:
            raise UserError(
                "'task.system_prompt' is given but 'task.chat' is false; set task.chat to true or put it in task.prompt_template"
            )

    def digits(self) -> tuple[int, int]:
        """Returns the minimum and maximum digits, with the task's defaults."""
        low, high = (3, 6) if self.name == "sort" else (1, 2)
        low = self.min_digits if self.min_digits is not None else min(low, self.max_digits or low)
        return low, self.max_digits if self.max_digits is not None else max(high, low)

    @property
    def share_held_out(self) -> float:
        """Returns ``held_out_share``, or the task's default."""
        if self.held_out_share is not None:
            return self.held_out_share
        return 1 / 3 if self.name.startswith(REASONING_GYM) else 0.1

    def _check_foreign_keys(self) -> None:
        owners: dict[str, tuple[bool, str]] = {
            "min_digits": (self.name in ("sort", "addition"), "sort and addition"),
            "max_digits": (self.name in ("sort", "addition"), "sort and addition"),
            "path": (self.name == "jsonl", "jsonl"),
            "eval_path": (self.name == "jsonl", "jsonl"),
            "settings": (self.name.startswith(REASONING_GYM), "reasoning_gym"),
        }
        for key, (belongs, owner) in owners.items():
            if getattr(self, key) and not belongs:
                raise UserError(f"'task.{key}' is given but belongs to task {owner}, and 'task.name' is '{self.name}'; remove it")

    def _check_digits(self) -> None:
        if self.name not in ("sort", "addition"):
            return
        low, high = self.digits()
        least, most = (2, 64) if self.name == "sort" else (1, 18)
        if not least <= low <= most:
            raise UserError(f"'task.min_digits' is {low}; for task {self.name} it must be from {least} to {most}")
        if not low <= high <= most:
            raise UserError(f"'task.max_digits' is {high}; it must be from task.min_digits ({low}) to {most}")
