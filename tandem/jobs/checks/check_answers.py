"""Checks before reinforcement learning starts that the prompts have the ground truth and the columns that the reward functions need."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence

from tandem.config.rewards import COMPARING, RewardsConfig
from tandem.data.prompts import PromptSource
from tandem.data.split import Split
from tandem.data.tasks import TaskItem
from tandem.data.tasks.verifiers_task import VerifiersTask
from tandem.types import UserError


def check_answers(source: PromptSource, rewards: RewardsConfig) -> None:
    """Raises ``UserError`` with file and line for the first row of a finite task whose ground truth is missing, or is not a text, a number or a list of
    them, where a built-in reward function needs it."""
    comparing = next((function for function in rewards.composition if function.function in COMPARING), None)
    if comparing is None:
        return
    for item in _items(source):
        truths = item.ground_truth if isinstance(item.ground_truth, list) and comparing.function in ("task", "answer_matcher") else [item.ground_truth]
        if item.ground_truth is None:
            columns = ", ".join(map(repr, item.columns)) or "no other keys"
            raise UserError(
                f"{item.where}: there is no answer for reward function '{comparing.label}' (besides the prompt the row has {columns}); set task.answer_key "
                "to the key of the answer, or name a function of your own in rewards.functions"
            )
        if not truths or any(isinstance(truth, bool) or not isinstance(truth, str | int | float) for truth in truths):
            raise UserError(
                f"{item.where}: the answer is {str(item.ground_truth)[:60]!r}, and reward function '{comparing.label}' compares with a text, a number or a "
                "list of them; name another key in task.answer_key, for example a.b for the key b inside a"
            )


def check_episodes(source: PromptSource, has_agent: bool) -> None:
    """Raises ``UserError`` for an environment that plays episodes of its own, unless the recipe ``has_agent``, which plays them."""
    if isinstance(source.task, VerifiersTask) and source.task.episodes and not has_agent:
        raise UserError(
            f"environment '{source.task.name}' {source.task.episodes}, so a completion alone cannot be scored: set rollout.agent.function to "
            "tandem.rl.agents.verifiers_agent:episode"
        )


def check_columns(columns: Collection[str], needed: Mapping[str, Sequence[str]]) -> None:
    """Raises ``UserError`` for a reward function that cannot do without a column that is not among ``columns``, those of the prompts. ``needed``: by the
    function's name."""
    for label, names in needed.items():
        if missing := _missing(columns, names):
            raise UserError(
                f"reward function '{label}' has the parameter '{missing[0]}', which is neither a column of the prompts nor given in 'arguments' "
                f"({missing[1]}); rename it, or give it a default"
            )


def check_agent_columns(columns: Collection[str], agent: str, needed: Sequence[str]) -> None:
    """Raises ``UserError`` where ``agent`` cannot do without a column that is not among ``columns``, those of the prompts."""
    if missing := _missing(columns, needed):
        raise UserError(f"agent '{agent}' has the parameter '{missing[0]}', which is no column of the prompts ({missing[1]}); rename it, or give it a default")


def _missing(columns: Collection[str], names: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first of ``names`` that is not among ``columns``, and what the columns are instead."""
    missing = next((name for name in names if name not in columns), None)
    if missing is None:
        return None
    near = difflib.get_close_matches(missing, columns, n=1, cutoff=0.6)
    return missing, f"did you mean '{near[0]}'?" if near else f"they have {', '.join(map(repr, columns)) or 'no columns'}"


def _items(source: PromptSource) -> Iterator[TaskItem]:
    task = source.task
    if task.size is None:
        return
    for index in range(task.size):
        yield task.train_prompt(index)
    splits: tuple[Split, ...] = ("held_out", "final")
    for split in splits:
        yield from task.eval_prompts(split, task.size, source.seed)
