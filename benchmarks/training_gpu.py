"""A training step on a GPU: a model of 1.2B parameters at a sequence length of 4,096, beside the Hugging Face model in plain torch, taking turns in
one process on the same tokens from the same weights; fp8 beside bf16; and what offloaded moments cost.

    PYTHONPATH=. python benchmarks/training_gpu.py                              # needs torch, triton, transformers and a CUDA device of 80 GB
    PYTHONPATH=. python benchmarks/training_gpu.py --device cpu --model tiny    # does everything run: a minute, the figures mean nothing

Ours is ``trainer.step.train_step`` with weights, gradients and moments in fp32 and products in 16 bits. The peer is the loop that people write: the
model in bf16 autocast over fp32 weights, scaled_dot_product_attention, fused AdamW, clipping at 1. MFU is model operations (Chowdhery et al., 2022,
appendix B: 6 N + 12 L H Q T a token) a second over the dense bf16 peak that NVIDIA publishes, and over the rate that torch's own product of 8192 x 8192 x
8192 reaches in the same run. A step is timed from its collated batch to the end of the update. The first steps compile and are not counted.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_gpu import seconds
from machine import machine, write_report
from options import parser

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.hardware.load import hardware_of_device, source_of
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.predict import predict_step_time
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.kernels import select
from tandem.kernels.attention_backends import fast_attention
from tandem.kernels.mixed import in_precision, is_emulated
from tandem.layout.flops import step_flops
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import config_json, to_huggingface
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.adamw import Optimizer
from tandem.trainer.optimizers.make import make_optimizer
from tandem.trainer.step import train_step
from tandem.types import TrainSequence

MODELS = {
    "tiny": (ModelShapes("llama", 512, 64, 2, 4, 2, 16, 128, 256, tie_word_embeddings=True), 64),
    "1B": (ModelShapes("llama", 128256, 2048, 16, 32, 8, 64, 8192, 8192, tie_word_embeddings=True, rope_theta=5e5), 4096),
}
TARGET_MFU = 0.45
RATE = 1e-4


class Ours:
    """``precision`` and ``offload`` as in a recipe."""

    def __init__(self, shapes: ModelShapes, device: torch.device, precision: Any, offload: Any, micro_batch: int, folder: Path) -> None:
        self.micro_batch, self.device = micro_batch, device
        fast = fast_attention(shapes.head_dim) if device.type == "cuda" and precision != "fp32" else None
        kernels = select("auto", device=device, deterministic=device.type != "cuda", attention=fast or "auto")
        self.model = Decoder(shapes, in_precision(kernels, precision, device), device=device)
        fill(self.model)
        config = TrainerConfig(learning_rate=RATE, precision=precision, offload=offload, offload_folder=str(folder) if offload == "nvme" else "")
        self.optimizer: Optimizer = make_optimizer(self.model, config, folder)

    def prepare(self, batch: Sequence[Sequence[int]]) -> Callable[[], float]:
        sequences = [TrainSequence(str(i), tuple(ids), 1, (0.0,) + (1.0,) * (len(ids) - 1)) for i, ids in enumerate(batch)]
        parts = [sequences[i : i + self.micro_batch] for i in range(0, len(sequences), self.micro_batch)]
        micro_batches = [collate(part, device=self.device) for part in parts]
        loss = make_cross_entropy_loss(counts_of(sequences), "train")
        return lambda: train_step(self.model, self.optimizer, micro_batches, loss, RATE).metrics["train/loss"]


class Theirs:
    """transformers' model of the same weights, as it is or compiled."""

    def __init__(self, shapes: ModelShapes, device: torch.device, micro_batch: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.micro_batch, self.device = micro_batch, device
        given = config_json(shapes)
        config = AutoConfig.for_model(given.pop("model_type"), **given)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        source = Decoder(shapes, select("reference"), device=device)
        fill(source)
        self.model.load_state_dict({name: tensor.clone() for name, tensor in to_huggingface(source)}, strict=False)
        self.model.tie_weights()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def prepare(self, batch: Sequence[Sequence[int]]) -> Callable[[], float]:
        ids = torch.tensor([list(sequence) for sequence in batch], device=self.device)
        parts = ids.split(self.micro_batch)

        def step() -> float:
            self.optimizer.zero_grad()
            total = torch.zeros((), device=self.device)
            for part in parts:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    loss = self.model(input_ids=part, labels=part).loss * (len(part) / len(ids))
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            return total.item()

        return step


@torch.no_grad()
def fill(model: Decoder) -> None:
    """Random weights, drawn on the device, the same each time."""
    numbers = torch.Generator(model.device).manual_seed(0)
    for name, tensor in to_huggingface(model):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=numbers)


def batches(shapes: ModelShapes, length: int, sequences: int, count: int) -> list[list[list[int]]]:
    draw = random.Random(0)
    return [[[draw.randrange(shapes.vocab_size) for _ in range(length)] for _ in range(sequences)] for _ in range(count)]


def matrix_rate(device: torch.device, side: int) -> float:
    """Operations a second of torch's product in bf16 (fp32 on a CPU)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    took = [seconds(lambda: [a @ b for _ in range(10)], device) / 10 for _ in range(4)]
    return 2 * side**3 / min(took)


def measured(sides: dict[str, Any], given: list[list[list[int]]], warm: int, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """(seconds, loss) of each counted step of each side; they take turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number, batch in enumerate(given):
        for name, side in sides.items():
            step, losses = side.prepare(batch), list[float]()
            took = seconds(lambda step=step, losses=losses: losses.append(step()), device)
            if number >= warm:
                found[name].append((took, losses[0]))
    return found


def predicted(shapes: ModelShapes, length: int, options: argparse.Namespace, precision: Any, offload: Any, hardware: Hardware) -> tuple[float, float]:
    """Returns the planner's seconds of a step and the bytes that tensors take at most, without the device's context and the allocator's fragments."""
    config = TrainerConfig(learning_rate=RATE, precision=precision, offload=offload)
    passes = options.sequences // options.micro_batch
    layout = layout_of_trainer(config, ParallelConfig(), options.micro_batch * length, attended=length, on_cpu=False, micro_batches=passes)
    layout = replace(layout, sequence=length, micro_batch=options.micro_batch, global_batch=options.sequences)
    memory = predict_rank_memory(shapes, layout)
    return predict_step_time(shapes, layout, hardware).seconds, memory.total - memory.context - memory.fragmentation


def peak_gib(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else "-"


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--device", default="cuda")
    made.add_argument("--model", default="1B", choices=MODELS)
    made.add_argument("--sequences", type=int, default=16, help="of one optimizer step")
    made.add_argument("--micro-batch", type=int, default=4, help="sequences that pass through the model at once")
    made.add_argument("--steps", type=int, default=6, help="that are counted")
    made.add_argument("--warm", type=int, default=3, help="steps before those")
    made.add_argument("--folder", type=Path, help="where moments are offloaded to (default: a temporary folder)")
    options = made.parse_args()
    device = torch.device(options.device)
    is_trial = device.type != "cuda"
    if not is_trial and not torch.cuda.is_available():
        sys.exit("no CUDA device is found; run this on a machine with one, or try it with --device cpu --model tiny")
    with tempfile.TemporaryDirectory() as made_folder:
        text = report(options, device, is_trial, options.folder or Path(made_folder))
    if not is_trial:
        print(f"wrote {write_report('training-gpu', text, options.out)}")
    return 0


def report(options: argparse.Namespace, device: torch.device, is_trial: bool, folder: Path) -> str:
    shapes, length = MODELS[options.model]
    what = "a CPU: a trial, whose figures mean nothing" if is_trial else torch.cuda.get_device_name(device)
    hardware, rate = hardware_of_device(what), matrix_rate(device, 512 if is_trial else 8192)
    flops = step_flops(shapes, [length - 1] * options.sequences)
    given = batches(shapes, length, options.sequences, options.warm + options.steps)
    lines = [
        "# A training step on a GPU", "", f"{what}. {machine()}", "", *(__doc__ or "").split("\n\n")[2:], "",
        f"{parameter_count(shapes) / 1e9:.2f}B parameters, {options.sequences} sequences of {length} tokens a step, {options.micro_batch} at once, best "
        f"(median) of {options.steps} steps. Torch's product: {rate / 1e12:.1f} TFLOP/s; published peak: "
        + (
            f"{hardware.peak_flops['bf16'] / 1e12} TFLOP/s ({source_of(hardware, 'peak_flops')})." if hardware else "in no hardware file, so there is no MFU."
        ), "",
        "| side | step | tokens/s | MFU | of torch's product | memory | peer's step / this | losses apart | predicted | aimed at |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    tokens = options.sequences * (length - 1)
    theirs: list[tuple[float, float]] = []
    sixteen = "fp32" if is_trial else "bf16"
    kinds: list[tuple[str, str, str]] = [(sixteen, "none", "ours, " + sixteen), ("fp8", "none", "ours, fp8"), (sixteen, "cpu", "ours, moments in the host"),
                                         (sixteen, "nvme", "ours, moments in a file")]  # fmt: skip
    for precision, offload, name in kinds:
        if not is_trial:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        ours = Ours(shapes, device, precision, offload, options.micro_batch, folder)
        both: dict[str, Any] = {name: ours}
        if not theirs:
            both["transformers, plain torch"] = Theirs(shapes, device, options.micro_batch)
        found = measured(both, given, options.warm, device)
        memory = peak_gib(device) if len(both) == 1 else "both: " + peak_gib(device)
        theirs = theirs or found["transformers, plain torch"]
        for side, steps in found.items():
            best, median = min(s for s, _ in steps), statistics.median(s for s, _ in steps)
            mfu = f"{flops / best / hardware.peak_flops['bf16']:.1%}" if hardware else "-"
            ratio = "" if side.startswith("transformers") else f"**{min(s for s, _ in theirs) / best:.2f}**"
            apart = max(abs(a - b) for (_, a), (_, b) in zip(steps, theirs, strict=True))
            label = f"{side} (emulated)" if precision == "fp8" and is_emulated("fp8", device) else side
            aim = f"MFU {TARGET_MFU:.0%}" if (precision, offload) == (sixteen, "none") and side == name else ""
            took = f"{best * 1e3:,.1f} ms ({median * 1e3:,.1f})"
            foretold = ""
            if hardware and not side.startswith("transformers"):
                step_s, held = predicted(shapes, length, options, precision, offload, hardware)
                foretold = f"{step_s * 1e3:,.0f} ms, {held / 2**30:.1f} GiB"
            cells = [label, took, f"{tokens / best:,.0f}", mfu, f"{flops / best / rate:.1%}", memory, ratio, f"{apart:.1e}", foretold, aim]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        del ours, both
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
