"""Compiles every Triton program, with the arguments of its launch, to the machine code of a Hopper GPU: ``python compile_for_gpu.py bfloat16``;
with ``gated_delta`` those of the gated delta rule, which are fp32 and take minutes.

It needs no device and launches nothing. Prints a JSON line for each launch: the program's name, bytes of shared memory, the number of matrix
instructions in its PTX, and the hash of what was compiled."""

import json
import re
import sys
import types
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tandem.kernels import PagedBatch, empty_cache, empty_latent_cache
from tandem.kernels.api import DeltaStates
from tandem.kernels.triton import launch
from tandem.kernels.triton.kernels import TritonKernels
from tandem.kernels.triton.tiles import LinearTile

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HOPPER = GPUTarget("cuda", 90, 32)


class Absent:
    """The part of a driver that compilation uses."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"compilation used the driver's {name}")


class Always:
    """A tile chooser that always returns one tile."""

    def __init__(self, tile: LinearTile) -> None:
        self.tile = tile

    def choose(self, x: torch.Tensor, columns: int) -> LinearTile:
        return self.tile

    def agreeing(self, device: torch.device, dtype: torch.dtype) -> tuple[LinearTile, ...]:
        return (self.tile,)



def main(dtype: str) -> None:
    triton.runtime.driver.set_active(Absent())
    # Launches expect tensors on a device, of which compilation only uses the alignment of the address.
    launch.IS_INTERPRETED = False
    launch.check = lambda name, x, *shape: None  # type: ignore[assignment]
    for module in (m for name, m in sys.modules.items() if name.startswith("tandem.kernels.triton.") and "programs" not in name):
        if isinstance(getattr(module, "check", None), types.FunctionType):
            module.check = launch.check  # type: ignore[attr-defined]
        if hasattr(module, "processors"):
            module.processors = lambda device: 132  # type: ignore[attr-defined]
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        found = {
            "program": self.fn.__name__, "dtype": dtype, "rows": options.get("BLOCK_M"), "shared": kernel.metadata.shared,
            "cubin": len(kernel.asm["cubin"]), "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)), "mma": len(re.findall(r"\bmma\.sync", ptx)),
            "warps": kernel.metadata.num_warps, "hash": kernel.hash,
        }  # fmt: skip
        print(json.dumps(found), flush=True)
        return kernel

    JITFunction.run = compile_only
    if dtype == "gated_delta":
        gated_delta_programs()
    else:
        every_program(TritonKernels(), DTYPES[dtype])


def every_program(kernels: Any, dtype: torch.dtype) -> None:
    device, size = torch.device("cpu"), 128
    x, weight = torch.zeros(64, 1024, dtype=dtype), torch.zeros(512, 1024, dtype=dtype)
    for tile in kernels._tiles[dtype].linear:
        kernels._linear_tiles[dtype] = Always(tile)
        kernels.linear(x, weight, None)
    kernels.grouped_linear(x, torch.zeros(8, 512, 1024, dtype=dtype), torch.zeros(9, dtype=torch.int64))
    x.requires_grad_()
    for residual, centred in ((x, False), (x.float(), False), (x, True)):
        normed, total = kernels.add_rms_norm(x, residual, x[0].detach(), 1e-6, centred)
        (normed.sum() + total.sum()).backward()
    (kernels.silu_mul(x) + kernels.gelu_mul(x) + kernels.clamped_swiglu_mul(x)).sum().backward()
    x = x.detach()
    logits, ones = torch.zeros(64, 4096), torch.ones(64)
    hidden = x.clone().requires_grad_()
    scored = kernels.token_logprobs(hidden, weight, torch.zeros(64, dtype=torch.int64), 0.5)
    (scored.raw + scored.scaled).sum().backward()
    kernels.soft_cap(logits, 30.0)
    kernels.sample_rows(logits, ones, ones.long(), ones, ones, ones.double())
    qkv, table, positions = torch.zeros(64, 12 * size, dtype=dtype), torch.zeros(512, size), torch.zeros(64, dtype=torch.int64)
    heads, norm = (8, 2, size), torch.zeros(size, dtype=dtype)
    sum(out.sum() for out in kernels.rope(qkv.clone().requires_grad_(), positions, table, heads, None, None, 1e-6)).backward()
    q, k, v = kernels.rope(qkv, positions, table, heads, norm, norm, 1e-6)
    starts = torch.tensor([0, 64], dtype=torch.int32)
    kernels.packed_attention(q.requires_grad_(), k, v, starts, 64, 0.1, None).sum().backward()
    q = q.detach()
    kernels.packed_attention(q.clone().requires_grad_(), k, v, starts, 64, 0.1, 4096, cap=50.0).sum().backward()
    sinks = torch.zeros(8, dtype=dtype, requires_grad=True)
    kernels.packed_attention(q, k, v, starts, 64, 0.1, 4096, sinks=sinks).sum().backward()
    for stored in (dtype, torch.int8, torch.float8_e4m3fn, torch.uint8):
        (cache,) = empty_cache((64, 2, size), 1, stored, device)
        kernels.rope_to_cache(qkv, positions, table, heads, norm, norm, 1e-6, cache, positions)
        batch = PagedBatch(starts, starts[1:], torch.zeros(1, 32, dtype=torch.int32), positions)
        for splits in (True, False):
            kernels._splits = splits
            kernels.paged_attention(q, cache, batch, 0.1, 4096 if splits else None)
            if stored == dtype:
                kernels.paged_attention(q, cache, batch, 0.1, 4096, sinks=sinks)
        one = PagedBatch(starts.clamp(max=1), starts[1:], batch.block_tables, positions[:1])
        kernels.paged_attention(q[:1], cache, one, 0.1, None)
    latent_programs(kernels, dtype)


def latent_programs(kernels: Any, dtype: torch.dtype) -> None:
    """At the sizes of DeepSeek-V2-Lite and of V2 and V3, which have 16 and 128 heads."""
    starts, positions = torch.tensor([0, 64], dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    batch = PagedBatch(starts, starts[1:], torch.zeros(1, 32, dtype=torch.int32), positions)
    for heads, trained, dtypes in ((16, False, (dtype,)), (128, True, (dtype, torch.int8, torch.float8_e4m3fn))):
        q, rows = torch.zeros(64, heads, 576, dtype=dtype, requires_grad=trained), torch.zeros(64, 1, 576, dtype=dtype, requires_grad=trained)
        out = kernels.packed_attention(q, rows, rows[..., :512], starts, 64, 0.1, None)
        if trained:
            out.sum().backward()
        for stored in dtypes:
            (cache,) = empty_latent_cache(64, 576, 1, stored, torch.device("cpu"))
            kernels.latent_attention(q.detach(), cache, batch, 0.1, 512)


def gated_delta_programs() -> None:
    """At the sizes of Qwen3-Next, in fp32 as its layers compute, packed and over states."""
    q, v, gates = torch.zeros(64, 16, 128), torch.zeros(64, 32, 128), torch.zeros(64, 32)
    bounds = torch.tensor([0, 64], dtype=torch.int32)
    states = DeltaStates(torch.zeros(2, 32, 128, 128), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool), torch.zeros(64, dtype=torch.int64))
    for deterministic in (True, False):
        kernels = TritonKernels(deterministic)
        kernels.gated_delta_rule(q, q, v, gates, gates, bounds.long(), states)
        given = [x.clone().requires_grad_() for x in (q, q, v, gates, gates)]
        out = kernels.gated_delta_rule(*given, bounds)  # type: ignore[arg-type]
        if not deterministic:
            out.sum().backward()


if __name__ == "__main__":
    main(sys.argv[1])
