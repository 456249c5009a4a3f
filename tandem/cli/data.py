"""Check data before a run: the first rows as the model will see them, lengths in tokens, and what is wrong in which line.

FILE is what task.path of a recipe may be: JSON lines, JSON, CSV, Parquet or Arrow, also with .gz; a folder that datasets saved, or with such files; or a
dataset of the Hugging Face Hub, such as openai/gsm8k. With --recipe the keys, the template and the file are those of its task. Rows are prompts
for reinforcement learning, examples for supervised fine-tuning, preference pairs or texts; --form says which if the first row does not.
The exit status is 0 if every row can be used, and 1 if not.

examples:
  tandem data check examples/questions.jsonl
  tandem data check train.parquet --model Qwen/Qwen3-0.6B
  tandem data check openai/gsm8k --subset main --split test
  tandem data check --recipe recipes/dataset.yaml --model Qwen/Qwen3-0.6B
  tandem data check chats.jsonl --form examples --model Qwen/Qwen3-0.6B --json
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.engine_options import add_implementation, implementation
from tandem.config.implementation import OWN, Implementation
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.config.task import TaskConfig
    from tandem.data.data_check import ModelText


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    check = actions.add_parser(
        "check", help="show the first rows as the model will see them, and what is wrong in which line", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    check.add_argument("file", nargs="?", metavar="FILE", help="a file, a folder or a name on the Hub (default: task.path of --recipe)")
    check.add_argument(
        "--model", "--tokenizer", dest="model", metavar="MODEL",
        help="a Hugging Face folder or a model of the Hub (OWNER/NAME): its tokenizer, chat template and context",
    )  # fmt: skip
    check.add_argument("--recipe", help="a YAML recipe whose section task says what is read")
    check.add_argument("--form", choices=("auto", "prompts", "examples", "preferences", "text"), default="auto", help="what the rows are (default: auto)")
    check.add_argument("--subset", default="", help="of a dataset of the Hub")
    check.add_argument("--split", default="", help="of a dataset of the Hub or of a folder (default: train)")
    check.add_argument("--revision", default="", help="of a dataset of the Hub")
    check.add_argument("--prompt-key", default="", help="the key of the prompt (default: prompt, messages, question or problem)")
    check.add_argument("--answer-key", default="", help="the key of the answer (default: answer, reward_model.ground_truth, ground_truth or solution)")
    check.add_argument("--completion-key", default="completion", help="examples: the key of the completion")
    check.add_argument("--text-key", default="text", help="texts: the key of the text")
    check.add_argument("--chat", action="store_true", help="prompts that are texts become the user's message of the chat template")
    add_implementation(check)
    check.add_argument("--rows", type=int, default=3, help="number of first rows to show (default: 3)")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    from tandem.data.data_check import Keys, check_rows, form_of, lines_of
    from tandem.data.rows.source import read_rows
    from tandem.data.tasks.dataset import eval_source, train_source

    if options.rows < 0:
        raise UserError(f"--rows is {options.rows}; it must be 0 or more")
    task, model, context, new_tokens, implemented_by = _task(options)
    implemented_by = implementation(options, implemented_by)
    text = _model(model, context, new_tokens, implemented_by) if model else None
    sources = [train_source(task), *filter(None, [eval_source(task) if options.recipe else None])]
    status = 0
    for source in sources:
        rows = read_rows(source)
        form = form_of(rows) if options.form == "auto" and not options.recipe else "prompts" if options.form == "auto" else options.form
        report = check_rows(rows, form, task, text, options.rows, Keys(options.completion_key, options.text_key))
        print(json.dumps(report.to_json(), ensure_ascii=False) if options.json else "\n".join(lines_of(report)))
        status = max(status, int(bool(report.problems)))
    return status


def _task(options: argparse.Namespace) -> "tuple[TaskConfig, str, int, int, Implementation]":
    """Returns the task, the model ('' without one), the recipe's context (0: the model's), the tokens that a rollout adds to a prompt, and who computes the
    recipe's model."""
    from tandem.config.recipe import Recipe, load_config
    from tandem.config.task import TaskConfig
    from tandem.model.huggingface.hub import hub_model

    if options.recipe is None:
        if options.file is None:
            raise UserError("no file; name one, for example 'tandem data check questions.jsonl', or a recipe with --recipe")
        if options.overrides:
            raise UserError(f"'{options.overrides[0]}' sets a key of a recipe, and there is none; name it with --recipe")
        task, model, context, new_tokens, implemented_by = TaskConfig("dataset", path=options.file), "", 0, 0, OWN
    else:
        recipe = load_config(options.recipe, options.overrides)
        given = recipe.task
        if given is None or given.name != "dataset":
            has = "no section task" if given is None else f"task.name '{given.name}'"
            raise UserError(f"'{options.recipe}' has {has}, which reads no data file; name a recipe with task.name dataset, or a file without --recipe")
        task, model, context = given, recipe.model.path or "", recipe.model.max_length
        implemented_by = recipe.model.implemented_by
        new_tokens = recipe.rollout.max_tokens if isinstance(recipe, Recipe) else 0
        if not Path(model).is_dir() and hub_model(model) is None:
            model = ""
        if options.file is not None:
            task = replace(task, path=options.file, eval_path=None, eval_split="")
    changes: dict[str, Any] = {name: getattr(options, name) for name in ("subset", "split", "revision", "prompt_key", "answer_key") if getattr(options, name)}
    if options.chat:
        changes["chat"] = True
    task = replace(task, **changes)
    task.check()
    return task, options.model or model, context, new_tokens, implemented_by


def _model(name: str, context: int, new_tokens: int, implemented_by: Implementation) -> "ModelText":
    from tandem.data.data_check import ModelText
    from tandem.model.huggingface.model_config import read_shapes
    from tandem.model.model_source import find_model
    from tandem.text.tokenizer import Tokenizer

    path = find_model(name, "description", option="--model FOLDER")
    if not context and (path / "config.json").is_file():
        context = read_shapes(path, implemented_by=implemented_by).default_context
    return ModelText(path, Tokenizer.from_folder(path), max(context - new_tokens, 0))
