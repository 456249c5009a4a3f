"""How long ``tandem plan`` takes, in processes of their own: ``python benchmarks/planner_speed.py``.

Wall and CPU seconds from the start of Python to its end, the median of 5: one layout, full sweeps from 768 to 32,768 GPUs,
and the size of a serving pool.
"""

import json
import os
import statistics
import subprocess
import sys
import time

SIZES_70B = "--hidden 8192 --layers 80 --heads 64 --kv-heads 8 --ffn 28672 --vocab 128256"
SIZES_405B = "--hidden 16384 --layers 126 --heads 128 --kv-heads 8 --ffn 53248 --vocab 128256"
CASES = {
    "one layout, 70B on 768 GPUs": f"{SIZES_70B} --gpus 768 --seq 4096 --global-batch 768 --tp 8 --pp 2 --dp 48",
    "sweep, 70B on 768 GPUs": f"{SIZES_70B} --gpus 768 --seq 8192 --global-batch 768",
    "sweep, 405B on 16,384 GPUs": f"{SIZES_405B} --gpus 16384 --seq 8192 --global-batch 2048",
    "sweep, 405B on 32,768 GPUs, 128k tokens": f"{SIZES_405B} --gpus 32768 --seq 131072 --global-batch 4096",
    "serving pool, 70B, 100 requests a second": f"serving {SIZES_70B} --requests-per-s 100 --ttft 1000 --tpot 40",
    "serving pool, 405B, no targets": f"serving {SIZES_405B} --requests-per-s 20",
}
ROUNDS = 5


def measured(arguments: str) -> tuple[float, float, int]:
    """Returns the median wall and CPU seconds, and the layouts that were scored."""
    walls, cpus, considered = [], [], 1
    for _ in range(ROUNDS):
        began, before = time.perf_counter(), os.times()
        done = subprocess.run([sys.executable, "-m", "tandem.cli.main", "plan", *arguments.split(), "--json"], capture_output=True, text=True, check=True)
        after = os.times()
        walls.append(time.perf_counter() - began)
        cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
        considered = json.loads(done.stdout).get("considered", 1)
    return statistics.median(walls), statistics.median(cpus), considered


def main() -> int:
    from machine import machine, write_report
    from options import parser

    options = parser(__doc__ or "").parse_args()
    lines = ["# Time of `tandem plan`", "", machine(), "", *(__doc__ or "").split("\n\n")[1:], ""]
    lines += ["| case | layouts | wall s | CPU s |", "| --- | --- | --- | --- |"]
    for name, arguments in CASES.items():
        wall, cpu, considered = measured(arguments)
        lines.append(f"| {name} | {considered:,} | {wall:.2f} | {cpu:.2f} |")
    print("\n".join(lines))
    print(f"wrote {write_report('planner-speed', chr(10).join(lines), options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
