"""The peer of the GRPO benchmarks: TRL's GRPOTrainer on the same model, prompts, reward and settings.

Runs in the peer's own environment and is driven line by line, so that its steps can be interleaved with ours in one run:
``step`` takes one optimizer step, ``save FOLDER`` writes the model, ``quit`` ends.
Usage: ``trl_grpo.py MODEL PROMPTS.jsonl SETTINGS.json``.

A step is timed from TRL's ``on_step_begin`` to its ``on_step_end``: reading the data and logging are not counted. Its phases are those of TRL's own methods:
generation, the reference's pass (log-probabilities without gradients), rewards; the rest is the training. TRL generates with the weights that it trains,
so its weight update takes no time.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from clock import PhaseClock, Stopwatch
from judges import JUDGES
from lines import answer, command

with open(sys.argv[3], encoding="utf-8") as file:
    SETTINGS: dict[str, Any] = json.load(file)

import torch

torch.set_num_threads(SETTINGS["threads"])

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def judged(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
    """The rewards, as the recipe's own function gives them."""
    judge = JUDGES[SETTINGS["judge"]]
    return [judge(completion, truth) for completion, truth in zip(completions, ground_truth, strict=True)]


class Driven(TrainerCallback):
    """Waits for a line before every step and reports what the step took, when TRL logs what it drew."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.watch, self.phases = Stopwatch(), PhaseClock()
        self.took: dict[str, Any] = {}

    def measure(self, trainer: GRPOTrainer) -> None:
        """Times the phases of ``trainer``, inside its own methods."""

        def timed(name: str, phase: str, counts: Callable[[], bool] = lambda: True) -> None:
            method = getattr(trainer, name)

            def call(*arguments: Any, **named: Any) -> Any:
                if not counts():
                    return method(*arguments, **named)
                with self.phases.inside(phase):
                    return method(*arguments, **named)

            setattr(trainer, name, call)

        timed("_generate", "rollout")
        timed("_calculate_rewards", "rewards")
        timed("_get_per_token_logps_and_entropies", "inference", lambda: not torch.is_grad_enabled())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        while (words := command())[0] != "step":
            if words[0] == "quit":
                os._exit(0)
            self.model.save_pretrained(words[1])
            self.tokenizer.save_pretrained(words[1])
            answer(saved=words[1])
        self.watch.start()
        self.phases.begin("train")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.took = self.phases.end() | self.watch.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            length = float(logs["completions/mean_length"])
            answer(step=state.global_step, reward=float(logs["reward"]), mean_length=length, **self.took)


def main() -> None:
    model_folder, prompts_file = sys.argv[1:3]
    with open(prompts_file, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.padding_side = "left"
    for row in rows[:8]:
        assert tokenizer(row["prompt"])["input_ids"] == row["prompt_token_ids"], "the two sides read different tokens"
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    group, prompts = SETTINGS["group_size"], SETTINGS["prompts_per_step"]
    # The dataset has one row a prompt, in our order; TRL repeats each for its group.
    dataset = Dataset.from_list([{name: row[name] for name in ("prompt", "ground_truth")} for row in rows])
    config = GRPOConfig(
        output_dir=SETTINGS["output"],
        use_cpu=True,
        bf16=False,
        seed=SETTINGS["seed"],
        max_steps=len(rows) // prompts,
        per_device_train_batch_size=prompts * group // SETTINGS["micro_batches"],
        gradient_accumulation_steps=SETTINGS["micro_batches"],
        num_generations=group,
        max_completion_length=SETTINGS["max_tokens"],
        temperature=SETTINGS["temperature"],
        learning_rate=SETTINGS["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=SETTINGS["warmup_steps"],
        adam_beta1=SETTINGS["beta1"],
        adam_beta2=SETTINGS["beta2"],
        weight_decay=SETTINGS["weight_decay"],
        max_grad_norm=SETTINGS["max_grad_norm"],
        beta=SETTINGS["kl_coef"],
        loss_type="bnpo",  # TRL's name for a token mean over the batch
        scale_rewards="group",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    driven = Driven(model, tokenizer)
    trainer = GRPOTrainer(
        model=model, reward_funcs=judged, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[driven]
    )
    driven.measure(trainer)
    answer(ready=True)
    trainer.train()


main()
