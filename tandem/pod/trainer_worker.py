"""The trainer sidecar's worker: the actor, its optimizer and the frozen reference, and the calls that the pod makes of it.

Every call takes plain values and named byte strings and returns the same, so that it can cross a process boundary or not.
Every call may be made again for the same step: after a fault the pod simply asks once more.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.checkpoint_engine.convert import convert
from tandem.checkpoint_engine.register import WeightWriter
from tandem.config.recipe import Recipe
from tandem.kernels import Kernels
from tandem.model.decoder import Decoder
from tandem.model.huggingface import load_model, save_model
from tandem.pod.create_model import create_model
from tandem.pod.residents import release
from tandem.rl.algorithms.aggregate import counts_of
from tandem.rl.algorithms.cross_entropy import make_cross_entropy_loss
from tandem.rl.algorithms.loss import make_grpo_loss
from tandem.rl.batch import minibatches, train_sequences, unscored_sequences
from tandem.rl.pack import best_fit
from tandem.trainer.logprobs import infer, per_token
from tandem.trainer.micro_batch import MicroBatch, collate, forward_tokens
from tandem.trainer.optimizer import AdamW
from tandem.trainer.save import load_checkpoint, newest_committed, prune, save_checkpoint
from tandem.trainer.schedule import learning_rate
from tandem.trainer.step import StepResult, train_step
from tandem.types import RunError, Sample, TrainSequence, WeightVersion
from tandem.types.wire import decode_batch, decode_samples, decode_scores

logger = logging.getLogger(__name__)

Meta = Mapping[str, Any]
Blobs = Mapping[str, bytes]
Reply = tuple[dict[str, Any], dict[str, bytes]]
Progress = Callable[[dict[str, Any]], None]


class TrainerWorker:
    """The state of the worker between calls. ``steps``: optimizer steps that the actor has taken since the warm start."""

    def __init__(self, recipe: Recipe, directory: Path, kernels: Kernels, writer: WeightWriter, numerics: Mapping[str, Any]) -> None:
        self.recipe, self.directory, self.kernels, self.writer, self.numerics = recipe, directory, kernels, writer, numerics
        self.model: Decoder | None = None
        self.optimizer: AdamW | None = None
        self.reference: Decoder | None = None
        self.steps = 0
        self.inferred: tuple[int, dict[str, tuple[float, ...]]] | None = None
        self.converted: list[tuple[str, Tensor]] | None = None

    def methods(self) -> dict[str, Callable[[Meta, Blobs, Progress], Reply]]:
        """Every call by its name."""
        names = (
            "create_model", "begin_warm_up", "train_supervised", "export", "load", "inference", "train", "offload", "onload",
            "convert", "register", "save",
        )
        return {name: getattr(self, name) for name in names}

    # -- before reinforcement learning -------------------------------------------------------------------------------

    def create_model(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Make the model that the recipe describes as the folder ``models/initial``, once."""
        assert self.recipe.model.create is not None
        create_model(self.recipe.model.create, self.recipe.run.seed, self.directory / "models" / "initial")
        return {}, {}

    def begin_warm_up(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The folder ``meta["folder"]`` as the actor, with the optimizer that the section ``warm_up`` asks for."""
        warm_up = self.recipe.warm_up
        assert warm_up is not None
        settings = replace(
            self.recipe.trainer, learning_rate=warm_up.learning_rate, warmup_steps=warm_up.warmup_steps, schedule=warm_up.schedule,
            total_steps=warm_up.steps,
        )
        self.model = load_model(Path(meta["folder"]), self.kernels)
        self.optimizer = AdamW(self.model.named_parameters(), settings)
        self.warm_up_settings = settings
        self.steps = 0
        return {}, {}

    def train_supervised(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """One optimizer step of cross-entropy on a batch."""
        batch = decode_batch(blobs["batch"])
        model, optimizer = self._actor()
        if batch.step != self.steps:
            raise RunError(f"the trainer stands at warm-up step {self.steps} and was asked for step {batch.step}")
        result = train_step(
            model, optimizer, self._micro_batches(batch.sequences), make_cross_entropy_loss(counts_of(batch.sequences)),
            learning_rate(self.warm_up_settings, batch.step),
        )
        self.steps += 1
        return {"metrics": result.metrics}, {}

    def export(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The actor as a Hugging Face folder, written whole or not at all."""
        model, _ = self._actor()
        save_model(model, Path(meta["folder"]), Path(meta["tokenizer"]))
        return {}, {}

    # -- the state ---------------------------------------------------------------------------------------------------

    def load(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Stand at checkpoint ``step`` or before (``None``: the newest), or at the start model where there is none."""
        start = Path(meta["start"])
        self.model = load_model(start, self.kernels)
        self.optimizer = AdamW(self.model.named_parameters(), self.recipe.trainer)
        if self.recipe.algorithm.kl_coefficient > 0:
            self.reference = load_model(start, self.kernels).requires_grad_(False)
        found = newest_committed(self.directory / "checkpoints", meta["step"])
        self.steps = 0
        if found is not None:
            load_checkpoint(found.folder, self.model, self.optimizer)
            self.steps = found.step
        self.inferred = self.converted = None
        return {"step": self.steps}, {}

    def save(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Commit the checkpoint of ``step`` and remove those that the recipe does not keep."""
        model, optimizer = self._actor()
        self._expect(int(meta["step"]))
        start = Path(meta["start"])
        companions = [path for path in sorted(start.iterdir()) if path.suffix in (".json", ".jinja", ".txt") and "safetensors" not in path.name]
        checkpoint = save_checkpoint(self.directory / "checkpoints", self.steps, model, optimizer, {"numerics": dict(self.numerics)}, companions)
        prune(self.directory / "checkpoints", self.recipe.checkpoint.keep)
        return {"digest": checkpoint.digest}, {}

    # -- the cycle ---------------------------------------------------------------------------------------------------

    def offload(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Drop everything that the next step makes anew: gradients, saved inference, the allocator's free lists."""
        _, optimizer = self._actor()
        optimizer.zero_grad()
        self.inferred = None
        release()
        return {}, {}

    def onload(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Ready to train: on CPU the weights and moments never left memory."""
        self._actor()
        self.converted = None
        return {}, {}

    def convert(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The actor's weights under Hugging Face's names and shapes, as views."""
        model, _ = self._actor()
        self.converted = list(convert(model))
        return {"tensors": len(self.converted)}, {}

    def register(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Write the converted weights to the free segment and publish their manifest as ``version``."""
        version = WeightVersion(*meta["version"])
        self._expect(version.step)
        if self.converted is None:
            raise RunError("register was asked for before convert")
        manifest = self.writer.publish(self.converted, version)
        return {"bytes": manifest.size_bytes, "digest": manifest.digest}, {}

    def inference(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The reference model's log-probabilities of the samples, kept for ``train``."""
        samples = decode_samples(blobs["samples"])
        self.inferred = (int(meta["step"]), self._reference_logprobs(samples))
        return {}, {}

    def train(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The optimizer step (or steps, with several mini-batches) of ``step``."""
        step = int(meta["step"])
        self._expect(step)
        samples, scores = decode_samples(blobs["samples"]), decode_scores(blobs["scores"])
        reference = None
        if self.recipe.algorithm.kl_coefficient > 0:
            kept = self.inferred is not None and self.inferred[0] == step
            reference = self.inferred[1] if kept and self.inferred else self._reference_logprobs(samples)
        sequences = train_sequences(self.recipe.algorithm, samples, scores, reference)
        result = self._update(sequences, step, progress)
        self.steps += 1
        self.inferred = None
        return {"metrics": result.metrics, "tokens": result.tokens}, {}

    # -- parts -------------------------------------------------------------------------------------------------------

    def _update(self, sequences: Sequence[TrainSequence], step: int, progress: Progress) -> StepResult:
        """Every mini-batch of every epoch; the metrics are those of the first update, where the ratio starts from 1."""
        model, optimizer = self._actor()
        config, rollout = self.recipe.algorithm, self.recipe.rollout
        rate = learning_rate(self.recipe.trainer, step)
        old = None
        if config.old_logprobs == "recompute":
            found = infer(model, self._micro_batches(sequences), rollout.temperature)
            old = {s.id: per_token(found.get(s.id, {}), len(s.token_ids)) for s in sequences}
        first: StepResult | None = None
        for _ in range(config.epochs):
            for part in minibatches(sequences, config.minibatches, config.group_size):
                counts = counts_of(part, config.length_constant or rollout.max_tokens)
                result = train_step(
                    model, optimizer, self._micro_batches(part, old), make_grpo_loss(config, counts, rollout.temperature), rate,
                    rollout.temperature, lambda done, total: progress({"done": done, "total": total}),
                )
                first = first or result
        assert first is not None
        return first

    def _reference_logprobs(self, samples: Sequence[Sample]) -> dict[str, tuple[float, ...]]:
        assert self.reference is not None
        sequences = unscored_sequences(samples)
        found = infer(self.reference, self._micro_batches(sequences))
        return {s.id: per_token(found.get(s.id, {}), len(s.token_ids)) for s in sequences}

    def _micro_batches(
        self, sequences: Sequence[TrainSequence], old: Mapping[str, Sequence[float]] | None = None
    ) -> list[MicroBatch]:
        counted = [s for s in sequences if forward_tokens(s)]
        bins = best_fit([forward_tokens(s) for s in counted], self.recipe.trainer.micro_batch_tokens)
        return [collate([counted[i] for i in members], old_logprobs=old) for members in bins]

    def _actor(self) -> tuple[Decoder, AdamW]:
        if self.model is None or self.optimizer is None:
            raise RunError("the trainer's worker has no model yet; this is a fault of the pod's order of calls")
        return self.model, self.optimizer

    def _expect(self, step: int) -> None:
        if step != self.steps:
            raise RunError(f"the trainer stands at step {self.steps} and was asked for step {step}")
