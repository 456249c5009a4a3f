"""This machine as the planner sees it where a user names it: its GPUs, or what is measured on it. Imports no torch."""

from dataclasses import replace

from tandem.config.machine import MachineConfig
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.hardware.load import hardware_of_device
from tandem.jobs.checks.this_machine import this_machine
from tandem.runtime.machine.gpus import chosen_device, probe


def planned_machine() -> Hardware:
    """Returns the file of this machine's GPUs, as many as there are, and where there is none what is measured here: of the GPU, or of the CPU as one device.
    Raises ``UserError`` where it cannot be measured."""
    machine = MachineConfig()
    if chosen_device(machine, 1) == "cuda":
        gpus = probe().gpus
        known = hardware_of_device(gpus[0].name)
        if known is not None and all(gpu.name == gpus[0].name for gpu in gpus):
            return replace(known, gpus_per_node=len(gpus), memory_bytes=min(gpu.total_bytes for gpu in gpus))
    return this_machine(machine)
