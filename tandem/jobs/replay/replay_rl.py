"""Replays a recorded step of reinforcement learning in a pod of its own.

A difference shows which part is not a function of its inputs: the rollout (other tokens or log-probabilities), a reward function (other
scores), or the trainer (other metrics).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tandem.config.coordination import CoordinationConfig
from tandem.config.pods import PodsConfig
from tandem.config.recipe import Recipe
from tandem.jobs.pod_plan import plan_of
from tandem.jobs.replay.comparison import Comparison, Part, differences, same_device, scratch_run
from tandem.jobs.rl_run.draw_round import draw_round
from tandem.jobs.run_files import rl_start_folder
from tandem.model.huggingface.model_config import read_shapes
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.pod_checkpoints import PodCheckpoints
from tandem.pod.pod_threads import rank_threads
from tandem.pod.prompts import context_tokens, prompt_source
from tandem.pod.rl_models import published_bytes
from tandem.pod.sidecars import RolloutSidecar, TrainerSidecar
from tandem.pod.start import open_channels
from tandem.rl.rewards.model_scores import with_model_scores
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.round_prompts import RoundPrompts, recorded_batch
from tandem.rl.rollout.staleness import weights_of
from tandem.rl.step_metrics import rollout_metrics
from tandem.runtime.callback import Callback
from tandem.runtime.machine.gpus import check_pod_device
from tandem.runtime.machine.numerics import check_numerics, numerics_record
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows
from tandem.runtime.records.run_lock import RunLock
from tandem.runtime.records.run_records import Records
from tandem.runtime.records.tensor_digests import Stage, TensorDigests
from tandem.storage.digests import bytes_digest
from tandem.types import Round, RunError, Sample, Score, UserError
from tandem.types.round import joined


def replay_rl_step(
    recipe: Recipe, directory: Path, step: int, parts: Sequence[Part], *, inline: bool, callback: Callback, say: Callable[[str], None],
    record: Path | None = None,
) -> list[Comparison]:
    """Replays ``parts`` of ``step`` of the run in ``directory``. ``say`` receives a line for each stage, the folder ``record`` digests of the tensors.

    Raises ``UserError`` where the step is not in the journal, or this machine cannot give the same bits."""
    if "rollout" in parts and recipe.rollout.backend != "tandem":
        reason = f"the bits of {recipe.rollout.backend} depend on what else is in a batch, so the rollout is not replayed"
        if len(parts) == 1:
            raise UserError(f"{reason}; its samples are in the journal, and --only rewards or --only train replays what was made of them")
        say(reason)
        parts = [part for part in parts if part != "rollout"]
    with ExitStack() as stack:
        stack.enter_context(RunLock(directory))
        journal = stack.enter_context(Journal(directory / "journal.sqlite", read_only=True))
        rolled_out, judged, row = _recorded(directory, journal, step)
        # The pod of a replay has a store of its own, so that it publishes nothing where the run does.
        recipe = replace(recipe, machine=same_device(recipe.machine, directory, journal.get("device")), coordination=CoordinationConfig(), pods=PodsConfig())
        check_pod_device(recipe.machine, recipe.parallel.world, recipe.rollout.engine_ranks)
        numerics = journal.get("numerics", {})
        check_numerics(numerics, numerics_record(rank_threads(recipe), str(numerics.get("kernels"))))
        pod = stack.enter_context(_scratch_pod(recipe, directory, journal, inline, callback, record))
        prompts = RoundPrompts(stack.enter_context(closing(prompt_source(recipe, pod.start))), recipe, journal)
        comparisons, digests = [], None if record is None else TensorDigests(record / "controller.jsonl")
        weights = weights_of(step, recipe.rollout.max_staleness)
        try:
            at = pod.start_trainer(weights if "rollout" in parts else step)
            say(f"loaded the checkpoint of step {at}")
            if "rollout" in parts:
                _take_steps(pod, weights, say)
                drawn, recorded = list[Sample](), list[Sample]()
                for number, found in enumerate(rolled_out):
                    say(f"rollout of step {step}, round {number}")
                    new, buffer = draw_round(pod, prompts, step, number, lambda step, chosen: (), weights=weights)
                    drawn += [*new, *(buffer.samples if buffer is not None else ())]
                    recorded += [*found, *(journal.replay_buffer(step, number + 1).samples if buffer is not None else ())]
                comparisons.append(_compare_samples(drawn, recorded))
                if weights < step:
                    mismatch = pod.compare(weights, recorded)
                    say(f"the trainer's log-probabilities under the weights that drew them: mismatch_kl {mismatch['mismatch_kl']:g}")
                    if recipe.is_exact and any(mismatch.values()):
                        what = f"the trainer's log-probabilities of the recorded samples: {mismatch}, and must be 0"
                        comparisons[-1] = replace(comparisons[-1], differences=(*comparisons[-1].differences, what))
                for sample in drawn:
                    _add(digests, step, "rollout", f"sample {sample.id}, token_ids", sample.token_ids)
                    _add(digests, step, "rollout", f"sample {sample.id}, logprobs", sample.logprobs)
            _take_steps(pod, step, say)
            if "rewards" in parts and judged:
                again, state = list[Score](), prompts.trainer_state(step)
                with RewardPool(recipe.rewards) as rewards:
                    for samples, _ in judged:
                        say(f"rewards of step {step}: {len(samples)} samples")
                        model_scores, columns = None, dict[str, list[Any]]()
                        if recipe.rewards_need_models:
                            model_scores, columns = pod.infer(step, samples, recipe.rewards.needs, "rewards")
                        own = rewards.score(samples, prompts.of_samples(samples), state, columns or None)
                        again += own if model_scores is None else with_model_scores(own, model_scores, recipe.reward_model.weight)
                comparisons.append(_compare_scores(again, joined(judged).scores))
                for score in again:
                    _add(digests, step, "rewards", f"sample {score.sample_id}, score", [] if score.value is None else [score.value])
            if "train" in parts and row is not None:
                say(f"optimizer step {step}")
                trained = pod.train(step, *pod.trained_on(step))
                numbers = {**rollout_metrics(judged, recipe), **trained}
                lines = differences({name: row.get(name) for name in numbers}, numbers)
                comparisons.append(Comparison("train", len(numbers), tuple(lines)))
        except SidecarDied as death:
            raise RunError(f"{death}; the run was not changed; start the replay again") from None
        return comparisons


def _take_steps(pod: Pod, step: int, say: Callable[[str], None]) -> None:
    """Takes the recorded optimizer steps before ``step``."""
    assert pod.trainer_step is not None
    for between in range(pod.trainer_step, step):
        say(f"replaying step {between} from its recorded samples and scores")
        pod.train(between, *pod.trained_on(between))


def _add(digests: TensorDigests | None, step: int, stage: Stage, name: str, values: Sequence[float]) -> None:
    if digests is not None:
        digests.add(step, stage, name, bytes_digest(json.dumps(list(values)).encode()), math.hypot(*values))


def _recorded(directory: Path, journal: Journal, step: int) -> tuple[list[list[Sample]], list[Round], dict[str, Any] | None]:
    """Returns the samples of each round of ``step``, the rounds that were judged, and its row, ``None`` where the run ended in the middle of the step."""
    rolled_out = journal.drawn(step)
    if not rolled_out:
        steps = journal.journalled_steps()
        recorded = f"the steps {steps[0]} to {steps[-1]}" if steps else "no step"
        raise UserError(f"step {step} of '{directory}' was never sampled; its journal has {recorded}")
    row = next((row for row in read_rows(directory / "metrics.jsonl") if row["step"] == step), None)
    return rolled_out, journal.rounds(step), row


@contextmanager
def _scratch_pod(
    recipe: Recipe, directory: Path, recorded: Journal, inline: bool, callback: Callback, record: Path | None
) -> Iterator[Pod]:
    """Yields a pod that reads the run's checkpoints and its journal ``recorded``, and writes nothing to the run."""
    start = rl_start_folder(recipe, directory).resolve()
    shapes, context = read_shapes(start, implemented_by=recipe.model.implemented_by), context_tokens(recipe.model, recipe.rollout.max_tokens, start)
    planned = plan_of(recipe, shapes, context, start)
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_run(recipe, directory, {}, record))
        journal = stack.enter_context(Journal(scratch / "journal.sqlite"))
        trainer, rollout = open_channels(recipe, scratch, inline, None)
        stack.callback(trainer.close)
        stack.callback(rollout.close)
        yield Pod(
            TrainerSidecar(trainer), RolloutSidecar(rollout), start, published_bytes(recipe, shapes), journal,
            partial(recorded_batch, recipe, recorded), Records(journal, None, callback), PodCheckpoints(journal, callback), 0, planned.residency,
            planned.prefetch,
        )  # fmt: skip


def _compare_samples(drawn: Sequence[Sample], recorded: Sequence[Sample]) -> Comparison:
    """Compares samples in everything but the incarnation of their weight versions, which counts the trainer's starts."""

    def facts(sample: Sample) -> dict[str, object]:
        names = (
            "id", "prompt_token_ids", "token_ids", "logprobs", "sampling_logprobs", "finish_reason", "text", "response_mask", "messages", "fault", "outcome",
        )  # fmt: skip
        own = {name: getattr(sample, name) for name in names}
        return {**own, "weight_steps": tuple(v.step for v in sample.sampled_weight_versions), "branches": [facts(branch) for branch in sample.branches]}

    pairs = zip(map(facts, drawn), map(facts, recorded), strict=True)
    return Comparison("rollout", len(recorded), tuple(_unequal((str(theirs["id"]), ours, theirs) for ours, theirs in pairs)))


def _compare_scores(judged: Sequence[Score], recorded: Sequence[Score]) -> Comparison:
    def facts(score: Score) -> dict[str, object]:
        return {"state": score.state, "value": score.value, "components": dict(score.components), "correct": score.correct}

    pairs = zip(judged, recorded, strict=True)
    return Comparison("rewards", len(recorded), tuple(_unequal((theirs.sample_id, facts(ours), facts(theirs)) for ours, theirs in pairs)))


def _unequal(triples: Iterable[tuple[str, dict[str, object], dict[str, object]]]) -> Iterator[str]:
    """Yields a line for each (name, replayed, recorded) whose facts differ, with the first fact that does."""
    for name, ours, theirs in triples:
        fact = next((fact for fact in theirs if ours[fact] != theirs[fact]), None)
        if fact is not None:
            yield f"{name}: {fact} recorded {theirs[fact]!r}, now {ours[fact]!r}"
