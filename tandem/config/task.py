"""Section ``task``: the task that the model learns."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe

BUILT_IN_TASKS = ("sort", "addition", "programs", "dataset")
REASONING_GYM = "reasoning_gym:"
VERIFIERS = "verifiers:"
MOST_OPERATIONS = 16


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """The task that the model learns."""

    name: str
    """`sort`, `addition`, `programs` (Python functions, judged by `code_executor`), `dataset` (your own prompts), `reasoning_gym:NAME` (needs
    `pip install 'tandem-rl[reasoning-gym]'`), or `verifiers:NAME`, an environment of Prime Intellect's package (needs `pip install 'tandem-rl[verifiers]'` and
    the environment)."""
    min_digits: int | None = None
    """For `sort`: minimum digits of a list (default 3). For `addition`: minimum digits of an operand (default 1)."""
    max_digits: int | None = None
    """The maximum (default 6; 2)."""
    digits_distribution: Literal["uniform", "pareto"] | None = None
    """For `sort`: how the digits of a list are distributed from the minimum to the maximum. `pareto`, with shape 1.2: most lists are short and few are long.
    Default: `uniform`."""
    max_operations: int | None = None
    """For `programs`: maximum operations of a program; the minimum is 2 (default 3)."""
    path: str | None = None
    """For `dataset`: a file (JSON lines, JSON, CSV, Parquet, Arrow; also with `.gz`), a folder that `datasets` saved or with such files, or the name of a
    dataset of the Hugging Face Hub, such as `openai/gsm8k`. All rows are checked before work begins. Parquet, Arrow, folders and the Hub need
    `pip install 'tandem-rl[data]'`."""
    subset: str = ""
    """For `dataset`, of the Hub: the subset (`main` of `openai/gsm8k`). Empty: the only one."""
    split: str = "train"
    """For `dataset`, of the Hub or a folder: the split of the training prompts."""
    revision: str = ""
    """For `dataset`, of the Hub: the branch, tag or commit. Empty: the newest."""
    eval_path: str | None = None
    """For `dataset`: a second file, folder or name, with the prompts of evaluations and of the final accuracy."""
    eval_split: str = ""
    """For `dataset`: the split of those prompts, of `eval_path` or, without it, of `path`."""
    prompt_key: str = "auto"
    """For `dataset`: the key of the prompt, a text or a list of messages; `a.b` is the key `b` inside the key `a`. `auto`: `prompt`, `messages`,
    `question` or `problem`."""
    answer_key: str = "auto"
    """For `dataset`: the key of the ground truth; empty: none. Every key but that of the prompt is passed to reward functions as a column. `auto`:
    `answer`, `reward_model.ground_truth` (rows prepared for verl), `ground_truth` or `solution`, or else the assistant's last message."""
    held_out_share: float | None = None
    """Without `eval_path` and `eval_split`, the share of all instances held out for evaluations, and as many again for the final accuracy, by a hash of the
    instance. Default 0.1, or 1/3 for a `reasoning_gym` dataset."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For `reasoning_gym`: the dataset's own settings. For `verifiers`: those of the environment (`taskset`, its seats, ...) and `select`, which of its tasks
    are used, under the package's names."""
    prompt_template: str = "{prompt}"
    """The text that the model reads, with `{prompt}` in place of the task's text. With `chat` it is the text of the user's message."""
    chat: bool | None = None
    """Apply the tokenizer's chat template to the prompt (needs `pip install 'tandem-rl[chat]'`). Empty: to prompts that are messages, not to texts."""
    tools: tuple[str, ...] = ()
    """Tools that the chat template shows to the model, and that it calls with `rollout.multi_turn` or an agent: `calculator`, or a function of your own as
    `module:function` or `path/to/file.py:function`. Its signature and docstring (with a section `Args:`) say how it is called. They take the
    place of those of a row."""
    system_prompt: str = ""
    """With `chat`: the system message of prompts that have none."""

    def check(self) -> None:
        """Raises ``UserError`` for an unknown task, a value out of range or a key that belongs to another task."""
        if self.name not in BUILT_IN_TASKS and not self.name.removeprefix(REASONING_GYM).strip():
            raise UserError(f"'task.name' is '{self.name}'; name the dataset behind it, for example reasoning_gym:chain_sum")
        if self.name not in BUILT_IN_TASKS and not self.name.removeprefix(VERIFIERS).strip():
            raise UserError(f"'task.name' is '{self.name}'; name the environment behind it, for example verifiers:gsm8k-v1")
        if self.name not in BUILT_IN_TASKS and not self.name.startswith((REASONING_GYM, VERIFIERS)):
            near = difflib.get_close_matches(self.name, BUILT_IN_TASKS, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else "use sort, addition, programs, dataset, reasoning_gym:NAME or verifiers:NAME"
            raise UserError(f"'task.name' is '{self.name}'; {hint}")
        self._check_foreign_keys()
        self._check_digits()
        if self.eval_path or self.eval_split:
            given = "eval_path" if self.eval_path else "eval_split"
            refuse_unread("task", self, f"the prompts of task.{given} are held out", "held_out_share", fix=f"leave task.{given} empty")
        if self.name != "dataset":
            reason = f"task.name is '{self.name}'"
            refuse_unread("task", self, reason, "prompt_key", "answer_key", "subset", "split", "revision", "eval_split", fix="set task.name to dataset")
        if self.name == "dataset" and not self.path:
            raise UserError("'task.path' is missing; task 'dataset' needs the file, the folder or the name on the Hub to read")
        if self.name == "dataset" and not self.prompt_key:
            raise UserError("'task.prompt_key' is empty; name the key that holds the prompt")
        if not 0 < self.share_held_out < 0.5:
            raise UserError(
                f"'task.held_out_share' is {self.held_out_share}; it must be above 0 and below 0.5 (it is held out twice: "
                "for the evaluations of a run and for its final accuracy)"
            )
        if "{prompt}" not in self.prompt_template:
            raise UserError(f"'task.prompt_template' is {self.prompt_template!r}; it must contain {{prompt}} where the task's text goes")
        if self.tools and not self.chat and (self.chat is not None or self.name != "dataset"):
            raise UserError("'task.tools' is given but 'task.chat' is not true; the chat template shows tools: set task.chat to true")
        for tool in self.tools:
            where, colon, what = tool.rpartition(":")
            if tool != "calculator" and not (colon and where and what.isidentifier()):
                raise UserError(f"'task.tools' contains '{tool}', which is neither calculator nor of the form module:function or path/to/file.py:function")
        if self.system_prompt and not self.chat and (self.chat is not None or self.name != "dataset"):
            raise UserError(
                "'task.system_prompt' is given but 'task.chat' is not true; set task.chat to true or put it in task.prompt_template"
            )

    def digits(self) -> tuple[int, int]:
        """Returns the minimum and maximum digits, with the task's defaults."""
        low, high = (3, 6) if self.name == "sort" else (1, 2)
        low = self.min_digits if self.min_digits is not None else min(low, self.max_digits or low)
        return low, self.max_digits if self.max_digits is not None else max(high, low)

    @property
    def operations(self) -> int:
        """The maximum operations of a program, with the task's default."""
        return 3 if self.max_operations is None else self.max_operations

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
            "digits_distribution": (self.name == "sort", "sort"),
            "max_operations": (self.name == "programs", "programs"),
            "path": (self.name == "dataset", "dataset"),
            "eval_path": (self.name == "dataset", "dataset"),
            "settings": (self.name.startswith((REASONING_GYM, VERIFIERS)), "reasoning_gym and verifiers"),
        }
        for key, (belongs, owner) in owners.items():
            if getattr(self, key) and not belongs:
                raise UserError(f"'task.{key}' is given but belongs to task {owner}, and 'task.name' is '{self.name}'; remove it")

    def _check_digits(self) -> None:
        if not 2 <= self.operations <= MOST_OPERATIONS:
            raise UserError(f"'task.max_operations' is {self.max_operations}; it must be from 2 to {MOST_OPERATIONS}")
        if self.name not in ("sort", "addition"):
            return
        low, high = self.digits()
        least, most = (2, 64) if self.name == "sort" else (1, 18)
        if not least <= low <= most:
            raise UserError(f"'task.min_digits' is {low}; for task {self.name} it must be from {least} to {most}")
        if not low <= high <= most:
            raise UserError(f"'task.max_digits' is {high}; it must be from task.min_digits ({low}) to {most}")


def check_environment(recipe: "Recipe") -> None:
    """Checks that a ``verifiers`` environment, and nothing else, is scored by its own functions."""
    is_environment, functions = recipe.task.name.startswith(VERIFIERS), [function.function for function in recipe.rewards.composition]
    if "verifiers" in functions and not is_environment:
        raise UserError(f"reward function 'verifiers' is that of a task verifiers:NAME, and 'task.name' is '{recipe.task.name}'; name another function")
    if "verifiers" in functions and recipe.rollout.agent is not None:
        raise UserError("reward function 'verifiers' reads a completion, and 'rollout.agent' plays episodes; name 'agent', which reads what they are worth")
    if is_environment and "task" in functions:
        own = "agent" if recipe.rollout.agent is not None else "verifiers"
        raise UserError(f"task '{recipe.task.name}' is scored by its environment, not by 'task'; set rewards.functions to [{{function: {own}}}]")
