"""Supervised fine-tuning from one Hugging Face folder to another."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tandem.config.trainer import TrainerConfig
from tandem.config.warm_up import WarmUpConfig
from tandem.kernels import KernelChoice, select
from tandem.model.huggingface import load_model, save_model
from tandem.rl.algorithms.supervised import Example, fine_tune


def sft(
    source: Path,
    destination: Path,
    examples: Iterator[Example],
    config: WarmUpConfig,
    trainer: TrainerConfig,
    kernels: KernelChoice = "auto",
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Fine-tune the model in ``source`` on ``examples`` (token ids) and write it, with its tokenizer, to
    ``destination``.

    Returns the metrics of every step. Nothing is written before all steps are done.
    """
    dtype = getattr(torch, trainer.dtype)
    model = load_model(source, select(kernels, dtype), dtype=dtype)
    rows = fine_tune(model, examples, config, trainer, on_step)
    save_model(model, destination, source)
    return rows
