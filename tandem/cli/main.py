"""The ``tandem`` command: runs a subcommand and turns every known error into one line and an exit status."""

import argparse
import difflib
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

from tandem import __version__
from tandem.cli.flags_file import expanded
from tandem.cli.number_types import whole_number
from tandem.cli.vllm_flags import check_flags
from tandem.runtime.process.fast_exit import fast_exit
from tandem.runtime.process.temporary import choose_temporary_folder
from tandem.types import UserError

COMMANDS = {
    "train": "train a model from a recipe: pretraining, fine-tuning, or GRPO in a pod",
    "pod": "start a pod that draws samples for a run on another machine",
    "plan": "predict time, memory and cost of training on GPUs, and recommend a layout",
    "recipes": "list, print or copy the recipes that come with Tandem",
    "status": "show where a run is, and how far",
    "logs": "show what a run says",
    "cancel": "stop a run after its step, which it saves",
    "nodes": "list the nodes of a cluster, and cordon and uncordon them",
    "scale": "set the number of nodes of a run on Ray while it runs",
    "resume": "continue an interrupted run",
    "verify": "verify every byte that a run's results depend on",
    "replay": "repeat a recorded step and compare every number",
    "generate": "complete prompts with a model",
    "serve": "serve OpenAI's API over HTTP",
    "gateway": "serve the models of several servers at one address",
    "keys": "create, list, rotate and revoke the API keys of a gateway",
    "data": "check a data file: rows as the model sees them, lengths, mistakes",
    "tokenize": "tokenize text or examples to shards of token ids",
    "evaluate": "measure accuracy on a task, perplexity, or tasks of lm-eval",
    "quantize": "quantize a model to 8 or 4 bits: int8, fp8, round to nearest, GPTQ, AWQ",
    "weights": "check that weights reach engines unchanged, for any two layouts, without a training job",
    "sidecar": "make the environments of vLLM, Megatron-Core and DeepSpeed, which can take a side of a pod",
    "convert": "convert a model between Hugging Face, Megatron and Tandem checkpoints",
    "models": "list, show, promote and compare the versions of the model registry",
    "dashboard": "show runs in the browser while they train",
    "top": "show a run in the terminal while it trains",
    "report": "write a run's report.html again, or compare runs",
    "emit": "write the files of a whole topology, for training or inference, for any launcher",
    "up": "start what watches over runs and servers: Prometheus, alerts, dashboards",
    "doctor": "show what Tandem finds and uses on this machine",
    "completion": "print the completion script of a shell",
}

FORMS = {"plan": ("serving",)}
"""The commands whose first word may be followed by one that makes another command of them, in a module of both names."""
ENGINE_COMMANDS = ("serve", "generate")
"""The commands with the options of ``EngineArgs``, which take vLLM's flags."""
LONGEST_LINE = 1500
"""Characters of an error message; longer ones repeat a value that is absurd."""
_ESCAPES = {"\n": " "}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose whole numbers have 63 bits, as those of a recipe."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, whole_number)
        self.commands: dict[str, Parser] = {}
        """The parsers of the commands, by name."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; see '{self.prog} --help'")


def parser() -> Parser:
    """Returns the parser of all commands; each module of ``tandem.cli`` adds the arguments of its own."""
    main_parser = Parser(
        prog="tandem",
        description="Pretraining, fine-tuning and reinforcement-learning post-training of language models.",
        epilog="example: tandem train sort --run.seed=1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    commands: argparse._SubParsersAction[Parser] = main_parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, help_text in COMMANDS.items():
        module = importlib.import_module(f"tandem.cli.{name}")
        command = commands.add_parser(
            name, help=help_text, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.arguments(command)
        main_parser.commands[name] = command
        for second in FORMS.get(name, ()):
            module = importlib.import_module(f"tandem.cli.{name}_{second}")
            command = commands.add_parser(f"{name} {second}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
            module.arguments(command)
            main_parser.commands[f"{name} {second}"] = command
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. 0: success; 1: the run failed; 2: usage error; 130: interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    choose_temporary_folder()
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        _check_text(given)
        if not given:
            raise UserError(f"no command; give one of {', '.join(COMMANDS)}, or see 'tandem --help'")
        _check_command(given[0])
        given = with_form(given)
        main_parser = parser()
        if given[0] in ENGINE_COMMANDS:
            command = main_parser.commands[given[0]]
            given[1:] = expanded(given[1:], command)
            check_flags(given, command._option_string_actions)
        options, extra = main_parser.parse_known_args(given)
        if options.command is None:
            raise UserError(f"unknown argument '{given[0]}'; see 'tandem --help'")
        overrides = [text for text in extra if text.startswith("--") and "=" in text]
        unknown = [text for text in extra if text not in overrides]
        if unknown or (overrides and not getattr(options, "takes_overrides", False)):
            raise UserError(_unknown_argument((unknown or overrides)[0], options, main_parser))
        options.overrides = overrides
        return int(importlib.import_module(f"tandem.cli.{options.command.replace(' ', '_')}").run(options))
    except UserError as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:  # A full disk or a read-only folder is no bug, so it gets one line and no traceback.
        where = f"'{error.filename}': " if error.filename else ""
        return fail(f"{where}{error.strerror or error}", 1)
    except MemoryError:
        return fail("out of memory; give the command smaller values or more memory", 1)


def with_form(given: list[str]) -> list[str]:
    """Returns the words of a command line, of which the first two are one where they name a command together."""
    return [" ".join(given[:2]), *given[2:]] if given[1:] and given[1] in FORMS.get(given[0], ()) else given


def fail(message: str, exit_code: int) -> int:
    """Prints an error as one line; returns ``exit_code``."""
    line = "".join(c if c.isprintable() else _ESCAPES.get(c, repr(c)[1:-1]) for c in message.strip())
    if len(line) > LONGEST_LINE:
        # The beginning names the thing, the end the fix.
        line = f"{line[: 2 * LONGEST_LINE // 3]} ... {line[-LONGEST_LINE // 3 :]}"
    print(f"tandem: {line}", file=sys.stderr)
    return exit_code


def _check_text(given: Sequence[str]) -> None:
    """Raises ``UserError`` for an argument with bytes that are not UTF-8: runs, journals and registries save names as UTF-8."""
    for number, argument in enumerate(given, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raw = os.fsencode(argument[error.start]) if "\udc80" <= argument[error.start] <= "\udcff" else b"?"
            raise UserError(
                f"argument {number} is {argument!r}, whose byte 0x{raw.hex()} is not UTF-8; write it, or rename the file, in UTF-8"
            ) from None


def _check_command(given: str) -> None:
    if given.startswith("-") or given in COMMANDS:
        return
    near = difflib.get_close_matches(given, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"the commands are {', '.join(COMMANDS)}"
    raise UserError(f"unknown command '{given}'; {hint}")


def _unknown_argument(text: str, options: argparse.Namespace, main_parser: Parser) -> str:
    help_hint = f"see 'tandem {options.command} --help'"
    if getattr(options, "takes_overrides", False):
        if text.startswith("--") and "=" not in text and "." in text:
            return f"unknown argument '{text}'; a key of the recipe is set with an equals sign: {text}=VALUE"
        if re.fullmatch(r"[a-z]\w*(\.\w+)+=.*", text, re.DOTALL):  # As Hydra takes it, and with it verl.
            return f"unknown argument '{text}'; a key of the recipe is set with two dashes: --{text}"
    near = difflib.get_close_matches(text.partition("=")[0], main_parser.commands[options.command]._option_string_actions, n=1, cutoff=0.75)
    return f"unknown argument '{text}'; did you mean '{near[0]}'? {help_hint}" if near else f"unknown argument '{text}'; {help_hint}"


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    with fast_exit():
        sys.exit(main())
