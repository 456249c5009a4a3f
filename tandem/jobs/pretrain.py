"""Pretraining: the next token of tokenized text, in one process. The loop, and what it needs."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import NoReturn

from tandem.config.pretrain import PretrainRecipe
from tandem.data.loader import Loader
from tandem.data.stream import Sequence as Pieces
from tandem.jobs.pretrain_checkpoints import RunCheckpoints
from tandem.model.decoder import Decoder
from tandem.model.huggingface import save_model
from tandem.rl.algorithms.aggregate import counts_of
from tandem.rl.algorithms.cross_entropy import make_cross_entropy_loss
from tandem.rl.algorithms.update import pack, sequence_logprobs
from tandem.runtime.journal import Journal
from tandem.runtime.listener import Listener
from tandem.runtime.metrics import MetricsFile
from tandem.runtime.processes import memory_of
from tandem.trainer.guard import StepGuard
from tandem.trainer.kept_batch import write_batch
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizer import Optimizer
from tandem.trainer.schedule import learning_rate
from tandem.trainer.step import train_step
from tandem.types import RunError, TrainSequence


def pretrain(run: "PretrainRun") -> int:
    """Train to ``run.max_steps``; returns the number of optimizer steps taken."""
    last = run.recipe.run.max_steps
    with run.batches() as loader:
        for step, sequences in loader:
            due = run.checkpoints.due(step)
            if due != "nothing" or step == last:
                run.checkpoint(step)
            if due == "stop" and step < last:
                run.stop(step)
            if step % run.recipe.evaluation.every_steps == 0 or step == last:
                run.evaluate(step)
            if step == last:
                run.checkpoints.finish()
                return step
            run.write_row(step, run.train(step, sequences), loader.idle_s)
    raise AssertionError("the loader has no end")


@dataclass
class PretrainRun:
    """The model, its optimizer, its data and its files. ``sequence`` and ``held_out`` give packed sequences by index;
    ``start`` is the folder that the model came from. ``trained``: metrics of the last step. ``timings``: seconds of each phase since the last row."""

    recipe: PretrainRecipe
    directory: Path
    start: Path
    model: Decoder
    optimizer: Optimizer
    sequence: Callable[[int], Pieces]
    held_out: Callable[[int], Pieces] | None
    journal: Journal
    metrics: MetricsFile
    listener: Listener
    guard: StepGuard
    checkpoints: RunCheckpoints
    first_step: int = 0
    trained: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    row_began: float = field(default_factory=perf_counter)
    waited_s: float = 0.0

    def batches(self) -> Loader[Pieces]:
        """Batches from ``first_step`` on, read ahead."""
        data = self.recipe.data
        return Loader(self.sequence, data.sequences_per_step, first_step=self.first_step, ahead=data.read_ahead)

    def train(self, step: int, batch: Sequence[Pieces]) -> dict[str, float]:
        """One optimizer step on ``batch``; returns its metrics."""
        with self._timed("train", step):
            sequences = train_sequences(batch)
            embedding = self.model.embed_tokens
            bins = pack(sequences, self.recipe.trainer.micro_batch_tokens)
            micro_batches = [collate([sequences[i] for i in chosen], embedding.dtype, embedding.device) for chosen in bins]
            report = lambda done, total: self.listener.progress("train", done, total, "micro-batches")
            loss = make_cross_entropy_loss(counts_of(sequences), "train")
            result = train_step(
                self.model, self.optimizer, micro_batches, loss, learning_rate(self.recipe.trainer, step), on_progress=report,
                guard=self.guard,
            )  # fmt: skip
        if result.verdict == "skipped":
            self.skip(step, sequences, result.metrics)
        self.trained = result.metrics
        return result.metrics

    def skip(self, step: int, sequences: Sequence[TrainSequence], metrics: dict[str, float]) -> None:
        """Keep the batch of a step that was left out, and say so. Raises ``RunError`` where there were too many in a row."""
        kept, guard = self.directory / "skipped" / f"step-{step}.json", self.guard
        write_batch(kept, step, sequences, metrics)
        what = f"step {step}: the gradient norm is {metrics['actor/grad_norm']} and the loss {metrics['train/loss']}"
        if guard.is_exhausted:
            raise RunError(
                f"{what}, {guard.skipped_in_a_row} steps in a row, more than trainer.max_skipped_steps ({guard.limit}): training has diverged; "
                f"lower trainer.learning_rate or lengthen its warm-up; the batch is kept in '{kept}'"
            )
        self.listener.message(f"{what}; it is left out ({guard.skipped_in_a_row} in a row, at most {guard.limit}), its batch is kept in '{kept}'")

    def evaluate(self, step: int) -> None:
        """The loss on the held-out data, in nats a token; journalled once."""
        if self.held_out is None or self.journal.evaluation(step, "held_out") is not None:
            return
        with self._timed("evaluate", step):
            sequences = train_sequences([self.held_out(i) for i in range(self.recipe.evaluation.sequences)])
            report = lambda done, total: self.listener.progress("evaluate", done, total, "micro-batches")
            found = sequence_logprobs(self.model, sequences, self.recipe.trainer.micro_batch_tokens, on_progress=report)
            tokens = sum(len(s.token_ids) - 1 for s in sequences)
            loss = -math.fsum(math.fsum(values) for values in found.values()) / tokens
        self.journal.commit_evaluation(step, "held_out", {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens})
        self.listener.message(f"step {step}: held-out loss {loss:.4f}, perplexity {math.exp(min(loss, 700.0)):.2f} on {tokens} tokens")

    def checkpoint(self, step: int) -> None:
        """Begin the checkpoint of the state after ``step`` steps, once. The rows before it are on the disk first: no resume writes them
        again."""
        if step == self.checkpoints.last:
            return
        with self._timed("checkpoint", step):
            self.metrics.sync()
            self.timings["checkpoint_stall"] = self.checkpoints.save(step, self.trained)

    def stop(self, step: int) -> NoReturn:
        """End here, with everything saved, as SIGTERM asks."""
        self.checkpoints.finish()
        self.listener.message(f"stopped after step {step}, which is saved: 'tandem resume {self.directory}' goes on")
        raise KeyboardInterrupt

    def export(self) -> Path:
        """The trained model as a Hugging Face folder, once."""
        folder = self.directory / "model"
        if not folder.exists():
            save_model(self.model, folder, self.start)
        return folder

    def write_row(self, step: int, trained: dict[str, float], waited_s: float) -> None:
        """The row of ``step`` in ``metrics.jsonl``. ``waited_s``: seconds that the loader has kept compute waiting so far."""
        now = perf_counter()
        seconds, self.row_began = now - self.row_began, now
        tokens = self.recipe.data.sequences_per_step * self.recipe.data.sequence_length
        timings, self.timings = self.timings, {}
        waited, self.waited_s = waited_s - self.waited_s, waited_s
        row: dict[str, float | int] = {"step": step, **trained, "train/tokens": (step + 1) * tokens}
        row.update({f"timing_s/{name}": value for name, value in sorted({**timings, "data_wait": waited}.items())})
        row["timing_s/step"] = row["perf/time_per_step"] = seconds
        row["perf/tokens_per_s"] = tokens / seconds
        row["memory/train/measured"] = float(memory_of(os.getpid()).rss_bytes)
        self.metrics.append(row)
        self.listener.row(row)

    @contextlib.contextmanager
    def _timed(self, phase: str, step: int) -> Iterator[None]:
        self.listener.phase(phase, step)
        began = perf_counter()
        with self.journal.transition(step, "trainer", phase):
            yield
        self.timings[phase] = self.timings.get(phase, 0.0) + perf_counter() - began


def train_sequences(batch: Sequence[Pieces]) -> list[TrainSequence]:
    """Every piece as a sequence of its own: no attention from one document to another. Each token but a piece's first is
    predicted; a piece of one token teaches nothing."""
    found = []
    for number, pieces in enumerate(batch):
        for place, piece in enumerate(pieces):
            length = len(piece.tokens)
            if length > 1:
                found.append(TrainSequence(f"{number}/{place}", tuple(piece.tokens), 1, (0.0,) + (1.0,) * (length - 1)))
    return found
