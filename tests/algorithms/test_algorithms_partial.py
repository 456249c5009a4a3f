"""Partial rollouts: which groups a round begins, continues and hands to its step, and what of their tokens is off-policy."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.filter_groups import FilterGroupsConfig
from tandem.config.load import build
from tandem.config.recipe import Recipe
from tandem.data.order import indices_after, prompt_indices
from tandem.kernels.api import TokenLogprobs
from tandem.model.head_outputs import HeadOutputs
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.algorithms.loss import make_policy_loss
from tandem.rl.algorithms.update import counts_of
from tandem.rl.rollout.filter_groups import groups_lacking, is_complete, trained_on
from tandem.rl.rollout.partial import cut_by_budget, groups_to_begin, taken, with_drawn
from tandem.rl.step_metrics import partial_metrics, rollout_metrics
from tandem.trainer.micro_batch import collate
from tandem.types import FinishReason, ReplayBuffer, Round, Sample, Score, ScoreState, UserError, WeightVersion

PROMPTS, GROUP, BUDGET, MOST = 4, 3, 5, 30
Take = Callable[[ReplayBuffer, int], tuple[list[Sample], ReplayBuffer]]


def sample(prompt: str, index: int, steps: list[int], reason: FinishReason = FinishReason.STOP, begun: int = 0) -> Sample:
    values = tuple(-0.5 - 0.1 * place for place in range(len(steps)))
    versions = tuple(WeightVersion(0, step) for step in steps)
    return Sample(f"{begun}/{prompt}/{index}", prompt, index, (1, 2), (7,) * len(steps), values, values, versions, reason, "")


def length_of(sample: Sample) -> int:
    """Returns the length at which a sample of the simulation ends."""
    return 1 + int(random.Random(sample.id).paretovariate(1.2)) * 3 % MOST


def drawn_by(buffer: ReplayBuffer, begun: list[str], step: int) -> list[Sample]:
    """Returns what a round draws: ``BUDGET`` tokens of every unfinished sample and of those of new groups."""
    fresh = [sample(prompt, index, [], begun=step) for prompt in begun for index in range(GROUP)]
    drawn = []
    for each in [*buffer.unfinished, *fresh]:
        length = min(length_of(each), len(each.token_ids) + BUDGET)
        reason = FinishReason.STOP if length == length_of(each) else FinishReason.LENGTH
        steps = [version.step for version in each.sampled_weight_versions] + [step] * (length - len(each.token_ids))
        drawn.append(cut_by_budget(replace(sample(each.prompt_id, each.index, steps, reason), id=each.id), MOST))
    return drawn


@pytest.mark.parametrize("size", [None, 9, 40])
def test_every_step_has_its_groups_oldest_first_and_every_group_that_was_begun_is_trained_once(size: int | None) -> None:
    buffer, trained, begun_at = ReplayBuffer(), list[str](), dict[str, int]()
    for step in range(60):
        in_step: list[str] = []
        rounds = 0
        while len(in_step) < PROMPTS:
            in_use = set(in_step) | {each.prompt_id for each in buffer.samples}
            count = groups_to_begin(buffer, PROMPTS - len(in_step), in_use, size)
            indices, started = indices_after(buffer.started, count, 0, size, {int(name) for name in in_use})
            drawn = drawn_by(buffer, [str(index) for index in indices], step)
            samples, buffer = taken(with_drawn(buffer, drawn, started), PROMPTS - len(in_step))
            in_step += dict.fromkeys(each.prompt_id for each in samples)
            assert all(each.finish_reason is not FinishReason.ABORT and len(each.token_ids) == length_of(each) for each in samples)
            begun_at |= {each.id: step for each in drawn if each.id.startswith(f"{step}/")}
            trained += [each.id for each in samples]
            rounds += 1
            assert rounds <= MOST // BUDGET + 1
        assert len(set(in_step)) == PROMPTS
    assert len(trained) == len(set(trained)) == 60 * PROMPTS * GROUP
    waiting = {each.id for each in buffer.samples}
    assert set(begun_at) == set(trained) | waiting and not set(trained) & waiting
    # Nothing waits for longer than its tokens take, and the wait for its turn.
    assert all(60 - begun_at[name] <= MOST // BUDGET + 2 for name in waiting)
    if size is None:
        # The mean length of what is trained is that of what was begun: neither short nor long samples are favoured.
        early = [name for name, step in begun_at.items() if step < 40]
        assert set(early) <= set(trained)


def trained_in_steps(steps: int, take: Take, config: FilterGroupsConfig | None) -> tuple[list[int], list[int]]:
    """Simulates ``steps`` steps, killed in every round and resumed from what the journal keeps: the rounds and the buffer. A group is useful or not whatever
    its lengths. Returns the lengths of the samples that were begun in the first two thirds of the steps, and of those that were handed over."""
    buffer, begun_lengths, handed_over = ReplayBuffer(), dict[str, int](), dict[str, int]()
    for step in range(steps):
        rounds: list[Round] = []
        while not is_complete(rounds, config, PROMPTS):
            wanted, samples = groups_lacking(rounds, config, PROMPTS), list[Sample]()
            while wanted:
                buffer = ReplayBuffer(tuple(buffer.samples), buffer.started)
                count = groups_to_begin(buffer, wanted, (), None)
                drawn = drawn_by(buffer, [str(buffer.started + number) for number in range(count)], step)
                begun_lengths |= {each.id: length_of(each) for each in drawn if each.id.startswith(f"{step}/") and step < 2 * steps // 3}
                new, buffer = take(with_drawn(buffer, drawn, buffer.started + count), wanted)
                samples += new
                wanted -= len({each.prompt_id for each in new})
            handed_over |= {each.id: len(each.token_ids) for each in samples}
            useful = {each.prompt_id: random.Random(f"useful {each.prompt_id}").random() < 0.5 for each in samples}
            scores = [Score(each.id, ScoreState.NUMBER, float(useful[each.prompt_id] and each.index == 0)) for each in samples]
            rounds.append(Round(samples, scores))
        # A partial rollout hands over no more than the step lacks, so nothing is in surplus.
        assert len({each.prompt_id for each in trained_on(rounds, config, PROMPTS).samples}) == PROMPTS
    return list(begun_lengths.values()), [length for name, length in handed_over.items() if name in begun_lengths]


def taken_and_dropped(buffer: ReplayBuffer, wanted: int) -> tuple[list[Sample], ReplayBuffer]:
    """Drops what is unfinished when a step has its groups, as a synchronous run that begins too many groups does."""
    samples, rest = taken(buffer, wanted)
    is_enough = len({each.prompt_id for each in samples}) == wanted
    kept = tuple(each for group in rest.complete_groups for each in group) if is_enough else rest.samples
    return samples, replace(rest, samples=kept)


@pytest.mark.parametrize("config", [None, FilterGroupsConfig(max_num_gen_batches=1000)], ids=["all groups", "dynamic sampling"])
@pytest.mark.parametrize(("take", "is_fair"), [(taken, True), (taken_and_dropped, False)], ids=["oldest", "unfinished dropped"])
def test_resume_and_refill_favour_neither_long_nor_short_samples(take: Take, is_fair: bool, config: FilterGroupsConfig | None) -> None:
    """Every sample that is begun is judged, so both have the same lengths. A refill that drops unfinished groups fails: it judges short samples."""
    begun, judged = trained_in_steps(60, take, config)
    assert (sorted(begun) == sorted(judged)) is is_fair
    assert is_fair or sum(judged) / len(judged) < sum(begun) / len(begun)


def test_oldest_complete_groups_are_taken_and_the_others_wait() -> None:
    long = [sample("a", 0, [0]), sample("a", 1, [0] * 5, FinishReason.ABORT)]
    buffer = ReplayBuffer((*long, sample("b", 0, [0]), sample("c", 0, [0])), 3)
    samples, rest = taken(buffer, 1)
    assert [each.prompt_id for each in samples] == ["b"] and [each.prompt_id for each in rest.samples] == ["a", "a", "c"] and rest.started == 3
    assert rest.unfinished == [long[1]] and len(rest.complete_groups) == 1
    grown = replace(long[1], finish_reason=FinishReason.STOP)
    samples, rest = taken(with_drawn(rest, [grown, sample("d", 0, [1], FinishReason.ABORT)], 4), 5)
    assert [each.id for each in samples] == ["0/a/0", "0/a/1", "0/c/0"] and [each.prompt_id for each in rest.samples] == ["d"]
    assert partial_metrics(samples, rest, 2) == {
        "rollout/off_policy_share": 1.0, "rollout/staleness_max": 2.0, "rollout/buffer_groups": 1.0, "rollout/buffer_complete_groups": 0.0,
        "rollout/buffer_tokens": 1.0,
    }


def test_prompts_after_a_place_are_those_of_the_epochs_without_the_ones_in_use() -> None:
    order = [*prompt_indices(0, 5, 3, 5), *prompt_indices(1, 5, 3, 5)]
    first, passed = indices_after(0, 3, 3, 5, ())
    assert (first, passed) == (order[:3], 3)
    second, passed = indices_after(passed, 2, 3, 5, set(first))
    assert (second, passed) == (order[3:5], 5)
    third, passed = indices_after(passed, 2, 3, 5, set(order[5:7]))
    assert third == order[7:9] and passed == 9
    assert indices_after(7, 2, 3, None, {7}) == ([7, 8], 9)


def scored(samples: list[Sample]) -> list[Score]:
    return [Score(each.id, ScoreState.NUMBER, float(number)) for number, each in enumerate(samples)]


def test_tokens_of_older_weights_are_marked_and_masked_where_asked() -> None:
    samples = [sample("a", 0, [3, 3, 4, 5]), sample("a", 1, [5, 5])]
    kept, masked = (make_batch(5, samples, scored(samples), AlgorithmConfig(name="dr_grpo"), 32, mask_off_policy=asked) for asked in (False, True))
    assert kept.sequences[0].off_policy == (False, False, True, True, True, False) and kept.sequences[1].off_policy == ()
    assert kept.sequences[0].loss_mask == (0, 0, 1, 1, 1, 1) and masked.sequences[0].loss_mask == (0, 0, 0, 0, 0, 1)
    assert masked.sequences[1] == kept.sequences[1] and (kept.mask_tokens, masked.mask_tokens) == (6, 3)
    assert masked.sequences[0].advantages == kept.sequences[0].advantages


def test_a_token_of_older_weights_has_the_clipped_ratio_to_the_weights_that_drew_it() -> None:
    """The loss of PPO by its formula, with pi_old as recorded for every token, whatever weights drew it."""
    samples = [sample("a", 0, [3, 3, 4, 5]), sample("a", 1, [5, 5])]
    config = AlgorithmConfig(name="dr_grpo")
    batch = make_batch(5, samples, scored(samples), config, 32)
    rows = collate(batch.sequences, torch.float64)
    raw = torch.tensor([-0.2, -0.9, -0.7, -0.8, -0.5, -0.6], dtype=torch.float64)
    outputs = HeadOutputs(TokenLogprobs(raw, raw, torch.zeros(6, dtype=torch.float64)))
    share = make_policy_loss(config, counts_of(batch.sequences, 32), 1.0, mismatch_tokens=3)(outputs, rows)
    recorded = torch.tensor([-0.5, -0.6, -0.7, -0.8, -0.5, -0.6], dtype=torch.float64)
    ratio, advantage = torch.exp(raw - recorded), torch.tensor([-0.5] * 4 + [0.5] * 2, dtype=torch.float64)
    wanted = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    assert share.loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    # Tokens of step 5 agree with their record; the others are not compared.
    assert share.sums["mismatch_kl"].item() == 0.0 and share.maxima["mismatch_max_abs"].item() == 0.0


def recipe(rollout: dict[str, object], algorithm: dict[str, object]) -> Recipe:
    return build(Recipe, {"model": {"path": "m"}, "task": {"name": "sort"}, "rollout": rollout, "algorithm": algorithm})


@pytest.mark.parametrize(
    ("rollout", "algorithm", "words"),
    [
        ({"budget_tokens": 32}, {}, "budget_tokens' is 32.*less than rollout.max_tokens"),
        ({"budget_tokens": -1}, {}, "budget_tokens' is -1"),
        ({"mask_off_policy": True}, {}, "mask_off_policy' is true, which is not read"),
        ({"budget_tokens": 8}, {"filter_groups": {"gen_batch_size": 9}}, "gen_batch_size' is 9, which is not read: with rollout.budget_tokens a round begins"),
        ({"budget_tokens": 8}, {"old_logprobs": "recompute"}, "budget_tokens' with algorithm.old_logprobs recompute.*tis_cap"),
    ],
)
def test_partial_rollouts_that_cannot_work_are_refused(rollout: dict[str, object], algorithm: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        recipe(rollout, algorithm)


def test_partial_rollouts_with_old_log_probabilities_of_the_trainer_need_a_correction_or_a_mask() -> None:
    recipe({"budget_tokens": 8}, {"old_logprobs": "recompute", "tis_cap": 2.0})
    recipe({"budget_tokens": 8, "mask_off_policy": True}, {"old_logprobs": "recompute"})


def test_a_sample_that_repeats_itself_is_masked_as_a_truncated_one_and_counted() -> None:
    samples = [sample("a", 0, [5, 5], FinishReason.REPETITION), sample("a", 1, [5, 5], FinishReason.LENGTH), sample("a", 2, [5, 5])]
    for asked, counted in ((False, [2, 2, 2]), (True, [0, 0, 2])):
        batch = make_batch(5, samples, scored(samples), AlgorithmConfig(name="dr_grpo", mask_truncated=asked), 32)
        assert [sum(sequence.loss_mask) for sequence in batch.sequences] == counted
        # It still counts in the mean of its group: rewards 0, 1 and 2.
        assert [sequence.advantages[-1] for sequence in batch.sequences] == [-1.0, 0.0, 1.0]
    watched = recipe({"repetition_detection": {"min_count": 4}}, {})
    row = rollout_metrics([Round(samples, scored(samples))], watched)
    assert row["response_length/repetition_ratio"] == pytest.approx(1 / 3) and row["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert "response_length/repetition_ratio" not in rollout_metrics([Round(samples, scored(samples))], recipe({}, {}))
    with pytest.raises(UserError, match="min_count' is 1"):
        recipe({"repetition_detection": {"min_count": 1}}, {})
