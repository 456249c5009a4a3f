"""Make the environments of sidecars that other libraries drive: vLLM for the rollout, Megatron-Core or DeepSpeed for the trainer.

Each has an environment of its own, so that no two of them, nor Tandem, have to agree on a version. It is made once for this machine, under
~/.cache/tandem/sidecars (the variable TANDEM_SIDECARS names another folder), and serves every run. An installation that was interrupted begins anew.

examples:
  tandem sidecar install vllm
  tandem train sort --rollout vllm
  tandem sidecar install megatron --pip-args="--no-cache-dir"
  tandem sidecar list
"""

import argparse
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from tandem.types import UserError

NAMES = ("vllm", "megatron", "deepspeed")


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    install = actions.add_parser(
        "install", help="make the environment of a sidecar", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    install.add_argument("name", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    install.add_argument("--force", action="store_true", help="make it anew if it is there")
    install.add_argument("--pip-args", default="", metavar="ARGS", help="passed to every 'pip install', for example --pip-args='--index-url URL'")
    actions.add_parser("list", help="list the sidecars, with the versions of those that are installed")


def run(options: argparse.Namespace) -> int:
    return _install(options) if options.action == "install" else _list()


def _install(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.backends.environment import folder_of, install, installed

    try:
        pip_arguments = shlex.split(options.pip_args)
    except ValueError as error:
        raise UserError(f"--pip-args is {options.pip_args!r}: {error}") from None
    folder, console, began = folder_of(options.name), Console(stderr=True), time.monotonic()

    def make(say: Callable[[str], None]) -> None:
        record = install(options.name, force=options.force, pip_arguments=pip_arguments, say=say)
        print(f"{options.name}: {_describe(record.versions)} in {folder}")

    if not console.is_terminal:
        make(lambda line: console.print(f"{time.monotonic() - began:6.0f} s  {line}", markup=False, highlight=False, soft_wrap=True))
        return 0
    with console.status(f"making {folder} (minutes, and gigabytes of disk)") as status:
        make(lambda line: status.update(f"making {folder}: {line} ({_megabytes(folder):,.0f} MiB)"))
    assert installed(options.name) is not None
    return 0


def _list() -> int:
    from tandem.backends.environment import installed
    from tandem.backends.sidecars import SIDECARS

    for name, sidecar in SIDECARS.items():
        try:
            record = installed(name)
            state = "not installed" if record is None else _describe(record.versions)
        except UserError as error:
            state = f"BROKEN: {error}"
        print(f"{name:<10} {sidecar.role:<8} {sidecar.key}: {name:<10} {sidecar.purpose}; {state}")
    return 0


def _describe(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink()) / 2**20
