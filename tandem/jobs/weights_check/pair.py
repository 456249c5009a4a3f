"""Moves weights of random numbers from a trainer to engines, twice, without a training job, and compares every digest after each update.

The sidecars, ranks, engines and the calls are those of a run in a pod. The first weights are those of a folder as the safetensors library reads it. Then the
trainer takes a step, which changes them, and exports a folder; an engine that reads these folders itself says what the updated one has to hold.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.backends.vllm.model_check import check_model
from tandem.config.recipe import Recipe
from tandem.jobs.run_files import write_recipe
from tandem.jobs.weights_check.compare import Digests, Found, check_engine, check_published, lines_of, unchanged
from tandem.jobs.weights_check.layouts import GROUP_SIZE, LayoutPair, recipe_of_pair
from tandem.jobs.weights_check.numbers import fill_folder, read_folder
from tandem.layout.residents import KEEP
from tandem.layout.shapes import adapted_shapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.pod.failures import SidecarDied
from tandem.pod.sidecars import RolloutSidecar, TrainerSidecar
from tandem.pod.start import open_channels
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.machine.gpus import check_pod_device, pod_device
from tandem.types import FinishReason, RunError, Sample, Score, ScoreState, WeightManifest, WeightVersion
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.publication import current

OnStep = Callable[[str], None]


class Truth(NamedTuple):
    """What one version must be: ``folder`` to read whole, and with LoRA the ``adapter`` beside it, which alone is published."""

    folder: Path
    adapter: Path | None = None

    def published(self) -> dict[str, torch.Tensor]:
        """Returns what the trainer has to publish, by name."""
        if self.adapter is None:
            return read_folder(self.folder)
        return {name.removeprefix("base_model.model."): tensor for name, tensor in read_folder(self.adapter, "adapter_model.safetensors").items()}


@dataclass(frozen=True, slots=True)
class PairReport:
    """``found``: what is wrong. ``tensors``: that were published in each version, ``size_bytes`` in all; ``digests``: of engines that were compared."""

    pair: LayoutPair
    tensors: int
    size_bytes: int
    digests: int
    found: tuple[str, ...]


class PairCheck:
    """One pair of layouts in the empty folder ``directory``, for the model in ``source``. ``on_step`` is told what is done."""

    def __init__(self, pair: LayoutPair, source: Path, directory: Path, *, seed: int = 0, threads: int = 0, inline: bool = False, on_step: OnStep) -> None:
        self.pair, self.directory, self.start, self.seed = pair, directory, directory / "start", seed
        self.recipe: Recipe = recipe_of_pair(pair, self.start, seed, threads)
        check_pod_device(self.recipe.machine, self.recipe.parallel.world, self.recipe.rollout.engine_ranks)
        self._source, self._inline, self._on_step = source, inline, on_step
        self.lora = self.recipe.trainer.lora

    def run(self) -> PairReport:
        """Raises ``RunError`` if a process dies or an update is refused."""
        try:
            with ExitStack() as stack:
                return self._run(stack)
        except SidecarDied as death:
            raise RunError(f"{self.pair.title}: {death}") from None

    def _run(self, stack: ExitStack) -> PairReport:
        fill_folder(self._source, self.start, self.seed, getattr(torch, self.recipe.trainer.dtype))
        if self.recipe.rollout.backend == "vllm":
            check_model(read_shapes(self.start), pod_device(self.recipe.machine), self.recipe)
        write_recipe(self.recipe, self.directory)
        (self.directory / "logs").mkdir()
        for channel in (channels := open_channels(self.recipe, self.directory, self._inline, None)):
            stack.callback(channel.close)
        self.trainer, self.rollout = TrainerSidecar(channels[0]), RolloutSidecar(channels[1])
        self._on_step("start the trainer")
        self.trainer.channel.start()
        self.kernels = str(self.trainer.load(self.start, None, KEEP, ())["kernels"])
        shapes = adapted_shapes(read_shapes(self.start), self.lora)
        self.buffers = self.trainer.channel.allocate(segment_bytes(shapes, self.recipe.trainer.dtype))
        first = Truth(self.start, self._export(0) if self.lora else None)
        self._on_step("first update")
        self._publish(0)
        self.rollout.channel.start()
        self.rollout.start_engine(self.start, self.kernels)
        manifests, held = [self._manifest(0)], [self._update(0)]
        self._on_step("a step of training")
        if self.pair.sleep:
            self.rollout.sleep_engine(self.pair.sleep)
        self._train()
        second = Truth(self.start if self.lora else self.directory / "model-1", self._export(1))
        self._on_step("second update")
        self._publish(1)
        manifests.append(self._manifest(1))
        held.append(self._update(1))
        return self._compare([first, second], manifests, held)

    # -- what a pod does in a step --------------------------------------------------------------------------------------

    def _publish(self, step: int) -> None:
        self.trainer.offload(step, release=False)
        self.trainer.convert(step)
        self.trainer.register(WeightVersion(1, step), self.buffers)

    def _update(self, step: int) -> list[list[dict[str, str]]]:
        self.rollout.update_weight(WeightVersion(1, step))
        return self.rollout.weight_digests()

    def _manifest(self, step: int) -> WeightManifest:
        store = open_store(store_address(self.recipe.coordination, self.directory))
        try:
            published = current(store)
        finally:
            store.close()
        if published is None or published[0].version != WeightVersion(1, step):
            raise RunError(f"{self.pair.title}: after 'register' of step {step} the store has {published and published[0].version}")
        return published[0]

    def _train(self) -> None:
        """Takes one step on random tokens, half of them rewarded."""
        draw, size = random.Random(self.seed), read_shapes(self.start).vocab_size
        samples = [_sample(f"{prompt}", index, [draw.randrange(size) for _ in range(6)]) for prompt in range(GROUP_SIZE) for index in range(GROUP_SIZE)]
        scores = [Score(sample.id, ScoreState.NUMBER, float(sample.index % 2)) for sample in samples]
        trained = self.trainer.train(0, samples, scores)
        if trained["verdict"] == "skipped":
            raise RunError(f"{self.pair.title}: the trainer skipped its step, so nothing has changed to be updated")

    def _export(self, step: int) -> Path | None:
        """Writes the trainer's model after ``step`` steps as ``model-STEP``. Returns the folder of its adapter, if it has one."""
        # A model that no rank holds whole is exported from its checkpoint.
        self.trainer.save(step, ())
        self.trainer.finish_save()
        parent = self.directory if self.lora is None else self.directory / f"lora-{step}"
        self.trainer.export(parent / f"model-{step}", parent / "critic", parent / "draft")
        return None if self.lora is None else parent / "adapter"

    # -- comparing ------------------------------------------------------------------------------------------------------

    def _compare(self, truths: Sequence[Truth], manifests: Sequence[WeightManifest], held: Sequence[list[list[dict[str, str]]]]) -> PairReport:
        folders, found = [truth.published() for truth in truths], list[Found]()
        found += check_published(manifests[0], folders[0]) + check_published(manifests[1], folders[1], manifests[0])
        wanted = [self._read_by_an_engine(truth) for truth in truths]
        found += check_engine(held[0], wanted[0], None, manifests[0]) + check_engine(held[1], wanted[1], held[0], manifests[1])
        lines = lines_of(found)
        lines += [f"version 2 changed no digest in engine {worker}, rank {rank}, although the weights changed" for worker, rank in unchanged(*held)]
        if manifests[0].digest == manifests[1].digest:
            lines.append("version 2 has the digest of version 1, although the trainer took a step")
        count = sum(len(rank) for version in held for ranks in version for rank in ranks)
        return PairReport(self.pair, len(manifests[1].tensors), manifests[1].size_bytes, count, tuple(lines))

    def _read_by_an_engine(self, truth: Truth) -> list[list[Digests]]:
        self._on_step("an engine that reads the folder")
        folder, adapter = truth.folder, truth.adapter
        if adapter is not None and self.recipe.rollout.backend == "vllm":
            # The adapter is added to its weights; the trainer exports them so beside it.
            folder, adapter = next(adapter.parent.glob("model-*")), None
        self.rollout.start_engine(folder, self.kernels, reads_weights=True, adapter=adapter)
        return [list[Digests](ranks) for ranks in self.rollout.weight_digests()]


def _sample(prompt: str, index: int, tokens: list[int]) -> Sample:
    asked, drawn = tuple(tokens[:3]), tuple(tokens[3:])
    logprobs = (-1.0,) * len(drawn)
    return Sample(f"0/{prompt}/{index}", prompt, index, asked, drawn, logprobs, logprobs, (WeightVersion(1, 0),) * len(drawn), FinishReason.LENGTH, "")
