"""What the training step gains where a group's prompt is computed once (``trainer.share_prompts``).

    python benchmarks/shared_prompt.py [--rounds 5] [--threads 1]

A Qwen3 of 3.5M parameters (hidden 256, 4 layers, vocabulary 1,024) takes policy updates (forward and backward pass, AdamW) on two groups of 8 completions
of 128 tokens each, in micro-batches of 16,384 tokens. Each side has its turn in every round; the best of its rounds counts, in wall and in CPU seconds.
Peak memory is what an update needs beside the model, its gradients and the optimizer's state. ``tokens`` is the ratio of the tokens that go through the
network; the head computes the same rows on both sides. Log-probabilities of both sides have the same bits (asserted).
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import machine, write_report
from options import parser as shared_parser

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.logprobs import sequence_logprobs
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.types import Batch, TrainSequence

SHAPES = ModelShapes(
    architecture="qwen3", vocab_size=1024, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=768, max_position_embeddings=4096, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
PROMPTS, GROUP, COMPLETION = 2, 8, 128
PROMPT_TOKENS = (32, 128, 512, 1024)


def make_batch(prompt_tokens: int) -> Batch:
    draw, sequences = random.Random(0), []
    for group in range(PROMPTS):
        prompt = tuple(draw.randrange(1024) for _ in range(prompt_tokens))
        for member in range(GROUP):
            before, logprobs = (0.0,) * prompt_tokens, tuple(-draw.uniform(5, 8) for _ in range(COMPLETION))
            tokens = (*prompt, *(draw.randrange(1024) for _ in range(COMPLETION)))
            advantages = before + (draw.uniform(-1, 1),) * COMPLETION
            sequences.append(
                TrainSequence(
                    f"{group}/{member}", tokens, prompt_tokens, before + (1.0,) * COMPLETION, advantages, before + logprobs, before + logprobs
                )
            )  # fmt: skip
    return Batch(0, tuple(sequences))


class Side:
    """A trainer of the model, with or without shared prompts."""

    def __init__(self, share_prompts: bool) -> None:
        torch.manual_seed(0)
        model = Decoder(SHAPES, select("auto", torch.float32))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.ones_like(parameter) if parameter.ndim == 1 else 0.02 * torch.randn_like(parameter))
        self.settings = TrainerConfig(learning_rate=1e-6, share_prompts=share_prompts)
        self.replica = Replica(alone(), model, AdamW(model.named_parameters(), self.settings))

    def step(self, batch: Batch) -> tuple[float, float, int]:
        """Takes one update; returns its wall and CPU seconds, and the tokens that went through the network."""
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = update_policy(self.replica, batch, AlgorithmConfig(), self.settings).tokens
        return time.perf_counter() - wall, time.process_time() - cpu, tokens

    def logprobs(self, batch: Batch) -> dict[str, tuple[float, ...]]:
        frozen = FrozenReplica(alone(), self.replica.model)
        return sequence_logprobs(frozen, batch.sequences, self.settings.micro_batch_tokens, share_prompts=self.settings.share_prompts)


def peak_bytes(share_prompts: bool, prompt_tokens: int) -> int:
    """Returns the bytes by which an update raises the peak of this process, after one on a single short sequence."""
    side = Side(share_prompts)
    side.step(Batch(0, make_batch(8).sequences[:1]))
    Path("/proc/self/clear_refs").write_text("5")  # The peak is what it has now.
    before = resident("VmRSS")
    side.step(make_batch(prompt_tokens))
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Returns the bytes under ``name`` in the status of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak_of_a_process(share_prompts: bool, prompt_tokens: int, threads: int) -> int:
    command = [sys.executable, __file__, "--peak", json.dumps([share_prompts, prompt_tokens]), "--threads", str(threads)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    arguments = shared_parser(__doc__ or "", threads=1)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--peak", default="", help="measures one side's peak in this process")
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        print(peak_bytes(*json.loads(given.peak)))
        return
    about = machine()
    rows = []
    for prompt_tokens in PROMPT_TOKENS:
        batch, sides = make_batch(prompt_tokens), [Side(False), Side(True)]
        assert sides[0].logprobs(batch) == sides[1].logprobs(batch), "sharing must not change a bit of a log-probability"
        taken = [[side.step(batch) for side in sides] for _ in range(given.rounds)]
        separate, shared = ([min(each[place][what] for each in taken) for what in (0, 1)] for place in (0, 1))
        tokens = [taken[0][place][2] for place in (0, 1)]
        peaks = [peak_of_a_process(share, prompt_tokens, given.threads) / 2**20 for share in (False, True)]
        rows.append(
            f"| {prompt_tokens} | {separate[0]:.3f} s | {shared[0]:.3f} s | {separate[0] / shared[0]:.2f} | {separate[1] / shared[1]:.2f} | "
            f"{tokens[0] / tokens[1]:.2f} | {peaks[0]:,.0f} MiB | {peaks[1]:,.0f} MiB | {peaks[1] / peaks[0]:.2f} |"
        )
        print(rows[-1])
    text = [
        "# A group's prompt computed once in training", "", about, "", (__doc__ or "").split("\n\n", 2)[2].strip(), "",
        f"{given.rounds} rounds, {given.threads} thread{'s' if given.threads > 1 else ''}:", "",
        "| prompt tokens | separate | shared | wall, ratio | CPU, ratio | tokens, ratio | peak, separate | peak, shared | peak, ratio |",
        "|---|---|---|---|---|---|---|---|---|", *rows, "",
    ]  # fmt: skip
    print(write_report("shared-prompt", "\n".join(text), given.out))


if __name__ == "__main__":
    main()
