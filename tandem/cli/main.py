"""The ``tandem`` command: finds the subcommand and turns every known error into one line and an exit code."""

import argparse
import difflib
import importlib
import signal
import sys
import warnings
from collections.abc import Sequence

from tandem.types import UserError

COMMANDS = {
    "train": "train a model from a recipe: pretraining, fine-tuning, or GRPO in a pod",
    "resume": "go on with a run that was interrupted",
    "replay": "run one recorded step again and compare",
    "generate": "complete prompts with a model",
    "serve": "answer OpenAI's API over HTTP with a model",
    "tokenize": "text, or examples, to shards of token ids",
    "evaluate": "measure a model on a task's held-out prompts",
    "quantize": "store a model's weights in 8 or 4 bits: int8, fp8, round to nearest, GPTQ, AWQ",
    "convert": "write a model in another layout: Hugging Face, Megatron, our checkpoints",
    "models": "list, show, promote and compare the versions of the model registry",
    "report": "write a run's report.html again",
    "doctor": "say what this machine has and what Tandem will use of it",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; see '{self.prog} --help'")


def parser() -> argparse.ArgumentParser:
    """Every command with its arguments; each module of ``tandem.cli`` adds its own."""
    main_parser = Parser(
        prog="tandem",
        description="Pretraining, fine-tuning and reinforcement-learning post-training of language models.",
        epilog="example: tandem train recipes/sort.yaml --run.seed=1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, help_text in COMMANDS.items():
        module = importlib.import_module(f"tandem.cli.{name}")
        command = commands.add_parser(
            name, help=help_text, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.arguments(command)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: the run failed; 2: usage error; 130: interrupted."""
    # torch says this where NumPy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        if not given:
            raise UserError(f"no command; give one of {', '.join(COMMANDS)}, or see 'tandem --help'")
        _check_command(given[0])
        options, extra = parser().parse_known_args(given)
        if options.command is None:
            raise UserError(f"unknown argument '{given[0]}'; see 'tandem --help'")
        overrides = [text for text in extra if text.startswith("--") and "=" in text]
        unknown = [text for text in extra if text not in overrides]
        if unknown or (overrides and not getattr(options, "takes_overrides", False)):
            raise UserError(_unknown_argument((unknown or overrides)[0], options))
        options.overrides = overrides
        return int(importlib.import_module(f"tandem.cli.{options.command}").run(options))
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a folder that may not be written: of the machine, not a defect
        where = f"'{error.filename}': " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 1)


def _fail(message: str, exit_code: int) -> int:
    print("tandem: " + " ".join(message.split("\n")), file=sys.stderr)
    return exit_code


def _check_command(given: str) -> None:
    if given.startswith("-") or given in COMMANDS:
        return
    near = difflib.get_close_matches(given, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(COMMANDS)}"
    raise UserError(f"unknown command '{given}'; {hint}")


def _unknown_argument(text: str, options: argparse.Namespace) -> str:
    help_hint = f"see 'tandem {options.command} --help'"
    if text.startswith("--") and getattr(options, "takes_overrides", False) and "=" not in text and "." in text:
        return f"unknown argument '{text}'; a key of the recipe is set with an equals sign: {text}=VALUE"
    return f"unknown argument '{text}'; {help_hint}"


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
