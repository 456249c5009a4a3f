"""The code executor: runs the program in a completion against the tests of its prompt."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tandem.config.code_executor import CodeExecutorConfig
from tandem.config.rewards import RewardFunctionConfig
from tandem.rl.rewards.code.program import Program, ProgramBroken, ProgramEnded
from tandem.rl.rewards.code.program_tests import ProgramTests, is_output, is_value, read_tests
from tandem.rl.rewards.code.runner import pack, unpack
from tandem.rl.rewards.code.sandbox import Sandbox, find_sandbox
from tandem.rl.rewards.judgement import Item, Judge, Judgement, infrastructure_fault, model_fault, number
from tandem.runtime.process.processes import available_cores

KIB = 2**10
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def code_judge(function: RewardFunctionConfig, fault_value: float) -> Judge:
    """Returns the judge that runs programs, at most ``code.parallel`` at a time. Raises ``UserError`` if this machine has no sandbox."""
    settings = function.code
    sandbox = find_sandbox(settings)
    threads = ThreadPoolExecutor(settings.parallel or available_cores(), thread_name_prefix="program")

    async def judge(items: Sequence[Item]) -> list[Judgement]:
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(threads, partial(judge_program, item, settings, sandbox, fault_value)) for item in items)))

    return Judge(function.label, True, lambda items, call: judge(items), is_async=True)


def judge_program(item: Item, settings: CodeExecutorConfig, sandbox: Sandbox, fault_value: float) -> Judgement:
    """Returns the judgement of one completion. A completion without a program, or with one that cannot be loaded, is a model fault; a ground truth without
    tests, or a sandbox that does not start, an infrastructure fault. Details: ``passed``, the share of the tests that pass."""
    try:
        tests = read_tests(item.ground_truth, item.columns)
    except ValueError as error:
        return infrastructure_fault(str(error))
    program = extract_program(item.completion, settings)
    if not program:
        return model_fault(fault_value, "no program found")
    passed = 0
    try:
        for result in _results(tests, program, settings, sandbox):
            passed += result
    except ProgramBroken as broken:
        return model_fault(fault_value, f"the program cannot be loaded: {broken}")
    except ProgramEnded as end:
        if not end.started:
            return infrastructure_fault(f"the sandbox {end}")
    share = passed / tests.count
    return number(share if settings.score == "share" else float(share == 1), correct=share == 1, details={"passed": share})


def extract_program(completion: str, settings: CodeExecutorConfig) -> str:
    """Returns the program in ``completion``; empty if there is none."""
    if settings.extract == "whole":
        return completion.strip()
    blocks = _BLOCK.findall(completion)
    return blocks[-1].strip() if blocks else ""


def _results(tests: ProgramTests, program: str, settings: CodeExecutorConfig, sandbox: Sandbox) -> Iterator[bool]:
    """Yields whether each test passes. Raises ``ProgramEnded`` where the program answers no more."""
    request: dict[str, Any] = {"program": program, "limits": sandbox.limits, "output_bytes": settings.output_kib * KIB}
    start = lambda mode, **more: Program(sandbox, {**request, "mode": mode, **more}, settings.wall_s, 8 * settings.output_kib * KIB)
    if tests.inputs:
        with start("inputs", run=settings.run, compile=settings.compile, file=settings.file) as running:
            for given, wanted in tests.inputs:
                answer = running.ask({"input": given})
                yield answer.get("how") == "" and is_output(str(answer.get("output")), wanted)
    elif tests.calls:
        with start("calls") as running:
            for arguments, wanted in tests.calls:
                answer = running.ask({"call": tests.function, "arguments": pack(arguments), "named": {}})
                yield "value" in answer and is_value(_unpacked(answer["value"]), wanted)
    else:
        # The assertions are where the program cannot reach them: it receives the arguments of each call and returns a value.
        with start("calls") as running, start("tests", tests=list(tests.assertions)) as asserting:
            while "finished" not in (said := asserting.answer()):
                if "passed" in said:
                    yield said["passed"] is True
                else:
                    asserting.send(running.ask(said))


def _unpacked(value: Any) -> Any:
    try:
        return unpack(value)
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
