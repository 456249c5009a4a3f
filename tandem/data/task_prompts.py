"""The prompts of a task for the model in a folder: one tokenizer, one chat template, one context length."""

from pathlib import Path

from tandem.config.prompt_order import PromptOrderConfig
from tandem.config.task import TaskConfig
from tandem.data.prompt_format import chat_format_of, text_encode
from tandem.data.prompts import PromptSource
from tandem.data.tools.load import tool_schemas
from tandem.text.tokenizer import Tokenizer


def task_prompts(
    task: TaskConfig, folder: Path, *, seed: int, prompts_per_draw: int = 1, rounds: int = 1, order: PromptOrderConfig | None = None,
    context_tokens: int, max_new_tokens: int = 0
) -> PromptSource:
    """Returns the prompts of ``task``, tokenized for the model in ``folder``."""
    tokenizer = Tokenizer.from_folder(folder)
    return PromptSource(
        task, text_encode(tokenizer), seed=seed, prompts_per_draw=prompts_per_draw, rounds=rounds, order=order, context_tokens=context_tokens,
        max_new_tokens=max_new_tokens, chat_format=chat_format_of(folder, tokenizer, tool_schemas(task.tools)),
    )  # fmt: skip
