"""This machine as hardware of the planner, measured once in a process of its own: every core, or the GPU, is one device of a node."""

import functools
import os

from tandem.config.machine import MachineConfig
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.hardware.load import THIS_MACHINE
from tandem.estimate.time import Product
from tandem.jobs.checks.measured_speed import measure
from tandem.runtime.machine.available_memory import total_bytes
from tandem.runtime.machine.gpus import chosen_device, probe

LARGEST = Product(1024, 4096, 4096)
"""Large enough for the fastest rate, and measured within a second on two cores."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@functools.cache
def this_machine(machine: MachineConfig) -> Hardware:
    """Returns the measured hardware. The peak is that of the fastest product: the data sheet of a CPU is not known. Raises ``UserError`` where it cannot be
    measured."""
    device = chosen_device(machine, 1)
    if device == "cpu":
        # In fp32 tensors, whatever the precision of the products.
        speeds = {precision: measure([LARGEST], DTYPES["fp32"], device, machine, precision=precision) for precision in DTYPES}
        memory_bytes, count, units = total_bytes(), 1, os.cpu_count() or 1
    else:
        speeds = {precision: measure([LARGEST], dtype, device, machine) for precision, dtype in DTYPES.items()}
        gpus = probe().gpus
        memory_bytes, count, units = min(gpu.total_bytes for gpu in gpus), len(gpus), 1
    rates = {precision: LARGEST.flops / speed.seconds[LARGEST] for precision, speed in speeds.items()}
    bandwidth = speeds["fp32"].bytes_per_s
    # A copy is read and written: what one rank sends another through memory moves at half the rate.
    measured = f"measured: a product of {LARGEST.rows} x {LARGEST.inputs} with {LARGEST.inputs} x {LARGEST.outputs}, and a copy"
    return Hardware(
        THIS_MACHINE, rates, memory_bytes, bandwidth, units, bandwidth / 2, bandwidth / 2, count, product_flops=rates,
        sources=dict.fromkeys(("peak_flops", "product_flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth"), measured),
    )  # fmt: skip
