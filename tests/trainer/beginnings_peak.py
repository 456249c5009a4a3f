"""Prints as JSON what an update of a decoder on a CPU takes in memory beside its weights and gradients, at its worst moment.

Arguments: layers, tokens of a prompt and of a completion, completions of a prompt, prompts. Memory that is freed goes back to the system at once, so that the
peak of the process is that of its tensors."""

import gc
import json
import random
import sys
from pathlib import Path

import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.rl.algorithms.loss import make_policy_loss
from tandem.runtime.machine.heap import give_back, give_back_large_memory
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.micro_batch import collate
from tandem.trainer.step import predict
from tandem.types import TrainSequence


def shapes_of(layers: int) -> ModelShapes:
    return ModelShapes("qwen3", 512, 384, layers, 6, 3, 64, 1152, 4096, tie_word_embeddings=True, qk_norm=True)


def sequences(prompt_tokens: int, completion_tokens: int, group: int, prompts: int) -> list[TrainSequence]:
    draw, made = random.Random(1), list[TrainSequence]()
    for prompt in range(prompts):
        asked = [draw.randrange(512) for _ in range(prompt_tokens)]
        for member in range(group):
            tokens, before = (*asked, *(draw.randrange(512) for _ in range(completion_tokens))), (0.0,) * prompt_tokens
            advantages = (*before, *[draw.uniform(-1, 1)] * completion_tokens)
            logprobs = (*before, *[-3.0] * completion_tokens)
            made.append(TrainSequence(f"{prompt}/{member}", tokens, prompt_tokens, (*before, *[1.0] * completion_tokens), advantages, logprobs))
    return made


def resident(name: str) -> int:
    """Returns the bytes of a line of the process's status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    layers, *sizes = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    give_back_large_memory()
    model, batch = Decoder(shapes_of(layers), select("cpu")), sequences(*sizes)
    initialise(model, 0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    micro_batch = collate(batch, model.dtype, finds_beginnings=model.computes_beginnings_once)
    loss = make_policy_loss(AlgorithmConfig(kl_coef=0.0), counts_of(batch), 1.0)

    def update() -> None:
        loss(predict(model, micro_batch, 1.0), micro_batch).loss.backward()

    # The first one brings what is there once: threads, tables, workspace.
    update()
    gc.collect()
    give_back()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    update()
    distinct = 0 if micro_batch.beginnings is None else len(micro_batch.beginnings.first)
    print(json.dumps({"peak": resident("VmHWM") - before, "tokens": len(micro_batch.tokens), "distinct": distinct}))


if __name__ == "__main__":
    main()
