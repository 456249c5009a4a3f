"""Registers the committed checkpoints of any job as versions in the model registry."""

from collections.abc import Mapping
from pathlib import Path

from tandem.config.load import to_mapping
from tandem.config.recipe import AnyRecipe
from tandem.model_registry.open import open_registry
from tandem.model_registry.versions import NewVersion
from tandem.runtime.callback import Callback
from tandem.runtime.records.elastic import fewer_ranks
from tandem.runtime.records.journal import Journal
from tandem.types import RunError, UserError


class Registered:
    """Registers checkpoints of the run in ``directory`` in the registry of ``recipe``, if it has one. A failing registry gives a message and does
    not stop the run."""

    def __init__(self, recipe: AnyRecipe, directory: Path, journal: Journal, callback: Callback) -> None:
        self._recipe, self._directory, self._journal, self._callback = recipe, directory, journal, callback
        self._registry = open_registry(recipe.registry, create=True) if recipe.registry.is_on else None

    def enter(self, step: int, digest: str, metrics: Mapping[str, float]) -> None:
        """Registers ``checkpoints/step-N``, whose bytes have ``digest``."""
        if self._registry is None:
            return
        recipe, folder = self._recipe, self._directory / "checkpoints" / f"step-{step}"
        entry = NewVersion(
            recipe.registry.name or self._directory.name, str(folder.resolve()), digest, step, str(self._directory.resolve()), to_mapping(recipe),
            self._journal.get("data", {}), recipe.model.path or "", {**metrics, **self._evaluated(step), **self._fewer_ranks(step)},
        )  # fmt: skip
        try:
            self._registry.register(entry)
        except (RunError, UserError) as error:
            self._callback.message(f"the checkpoint of step {step} was not registered: {error}")

    def close(self) -> None:
        if self._registry is not None:
            self._registry.close()

    def _fewer_ranks(self, step: int) -> dict[str, float]:
        """Returns the smallest number of data-parallel ranks that took a step before ``step``, and the number that the recipe asks for, if it is
        larger."""
        spans = [span for span in fewer_ranks(self._journal.events()) if span.first < step]
        return {"parallel/data": min(span.now for span in spans), "parallel/data_asked": spans[-1].asked} if spans else {}

    def _evaluated(self, step: int) -> dict[str, float]:
        """Returns the evaluations of the weights after ``step`` steps; those of earlier weights say nothing of them."""
        kinds = ("held_out", "held_out_pairs", "held_out_drafts")
        names = {**dict.fromkeys(kinds, ("held_out/loss", "loss")), "sampled": ("evaluation/accuracy", "accuracy")}
        evaluated = {}
        for kind, (name, key) in names.items():
            result = self._journal.evaluation(step, kind)
            if result is not None:
                evaluated[name] = float(result[key])
        return evaluated
