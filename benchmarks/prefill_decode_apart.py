"""What streams notice of long prompts that another server computes.

16 streams with prompts of 32 tokens, and prompts of 4,096 tokens (none seen before) one after another, each answered with one token; a model of random
parameters; two servers with one thread each, each pinned to a core of its own, behind one gateway. Together: each server takes whole requests. Apart:
`--role prefill` and `--role decode`, with `router.prefill_apart: always`. Client and gateway share the cores with the servers.

    python benchmarks/prefill_decode_apart.py [--prompts 3] [--out benchmarks/results]
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from long_prompts import MODEL, Measured, ask, percentiles
from machine import machine, write_report
from serving import ready

from tandem.model.create_model import create_model
from tandem.runtime.process.processes import Threads

COMMAND = str(Path(sys.executable).with_name("tandem"))
KEY = ("--kv-transfer-key", "the key of all servers of this benchmark")
SIDES = {
    "together": ("never", (), ()),
    "apart": ("always", (*KEY, "--role", "prefill"), (*KEY, "--role", "decode")),
}


def main() -> None:
    """Write one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3, help="long prompts, one after another")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        create_model(MODEL, 0, folder)
        for name, (policy, *roles) in SIDES.items():
            with servers(Path(work), folder, policy, roles) as url:
                found[name] = asyncio.run(ask(url, options.prompts))
    worst = {name: percentiles(each.beside)[1] for name, each in found.items()}
    first = {name: statistics.median(each.first_token) for name, each in found.items()}
    lines = ["# Prompts and answers in different servers", "", machine(), "", (__doc__ or "").split("\n\n")[1], ""]
    lines += ["| servers | between tokens alone, ms p50 / p99 | beside prompts, ms p50 / p99 | first token of a long prompt, s |", "| --- | --- | --- | --- |"]
    for name, each in found.items():
        (low, high), (middle, _) = percentiles(each.alone), percentiles(each.beside)
        lines.append(f"| {name} | {low:.1f} / {high:.1f} | {middle:.1f} / {worst[name]:.1f} | {first[name]:.2f} |")
    ratios = f"p99 between tokens {worst['together'] / worst['apart']:.2f}, first token {first['together'] / first['apart']:.2f}"
    lines += ["", f"Together over apart: {ratios}."]
    print("\n".join(lines))
    print(f"wrote {write_report('prefill-decode-apart', chr(10).join(lines), options.out)}")


@contextlib.contextmanager
def servers(work: Path, folder: Path, policy: str, roles: list[tuple[str, ...]]) -> Iterator[str]:
    """Gives the address of a gateway before two servers, one a core."""
    with contextlib.ExitStack() as stack:
        urls = []
        for core, flags in enumerate(roles):
            log = work / f"serve-{policy}-{core}.log"
            command = ["taskset", "-c", str(core), COMMAND, "serve", str(folder), "--served-model-name", "m", "--port", "0", "--threads", "1", *flags]
            urls.append(ready(_started(stack, [*command, "--max-num-seqs", "32"], log), log))
        file, log = work / f"{policy}.json", work / f"gateway-{policy}.log"
        file.write_text(json.dumps({"backends": [{"url": url} for url in urls], "port": 0, "router": {"prefill_apart": policy}}))
        gateway = _started(stack, [COMMAND, "gateway", str(file)], log)
        while b"gateway at " not in log.read_bytes():
            assert gateway.poll() is None, log.read_text()
        yield "http://" + log.read_text().split("gateway at http://")[1].split()[0]


def _started(stack: contextlib.ExitStack, command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    sink = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, **Threads(1).environment()})
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


if __name__ == "__main__":
    main()
