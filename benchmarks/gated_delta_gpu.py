"""The gated delta rule of one layer of Qwen3-Next on a GPU: decoding as a share of the measured copy bandwidth, and sequences of 8,192 tokens, token by token
(the deterministic kernels) and in chunks, also with gradients, beside transformers' chunks in plain torch on the same numbers.

    PYTHONPATH=. python benchmarks/gated_delta_gpu.py                # needs torch, triton, transformers and a CUDA device; minutes, most of them compilation
    PYTHONPATH=. python benchmarks/gated_delta_gpu.py --device cpu   # does everything run: half a minute, the figures mean nothing

A decoding step must read and write the state of every sequence once: these bytes over its time are compared with the bandwidth of a copy in the same run.
"""

import statistics
import sys
from collections.abc import Callable

import torch
from engine_gpu import ceilings, seconds
from machine import machine, write_report
from options import parser
from torch import Tensor

from tandem.kernels import Kernels, select
from tandem.kernels.api import DeltaStates

KEY_HEADS, HEADS, SIZE = 16, 32, 128
REPEATS = 20


def inputs_of(tokens: int, device: torch.device) -> list[Tensor]:
    """Returns q, k, v, decay and beta of ``tokens`` tokens, as a layer computes them."""
    normal = lambda *shape: torch.randn(tokens, *shape, device=device)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    return [
        unit(normal(KEY_HEADS, SIZE)) * SIZE**-0.5, unit(normal(KEY_HEADS, SIZE)), normal(HEADS, SIZE), normal(HEADS).sigmoid(), normal(HEADS).sigmoid(),
    ]  # fmt: skip


def best(call: Callable[[], object], device: torch.device, rounds: int, repeats: int) -> tuple[float, float]:
    """Returns (best, median) seconds of a call; the first compiles and is not counted."""
    call()
    times = [seconds(lambda: [call() for _ in range(repeats)], device) / repeats for _ in range(rounds)]
    return min(times), statistics.median(times)


def decode_row(kernels: Kernels, sequences: int, device: torch.device, copy_rate: float, rounds: int, repeats: int) -> str:
    matrices = torch.zeros(sequences, HEADS, SIZE, SIZE, device=device)
    states = DeltaStates(matrices, torch.arange(sequences, device=device), torch.zeros(sequences, dtype=torch.bool, device=device))
    inputs, bounds = inputs_of(sequences, device), torch.arange(sequences + 1, device=device)
    least, usual = best(lambda: kernels.gated_delta_rule(*inputs, bounds, states), device, rounds, repeats)  # type: ignore[arg-type]
    share = 2 * matrices.nbytes / least / copy_rate
    return f"| decode, {sequences} sequences | {least * 1e6:.0f} us ({usual * 1e6:.0f}) | {share:.2f} of the copy bandwidth | 0.70 |"


def forward_and_backward(call: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    given = [x.detach().requires_grad_() for x in inputs]
    call(*given).sum().backward()


def sequence_rows(tokens: int, device: torch.device, rounds: int, repeats: int) -> list[str]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    inputs, bounds = inputs_of(tokens, device), torch.tensor([0, tokens], dtype=torch.int32, device=device)
    exact, chunks = select("auto", device=device), select("auto", device=device, deterministic=False)

    def theirs(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        q, k = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (q * SIZE**0.5, k))
        out: Tensor = torch_chunk_gated_delta_rule(*(x.unsqueeze(0) for x in (q, k, v)), g=decay.log().unsqueeze(0), beta=beta.unsqueeze(0))[0]
        return out.squeeze(0)

    by_tokens = lambda *given: exact.gated_delta_rule(*given, bounds)
    by_chunks = lambda *given: chunks.gated_delta_rule(*given, bounds)
    with torch.no_grad():
        expected = theirs(*inputs)
        apart = [float((call(*inputs) - expected).norm() / expected.norm()) for call in (by_tokens, by_chunks)]
    rows = []
    for name, call in (("token by token", by_tokens), ("in chunks", by_chunks)):
        for what, of in (("forward", torch.no_grad()(lambda call: call(*inputs))), ("forward and backward", lambda call: forward_and_backward(call, inputs))):
            ours, usual = best(lambda call=call, of=of: of(call), device, rounds, repeats)  # type: ignore[misc]
            other, _ = best(lambda of=of: of(theirs), device, rounds, repeats)  # type: ignore[misc]
            rates = f"{ours * 1e3:.2f} ms ({usual * 1e3:.2f}), transformers {other * 1e3:.2f} ms"
            rows.append(f"| {tokens} tokens {name}, {what} | {rates} | {other / ours:.2f} times | 1 |")
            print(rows[-1], flush=True)
    rows.append(f"\nOutputs differ from transformers' by {apart[0]:.1e} (token by token) and {apart[1]:.1e} (in chunks) of their norm.")
    return rows


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--device", default="cuda")
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is found; run this on a machine with one, or try it with --device cpu")
    is_trial = device.type != "cuda"
    rounds, repeats, tokens = (1, 1, 256) if is_trial else (options.rounds, REPEATS, 8192)
    torch.manual_seed(0)
    copy_rate, _ = ceilings(device, torch.float32)
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU: a trial, whose figures mean nothing"
    lines = [
        "# The gated delta rule on a GPU", "",
        f"{what}. {machine()}", "", f"One layer: {KEY_HEADS} key heads, {HEADS} value heads of {SIZE} x {SIZE}, fp32. Measured ceiling: copy "
        f"{copy_rate / 1e12:.2f} TB/s. Best (median) of {rounds} rounds.", "", "| what | measured | share or ratio | aimed at |", "|---|---|---|---|",
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    for sequences in (1, 64, 256) if not is_trial else (1, 4):
        lines.append(decode_row(select("auto", device=device), sequences, device, copy_rate, rounds, repeats))
        print(lines[-1], flush=True)
    lines += sequence_rows(tokens, device, rounds, repeats)
    print(lines[-1])
    if not is_trial:
        print(f"wrote {write_report('gated-delta-gpu', chr(10).join(lines), options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
