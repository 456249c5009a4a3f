"""The scores of samples: those in the journal are used and never computed again."""

from collections.abc import Sequence
from time import perf_counter

from tandem.jobs.rl_run.rl_run import RLRun
from tandem.layout.residents import Phase
from tandem.pod.pod import Pod
from tandem.rl.rewards.judging import Judging, RewardTime
from tandem.rl.rewards.model_scores import with_model_scores
from tandem.rl.rewards.pool import check_fault_share
from tandem.runtime.traces.parts import share_of_parts
from tandem.runtime.traces.spans import span
from tandem.runtime.traces.steps import STEP
from tandem.types import Prompt, RunError, Sample, Score, ScoreState


def judge(run: RLRun, of: tuple[int, int | str], prompts: Sequence[Prompt], group_size: int, *, has_inference: bool = True) -> Judging:
    """Begins to judge samples of ``prompts`` as they finish: those ``of`` a step and its round or an evaluation; ends a judgement of them that a fault has
    left behind. ``has_inference``: whether the inference phase follows."""
    if (left := run.judgements.pop(of, None)) is not None:
        left.fail(RunError("the rollout was repeated"))
    ratio = share_of_parts(run.recipe.traces, is_whole=of[0] in run.recipe.run.trace_steps)
    state = run.prompts.trainer_state(of[0])
    run.judgements[of] = run.rewards.open(prompts, state, group_size=group_size, has_inference=has_inference, trace_ratio=ratio)
    return run.judgements[of]


def scores_of_round(pod: Pod, run: RLRun, step: int, number: int, samples: Sequence[Sample]) -> list[Score]:
    """Returns the scores of ``samples``, those of round ``number``, from the journal, or those of the judgement that began during the rollout, which goes
    on during the passes of the other models, and journals them. Where another round may follow, those are the models that rewards need."""
    recorded = run.journal.scores(step, number)
    if recorded is not None:
        return recorded
    if (step, number) not in run.judgements:  # The samples are the journal's, or were drawn in several rounds.
        judge(run, (step, number), run.prompts.of_samples(samples), 0).complete(samples)
    judging, may_repeat, model_scores = run.judgements[step, number], run.recipe.has_rounds, None
    if run.recipe.rewards_need_models if may_repeat else run.recipe.has_inference:
        model_scores, columns = pod.infer(step, samples, run.recipe.rewards.needs, "rewards" if may_repeat else "all")
        if columns:
            judging.add_inferred(columns)
    elif not may_repeat:
        pod.hand_over(step, Phase.TRAIN)
    began = perf_counter()
    with span("rewards", {STEP: step, "tandem.samples": len(samples)}):
        judged = judging.result()
    if model_scores is not None:
        judged = with_model_scores(judged, model_scores, run.recipe.reward_model.weight)
    del run.judgements[step, number]
    for label, took in judging.times().items():
        run.reward_times[label] = run.reward_times.get(label, RewardTime(0.0, 0.0, 0.0)).plus(took)
    run.records.add_time("reward", perf_counter() - began)
    _tell_of_faults(run, step, judged)
    check_fault_share(judged, run.recipe.rewards)
    if judged and all(score.state is ScoreState.NOT_APPLICABLE for score in judged):
        run.records.callback.message(f"step {step}: every reward function returned None for every sample, so the step teaches nothing")
    run.journal.commit_scores(step, judged, number)
    return judged


def _tell_of_faults(run: RLRun, step: int, judged: Sequence[Score]) -> None:
    faults = [score for score in judged if score.state is ScoreState.INFRASTRUCTURE_FAULT]
    if faults:
        run.journal.record_event("reward_fault", {"step": step, "count": len(faults), "first": faults[0].sample_id, "reason": faults[0].reason})
        run.records.callback.message(f"step {step}: {len(faults)} of {len(judged)} samples masked; {faults[0].sample_id}: {faults[0].reason}")
