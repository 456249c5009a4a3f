"""Section ``draft``: the draft head that is trained while the policy moves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.config.limits import check_float32
from tandem.config.transformers_module import Refusal
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe

MOST_DRAFT_STEPS = 16


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Trains the EAGLE-3 head of `rollout.engine.speculative_config` on the samples of every step, so that it goes on drafting what the policy draws while
    this moves; without the section the head stays as it is. It changes no sample and no bit of the policy. After the policy's update the head takes one
    update of its own with the new weights, by AdamW and the loss of [`algorithm.name: draft`](pretraining.md#draft-heads), and it is published and saved
    with the policy."""

    learning_rate: float = 1e-4
    """Learning rate of the head, with the warm-up, the schedule, `weight_decay` and `max_grad_norm` of section `trainer`."""
    draft_steps: int = 5
    """Positions of a draft that the head is trained for. From the second on it reads its own output (training-time test)."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"'draft.learning_rate' is {self.learning_rate}; it must be above 0 and finite")
        check_float32("draft", self, "learning_rate")
        check_draft_steps("draft", self.draft_steps)


def check_draft_steps(section: str, value: int) -> None:
    """Raises ``UserError`` for a number of positions that ``section`` cannot have."""
    if not 1 <= value <= MOST_DRAFT_STEPS:
        raise UserError(f"'{section}.draft_steps' is {value}; it must be from 1 to {MOST_DRAFT_STEPS}")


def check_predictor_of(recipe: "Recipe") -> None:
    """Raises ``UserError`` where the engine drafts by multi-token prediction and the run makes the model that it begins with, which has no layer of it."""
    speculative = recipe.rollout.engine.speculative_config
    if speculative is None or speculative.method != "mtp":
        return
    for section, given, fix in (("model.create", recipe.model.create, "name a model that has one in model.path"), ("sft", recipe.sft, "remove the section")):
        if given is not None:
            raise UserError(
                f"'rollout.engine.speculative_config.method' is 'mtp' and section '{section}' makes a model with no layer of multi-token prediction; choose "
                f"method 'ngram', 'suffix' or 'draft', or {fix}"
            )


def check_trained_draft(recipe: "Recipe") -> None:
    """Raises ``UserError`` for the first key that a head trained beside the policy cannot be combined with."""
    if recipe.draft is None:
        return
    speculative, pods = recipe.rollout.engine.speculative_config, recipe.pods
    if speculative is None or speculative.method != "eagle3":
        given = "is not given" if speculative is None else f"has method '{speculative.method}'"
        raise UserError(
            f"section 'draft' trains an EAGLE-3 head and 'rollout.engine.speculative_config' {given}; set it to {{method: eagle3, model: FOLDER}}, or remove "
            "section 'draft'"
        )
    parallel, alone = recipe.parallel, "is published in one pod"
    refusals: tuple[Refusal, ...] = (
        ("rollout.backend", recipe.rollout.backend, ("tandem",), "drafts for Tandem's own engine"),
        ("trainer.backend", recipe.trainer.backend, ("tandem",), "is trained by Tandem's own trainer"),
        ("model.implementation", recipe.model.implementation, ("auto", "tandem"), "reads hidden states of Tandem's own decoder"),
        ("parallel.context", parallel.context, (1,), "is trained on whole sequences"),
        ("parallel.zero", parallel.zero, (0, 1, 2), "reads whole weights of the policy"),
        ("rollout.engine.tensor_parallel_size", recipe.rollout.engine.tensor_parallel_size, (1,), "is replaced in an engine of one rank"),
        ("trainer.lora", None if recipe.trainer.lora is None else "given", (None,), "is trained beside whole weights"),
        ("trainer.offload_parameters", recipe.trainer.offload_parameters, ("none",), "reads the policy's weights in memory"),
        ("pods.count", pods.count, (1,), alone),
        ("pods.max_count", pods.max_count, (0, 1), alone),
        ("pods.weights_url", pods.weights_url or None, (None,), alone),
    )
    for key, value, possible, reason in refusals:
        if value not in possible:
            fix = "remove it" if possible == (None,) else f"set it to {possible[0] if len(possible) == 1 else ' or '.join(map(str, possible))}"
            raise UserError(f"'{key}' is {value} and section 'draft' is given, whose head {reason}; {fix}, or remove section 'draft'")
