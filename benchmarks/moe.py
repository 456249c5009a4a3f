"""A mixture of experts beside transformers' block of the same weights, at several numbers of tokens.

The two take turns and the best of the repetitions counts. Ours is the engine's path (packed experts, one grouped product a
matrix); the peer is ``Qwen3MoeSparseMoeBlock`` with the faster of its implementations, grouped products and a loop over
experts. Times are CPU microseconds of one thread.

    python benchmarks/moe.py [--seconds 0.5] [--out benchmarks/results]
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import transformers
from linear import interleaved
from machine import machine, write_report
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.model.moe import Experts, mixture

SHAPES = [(128, ExpertShapes(8, 2, 256)), (512, ExpertShapes(32, 4, 512)), (1024, ExpertShapes(64, 8, 384))]
ROWS = [1, 8, 64, 512]


def main() -> None:
    """Write one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each cell")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    seconds = options.seconds
    torch.set_num_threads(1)
    kernels = select("cpu")
    lines = ["# A mixture of experts beside transformers", "", machine(), "", __doc__.split("\n\n")[1], ""]
    lines += ["| hidden | experts | each | tokens | tandem us | transformers us | ratio |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for hidden, shapes in SHAPES:
        peers = []
        for implementation in ("eager", "grouped_mm"):
            config = transformers.Qwen3MoeConfig(
                hidden_size=hidden, num_experts=shapes.num_experts, num_experts_per_tok=shapes.num_experts_per_tok,
                moe_intermediate_size=shapes.intermediate_size, norm_topk_prob=True,
            )
            config._experts_implementation = implementation
            peers.append(Qwen3MoeSparseMoeBlock(config))
        ours = Experts(shapes, hidden, torch.float32, torch.device("cpu"))
        with torch.no_grad():
            for parameter, *others in zip(*(m.parameters() for m in (peers[0], peers[1])), strict=True):
                parameter.normal_(0.0, 0.05)
                others[0].copy_(parameter)
            ours.router.copy_(peers[0].gate.weight)
            ours.gate_up_proj.copy_(peers[0].experts.gate_up_proj)
            ours.down_proj.copy_(peers[0].experts.down_proj)
        packed = ours.pack(kernels)
        for rows in ROWS:
            x = torch.randn(rows, hidden)
            with torch.inference_mode():
                torch.testing.assert_close(mixture(kernels, packed, x), peers[0](x.unsqueeze(0))[0], atol=1e-4, rtol=1e-3)
                calls = [partial(mixture, kernels, packed, x), *(partial(peer, x.unsqueeze(0)) for peer in peers)]
                mine, *theirs = interleaved(calls, seconds)
            best = min(peer.cpu for peer in theirs)
            lines.append(
                f"| {hidden} | {shapes.num_experts} | {shapes.num_experts_per_tok} | {rows} | {mine.cpu * 1e6:.0f} | "
                f"{best * 1e6:.0f} | {best / mine.cpu:.2f} |"
            )
            print(lines[-1], flush=True)
    print(f"wrote {write_report('moe', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
