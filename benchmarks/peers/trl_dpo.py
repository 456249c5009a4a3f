"""The peer of the DPO benchmark: TRL's DPOTrainer on the same model, pairs and settings, in their order. ``trl_dpo.py MODEL PAIRS.jsonl SETTINGS.json``.

Driven line by line: ``step`` takes one optimizer step, ``quit`` ends. A step is timed from TRL's ``on_step_begin`` to its ``on_step_end``: reading the data
and logging are not counted. The reference's log-probabilities are computed before the first step, as ours are."""

import json
import os
import sys
from typing import Any, ClassVar

from clock import Stopwatch
from lines import answer, command

with open(sys.argv[3], encoding="utf-8") as file:
    SETTINGS: dict[str, Any] = json.load(file)

import torch

torch.set_num_threads(SETTINGS["threads"])

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402


class Measured(DPOTrainer):
    """Keeps the losses of a step's passes."""

    losses: ClassVar[list[torch.Tensor]] = []

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)
        self.losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
        return loss


class Driven(TrainerCallback):
    """Waits for a line before every step and reports what the step took."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if command()[0] == "quit":
            os._exit(0)
        Measured.losses.clear()
        self.watch.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        took = self.watch.stop()
        answer(step=state.global_step, loss=float(torch.stack(Measured.losses).mean()), **took)


def main() -> None:
    model_folder, pairs_file = sys.argv[1:3]
    with open(pairs_file, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    dataset = Dataset.from_list([{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows])
    passes, batch = SETTINGS["micro_batches"], SETTINGS["batch"]
    config = DPOConfig(
        output_dir=SETTINGS["output"],
        use_cpu=True,
        bf16=False,
        seed=0,
        max_steps=len(rows) // batch,
        per_device_train_batch_size=batch // passes,
        gradient_accumulation_steps=passes,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=batch // passes,
        max_length=None,
        beta=SETTINGS["beta"],
        loss_type="sigmoid",
        learning_rate=SETTINGS["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=SETTINGS["beta1"],
        adam_beta2=SETTINGS["beta2"],
        weight_decay=SETTINGS["weight_decay"],
        max_grad_norm=SETTINGS["max_grad_norm"],
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Measured(model=model, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[Driven()])
    for row, made in zip(rows[:64], trainer.train_dataset, strict=False):
        for answered in ("chosen", "rejected"):
            assert made["prompt_ids"] + made[f"{answered}_ids"] == row[f"{answered}_token_ids"], "the two sides read different tokens"
    answer(ready=True)
    trainer.train()


main()
