"""A run of reinforcement learning: what the loop (``jobs.rl``) needs besides the pod. The other modules of this package do one part of a step each."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.config.recipe import Recipe
from tandem.estimate.memory import PodMemory
from tandem.jobs.run import Run
from tandem.pod.pod import Pod
from tandem.rl.rewards.judging import Judging, RewardTime
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.filter_groups import is_complete, trained_on
from tandem.rl.rollout.past_lengths import PastLengths
from tandem.rl.rollout.round_prompts import RoundPrompts
from tandem.rl.rollout.staleness import weights_of
from tandem.runtime.process.watchdog import Watchdog
from tandem.runtime.records.checkpoint_tiers import record_written
from tandem.runtime.records.journal import Journal
from tandem.runtime.traces.spans import OpenSpan
from tandem.runtime.traces.steps import step_span
from tandem.trainer.checkpoint.trigger import CheckpointTrigger, copies_due
from tandem.types import Round

if TYPE_CHECKING:
    from tandem.trainer.checkpoint.uploader import Uploader


@dataclass(kw_only=True)
class RLRun(Run):
    """``journal``: the one of ``records``. ``lengths``: those of the samples in its first ``steps_measured`` steps. ``reward_times``: of the functions, by
    label, since the newest row. ``judgements``: those that are under way, by the step and the round of their samples, or the kind of an evaluation.
    ``target_was_told``: the user knows that the target is reached."""

    recipe: Recipe
    journal: Journal
    prompts: RoundPrompts
    rewards: RewardPool
    memory: PodMemory
    trigger: CheckpointTrigger
    watchdog: Watchdog
    uploader: "Uploader | None" = None
    target_was_told: bool = False
    lengths: PastLengths = field(default_factory=PastLengths)
    steps_measured: int = 0
    reward_times: dict[str, RewardTime] = field(default_factory=dict)
    judgements: dict[tuple[int, int | str], Judging] = field(default_factory=dict)

    def step_span(self, step: int) -> "AbstractContextManager[OpenSpan | None]":
        """Records the block as the trace of ``step``, with section ``traces``."""
        return step_span(self.recipe.traces, self.directory, step)

    def is_complete(self, rounds: Sequence[Round]) -> bool:
        """Returns whether a step with ``rounds`` needs no further one."""
        return is_complete(rounds, self.recipe.algorithm.filter_groups, self.recipe.rollout.prompts_per_step)

    def weights_of(self, step: int) -> int:
        """Returns the step of the weights that draw the samples of ``step``."""
        return weights_of(step, self.recipe.rollout.max_staleness)

    def train(self, pod: Pod, step: int, rounds: Sequence[Round]) -> dict[str, float]:
        """Takes the optimizer step on the groups of ``rounds`` that dynamic sampling takes, all without it; returns its metrics."""
        filtered, wanted = self.recipe.algorithm.filter_groups, self.recipe.rollout.prompts_per_step
        batch = trained_on(rounds, filtered, wanted)
        if (useful := len({sample.prompt_id for sample in batch.samples})) < wanted:
            self.records.callback.message(f"step {step}: {useful} of {wanted} groups have different rewards, after {len(rounds)} rounds of rollout")
        if self.recipe.algorithm.has_inference and self.recipe.has_rounds:
            pod.infer(step, batch.samples, part="update")
        return pod.train(step, batch.samples, batch.scores)

    def checkpoint(self, pod: Pod, step: int) -> None:
        """Begins the checkpoint of the state after ``step`` steps, once. Flushes earlier rows first, because no resume writes them again."""
        self.records.sync()
        pod.checkpoint(step)
        self.trigger.saved()

    def copy_checkpoint(self, pod: Pod, step: int) -> None:
        """Begins the checkpoint of the state after ``step`` steps in the tiers before the run's folder, where it is due."""
        tiers = copies_due(self.recipe.checkpoint, step)
        if tiers:
            # A resume may begin there, on this machine or, with pods that joined, on another one.
            self.records.sync()
            pod.copy_checkpoint(step, tiers)
        self.record_copies()

    def record_copies(self) -> None:
        """Journals the checkpoints that were copied to ``checkpoint.upload`` meanwhile."""
        for each in [] if self.uploader is None else self.uploader.take_written():
            record_written(self.journal, *each)

    def finish_checkpoints(self, pod: Pod) -> None:
        """Waits for the checkpoint that is under way and for its copy. Raises ``RunError`` if the newest could not be copied."""
        pod.finish_checkpoints()
        if self.uploader is not None:
            self.uploader.finish()
            self.record_copies()
