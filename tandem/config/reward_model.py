"""Section ``reward_model``: a model that scores samples, beside the reward functions."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RewardModelConfig:
    """A model that scores the samples of each step in the inference phase. Its score, times `weight`, is added to the reward of section `rewards`
    (whose functions may have the weight 0) and is `reward/reward_model` in metrics. Evaluations use the functions alone."""

    path: str = ""
    """A Hugging Face folder, or a model of the Hub: a `*ForSequenceClassification` or `*ForTokenClassification` with `num_labels` 1 and the tokenizer
    of the actor. It reads the prompt with the completion and scores the state of the last token, as transformers does. Empty: none."""
    weight: float = 1.0
    """Its weight in the reward."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if not -1e6 < self.weight < 1e6:
            raise UserError(f"'reward_model.weight' is {self.weight}; it must be a finite number")
        if not self.path and self != RewardModelConfig():
            raise UserError("section 'reward_model' has no 'path'; name the folder of a reward model, or remove the section")
