"""The rollout sidecar's worker: the engine, and the calls that the pod makes of it."""

import logging
from dataclasses import replace
from pathlib import Path

from tandem.checkpoint_engine.update import WeightReader
from tandem.config.recipe import Recipe
from tandem.engine.llm import LLM
from tandem.pod.prompts import context_tokens
from tandem.pod.residents import kv_cache_tokens
from tandem.rl.rollout.dispatch import request_key
from tandem.rl.rollout.groups import samples_of, sampling_params
from tandem.runtime.calls import Blobs, Meta, Method, Progress, Reply
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.types import RunError, WeightVersion
from tandem.types.wire_records import decode_prompts, encode_samples

logger = logging.getLogger(__name__)


class RolloutWorker:
    """The state of the worker between calls: an engine, and a reader that keeps its staging memory warm."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.recipe = recipe
        self.reader = WeightReader(EmbeddedStore(directory / "pod" / "store.sqlite"))
        self.llm: LLM | None = None

    def methods(self) -> dict[str, Method]:
        """Every call by its name."""
        return {"start_engine": self.start_engine, "update_weight": self.update_weight, "rollout": self.rollout}

    def start_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Starts the recipe's engine with dummy weights for the model in ``folder``: shapes and tokenizer are read, weights are not."""
        folder, machine = Path(meta["folder"]), self.recipe.machine
        length = context_tokens(self.recipe, folder)
        args = replace(
            self.recipe.rollout.engine,
            model=str(folder),
            load_format="dummy",
            seed=self.recipe.run.seed,
            max_model_len=length,
            kv_cache_tokens=kv_cache_tokens(self.recipe, length),
            kernels=machine.kernels,
            attention=machine.attention,
        )
        self.llm = LLM.from_engine_args(args)
        return {}, {}

    def update_weight(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Copy out, verify and apply the published ``version``; nothing is applied unless every tensor verifies."""
        llm, version = self._engine(), WeightVersion(*meta["version"])
        if llm.weight_version != version:
            self.reader.update(llm.update_weights, version)
        return {"version": list(llm.weight_version)}, {}

    def rollout(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Samples of the prompts under the weights that the engine holds."""
        llm, settings, step = self._engine(), meta["settings"], int(meta["step"])
        if llm.weight_version.step != step:
            raise RunError(f"the engine holds the weights of step {llm.weight_version.step} and was asked for samples of step {step}")
        prompts = decode_prompts(blobs["prompts"])
        keys = [request_key(step, prompt.id, settings["purpose"]) for prompt in prompts]
        outputs = llm.generate(
            [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts], sampling_params(settings), use_tqdm=False,
            request_keys=keys, on_progress=lambda done, total: progress({"done": done, "total": total}),
        )
        return {}, {"samples": encode_samples(samples_of(step, prompts, outputs))}

    def _engine(self) -> LLM:
        if self.llm is None:
            raise RunError("the rollout's worker has no engine yet; this is a fault of the pod's order of calls")
        return self.llm
