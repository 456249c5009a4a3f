"""Measures matrix products and copies on this machine, in a process of its own: reads what to measure from standard input, writes the answer as JSON."""

import json
import sys
import time

import torch

from tandem.kernels import select

MOST_ROWS, MOST_OUTPUTS, MOST_INPUTS = 1024, 8192, 16384
"""A larger product is measured at this size, and takes longer in proportion."""
COPIED_BYTES = 1 << 26
MEASURED_S, MOST_REPETITIONS = 0.1, 1000


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    device, dtype = torch.device(asked["device"]), getattr(torch, asked["dtype"])
    kernels = select(asked["kernels"], dtype, device)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(rows: int, outputs: int, inputs: int) -> float:
        measured = min(rows, MOST_ROWS), min(outputs, MOST_OUTPUTS), min(inputs, MOST_INPUTS)
        tokens = torch.randn(measured[0], measured[2], device=device, dtype=dtype)
        matrix = kernels.pack(torch.randn(measured[1:], device=device, dtype=dtype))
        times: list[float] = []
        # The first product starts threads; the best of several is the one that no other process disturbed.
        while len(times) < 3 or (sum(times) < MEASURED_S and len(times) < MOST_REPETITIONS):
            began = time.perf_counter()
            kernels.linear_packed(tokens, matrix, None)
            finish()
            times.append(time.perf_counter() - began)
        return min(times[1:]) * (rows / measured[0]) * (outputs / measured[1]) * (inputs / measured[2])

    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        finish()
        copies.append(time.perf_counter() - began)
    with torch.no_grad():
        measured = [seconds(*each) for each in asked["products"]]
    print(json.dumps({"seconds": measured, "bytes_per_s": 2 * COPIED_BYTES / min(copies)}))


if __name__ == "__main__":
    main()
