"""A run on data: tokenized text or examples, in one process or on the ranks of a mesh. The loop (``pretrain``) calls it for every step."""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.config.pretrain import PretrainRecipe
from tandem.data.loader import Loader, batch_indices
from tandem.data.stream import Sequence as Pieces
from tandem.jobs.data_run.data_checkpoints import DataCheckpoints
from tandem.jobs.data_run.draft_inputs import HEAD
from tandem.jobs.data_run.train_data import TrainData
from tandem.jobs.finished import remove_model
from tandem.jobs.run import Run
from tandem.layout.flops import draft_step_flops, step_flops
from tandem.model.decoder import Decoder
from tandem.model.draft_decoder import DraftDecoder
from tandem.model.export_dtype import export_dtype
from tandem.model.huggingface.model_config import read_json
from tandem.runtime.health.run_health import RunHealth
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.process.processes import memory_of
from tandem.runtime.records.agreements import record_agreement
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.runtime.traces.spans import OpenSpan
from tandem.runtime.traces.steps import step_span
from tandem.trainer.bad_batch import dump_batch
from tandem.trainer.beginnings import computes_beginnings_once
from tandem.trainer.checkpoint.export_draft import export_draft
from tandem.trainer.corruption.check import CorruptionCheck
from tandem.trainer.device_speed import DeviceSpeed
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.losses.aggregate import GlobalCounts, counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.losses.dpo import make_dpo_loss
from tandem.trainer.losses.draft import make_draft_loss, with_acceptance
from tandem.trainer.losses.reward_model import make_reward_model_loss
from tandem.trainer.lr_schedule import learning_rate
from tandem.trainer.micro_batch import MicroBatch, forward_tokens, make_micro_batches
from tandem.trainer.packing import pack, pack_pairs
from tandem.trainer.parallel.draft_pipeline import DraftPipeline
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.sequence_scores import scored_sequence
from tandem.trainer.step import ForwardBackward, Loss, StepResult, predict, sum_shares, train_step, unstacked
from tandem.trainer.tensor_record import TensorRecord
from tandem.types import RunError, TrainSequence

HELD_OUT, HELD_OUT_PAIRS, HELD_OUT_DRAFTS = "held_out", "held_out_pairs", "held_out_drafts"
"""Kinds of evaluations in the journal."""


@dataclass(kw_only=True)
class DataRun(Run):
    """A model on its ranks, and its data.

    Args:
        start: the folder of the model that the run starts from.
        trained: metrics of the last step.
        step_tokens: tokens of the last step on all ranks.
        step_flops: floating-point operations of the last step on this rank.
        waited_s: seconds that the loader has kept compute waiting so far.
        predicted_bytes: resident bytes that the first rank was predicted to need; 0 where they are not predicted.
        health: on the first rank, records what holds up the run, from the ``step_times`` of all ranks.
    """

    recipe: PretrainRecipe
    start: Path
    replica: Replica
    data: TrainData
    guard: GradScaler
    checkpoints: DataCheckpoints
    trained: dict[str, float] = field(default_factory=dict)
    step_tokens: int = 0
    step_flops: float = 0.0
    waited_s: float = 0.0
    predicted_bytes: int = 0
    tracer: Tracer = NO_TRACE
    record: TensorRecord | None = None
    check: CorruptionCheck | None = None
    health: RunHealth | None = None
    step_times: Callable[[], Sequence[RankTimes]] = tuple

    @property
    def ranks(self) -> Ranks:
        return self.replica.ranks

    def step_span(self, step: int) -> "AbstractContextManager[OpenSpan | None]":
        """Records the block as the trace of ``step``, with section ``traces``."""
        return step_span(self.recipe.traces, self.directory, step, rank=self.ranks.mesh.rank, attempt=f"from step {self.first_step}")

    @property
    def model(self) -> Decoder:
        return self.replica.model

    @cached_property
    def device_speed(self) -> DeviceSpeed:
        return DeviceSpeed(self.model.device, self.recipe.trainer.multiplies_in)

    def batches(self) -> Loader[Pieces]:
        """Returns a loader of this rank's share of the batches from ``first_step`` on, which reads ahead."""
        data, ranks = self.recipe.data, self.ranks.data
        return Loader(
            self.data.sequence, data.global_batch_size, first_step=self.first_step, rank=ranks.rank, ranks=ranks.size, ahead=data.read_ahead
        )

    def train(self, step: int, batch: Sequence[Pieces]) -> dict[str, float]:
        """Takes the step on ``batch`` and returns its metrics. Saves the batch of a skipped step."""
        sequences, result = self.take(step, batch)
        if result.verdict == "skipped":
            self.skip(step, sequences, result.metrics)
        return self.trained

    def take(self, step: int, batch: Sequence[Pieces]) -> tuple[list[TrainSequence], StepResult]:
        """Takes one optimizer step on a global batch, of which ``batch`` is this rank's share. Returns the share's sequences and the result."""
        with self.records.phase("train", step):
            with self.tracer.span("shard the batch"):
                sequences = self.sequences(batch)
                counts, self.step_tokens, micro_batches = self.micro_batches(sequences)
                sharing = self.ranks.world.size // self.ranks.data.size
                self.step_flops = self._flops([forward_tokens(sequence) for sequence in sequences]) / sharing
            if self.record is not None:
                self.record.step = step
                self.record.batch(sequences)
            result = self.update(step, counts, micro_batches)
        self.trained = with_acceptance(result.metrics) if self.recipe.trains_draft else result.metrics
        if self.recipe.learns_from_examples and not self.recipe.trains_values:
            self.trained = {**self.trained, "train/learned_tokens": counts.tokens}
        return sequences, result

    def sequences(self, batch: Sequence[Pieces]) -> list[TrainSequence]:
        """Returns the sequences of ``batch`` that are trained on."""
        if not self.recipe.trains_values:
            return train_sequences(batch)
        numbered = [(f"{number}/{place}", piece) for number, pieces in enumerate(batch) for place, piece in enumerate(pieces)]
        return [scored_sequence(name, tuple(piece.tokens), self.pad_token_id, piece.margin) for name, piece in numbered]

    @cached_property
    def pad_token_id(self) -> int | None:
        """The padding id of the start model, which a value model does not score (``scored_sequence``)."""
        return read_json(self.start / "config.json").get("pad_token_id")

    def update(
        self, step: int, counts: GlobalCounts, micro_batches: Sequence[MicroBatch], forward_backward: ForwardBackward | None = None
    ) -> StepResult:
        """Takes optimizer step ``step`` on a global batch of ``counts``. ``forward_backward``: runs the micro-batches (``None``: the replica's)."""
        record = self.record
        if record is not None:
            record.step = step
            record.weights(self.replica, "before the step")
        if self.check is not None:
            self.check.begin_step(step)
        result = train_step(
            self.model, self.replica.optimizer, micro_batches, self.loss(counts),
            learning_rate(self.recipe.trainer, step, self.recipe.run.max_steps), on_progress=self.records.progress("train"), guard=self.guard,
            sums=self.replica.sums, forward_backward=forward_backward or self.replica.forward_backward, tracer=self.tracer,
            on_phase=lambda phase: self.records.enter(phase, step), on_gradients=None if record is None else partial(record.gradients, self.replica),
            check=self.check,
        )  # fmt: skip
        if record is not None:
            record.weights(self.replica, "after the step")
        if self.check is not None and (compared := self.check.take_compared()) and self.records.journal is not None:
            record_agreement(self.records.journal, step, compared)
        return result

    def loss(self, counts: GlobalCounts) -> Loss:
        """Returns the loss of a global batch of ``counts``."""
        if not self.recipe.learns_from_pairs:
            return make_draft_loss(counts, "train/loss") if self.recipe.trains_draft else make_cross_entropy_loss(counts, "train")
        algorithm = self.recipe.algorithm
        if self.recipe.trains_values:
            return make_reward_model_loss(algorithm.center_coef, counts.sequences // 2, "train/loss")
        return make_dpo_loss(algorithm.loss_type, algorithm.beta, algorithm.label_smoothing, counts.sequences // 2, "train/loss")

    def micro_batches(self, sequences: Sequence[TrainSequence]) -> tuple[GlobalCounts, int, list[MicroBatch]]:
        """Returns the counts of the global batch, its tokens, and this rank's micro-batches (``Replica.passes``)."""
        most, share = self.recipe.trainer.micro_batch_tokens, self.recipe.trainer.share_prompts
        bins = pack_pairs(sequences, most, share) if self.recipe.learns_from_pairs else pack(sequences, most)
        counts, tokens, passes = counts_of(sequences), sum(len(s.token_ids) for s in sequences), len(bins)
        if self.ranks.world.size > 1:
            every = self.ranks.all_values([counts.tokens, counts.sequences, len(bins)], "counts of the batch")
            counted, in_all, every_token = self.ranks.sums([counts.tokens, counts.sequences, tokens], "counts of the batch")
            counts, tokens = GlobalCounts(counted, int(in_all)), int(every_token)
            passes = self.replica.passes(len(bins), int(max(row[2] for row in every)))
        once = computes_beginnings_once(self.model)
        return counts, tokens, make_micro_batches(sequences, bins, passes, self.model.dtype, self.model.device, share_prompts=share, finds_beginnings=once)

    def skip(self, step: int, sequences: Sequence[TrainSequence], metrics: dict[str, float]) -> None:
        """Saves the batch of a skipped step and reports it. Raises ``RunError`` after too many in a row."""
        ranks, guard = self.ranks.data, self.guard
        kept = self.directory / "skipped" / (f"step-{step}.json" if ranks.size == 1 else f"step-{step}-share-{ranks.rank}-of-{ranks.size}.json")
        if all(self.ranks.groups[name].rank == 0 for name in ("tensor", "context", "pipeline")):
            dump_batch(kept, step, sequences, metrics)
        what = f"step {step}: the gradient norm is {metrics['actor/grad_norm']} and the loss {metrics['train/loss']}"
        if guard.is_exhausted:
            raise RunError(
                f"{what}, {guard.skipped_in_a_row} steps in a row, more than trainer.max_skipped_steps ({guard.limit}): training has diverged; "
                f"lower trainer.learning_rate or raise trainer.warmup_steps; the batch is saved in '{kept}'"
            )
        left = f"it is skipped ({guard.skipped_in_a_row} in a row, at most {guard.limit}), its batch is saved in '{kept}'"
        self.records.callback.message(f"{what}; {left}")

    def evaluate(self, step: int) -> None:
        """Measures the loss on the held-out data, in nats per token or of preference pairs, and journals it, once for each step."""
        held_out, kind = self.data.held_out, HELD_OUT_PAIRS if self.recipe.learns_from_pairs else HELD_OUT_DRAFTS if self.recipe.trains_draft else HELD_OUT
        if held_out is None or self.ranks.agreed(self.records.evaluation(step, kind) is not None, "whether to evaluate"):
            return
        with self.records.phase("evaluate", step):
            share = batch_indices(0, self.data.held_out_sequences, self.ranks.data.rank, self.ranks.data.size)
            sequences = [s for s in self.sequences([held_out(i) for i in share]) if forward_tokens(s) > 0]
            counts, _, micro_batches = self.micro_batches(sequences)
            if self.recipe.trains_draft:
                self._draft_evaluated(step, counts, micro_batches)
                return
            logprobs = self.replica.infer(micro_batches, on_progress=self.records.progress("evaluate"))
            self.replica.reshard()
            if self.recipe.learns_from_pairs:
                self._pairs_evaluated(step, counts, micro_batches, logprobs)
                return
            own = math.fsum(itertools.chain.from_iterable(raw.tolist() for raw, _ in logprobs))
            loss = -self.ranks.sums([own], "the held-out loss")[0] / counts.tokens
            tokens = int(counts.tokens)
        perplexity = math.exp(min(loss, 700.0))
        self.records.evaluated(step, HELD_OUT, {"loss": loss, "perplexity": perplexity, "tokens": tokens})
        self.records.callback.message(f"step {step}: held-out loss {loss:.4f}, perplexity {perplexity:.2f} on {tokens} tokens")

    def _flops(self, lengths: Sequence[int]) -> int:
        """Returns the operations of a step on sequences of ``lengths`` tokens."""
        if isinstance(self.model, DraftDecoder):
            return draft_step_flops(self.model.target.shapes, self.model.head_shapes, self.model.steps, lengths)
        return step_flops(self.model.shapes, lengths, absorbed=True)

    def _draft_evaluated(self, step: int, counts: GlobalCounts, micro_batches: Sequence[MicroBatch]) -> None:
        """Journals the loss of the head on the held-out data, and the share of the target's greedy tokens that it drafts, by position."""
        loss, pipeline = self.loss(counts), self.replica.pipeline
        if isinstance(pipeline, DraftPipeline):
            own = pipeline.sums(micro_batches, loss)
        else:
            with torch.no_grad():
                own = sum_shares(loss(predict(self.model, each, 1.0), each) for each in micro_batches).sums
        sums = dict(zip(own, self.ranks.sums(list(own.values()), "the held-out loss"), strict=True))
        measured = {name.removeprefix("draft/").removeprefix("train/"): value for name, value in with_acceptance(sums).items()}
        self.records.evaluated(step, HELD_OUT_DRAFTS, measured)
        rates = ", ".join(f"{measured[f'acceptance/{position}']:.3f}" for position in range(self.recipe.algorithm.draft_steps))
        length = f"acceptance length {measured['acceptance_length']:.2f}"
        self.records.callback.message(f"step {step}: held-out loss {measured['loss']:.4f}, {length}, acceptance by position {rates}")

    def _pairs_evaluated(self, step: int, counts: GlobalCounts, micro_batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> None:
        """Journals the loss of the held-out pairs and the share of them whose chosen answer is preferred. ``logprobs``: what the inference pass
        kept of each micro-batch."""
        loss = self.loss(counts)
        sums = sum_shares(loss(unstacked(self.model, kept), rows) for kept, rows in zip(logprobs, micro_batches, strict=True)).sums
        names = {"loss": "train/loss", "accuracy": "rewards/accuracies", "margin": "rewards/margins"}
        measured = self.ranks.sums([sums.get(name, 0.0) for name in names.values()], "the held-out loss")
        result = dict(zip(names, measured, strict=True)) | {"pairs": counts.sequences // 2}
        self.records.evaluated(step, HELD_OUT_PAIRS, result)
        said = f"held-out loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f} of {result['pairs']} pairs"
        self.records.callback.message(f"step {step}: {said}")

    def checkpoint(self, step: int) -> None:
        """Begins the checkpoint of the state after ``step`` steps, once. Flushes earlier rows first, because no resume writes them again."""
        if step == self.checkpoints.last:
            return
        with self.records.phase("checkpoint", step):
            self.records.sync()
            self.records.timings["checkpoint_stall"] = self.checkpoints.save(step, self.trained, self.tracer.span("checkpoint write", step=step))

    def export(self) -> Path:
        """Writes the trained model as a Hugging Face folder, in place of that of an earlier end of the run, and returns the folder."""
        if self.ranks.is_first:
            remove_model(self.directory / "model")
        checkpoints, dtype = self.checkpoints.replica, export_dtype(self.recipe.model, self.recipe.trainer.dtype)
        if isinstance(self.model, DraftDecoder):
            export_draft(checkpoints, checkpoints.state, self.model.target.shapes, self.directory / HEAD, self.directory / "model", dtype)
            return self.directory / "model"
        checkpoints.export(self.directory / "model", dtype)
        return self.directory / "model"

    def write_row(self, step: int, trained: dict[str, float], waited_s: float) -> None:
        """Writes the row of ``step`` to ``metrics.jsonl``. ``waited_s``: seconds that the loader has kept compute waiting so far."""
        data = self.recipe.data
        tokens, so_far = data.global_batch_size * data.sequence_length, "train/tokens"
        done = (step + 1) * tokens
        if self.recipe.learns_from_examples:
            tokens, so_far, done = self.step_tokens, "train/examples", (step + 1) * data.global_batch_size
        self.records.add_time("data_wait", waited_s - self.waited_s)
        self.waited_s = waited_s
        row: dict[str, float | int] = {"step": step, **trained, so_far: done}
        if self.recipe.learns_from_examples:
            row["train/step_tokens"] = tokens
        row["memory/train/measured"] = float(memory_of(os.getpid()).rss_bytes)
        if self.predicted_bytes:
            row["memory/train/predicted"] = float(self.predicted_bytes)
        self.records.row(row | self.device_speed.memory(), tokens, lambda seconds: self.device_speed.rates(self.step_flops, seconds))
        if self.health is not None:
            self.health.look(step, self.step_times())


def train_sequences(batch: Sequence[Pieces]) -> list[TrainSequence]:
    """Returns every piece as a sequence of its own, without attention between documents. Learned are all tokens but a piece's first, or the
    marked ones; pieces of one token are dropped."""
    sequences = []
    for number, pieces in enumerate(batch):
        for place, piece in enumerate(pieces):
            length = len(piece.tokens)
            if length > 1:
                mask = (0.0,) + ((1.0,) * (length - 1) if piece.learned is None else tuple(map(float, piece.learned[1:])))
                prompt_length = 1 if piece.learned is None else mask.index(1.0)
                reference = None if piece.reference is None else tuple(piece.reference)
                sequences.append(TrainSequence(f"{number}/{place}", tuple(piece.tokens), prompt_length, mask, reference_logprobs=reference))
    return sequences
