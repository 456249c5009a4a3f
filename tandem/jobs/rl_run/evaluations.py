"""The evaluations of a run: those in the journal are used and never computed again."""

from collections.abc import Sequence

from tandem.evaluation.tasks import EvaluationResult, summarize
from tandem.jobs.finished import target_reached
from tandem.jobs.rl_run.rl_run import RLRun
from tandem.jobs.rl_run.scores import judge
from tandem.pod.pod import Pod
from tandem.pod.states import RolloutState
from tandem.rl.rollout.dispatch import evaluation_settings
from tandem.types import Prompt, RunError


def target_holds(pod: Pod, run: RLRun, step: int) -> bool:
    """Evaluates if ``step`` is due. Returns whether the target is reached, so that the run may end. Raises ``RunError`` where the model that the run begins
    with needs no training."""
    settings, sft, source = run.recipe.evaluation, run.recipe.sft, run.prompts.source
    if step % settings.every_steps:
        return False
    recorded = run.journal.evaluation(step, "sampled")
    accuracy = recorded["accuracy"] if recorded else evaluate(pod, run, step, "sampled", source.held_out(settings.prompts)).accuracy
    if step == 0:
        if run.journal.evaluation(step, "greedy") is None:
            evaluate(pod, run, step, "greedy", source.fresh(settings.final_prompts))
        if sft is not None and accuracy > sft.max_accuracy:
            raise RunError(
                f"the model that reinforcement learning starts from already has a held-out sampled accuracy of {accuracy:.3f}, more than sft.max_accuracy "
                f"({sft.max_accuracy:g}); lower sft.steps or raise sft.corrupted_share"
            )
    reached = target_reached(run.journal, settings, step)
    if reached and not run.target_was_told:
        run.target_was_told = True
        run.records.callback.message(
            f"step {step}: target reached: the held-out accuracy is {accuracy:.3f}, and the target {settings.target_accuracy:g} in {settings.consecutive} "
            f"evaluation{'s in a row' if settings.consecutive > 1 else ''}"
        )
    return reached


def final_evaluation(pod: Pod, run: RLRun, step: int) -> None:
    """Evaluates sampled and greedy on prompts with a new seed."""
    prompts = run.prompts.source.fresh(run.recipe.evaluation.final_prompts)
    for kind in ("final_greedy", "final"):
        if run.journal.evaluation(step, kind) is None:
            evaluate(pod, run, step, kind, prompts)


def evaluate(pod: Pod, run: RLRun, step: int, kind: str, prompts: Sequence[Prompt]) -> EvaluationResult:
    """Draws and judges one completion for each of ``prompts``, and journals the evaluation as ``kind``."""
    settings = evaluation_settings(run.recipe.rollout, run.recipe.run.seed, greedy=kind.endswith("greedy"), purpose=kind)
    judging = judge(run, (step, kind), prompts, 1, has_inference=False)
    samples = pod.roll_out(step, prompts, settings, RolloutState.EVALUATE, on_samples=judging.add)
    judging.complete(samples)
    result = summarize(prompts, samples, judging.result(), examples=run.recipe.evaluation.examples)
    del run.judgements[step, kind]
    run.journal.commit_evaluation(step, kind, result.to_json())
    run.records.callback.evaluated(step, result.accuracy, result.count, kind)
    return result
