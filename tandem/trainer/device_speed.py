"""The training speed and the peak memory of a rank's device, for the rows of a run, and what a run says of it at its start."""

import torch

from tandem.config.trainer import TrainerConfig
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.hardware.load import hardware_of_device, source_of
from tandem.kernels.api import Kernels
from tandem.kernels.mixed import emulation_note

AGAINST_BF16 = ("bf16", "fp16")
"""Precisions that GPUs multiply at the rate of bf16; other precisions have no MFU here."""


class DeviceSpeed:
    """Measures ``device`` for products in ``precision``."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self._device, self._precision = device, precision
        self.hardware: Hardware | None = hardware_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def rates(self, flops: float, seconds: float) -> dict[str, float]:
        """Returns the model TFLOP/s of a step of ``flops`` operations on this rank in ``seconds``, and the model FLOPs utilization (MFU, Chowdhery
        et al., 2022, appendix B) if the peak rate of the device is known."""
        rates = {"perf/model_tflops": flops / seconds / 1e12}
        if self.hardware is not None and self._precision in AGAINST_BF16:
            rates["perf/mfu"] = flops / seconds / self.hardware.peak_flops["bf16"]
        return rates

    def memory(self) -> dict[str, float]:
        """Returns the peak bytes of tensors on the GPU since the last call."""
        if self._device.type != "cuda":
            return {}
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return {"memory/gpu/peak": float(most)}

    def describe(self) -> str:
        """Returns a line on the GPU and its peak rate."""
        name = torch.cuda.get_device_name(self._device)
        if self.hardware is None:
            return f"computing on {name}; no hardware file (estimate.hardware) has its peak rate, so rows have no perf/mfu"
        if self._precision not in AGAINST_BF16:
            return f"computing on {name} in {self._precision}; perf/mfu is of bf16 and fp16 only, so rows have none"
        return f"computing on {name}; perf/mfu is of {self.hardware.peak_flops['bf16'] / 1e12} TFLOP/s ({source_of(self.hardware, 'peak_flops')})"


def device_notes(device: torch.device, trainer: TrainerConfig, kernels: Kernels, where: str = "here") -> list[str]:
    """Returns lines for the start of a run: the GPU, and that ``trainer.precision`` is emulated ``where``."""
    notes = [DeviceSpeed(device, trainer.multiplies_in).describe()] if device.type == "cuda" else []
    note = emulation_note(trainer.precision, device, kernels, where)
    return [*notes, f"trainer.{note}"] if note else notes
