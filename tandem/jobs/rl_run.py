"""A run of reinforcement learning: its prompts, rewards, evaluations and rows. The loop (``rl``) calls it for everything but the pod's work."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tandem.config.recipe import Recipe
from tandem.estimate.memory import PodMemory
from tandem.evaluation.tasks import EvaluationResult, summarize
from tandem.jobs.draw_round import Listen, begin_round, draw_round
from tandem.jobs.finished import target_reached
from tandem.jobs.run import Run
from tandem.layout.residents import Phase
from tandem.pod.pod import Pod
from tandem.pod.recovery import go_back
from tandem.pod.states import RolloutState
from tandem.rl.rewards.judging import Judging, RewardTime
from tandem.rl.rewards.model_scores import with_model_scores
from tandem.rl.rewards.pool import RewardPool, check_fault_share
from tandem.rl.rollout.dispatch import evaluation_settings
from tandem.rl.rollout.filter_groups import is_complete, trained_on
from tandem.rl.rollout.past_lengths import PastLengths
from tandem.rl.rollout.round_prompts import RoundPrompts
from tandem.rl.rollout.staleness import check_staleness, weights_of
from tandem.rl.step_metrics import partial_metrics, rollout_metrics, staleness, staleness_max
from tandem.runtime.records.journal import Journal
from tandem.trainer.checkpoint.trigger import CheckpointTrigger
from tandem.types import Prompt, Round, RunError, Sample, Score, ScoreState
from tandem.types.round import joined

if TYPE_CHECKING:
    from tandem.trainer.checkpoint.uploader import Uploader

MOST_STEPS_MEASURED = 64
"""Steps whose samples a resumed run reads for the lengths that it expects of later ones."""


@dataclass(kw_only=True)
class RLRun(Run):
    """What the loop needs besides the pod. ``journal``: the one of ``records``. ``lengths``: those of the samples in its first ``steps_measured`` steps."""

    recipe: Recipe
    journal: Journal
    prompts: RoundPrompts
    rewards: RewardPool
    memory: PodMemory
    trigger: CheckpointTrigger
    uploader: "Uploader | None" = None
    target_was_told: bool = False
    lengths: PastLengths = field(default_factory=PastLengths)
    steps_measured: int = 0
    reward_times: dict[str, RewardTime] = field(default_factory=dict)
    """Of the functions, by label, since the newest row."""
    judgements: dict[tuple[int, int | str], Judging] = field(default_factory=dict)
    """Those that are under way, by the step and the round of their samples, or the kind of an evaluation."""

    # -- samples and scores: those in the journal are used and never computed again ------------------------------------

    def is_complete(self, rounds: Sequence[Round]) -> bool:
        """Returns whether a step with ``rounds`` needs no further one."""
        return is_complete(rounds, self.recipe.algorithm.filter_groups, self.recipe.rollout.prompts_per_step)

    def samples(self, pod: Pod, step: int, number: int) -> list[Sample]:
        """Returns the samples of round ``number`` of ``step`` from the journal, or draws and journals them."""
        recorded = self.journal.samples(step, number)
        if recorded is not None:
            return recorded
        if pod.ahead is not None and (pod.ahead.step, number) == (step, 0):
            drawn, buffer = pod.end_rollout(), None
        else:
            listen, weights = self._listen(step, number), self._weights_of(step)
            drawn, buffer = draw_round(pod, self.prompts, step, number, self._expected_lengths, listen, weights)
        if self.recipe.rollout.max_staleness:
            check_staleness(drawn, step, self.recipe.rollout.max_staleness)
        if (judging := self.judgements.get((step, number))) is not None:
            judging.complete(drawn)
        self.journal.commit_samples(step, drawn, number, buffer)
        return drawn

    def _listen(self, step: int, number: int) -> Listen:
        return lambda prompts: self.judge((step, number), prompts, self.recipe.algorithm.group_size).add

    def _expected_lengths(self, step: int, prompts: Sequence[Prompt]) -> list[float]:
        """Returns how long the samples of ``prompts`` are expected to be, from those of the steps before ``step``. A task that generates prompts repeats
        none."""
        if self.prompts.source.task.size is None:
            return []
        earlier = [each for each in self.journal.journalled_steps() if each < step - self.recipe.rollout.max_staleness]
        for each in earlier[max(self.steps_measured, len(earlier) - MOST_STEPS_MEASURED) :]:
            self.lengths.add(joined(self.journal.rounds(each)).samples)
        self.steps_measured = len(earlier)
        return self.lengths.expected(prompts)

    # -- one step off: the samples of a step are drawn while the step before trains ------------------------------------

    def draw_ahead(self, pod: Pod, step: int) -> None:
        """Begins to draw the samples of the step after ``step`` under the weights after ``step`` steps, once those of ``step`` are there."""
        following = step + 1
        if not self.recipe.rollout.max_staleness or following >= self.recipe.run.max_steps:
            return
        self._collect(pod, step)
        if pod.ahead is not None or self._is_collected(following):
            return
        if self.journal.samples(following) is not None:
            pod.serve_weights(step)  # For its further rounds.
            return
        begin_round(pod, self.prompts, following, self._expected_lengths, self._listen(following, 0), weights=step)

    def collect_ahead(self, pod: Pod, step: int) -> None:
        """Waits for the samples of ``step`` that are drawn under the weights of the step before, and journals them before the weights change. A checkpoint of
        ``step`` follows, so that a resume has no need of the weights before it; a run that is prolonged after its end has, and goes back to them."""
        weights = self._weights_of(step)
        if weights < step < self.recipe.run.max_steps and not self._is_collected(step):
            if pod.ahead is None and not pod.has_weights(weights):
                go_back(pod, weights)
            self._collect(pod, step)

    def keep_drawn(self, pod: Pod) -> None:
        """Waits for what is drawn ahead when a sidecar has died, and journals it. If the rollout has died too, it is begun again."""
        if pod.ahead is not None and pod.ahead.has_samples():
            self.samples(pod, step := pod.ahead.step, 0)
            pod.rest_engine(step)  # It lives, and need not start again.
        pod.ahead = None

    def state_needed(self, step: int) -> int:
        """Returns how many optimizer steps the trainer must have taken for ``step`` to go on: those before the weights that draw its samples, if it lacks
        some."""
        weights = self._weights_of(step)
        return weights if weights < step < self.recipe.run.max_steps and not self._is_collected(step) else step

    def _collect(self, pod: Pod, step: int) -> None:
        """Journals the samples of ``step``; if it may have several rounds, also their scores, which say whether another follows."""
        rounds = list[Round]()
        while not self.is_complete(rounds):
            samples = self.samples(pod, step, len(rounds))
            if not self.recipe.has_rounds:
                return
            rounds.append(Round(samples, self.scores(pod, step, len(rounds), samples)))

    def _is_collected(self, step: int) -> bool:
        """Returns whether the journal has what ``_collect`` journals."""
        return self.is_complete(self.journal.rounds(step)) if self.recipe.has_rounds else self.journal.samples(step) is not None

    def _weights_of(self, step: int) -> int:
        return weights_of(step, self.recipe.rollout.max_staleness)

    # -- scores --------------------------------------------------------------------------------------------------------

    def judge(self, of: tuple[int, int | str], prompts: Sequence[Prompt], group_size: int, *, has_inference: bool = True) -> Judging:
        """Begins to judge samples of ``prompts`` as they finish: those ``of`` a step and its round or an evaluation; ends a judgement of them that a fault has
        left behind. ``has_inference``: whether the inference phase follows."""
        if (left := self.judgements.pop(of, None)) is not None:
            left.fail(RunError("the rollout was repeated"))
        self.judgements[of] = self.rewards.open(prompts, self.prompts.trainer_state(of[0]), group_size=group_size, has_inference=has_inference)
        return self.judgements[of]

    def scores(self, pod: Pod, step: int, number: int, samples: Sequence[Sample]) -> list[Score]:
        """Returns the scores of ``samples``, those of round ``number``, from the journal, or those of the judgement that began during the rollout, which goes
        on during the passes of the other models, and journals them. Where another round may follow, those are the models that rewards need."""
        recorded = self.journal.scores(step, number)
        if recorded is not None:
            return recorded
        if (step, number) not in self.judgements:  # The samples are the journal's, or were drawn in several rounds.
            self.judge((step, number), self.prompts.of_samples(samples), 0).complete(samples)
        judging, may_repeat, model_scores = self.judgements[step, number], self.recipe.has_rounds, None
        if self.recipe.rewards_need_models if may_repeat else self.recipe.has_inference:
            model_scores, columns = pod.infer(step, samples, self.recipe.rewards.needs, "rewards" if may_repeat else "all")
            if columns:
                judging.add_inferred(columns)
        elif not may_repeat:
            pod.hand_over(step, Phase.TRAIN)
        began = perf_counter()
        judged = judging.result()
        if model_scores is not None:
            judged = with_model_scores(judged, model_scores, self.recipe.reward_model.weight)
        del self.judgements[step, number]
        for label, took in judging.times().items():
            self.reward_times[label] = self.reward_times.get(label, RewardTime(0.0, 0.0, 0.0)).plus(took)
        self.records.add_time("reward", perf_counter() - began)
        faults = [score for score in judged if score.state is ScoreState.INFRASTRUCTURE_FAULT]
        if faults:
            self.journal.record_event(
                "reward_fault", {"step": step, "count": len(faults), "first": faults[0].sample_id, "reason": faults[0].reason}
            )
            self.records.callback.message(f"step {step}: {len(faults)} of {len(judged)} samples masked; {faults[0].sample_id}: {faults[0].reason}")
        check_fault_share(judged, self.recipe.rewards)
        if judged and all(score.state is ScoreState.NOT_APPLICABLE for score in judged):
            self.records.callback.message(f"step {step}: every reward function returned None for every sample, so the step teaches nothing")
        self.journal.commit_scores(step, judged, number)
        return judged

    def train(self, pod: Pod, step: int, rounds: Sequence[Round]) -> dict[str, float]:
        """Takes the optimizer step on the groups of ``rounds`` that dynamic sampling takes, all without it; returns its metrics."""
        filtered, wanted = self.recipe.algorithm.filter_groups, self.recipe.rollout.prompts_per_step
        batch = trained_on(rounds, filtered, wanted)
        if (useful := len({sample.prompt_id for sample in batch.samples})) < wanted:
            self.records.callback.message(f"step {step}: {useful} of {wanted} groups have different rewards, after {len(rounds)} rounds of rollout")
        if self.recipe.algorithm.has_inference and self.recipe.has_rounds:
            pod.infer(step, batch.samples, part="update")
        return pod.train(step, batch.samples, batch.scores)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def target_holds(self, pod: Pod, step: int) -> bool:
        """Evaluates if ``step`` is due. Returns whether the target is reached, so that the run may end."""
        settings, sft = self.recipe.evaluation, self.recipe.sft
        if step % settings.every_steps:
            return False
        recorded = self.journal.evaluation(step, "sampled")
        accuracy = recorded["accuracy"] if recorded else self.evaluate(pod, step, "sampled", self.prompts.source.held_out(settings.prompts)).accuracy
        if step == 0:
            if self.journal.evaluation(step, "greedy") is None:
                self.evaluate(pod, step, "greedy", self.prompts.source.fresh(settings.final_prompts))
            if sft is not None and accuracy > sft.max_accuracy:
                raise RunError(
                    f"the model that reinforcement learning starts from already has a held-out sampled accuracy of {accuracy:.3f}, more than sft.max_accuracy "
                    f"({sft.max_accuracy:g}); lower sft.steps or raise sft.corrupted_share"
                )
        reached = target_reached(self.journal, settings, step)
        if reached and not self.target_was_told:
            self.target_was_told = True
            self.records.callback.message(
                f"step {step}: target reached: the held-out accuracy is {accuracy:.3f}, and the target {settings.target_accuracy:g} in {settings.consecutive} "
                f"evaluation{'s in a row' if settings.consecutive > 1 else ''}"
            )
        return reached

    def final_evaluation(self, pod: Pod, step: int) -> dict[str, Any]:
        """Evaluates sampled and greedy on prompts with a new seed. Returns the sampled evaluation."""
        prompts = self.prompts.source.fresh(self.recipe.evaluation.final_prompts)
        for kind in ("final_greedy", "final"):
            if self.journal.evaluation(step, kind) is None:
                self.evaluate(pod, step, kind, prompts)
        result = self.journal.evaluation(step, "final")
        assert result is not None
        return result

    def evaluate(self, pod: Pod, step: int, kind: str, prompts: Sequence[Prompt]) -> EvaluationResult:
        """Draws and judges one completion for each of ``prompts``, and journals the evaluation as ``kind``."""
        settings = evaluation_settings(self.recipe.rollout, self.recipe.run.seed, greedy=kind.endswith("greedy"), purpose=kind)
        judging = self.judge((step, kind), prompts, 1, has_inference=False)
        samples = pod.roll_out(step, prompts, settings, RolloutState.EVALUATE, on_samples=judging.add)
        judging.complete(samples)
        result = summarize(prompts, samples, judging.result(), examples=self.recipe.evaluation.examples)
        del self.judgements[step, kind]
        self.journal.commit_evaluation(step, kind, result.to_json())
        self.records.callback.evaluated(step, result.accuracy, result.count, kind)
        return result

    def checkpoint(self, pod: Pod, step: int) -> None:
        """Begins the checkpoint of the state after ``step`` steps, once. Flushes earlier rows first, because no resume writes them again."""
        self.records.sync()
        pod.checkpoint(step)
        self.trigger.saved()

    def finish_checkpoints(self, pod: Pod) -> None:
        """Waits for the checkpoint that is under way and for its copy. Raises ``RunError`` if the newest could not be copied."""
        pod.finish_checkpoints()
        if self.uploader is not None:
            self.uploader.finish()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _check_mismatch(self, step: int, trained: dict[str, float]) -> None:
        """Reports that rollout and trainer disagree where they compute the same bits. Raises ``RunError`` with ``run.on_mismatch: stop``."""
        largest = trained.get("mismatch_max_abs", 0.0)
        if not self.recipe.is_exact or (largest == 0 and trained.get("mismatch_kl", 0.0) == 0):
            return
        what = (
            f"step {step}: mismatch_kl is {trained['mismatch_kl']:.3g} (largest difference {largest:.3g}) and must be 0, since rollout and trainer compute "
            "the same bits; weights, samples or the memory of this machine are damaged"
        )
        self.journal.record_event("mismatch", {"step": step, "reason": what})
        self.records.callback.message(what)
        if self.recipe.run.on_mismatch == "stop":
            raise RunError(f"{what}; see 'tandem verify', then resume, with --run.on_mismatch=warn to continue in spite of it")

    def write_row(self, pod: Pod, step: int, rounds: Sequence[Round], trained: dict[str, float]) -> None:
        """Writes the row of ``step`` to ``metrics.jsonl``, once. Rewards and lengths are those of all samples that were drawn."""
        samples = joined(rounds).samples
        row: dict[str, Any] = {"step": step, "weight_version": step, "rollout/staleness": staleness(samples, step)}
        row.update(rollout_metrics(rounds, self.recipe))
        if self.recipe.rollout.max_staleness:
            row["rollout/staleness_max"] = staleness_max(samples, step)
        buffer = self.journal.replay_buffer(step + 1)
        if self.recipe.rollout.budget_tokens:
            row.update(partial_metrics(samples, buffer, step))
        row.update(self.prompts.metrics(step, samples))
        row.update(trained)
        held_out = self.journal.evaluation(step, "sampled")
        if held_out is not None:
            row["evaluation/accuracy"] = held_out["accuracy"]
        if rollout_s := self.records.timings.get("rollout"):
            sequences = [each for sample in (*samples, *buffer.samples) for each in sample.sequences]
            drawn, newest = [version for each in sequences for version in each.sampled_weight_versions], self._weights_of(step)
            row["perf/rollout_tokens_per_s"] = sum(version.step == newest for version in drawn) / rollout_s
            if self.recipe.rollout.max_staleness:
                row["perf/rollout_hidden_share"] = pod.hidden_s / rollout_s
                pod.hidden_s = 0.0
        predicted = {"train": self.memory.trainer, "rollout": self.memory.rollout, "wait_rollout": self.memory.trainer_idle, "inference": self.memory.inference}
        for phase, measured in sorted(pod.memory.items()):
            row[f"memory/{phase}/measured"] = measured
            row[f"memory/{phase}/predicted"] = float(predicted[phase])
        row.update(pod.device_metrics | pod.rollout_metrics | pod.moves.take())
        row.update({f"reward_s/{label}/{name}": seconds for label, took in self.reward_times.items() for name, seconds in took._asdict().items()})
        self.reward_times.clear()
        self.records.row(row, sum(len(s.prompt_token_ids) + len(s.token_ids) for sample in samples for s in sample.sequences))
        self._check_mismatch(step, trained)
