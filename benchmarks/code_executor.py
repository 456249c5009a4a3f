"""Programs that the code executor runs in a second, on two threads.

    python benchmarks/code_executor.py [--programs 300] [--threads 2]

A program of one line against one input, one call and one assertion, in each sandbox that this machine has; with assertions a program runs in two sandboxes.
Beside it the same interpreter alone, which starts, reads the program and ends.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from machine import machine, write_report
from options import parser as shared_parser

from tandem.config.code_executor import CodeExecutorConfig
from tandem.rl.rewards.code.executor import judge_program
from tandem.rl.rewards.code.sandbox import Sandbox, find_sandbox
from tandem.rl.rewards.judgement import Item

CASES: dict[str, tuple[str, Any]] = {
    "an input": ("a, b = map(int, input().split())\nprint(a + b)", {"inputs": ["1 2"], "outputs": ["3"]}),
    "a call": ("def add(a, b):\n    return a + b", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}),
    "an assertion": ("def add(a, b):\n    return a + b", ["assert add(1, 2) == 3"]),
}


def per_second(work: Callable[[], object], count: int, threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(lambda _: work(), range(count)))
        return count / (time.perf_counter() - began)


def judged(program: str, truth: Any, settings: CodeExecutorConfig, sandbox: Sandbox) -> None:
    judgement = judge_program(Item("0/p/0", "", program, (), truth, "benchmark", {}), settings, sandbox, 0.0)
    assert judgement.value == 1.0, judgement


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=2)
    parser.add_argument("--programs", type=int, default=300)
    options = parser.parse_args()
    lines = ["# Programs of the code executor", "", machine(), "", "| sandbox | against | programs a second | target |", "| --- | --- | --- | --- |"]
    for name, program in (("bubblewrap", "bwrap"), ("gvisor", "runsc")):
        if shutil.which(program) is None:
            lines.append(f"| {name} | not installed | | |")
            continue
        settings = CodeExecutorConfig(extract="whole", sandbox=name, wall_s=60.0)  # type: ignore[arg-type]
        sandbox = find_sandbox(settings)
        count = options.programs if name == "bubblewrap" else options.programs // 10
        for case, (text, truth) in CASES.items():
            rate = per_second(lambda text=text, truth=truth: judged(text, truth, settings, sandbox), count, options.threads)  # type: ignore[misc]  # noqa: B023
            target = "at least 40" if (name, case) == ("bubblewrap", "an input") else ""
            lines.append(f"| {name} | {case} | {rate:.0f} | {target} |")
            print(lines[-1], flush=True)
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else "python3"  # noqa: PTH110
    alone = per_second(lambda: subprocess.run([python, "-I", "-S", "-c", "print(1 + 2)"], capture_output=True, check=True), options.programs, options.threads)
    lines.append(f"| none | the interpreter alone | {alone:.0f} | |")
    print(f"{lines[-1]}\nwrote {write_report('code-executor', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
