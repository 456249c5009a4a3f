"""Section ``critic``: the value model of PPO."""

from dataclasses import dataclass

from tandem.config.limits import check_float32
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """The critic of `ppo`: a model that estimates the return from each token on. Its optimizer has the settings of section `trainer`, its updates
    are those of the actor (`algorithm.minibatches`, `algorithm.epochs`)."""

    path: str = ""
    """A Hugging Face folder, or a model of the Hub: a `*ForTokenClassification` or `*ForSequenceClassification` with `num_labels` 1 (such as a
    reward model), or a causal language model, which gets a new head. Empty: the model that reinforcement learning starts from."""
    learning_rate: float = 1e-5
    """Learning rate of the critic, with the warm-up and the schedule of section `trainer`; about ten times the actor's is usual."""
    warmup_steps: int = 0
    """Steps in which only the critic learns, before the actor's first update."""
    value_clip: float | None = 0.2
    """A new value counts as at most this far from the value before the step. Empty: off."""

    shared: bool = False
    """The critic is a second head on the actor, so that both have one trunk, one optimizer and one update. The exported model has the actor's head
    alone."""
    loss_coef: float = 0.1
    """With `shared`: weight of the value loss beside the policy loss."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if self.shared:
            reason = "critic.shared is true, so the critic is trained as a part of the actor"
            refuse_unread("critic", self, reason, "path", "learning_rate", "warmup_steps", fix="set critic.shared to false")
        else:
            refuse_unread("critic", self, "critic.shared is false", "loss_coef", fix="set critic.shared to true")
        if not 0 < self.loss_coef < float("inf"):
            raise UserError(f"'critic.loss_coef' is {self.loss_coef}; it must be above 0 and finite")
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"'critic.learning_rate' is {self.learning_rate}; it must be above 0 and finite")
        if self.warmup_steps < 0:
            raise UserError(f"'critic.warmup_steps' is {self.warmup_steps}; it must be 0 or more")
        if self.value_clip is not None and not 0 < self.value_clip < float("inf"):
            raise UserError(f"'critic.value_clip' is {self.value_clip}; it must be above 0 and finite, or empty")
        check_float32("critic", self, "learning_rate", "value_clip", "loss_coef")
