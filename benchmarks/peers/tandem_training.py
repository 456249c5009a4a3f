"""Our side of the training benchmark. ``tandem_training.py MODEL BATCHES.json THREADS [PRECISION]``; ``packed`` and ``varied`` train on the
next batch of that kind, ``rate`` times a large matrix product. A step is all that a run does for it: sequences packed, collated, trained on."""

import json
import sys
import time
from pathlib import Path

import torch
from clock import Stopwatch
from lines import answer, command

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.kernels.mixed import in_precision
from tandem.model.huggingface.model_folder import load_model
from tandem.runtime.machine.heap import freed_memory_kept
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.packing import pack
from tandem.trainer.step import train_step
from tandem.types import TrainSequence

SETTINGS = TrainerConfig(learning_rate=1e-4, micro_batch_tokens=16384)


def rate() -> float:
    """Operations a second of torch's matrix product."""
    a, b, best = torch.randn(2048, 2048), torch.randn(2048, 2048), float("inf")
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
    return 2 * 2048**3 / best


def main() -> None:
    torch.set_num_threads(int(sys.argv[3]))
    kernels = in_precision(select("auto"), sys.argv[4] if len(sys.argv) > 4 else "fp32", torch.device("cpu"))  # type: ignore[arg-type]
    models = {kind: load_model(Path(sys.argv[1]), kernels) for kind in ("packed", "varied")}
    optimizers = {kind: AdamW(model.named_parameters(), SETTINGS) for kind, model in models.items()}
    batches = {kind: iter(steps) for kind, steps in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")).items()}
    watch = Stopwatch()
    answer(ready=True)
    while (words := command())[0] != "quit":
        if words[0] == "rate":
            answer(operations_per_s=rate())
            continue
        model, optimizer = models[words[0]], optimizers[words[0]]
        batch = [TrainSequence(str(i), tuple(ids), 1, (0.0,) + (1.0,) * (len(ids) - 1)) for i, ids in enumerate(next(batches[words[0]]))]
        watch.start()
        micro_batches = [collate([batch[i] for i in chosen]) for chosen in pack(batch, SETTINGS.micro_batch_tokens)]
        result = train_step(model, optimizer, micro_batches, make_cross_entropy_loss(counts_of(batch), "train"), SETTINGS.learning_rate)
        took = watch.stop()
        answer(loss=result.metrics["train/loss"], **took)


with freed_memory_kept():
    main()
