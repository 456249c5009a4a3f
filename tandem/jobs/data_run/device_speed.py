"""How fast a rank's device trains, and what of its memory that takes, for the rows of a run."""

import torch

from tandem.layout.flops import Peak, peak_of

AGAINST_BF16 = ("bf16", "fp16")
"""Precisions that a GPU multiplies in at the rate of bf16; others have no MFU here."""


class DeviceSpeed:
    """Of ``device`` under ``trainer.precision``."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self._device, self._precision = device, precision
        self.peak: Peak | None = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def rates(self, flops: float, seconds: float) -> dict[str, float]:
        """Of a step of ``flops`` model operations on this rank: 10^12 of them a second, and as a share of what the device can do (MFU: Chowdhery et
        al., 2022, appendix B) where that is known."""
        found = {"perf/model_tflops": flops / seconds / 1e12}
        if self.peak is not None and self._precision in AGAINST_BF16:
            found["perf/mfu"] = found["perf/model_tflops"] / self.peak.bf16_tflops
        return found

    def memory(self) -> dict[str, float]:
        """The most bytes of the GPU that tensors took since the last call."""
        if self._device.type != "cuda":
            return {}
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return {"memory/gpu/peak": float(most)}

    def describe(self) -> str:
        """A line for who starts a run on a GPU."""
        name = torch.cuda.get_device_name(self._device)
        if self.peak is None:
            return f"computing on {name}; its peak rate is not in the table (layout.flops), so rows have no perf/mfu"
        if self._precision not in AGAINST_BF16:
            return f"computing on {name} in {self._precision}; perf/mfu is of bf16 and fp16 only, so rows have none"
        return f"computing on {name}; perf/mfu is of {self.peak.bf16_tflops} TFLOP/s ({self.peak.source})"
