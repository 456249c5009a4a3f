"""Supervised fine-tuning teaches a tiny task through the same step executor."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from tandem.config.trainer import TrainerConfig
from tandem.config.warm_up import WarmUpConfig
from tandem.rl.algorithms.supervised import fine_tune
from tandem.trainer.micro_batch import collate
from tandem.trainer.step import predict
from tandem.types import RunError, TrainSequence

TRAINER = TrainerConfig(beta2=0.99, micro_batch_tokens=200)
CONFIG = WarmUpConfig(steps=90, batch_size=16, learning_rate=3e-3, warmup_steps=4, schedule="linear")
END = 1


def copies(seed):
    """Prompts of two tokens, to be written again in reverse."""
    draw = random.Random(seed)
    while True:
        prompt = [draw.randrange(2, 10), draw.randrange(2, 10)]
        yield prompt, [*reversed(prompt), END]


def test_fine_tuning_lowers_the_loss_towards_a_task_that_can_be_known(make_model):
    heard = []
    rows = fine_tune(make_model(torch.float32), copies(0), CONFIG, TRAINER, lambda done, row: heard.append((done, row)))
    assert rows[0]["sft/loss"] > math.log(8)
    assert rows[-1]["sft/loss"] < 0.5 * math.log(8)
    assert heard == list(enumerate(rows, start=1))
    assert rows[0]["actor/lr"] == pytest.approx(3e-3 / 4)
    assert rows[-1]["actor/lr"] == pytest.approx(3e-3 / 86)


def test_the_first_loss_is_the_mean_over_all_completion_tokens_of_the_batch(make_model):
    # Prompts are not counted, and lengths differ: a mean of means would be another number.
    examples = [([2, 3], [4]), ([5], [6, 7, 8, END])]
    config = replace(CONFIG, steps=1, warmup_steps=0, batch_size=2)
    found = fine_tune(make_model(), iter(examples), config, replace(TRAINER, dtype="float64"))[0]["sft/loss"]
    losses = []
    for prompt, completion in examples:
        mask = (0.0,) * len(prompt) + (1.0,) * len(completion)
        alone = collate([TrainSequence("x", (*prompt, *completion), len(prompt), mask)], torch.float64)
        losses += (-predict(make_model(), alone, 1.0).raw).tolist()
    assert len(losses) == 5
    assert found == pytest.approx(sum(losses) / 5, rel=1e-12)


def test_demonstrations_that_run_out_are_named(make_model):
    with pytest.raises(RunError, match="ended in step 2"):
        fine_tune(make_model(), itertools.islice(copies(0), 40), CONFIG, replace(TRAINER, dtype="float64"))
