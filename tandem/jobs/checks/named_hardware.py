"""The hardware that a user names to the planner: a file, or this machine. Imports no torch."""

from dataclasses import replace

from tandem.config.machine import MachineConfig
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.hardware.load import THIS_MACHINE, hardware_of_device, load_hardware
from tandem.jobs.checks.this_machine import this_machine
from tandem.runtime.machine.gpus import chosen_device, probe


def named_hardware(name_or_path: str) -> Hardware:
    """Returns ``load_hardware``'s, or of ``this-machine`` the file of its GPUs, as many as there are, and where there is none what is measured here: of the
    GPU, or of the CPU as one device. Raises ``UserError`` as ``load_hardware`` does, and where this machine cannot be measured."""
    if name_or_path.lower() != THIS_MACHINE:
        return load_hardware(name_or_path)
    machine = MachineConfig()
    if chosen_device(machine, 1) == "cuda":
        gpus = probe().gpus
        known = hardware_of_device(gpus[0].name)
        if known is not None and all(gpu.name == gpus[0].name for gpu in gpus):
            return replace(known, gpus_per_node=len(gpus), memory_bytes=min(gpu.total_bytes for gpu in gpus))
    return this_machine(machine)
