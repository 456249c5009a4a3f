"""The trainer sidecar's worker: the actor, its optimizer and the frozen reference, and the calls that the pod makes of it.

Every call takes plain values and named byte strings and returns the same, so that it can cross a process boundary or not.
Every call may be made again for the same step: after a fault the pod simply asks once more.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tandem.checkpoint_engine.convert import convert
from tandem.checkpoint_engine.register import WeightWriter
from tandem.checkpoint_engine.shared_memory import WeightBuffers
from tandem.config.recipe import Recipe
from tandem.kernels import select
from tandem.model.create_model import create_model
from tandem.model.decoder import Decoder
from tandem.model.huggingface import load_model, save_model
from tandem.pod.prompts import prompt_source
from tandem.pod.residents import release
from tandem.rl.algorithms.batch import make_batch, train_sequence
from tandem.rl.algorithms.supervised import fine_tune
from tandem.rl.algorithms.update import sequence_logprobs, update_policy
from tandem.runtime.calls import Blobs, Meta, Method, Progress, Reply
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.text.tokenizer import TOKENIZER_FILES, Tokenizer
from tandem.trainer.optimizers.adamw import Optimizer
from tandem.trainer.optimizers.make import make_optimizer
from tandem.trainer.save import committed_steps, load_checkpoint, newest_committed, prune, save_checkpoint
from tandem.types import RunError, Sample, WeightVersion
from tandem.types.wire_records import decode_samples, decode_scores

logger = logging.getLogger(__name__)

COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""What makes a checkpoint a Hugging Face folder, besides the weights."""


@dataclass(frozen=True, slots=True)
class Inferred:
    """The samples of ``step``, which are drawn once, and the reference's log-probabilities of them by sample id."""

    step: int
    samples: list[Sample]
    reference_logprobs: dict[str, tuple[float, ...]]


class TrainerWorker:
    """The state of the worker between calls. ``steps``: optimizer steps that the actor has taken since the start model
    ``start``."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        self.kernels = select(recipe.machine.kernels, attention=recipe.machine.attention)
        self.store = EmbeddedStore(directory / "pod" / "store.sqlite")
        self.writer: WeightWriter | None = None
        self.start: Path | None = None
        self.model: Decoder | None = None
        self.optimizer: Optimizer | None = None
        self.reference: Decoder | None = None
        self.steps = 0
        self.inferred: Inferred | None = None
        self.converted: list[tuple[str, Tensor]] | None = None

    def methods(self) -> dict[str, Method]:
        """Every call by its name."""
        names = (
            "create_model", "warm_up", "export", "load", "inference", "train", "offload", "onload",
            "convert", "register", "save",
        )
        return {name: getattr(self, name) for name in names}

    # -- before reinforcement learning -------------------------------------------------------------------------------

    def create_model(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Make the model that the recipe describes as ``folder``, once."""
        assert self.recipe.model.create is not None
        create_model(self.recipe.model.create, self.recipe.run.seed, Path(meta["folder"]))
        return {}, {}

    def warm_up(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Fine-tune the folder ``source`` on the task's demonstrations and write ``destination``, once."""
        config, destination = self.recipe.warm_up, Path(meta["destination"])
        assert config is not None
        if destination.exists():
            return {"metrics": {}}, {}
        source = Path(meta["source"])
        model = load_model(source, self.kernels)
        prompts = prompt_source(self.recipe, source)
        shown = prompts.demonstrations(config.seed, config.corrupted_share, Tokenizer.from_folder(source).eos_token_ids[0])
        examples = ((d.prompt_token_ids, d.completion_token_ids) for d in shown)

        def report(done: int, row: dict[str, float]) -> None:
            progress({"done": done, "total": config.steps, "loss": row["sft/loss"]})

        rows = fine_tune(model, examples, config, self.recipe.trainer, report)
        prompts.close()
        save_model(model, destination, source)
        return {"metrics": rows[-1]}, {}

    def export(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The actor as a Hugging Face folder, written whole or not at all, once."""
        model, _ = self._actor()
        if not Path(meta["folder"]).exists():
            save_model(model, Path(meta["folder"]), self.start)
        return {}, {}

    # -- the state ---------------------------------------------------------------------------------------------------

    def load(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Stand at checkpoint ``step`` or before (``None``: the newest), or at the start model where there is none, or ``damaged`` ones alone."""
        start = self.start = Path(meta["start"])
        self.model = load_model(start, self.kernels)
        self.model.kv_cache_dtype = self.recipe.rollout.engine.kv_cache_dtype
        self.model.recompute = self.recipe.trainer.recompute
        self.optimizer = make_optimizer(self.model, self.recipe.trainer)
        if self.recipe.algorithm.kl_coef > 0:
            self.reference = load_model(start, self.kernels).requires_grad_(False)
            self.reference.kv_cache_dtype = self.recipe.rollout.engine.kv_cache_dtype
        checkpoints = self.directory / "checkpoints"
        found = newest_committed(checkpoints, meta["step"])
        self.steps = 0
        if found is not None:
            load_checkpoint(found.folder, self.model, self.optimizer)
            self.steps = found.step
        self.inferred = self.converted = None
        return {"step": self.steps, "kernels": self.kernels.name, "damaged": found is None and bool(committed_steps(checkpoints))}, {}

    def save(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Commit the checkpoint of ``step`` and remove those that the recipe does not keep."""
        model, optimizer = self._actor()
        self._expect(int(meta["step"]))
        assert self.start is not None
        checkpoints = self.directory / "checkpoints"
        companions = [self.start / name for name in COMPANIONS if (self.start / name).is_file()]
        checkpoint = save_checkpoint(checkpoints, self.steps, model, optimizer, {}, companions)
        prune(checkpoints, self.recipe.checkpoint.keep)
        return {"digest": checkpoint.digest}, {}

    # -- the cycle ---------------------------------------------------------------------------------------------------

    def offload(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Drop what the next step makes anew: gradients and saved inference. With ``release`` the freed memory goes back to
        the machine too, which costs the next step its page faults and is not worth it where the engine has room anyway."""
        _, optimizer = self._actor()
        optimizer.zero_grad()
        self.inferred = None
        if meta["release"]:
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
        if self.writer is None:
            first, second = meta["buffers"]
            self.writer = WeightWriter(WeightBuffers.open((first, second)), self.store)
        manifest = self.writer.publish(self.converted, version)
        return {"bytes": manifest.size_bytes, "digest": manifest.digest}, {}

    def inference(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The reference model's log-probabilities of the samples, kept for ``train``."""
        self.inferred = self._infer(int(meta["step"]), decode_samples(blobs["samples"]))
        return {}, {}

    def train(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The optimizer step (or steps, with several mini-batches) of ``step``."""
        step = int(meta["step"])
        self._expect(step)
        inferred = self.inferred if self.inferred is not None and self.inferred.step == step else None
        samples = inferred.samples if inferred is not None else decode_samples(blobs["samples"])
        if inferred is None and self.recipe.algorithm.kl_coef > 0:
            inferred = self._infer(step, samples)
        reference = inferred.reference_logprobs if inferred is not None else None
        scores, rollout = decode_scores(blobs["scores"]), self.recipe.rollout
        batch = make_batch(step, samples, scores, self.recipe.algorithm, rollout.max_tokens, reference)
        model, optimizer = self._actor()
        result = update_policy(
            model, optimizer, batch, self.recipe.algorithm, self.recipe.trainer, rollout.temperature,
            lambda done, total: progress({"done": done, "total": total}),
        )
        self.steps += 1
        self.inferred = None
        return {"metrics": result.metrics, "tokens": result.tokens}, {}

    # -- parts -------------------------------------------------------------------------------------------------------

    def _infer(self, step: int, samples: list[Sample]) -> Inferred:
        assert self.reference is not None
        sequences = [train_sequence(sample) for sample in samples]
        return Inferred(step, samples, sequence_logprobs(self.reference, sequences, self.recipe.trainer.micro_batch_tokens))

    def _actor(self) -> tuple[Decoder, Optimizer]:
        if self.model is None or self.optimizer is None:
            raise RunError("the trainer's worker has no model yet; this is a fault of the pod's order of calls")
        return self.model, self.optimizer

    def _expect(self, step: int) -> None:
        if step != self.steps:
            raise RunError(f"the trainer stands at step {self.steps} and was asked for step {step}")
