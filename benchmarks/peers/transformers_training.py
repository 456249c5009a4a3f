"""The peers of the training benchmark. ``transformers_training.py MODEL BATCHES.json THREADS loop|trainer [bf16]``; ``packed`` and ``varied`` train
on the next batch of that kind. ``loop``: the plain loop over transformers' model that people write. ``trainer``: Hugging Face's Trainer on
the packed data, timed from its ``on_step_begin`` to its ``on_step_end``, so that reading data and logging are not counted."""

import copy
import json
import os
import sys
import tempfile
from typing import Any

import torch
from clock import Stopwatch
from lines import answer, command
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

RATE, IGNORED = 1e-4, -100


def padded(batch: list[list[int]]) -> dict[str, torch.Tensor]:
    """Ids, labels and, where lengths differ, a mask: sequences padded to the longest."""
    width = max(map(len, batch))
    found = {
        "input_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids in batch]),
        "labels": torch.tensor([ids + [IGNORED] * (width - len(ids)) for ids in batch]),
    }
    if min(map(len, batch)) < width:
        found["attention_mask"] = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in batch])
    return found


def loop(model: Any, batches: dict[str, list[list[list[int]]]]) -> None:
    models = {"packed": model, "varied": copy.deepcopy(model)}
    optimizers = {kind: torch.optim.AdamW(each.parameters(), lr=RATE, weight_decay=0.0, fused=True) for kind, each in models.items()}
    rest, watch = {kind: iter(steps) for kind, steps in batches.items()}, Stopwatch()
    answer(ready=True)
    while (words := command())[0] != "quit":
        batch, model, optimizer = next(rest[words[0]]), models[words[0]], optimizers[words[0]]
        watch.start()
        optimizer.zero_grad()
        loss = model(**padded(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found = loss.item()
        answer(loss=found, **watch.stop())


class Driven(TrainerCallback):
    """Waits for a line before every step and answers when the step's loss is logged."""

    def __init__(self) -> None:
        self.watch, self.took = Stopwatch(), {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if command()[0] == "quit":
            os._exit(0)
        self.watch.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.took = self.watch.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            answer(loss=float(logs["loss"]), **self.took)


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def trainer(model: Any, batches: dict[str, list[list[list[int]]]]) -> None:
    steps = batches["packed"]
    rows = [{"input_ids": ids, "labels": ids} for step in steps for ids in step]
    config = TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=len(steps[0]), max_steps=len(steps), learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        bf16="bf16" in sys.argv[5:],
    )  # fmt: skip
    answer(ready=True)
    InOrder(model=model, args=config, train_dataset=rows, callbacks=[Driven()]).train()  # type: ignore[arg-type]


def main() -> None:
    torch.set_num_threads(int(sys.argv[3]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.train()
    with open(sys.argv[2], encoding="utf-8") as file:
        batches = json.load(file)
    {"loop": loop, "trainer": trainer}[sys.argv[4]](model, batches)


main()
