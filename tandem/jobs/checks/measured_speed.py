"""The measured speed of this machine. A process of its own measures, because the controller imports no torch."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping

from tandem.config.machine import MachineConfig
from tandem.estimate.time import Product, Speed
from tandem.runtime.process.processes import threads_of
from tandem.types import UserError

LIMIT_S, BUILD_LIMIT_S = 120.0, 1800.0
"""Of measuring, and of compiling the kernels before, on a machine that is slow or busy."""


def measure(
    products: Collection[Product], dtype: str, device: str, machine: MachineConfig, environment: Mapping[str, str] | None = None, precision: str = "fp32"
) -> Speed:
    """Returns the speed of ``products`` in torch's ``dtype`` under ``precision`` on ``device``, with the kernels and threads that a run on ``machine`` uses.
    The kernels are compiled if they are not. ``environment``: of the process that measures, beside that of this one. Raises ``UserError`` where it cannot be
    measured."""
    asked = {
        "products": list(products), "dtype": dtype, "precision": precision, "device": device, "threads": threads_of(machine), "kernels": machine.kernels,
        "limit_s": LIMIT_S,
    }  # fmt: skip
    command = [sys.executable, "-m", "tandem.kernels.measure"]
    try:
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=BUILD_LIMIT_S + LIMIT_S,
                              check=False, env={**os.environ, **(environment or {})})  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"the kernels were not built after {BUILD_LIMIT_S:.0f} s") from None
    if done.returncode == -signal.SIGALRM:
        raise UserError(f"matrix products of the model took more than {LIMIT_S:.0f} s")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise UserError((done.stderr.strip().splitlines() or ["the process that measures was killed"])[-1]) from None
    seconds, cpu = (dict(zip(products, answer[name], strict=True)) for name in ("seconds", "cpu_seconds"))
    return Speed(seconds, answer["bytes_per_s"], cpu, answer["bytes_per_cpu_s"])


def with_exchanges(speed: Speed) -> Speed:
    """Returns ``speed`` with the measured costs of collectives between CPUs of this machine. Raises ``UserError`` where they cannot be measured."""
    command = [sys.executable, "-m", "tandem.runtime.collectives.measure"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise UserError(f"collectives between two processes took more than {LIMIT_S:.0f} s") from None
    except ValueError:
        raise UserError((done.stderr.strip().splitlines() or ["the processes that measure collectives were killed"])[-1]) from None
    return speed._replace(call_cpu_s=answer["call_cpu_s"], sent_byte_cpu_s=answer["sent_byte_cpu_s"])
