"""Absurd values of every recipe key and command-line option, and a runner that watches a command for tracebacks, hangs, aborts and memory.

Shared by ``test_cli_absurd_values.py``, ``test_cli_absurd_*files.py`` and ``benchmarks/absurd_values.py``, which writes the table of all cases.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, NamedTuple

from tandem.cli.main import main, parser
from tandem.config.document import sections
from tandem.config.gateway import GatewayConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe

LIMIT_S = 10.0
"""A command that computes longer, or that waits three times as long (the machine may have other work), hangs."""
MOST_BYTES = 2**30
"""A command that refuses a value may not be larger than this. Measured: 0.2 GiB after its imports."""

NUMBERS = (
    "0", "-1", "1", "2147483648", "9223372036854775808", "1000000000000000000", "1e18", "1e308", "-1e308", ".nan", "nan", ".inf", "inf", "-.inf", "-inf",
    "9" * 5000, "9" * 400, "0x" + "f" * 5000, "1.5", "true", "null", "[]", "{}", "1_0", "0x7fffffffffffffff", "12:30:45", "2026-11-22",
)  # fmt: skip
TEXTS = (
    "", "''", "x" * 100_000, '"a\\0b"', '"\\ud800"', "\udcff", "größe 🌍", "../../..", "zero", "full", "a\nb", '"\\e[31m"', "-", "a/b@c",
    "x" * 300,
)  # fmt: skip
"""As they are given on the command line: those in quotation marks are YAML's escapes; ``\\udcff`` is the byte 0xff, which is not UTF-8. ``zero`` and
``full`` are links to those devices in the folder that a case runs in, so that a command that replaces its file replaces the link."""
NUMBERS_OF_OPTIONS = tuple(value for value in NUMBERS if not value.startswith((".", "-.")) and value not in ("[]", "{}", "null"))
TEXTS_OF_OPTIONS = (
    "", "x" * 100_000, "x" * 300, "\udcff", "größe 🌍", "../../..", "zero", "full", "/proc/self/mem", "a\nb", "\x1b[31m", "-", "{", "[" * 10_000,
    "null", "9" * 5000,
)  # fmt: skip


class Case(NamedTuple):
    """``name``: of the key or option. ``value``: what it is given. ``arguments``: the whole command. ``content``: of the file ``FILE_OF_CASE`` in the folder
    that it runs in; empty: it has none."""

    name: str
    value: str
    arguments: tuple[str, ...]
    content: str = ""


FILE_OF_CASE = "case.yaml"


class Outcome(NamedTuple):
    """``code``: the exit status, negative for a signal. ``err``: standard error. ``cpu_s``: of the command and its children, which other load does not
    change. ``peak_bytes``: resident, and ``most_bytes`` what it may be. ``is_late``: it was ended after its limit."""

    code: int
    err: str
    cpu_s: float
    peak_bytes: int
    is_late: bool = False
    most_bytes: int = MOST_BYTES

    @property
    def kind(self) -> str:
        """``accepted``, ``refused`` (exit 2), ``failed`` (exit 1), or the defect: ``hang``, ``abort``, ``traceback``, ``memory``, ``lines``, ``status``."""
        if self.is_late:
            return "hang"
        if self.code < 0:
            return "abort"
        if "Traceback" in self.err or "Error:" in self.err.partition(" ")[0]:
            return "traceback"
        if self.peak_bytes > self.most_bytes:
            return "memory"
        if self.code == 0:
            return "accepted" if "Error" not in self.err else "traceback"
        if self.code not in (1, 2):
            return "status"
        lines = self.err.splitlines()
        if len(lines) != 1 or not lines[0].startswith("tandem: ") or len(lines[0]) > 2000:
            return "lines"
        return "refused" if self.code == 2 else "failed"

    @property
    def is_good(self) -> bool:
        return self.kind in ("accepted", "refused", "failed")


def make_folder(folder: Path) -> Path:
    """Returns the new, empty folder ``folder`` for a case, with the links that ``TEXTS`` name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for device in ("zero", "full"):
        (folder / device).symlink_to(f"/dev/{device}")
    return folder


def run_forked(arguments: Sequence[str], *, cwd: Path | None = None, limit_s: float = LIMIT_S, stdin: int | None = None) -> Outcome:
    """Runs the command in a fork of this process, which has imported it, and ends it with its children after ``limit_s`` of computing, or three times as
    long."""
    with TemporaryFile() as out, TemporaryFile() as err:
        until = time.monotonic() + 3 * limit_s
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                if cwd is not None:
                    os.chdir(cwd)
                os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin, 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
                sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
                code = main(arguments)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                os._exit(code)
        status, used, is_late = _wait(child, until)
        is_late = is_late or used.ru_utime + used.ru_stime > limit_s
        err.seek(0)
        text = err.read(2**20).decode("utf-8", "replace")
    return Outcome(os.waitstatus_to_exitcode(status), text, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, is_late)


def _wait(child: int, until: float) -> "tuple[int, resource.struct_rusage, bool]":
    pause = 0.001
    while time.monotonic() < until:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            return status, used, False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    return status, used, True


# Values that make another key of the recipe readable.
_ENABLING: Mapping[str, tuple[str, ...]] = {
    "trainer.muon": ("--trainer.optimizer=muon",),
    "trainer.loss_scale": ("--trainer.precision=fp16",),
    "trainer.decay_steps": ("--trainer.schedule=wsd", "--trainer.decay_steps=1", "--run.max_steps=4"),
    "trainer.min_lr_ratio": ("--trainer.schedule=cosine",),
    "trainer.offload_folder": ("--trainer.offload=nvme",),
    "algorithm.length_constant": ("--algorithm.loss_agg_mode=seq-mean-token-sum-norm",),
    "algorithm.kl_estimator": ("--algorithm.kl_coef=0.01",),
    "rollout.top_": ("--algorithm.tis_cap=2", "--algorithm.old_logprobs=recompute"),
    "rollout.min_p": ("--algorithm.tis_cap=2", "--algorithm.old_logprobs=recompute"),
    "rollout.engine.speculative_config": ("--rollout.engine.speculative_config.method=ngram",),
    "model.create.num_experts": ("--model.create.architecture=qwen3_moe",),
    "model.create.moe_": ("--model.create.architecture=qwen3_moe",),
    "parallel.ranks_per_node": ("--parallel.data=2",),
    "parallel.virtual_stages": ("--parallel.pipeline=2", "--parallel.schedule=interleaved", "--model.create.num_hidden_layers=4"),
    "parallel.pipeline_layers": ("--parallel.pipeline=2", "--model.create.num_hidden_layers=4"),
    "registry.name": ("--registry.path=registry",),
    "checkpoint.memory_directory": ("--checkpoint.memory_every_steps=1",),
}


def recipe_cases(kind: type[Recipe] | type[PretrainRecipe], recipe: Path, given: Sequence[str] = ()) -> Iterator[Case]:
    """Yields ``train RECIPE --dry-run`` with each key of the class ``kind`` at each absurd value of its type. ``given``: overrides of every case."""
    for section in sections(kind):
        hints = typing.get_type_hints(section.kind)
        for field in dataclasses.fields(section.kind):
            key = f"{section.name}.{field.name}"
            for value in values_of(hints[field.name]):
                override = _override(section.name, field.name, value)
                # A key that the section does not read is refused; one value shows it.
                if override is not None and not (field.name in section.refused and value != "1"):
                    enabling = next((extra for start, extra in _ENABLING.items() if key.startswith(start)), ())
                    yield Case(key, value, ("train", str(recipe), "--dry-run", *given, *enabling, override))


def _override(section: str, name: str, value: str) -> str | None:
    if section.startswith("rewards.functions"):
        path = section.removeprefix("rewards.functions").lstrip(".")
        entry: dict[str, Any] = {"function": "format_checker" if path == "format" else "answer_matcher"}
        if path:
            entry[path] = {}
        text = json.dumps(entry)
        inner = f'"{name}": {value or "null"}'
        if path == "":
            return f"--rewards.functions=[{text[:-1]}, {inner}}}]" if name != "function" else f"--rewards.functions=[{{{inner}}}]"
        return f"--rewards.functions=[{text[:-2]}{inner}}}}}]"
    if section == "data.train":
        return f"--data.train=[{{path: {value or 'null'}}}]" if name == "path" else f"--data.train=[{{path: tokens, {name}: {value or 'null'}}}]"
    return f"--{section}.{name}={value}"


def gateway_cases(url: str) -> Iterator[Case]:
    """Yields ``gateway FILE --check`` before a backend at ``url`` with each key of the file, those of entries and sections too, at each absurd value of its
    type."""
    needed = {"backends": f"[{{url: '{url}'}}]", "url": f"'{url}'", "model": "m", "targets": "[{model: m}]"}
    for name, hint, placed in _keys_of(GatewayConfig, "", lambda text: text, needed):
        for value in values_of(hint):
            yield Case(name, value, ("gateway", FILE_OF_CASE, "--check"), placed(value or "null"))


def _keys_of(kind: type, inside: str, outer: Callable[[str], str], needed: Mapping[str, str]) -> Iterator[tuple[str, Any, Callable[[str], str]]]:
    """Yields name and type of each key of the class ``kind`` and of those inside it, and the function that puts a value of it into a whole file. ``outer``
    does so with a mapping of this class; ``needed``: values of keys without a default."""
    hints = typing.get_type_hints(kind)
    required = [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory is dataclasses.MISSING]
    for name, hint in hints.items():
        # A gateway without backends has servers of its own.
        both = [*required, *(["backends"] if kind is GatewayConfig and name != "servers" else [])]
        others = "".join(f"{other}: {needed[other]}, " for other in both if other != name)

        def placed(text: str, name: str = name, others: str = others) -> str:
            return outer(f"{{{others}{name}: {text}}}")

        yield f"{inside}{name}", hint, placed
        origins = _origins(hint)
        form = "{entry: %s}" if any(isinstance(each, type) and issubclass(each, Mapping) for each in origins) else "[%s]" if tuple in origins else "%s"
        for inner in filter(dataclasses.is_dataclass, _leaves(hint)):
            yield from _keys_of(inner, f"{inside}{name}.", lambda text, form=form, placed=placed: placed(form % text), needed)  # type: ignore[misc]


def values_of(hint: Any) -> tuple[str, ...]:
    """Returns the absurd values, as written on the command line, for a key of type ``hint``."""
    kinds, origins = set(_leaves(hint)), _origins(hint)
    if tuple in origins:
        inner = (*NUMBERS[:11], NUMBERS[15]) if int in kinds else TEXTS if str in kinds else ()
        return (*(f"[{value or 'null'}]" for value in inner), "1", "null", "[[]]", "[" * 50 + "]" * 50, "{}", "[" + "1," * 20_000 + "1]")
    if any(dataclasses.is_dataclass(each) for each in kinds):
        return ("1", "[]", "true", "nan", "x", "{}", "{a: 1}", "null")
    if any(isinstance(each, type) and issubclass(each, Mapping) for each in origins):
        return ("1", "[]", "nan", "x", "{a: .inf}", "{1: 2}", "{a: {b: {c: " + "[" * 50 + "]" * 50 + "}}}", "null")
    if kinds & {int, float}:
        return NUMBERS + (TEXTS if str in kinds else ("", "x", '"\\ud800"', "\udcff"))
    if bool in kinds:
        return ("1", "0", "x", "null", "[]", "", "nan")
    return (*TEXTS, "1", ".inf", "null", "[]", "{}", "true")


def _leaves(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        yield str
    elif arguments:
        for argument in arguments:
            yield from _leaves(argument)
    else:
        yield hint


def _origins(hint: Any) -> list[Any]:
    return [typing.get_origin(hint), *(origin for argument in typing.get_args(hint) for origin in _origins(argument))]


def option_cases(bases: Mapping[str, tuple[str, ...]]) -> Iterator[Case]:
    """Yields each command of ``bases`` (by name, with arguments that are valid) with each of its options that takes a value at each absurd value."""
    for command, base in bases.items():
        name = command.strip()
        for action in _actions(parser(), command.split()):
            if not action.option_strings or action.nargs == 0 or action.help == argparse.SUPPRESS:
                continue
            option = action.option_strings[-1] if not action.option_strings[0].startswith("--") else action.option_strings[0]
            for value in NUMBERS_OF_OPTIONS if action.type in (int, float) else TEXTS_OF_OPTIONS:
                if option in base:
                    at = base.index(option)
                    arguments = (*base[:at], f"{option}={value}", *base[at + 2 :])
                else:
                    arguments = (*base, f"{option}={value}")
                yield Case(f"{name} {option}", value, arguments)


def _actions(made: argparse.ArgumentParser, command: Sequence[str]) -> list[argparse.Action]:
    for name in command:
        choices = next(action.choices for action in made._actions if isinstance(action, argparse._SubParsersAction))
        made = typing.cast(Mapping[str, argparse.ArgumentParser], choices)[name]
    return made._actions
