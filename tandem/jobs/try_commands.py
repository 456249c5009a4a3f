"""Shell commands to try a trained model."""

import json
import os
import shlex
from pathlib import Path

from tandem.config.implementation import OWN, Implementation
from tandem.data.stream import Piece
from tandem.model.huggingface.model_config import read_shapes
from tandem.runtime.process.program import program
from tandem.text.tokenizer import Tokenizer


def data_commands(model: Path, example: Piece | None, implemented_by: Implementation, context: int) -> tuple[str, ...]:
    """Returns the command that completes a text or, for a model trained on examples, answers ``example``. ``context``: the tokens of the run's longest
    sequence."""
    generate = f"{program()} generate {shlex.quote(str(model))}{_flags(model, implemented_by, context)}"
    if example is None:
        return (f'{generate} --prompt "import " --max-tokens 64',)
    prompt = shell_word(taught_prompt(example, model))
    return (f"{generate} --prompt {prompt} --max-tokens 64 --temperature 0",)


def scoring_commands(model: Path) -> tuple[str, ...]:
    """Returns the command that trains a policy with the reward model ``model``."""
    return (f"{program()} train RECIPE --reward_model.path={shlex.quote(str(model))}",)


def drafting_commands(head: Path, target: Path, context: int) -> tuple[str, ...]:
    """Returns the command that generates with ``target`` and the drafts of ``head``. ``context``: as of ``data_commands``."""
    config, flags = json.dumps({"method": "eagle3", "model": str(head)}), _flags(target, OWN, context)
    return (f"{program()} generate {shlex.quote(str(target))}{flags} --speculative-config {shlex.quote(config)} --prompt TEXT",)


def task_commands(model: Path, prompt: str, implemented_by: Implementation, context: int) -> tuple[str, ...]:
    """Returns the commands that answer ``prompt`` of the run's task, and evaluate ``model`` on the task. ``context``: as of ``data_commands``."""
    return (
        f"{program()} generate {shlex.quote(str(model))}{_flags(model, implemented_by, context)} --prompt {shell_word(prompt)} --temperature 0",
        f"{program()} evaluate {shlex.quote(str(model))} --recipe {shlex.quote(os.path.relpath(model.parent / 'config.yaml'))}",
    )


def _flags(model: Path, implemented_by: Implementation, context: int) -> str:
    """Returns the flags with which ``tandem generate`` computes ``model`` as the run did."""
    if implemented_by.is_transformers:
        return " --model-impl transformers" + (" --trust-remote-code" if implemented_by.trust_remote_code else "")
    shapes = read_shapes(model)
    # With longrope the context decides which rotary frequencies all sequences have.
    return "" if shapes.positions_in(context) == shapes.default_context else f" --max-model-len {min(context, shapes.max_position_embeddings)}"


def taught_prompt(example: Piece, folder: Path) -> str:
    """Returns the prompt whose tokens are those of ``example`` before the first learned one, for ``tandem generate`` with the model in
    ``folder``; a general question where no text has just those tokens."""
    tokenizer = Tokenizer.from_folder(folder)
    learned = [1] * len(example.tokens) if example.learned is None else list(example.learned)
    asked = list(example.tokens[: learned.index(1)])
    for skip_special_tokens in (True, False):
        text = tokenizer.decode(asked, skip_special_tokens=skip_special_tokens)
        if text and tokenizer.encode(text, add_special_tokens=True) == asked:
            return text
    return "Who are you?"


def shell_word(text: str) -> str:
    """Returns ``text`` quoted as one word on one line of a shell command."""
    if "\n" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"
