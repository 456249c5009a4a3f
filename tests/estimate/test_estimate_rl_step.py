"""A step of reinforcement learning beside closed forms and order statistics."""

from dataclasses import replace

import pytest

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.prompt_beginnings import Prompts
from tandem.estimate.rl_step import RLStep, _round_requests, predict_rl_step, weight_update_seconds
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.speculation import Speculation
from tandem.estimate.serving.step_time import EngineStep, predict_decode_step, predict_step
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.predict import predict_step_time
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.types import UserError

LLAMA_3_8B = ModelShapes("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192, False)
H100 = load_hardware("H100-80GB")
TRAINING = TrainingLayout(ParallelConfig(data=8, zero=3), 2048, 64)
STEP = RLStep(
    prompts=16, group=1, prompt_lengths=Lengths.around(500, 0), output_lengths=Lengths.around(201, 0), training=TRAINING, engine=ServingLayout(), engines=1
)


def test_a_rollout_of_equal_lengths_is_its_prompts_and_a_step_for_each_further_token() -> None:
    time = predict_rl_step(LLAMA_3_8B, H100, STEP)
    prompts = predict_step(LLAMA_3_8B, ServingLayout(), H100, EngineStep(0, 0, 16 * 500, 250)).seconds
    decoding = 200 * predict_decode_step(LLAMA_3_8B, ServingLayout(), H100, 16, 500 + 201 / 2).seconds
    assert time.rollout == pytest.approx(prompts + decoding, rel=0.02)
    assert (time.tail, time.longest_tokens) == (pytest.approx(0, abs=1e-9), pytest.approx(201))
    assert time.seconds == pytest.approx(time.rollout + time.weight_update + time.switch + time.inference + time.training)


def test_drafts_divide_the_steps_by_the_tokens_that_one_accepts_and_are_left_out_where_they_cost_more() -> None:
    drafts, rate, engine = 3, 0.7, ServingLayout()
    drafted = Speculation(drafts, rate, draft_bytes=1 << 30, is_adaptive=False)
    # A geometric number of accepted tokens, cut at the drafts, and one more.
    accepted = sum(count * rate**count * (1 - rate) for count in range(drafts)) + drafts * rate**drafts
    assert drafted.tokens_a_step == pytest.approx(1 + accepted)
    assert (Speculation(drafts, 0.0).tokens_a_step, Speculation(drafts, 1.0).tokens_a_step) == (1, 1 + drafts)
    off, on = (predict_rl_step(LLAMA_3_8B, H100, replace(STEP, speculation=each)).rollout for each in (None, drafted))
    plain, verified = (predict_step(LLAMA_3_8B, engine, H100, EngineStep(16, 500 + 201 / 2, drafts=each)).seconds for each in (0, drafts))
    step = verified + drafts * (1 << 30) / (0.85 * H100.memory_bandwidth)
    assert off - on == pytest.approx(200 * (plain - step / (1 + accepted)), rel=0.03) and on < 0.6 * off
    # The weights are read once for all rows of a step, as are a sequence's keys for its drafts.
    assert plain < verified < 1.2 * plain
    useless = replace(drafted, acceptance=0.0)
    assert predict_rl_step(LLAMA_3_8B, H100, replace(STEP, speculation=useless)).rollout > off
    for left_out in (replace(useless, is_adaptive=True), replace(drafted, most_sequences=0)):
        assert predict_rl_step(LLAMA_3_8B, H100, replace(STEP, speculation=left_out)).rollout == off
    with pytest.raises(UserError, match=r"the acceptance of draft tokens is 1\.5; it must be from 0 to 1"):
        Speculation(drafts, 1.5)


def test_a_rollout_of_uniform_lengths_waits_for_the_largest_of_n() -> None:
    # Of N lengths from 1 to m the largest has m - sum over k < m of (k / m)^N on average; a step of few sequences takes the time of reading the weights.
    m, count = 1000, 8
    uniform = replace(STEP, prompts=count, prompt_lengths=Lengths.around(10, 0), output_lengths=Lengths.of(range(1, m + 1)))
    largest = m - sum((k / m) ** count for k in range(1, m))
    time = predict_rl_step(LLAMA_3_8B, H100, uniform)
    assert time.longest_tokens == pytest.approx(largest)
    assert time.rollout == pytest.approx((largest - 1) * predict_decode_step(LLAMA_3_8B, ServingLayout(), H100, 4, 250).seconds, rel=0.03)
    more = predict_rl_step(LLAMA_3_8B, H100, replace(uniform, prompts=4 * count, engines=4))
    assert more.longest_tokens == pytest.approx(m - sum((k / m) ** (4 * count) for k in range(1, m)))
    assert more.rollout > time.rollout


def test_the_tail_of_a_long_tailed_rollout_is_what_the_last_tenth_takes_beyond_the_others() -> None:
    long = replace(STEP, prompts=256, output_lengths=Lengths.around(400, 1.0))
    time = predict_rl_step(LLAMA_3_8B, H100, long)
    nine_in_ten, alone = long.output_lengths.quantile(0.9), predict_decode_step(LLAMA_3_8B, ServingLayout(), H100, 8, 2000).seconds
    assert time.tail == pytest.approx((time.longest_tokens - nine_in_ten) * alone, rel=0.15)
    assert time.tail > time.rollout / 2


def test_a_partial_rollout_ends_after_its_budget_and_draws_the_tokens_of_as_many_samples() -> None:
    long = replace(STEP, prompts=64, output_lengths=Lengths.around(400, 1.0))
    partial = replace(long, budget_tokens=500)
    whole, cut = (predict_rl_step(LLAMA_3_8B, H100, step) for step in (long, partial))
    assert cut.longest_tokens == 500 < whole.longest_tokens
    assert cut.rollout < 0.6 * whole.rollout
    assert sum(each.output_tokens for each in _round_requests(partial)) == sum(each.output_tokens for each in _round_requests(long))
    # What a sample has already is computed again in each further round.
    two = replace(STEP, prompts=1, output_lengths=Lengths.around(1200, 0), budget_tokens=500)
    assert [(each.prompt_tokens, each.output_tokens) for each in _round_requests(two)] == [(500, 500), (1000, 500), (1500, 200)]


def test_more_sequences_than_fit_wait_and_samples_of_a_group_share_their_prompt() -> None:
    narrow = replace(STEP, engine=ServingLayout(max_num_seqs=8))
    # The prompts of the second half are computed when the first half has ended.
    one, both = predict_rl_step(LLAMA_3_8B, H100, replace(narrow, prompts=8)), predict_rl_step(LLAMA_3_8B, H100, narrow)
    assert both.rollout == pytest.approx(2 * one.rollout, rel=0.01)
    grouped = replace(STEP, prompts=2, group=8)
    assert [each.prompt_tokens for each in _round_requests(grouped)] == ([500.0] + [0.0] * 7) * 2


def test_training_takes_the_steps_of_its_tokens_and_passes_a_third() -> None:
    equal = replace(STEP, prompts=64, output_lengths=Lengths.around(1548, 0), micro_batch_tokens=2048)
    time = predict_rl_step(LLAMA_3_8B, H100, equal)
    one = predict_step_time(LLAMA_3_8B, TRAINING, H100)
    assert time.training == pytest.approx(one.seconds)
    assert predict_rl_step(LLAMA_3_8B, H100, replace(equal, passes=2)).inference == pytest.approx(2 * (one.products + one.attention + one.memory_bound) / 3)
    assert predict_rl_step(LLAMA_3_8B, H100, replace(equal, epochs=2, trained=2)).training == pytest.approx(4 * one.seconds)
    four = predict_rl_step(LLAMA_3_8B, H100, replace(equal, minibatches=4)).training
    assert four == pytest.approx(one.seconds + 3 * one.optimizer, rel=0.1)


def test_a_pass_of_tandems_trainer_leaves_out_logits_and_the_end_of_the_last_layer_of_prompts() -> None:
    equal = replace(STEP, prompts=64, output_lengths=Lengths.around(1548, 0), micro_batch_tokens=2048, passes=1)
    # Nothing is predicted after the last token, which no network reads.
    head, kept = 128256 * 4096, 1548 / 2047
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    behind_attention = 4096 * 4096 + 3 * 4096 * 14336
    for parallel, left_out in ((TRAINING.parallel, head + behind_attention), (ParallelConfig(data=4, tensor=2), head)):
        own = replace(TRAINING, parallel=parallel, trainer=TrainerConfig())
        one, time = (predict_step_time(LLAMA_3_8B, own, H100), predict_rl_step(LLAMA_3_8B, H100, replace(equal, training=own)))
        share = 1 - (1 - kept) * left_out / (32 * layer + head)
        computed = share * one.products + one.attention + one.memory_bound
        assert time.inference == pytest.approx(computed / 3 + one.tensor_communication / 2)


def test_a_step_of_tandems_trainer_computes_what_samples_begin_with_once_in_passes_and_where_asked_in_updates() -> None:
    prompt, completion, group, own = 500, 1548, 4, replace(TRAINING, parallel=ParallelConfig(data=8), trainer=TrainerConfig())
    grouped = replace(STEP, prompts=16, group=group, output_lengths=Lengths.around(completion, 0), micro_batch_tokens=16_384, passes=1, training=own)
    shared = replace(grouped, training=replace(own, trainer=TrainerConfig(share_prompts=True)))
    plain, once = (predict_rl_step(LLAMA_3_8B, H100, step) for step in (grouped, shared))
    assert plain.inference == pytest.approx(once.inference) and once.training < plain.training
    # In fp8 a pass shares nothing unless it is asked to.
    in_fp8 = [replace(own, precision="fp8", trainer=TrainerConfig(precision="fp8", share_prompts=shares)) for shares in (False, True)]
    alone, whole = (predict_rl_step(LLAMA_3_8B, H100, replace(grouped, training=each)) for each in in_fp8)
    tokens = (prompt + group * (completion - 1)) / (group * (prompt + completion - 1))
    assert whole.inference / alone.inference == pytest.approx(tokens, rel=0.05)
    # Prompts with a system prompt have it once in each micro-batch, which has two of them; so do completions that begin alike.
    prefixed = replace(shared, alike=Prompts.with_prefix(prompt, 400))
    saved = (once.inference - predict_rl_step(LLAMA_3_8B, H100, prefixed).inference) / once.inference
    assert saved == pytest.approx(400 / 2 / (prompt + group * (completion - 1)), rel=0.15)
    begun = predict_rl_step(LLAMA_3_8B, H100, replace(shared, begun=0.5)).inference / once.inference
    assert begun == pytest.approx((prompt + group * (completion - 1) / 2) / (prompt + group * (completion - 1)), rel=0.06)


def test_prompts_shorter_than_what_was_known_to_begin_alike_are_predicted_to_take_what_those_with_a_prefix_of_that_share_do() -> None:
    own = replace(TRAINING, parallel=ParallelConfig(), global_batch=1, trainer=TrainerConfig(share_prompts=True))
    grouped = replace(STEP, prompts=32, group=8, output_lengths=Lengths.around(50, 0), micro_batch_tokens=1 << 20, passes=1, training=own)
    for prompt in (20, 100):
        step = replace(grouped, prompt_lengths=Lengths.around(prompt, 0))
        # 500 of 520 tokens are the same in all prompts.
        known = Prompts.of([(*range(500), *(1000 + number,) * 20) for number in range(32)])
        measured, prefixed, apart = (
            predict_rl_step(LLAMA_3_8B, H100, replace(step, alike=alike)) for alike in (known, Prompts.with_prefix(prompt, prompt * 500 / 520), None)
        )
        assert measured.training == pytest.approx(prefixed.training, rel=0.01) and measured.inference == pytest.approx(prefixed.inference, rel=0.01)
        assert 0 < measured.training < apart.training


def test_weights_are_written_by_all_ranks_of_a_node_and_read_by_every_engine_over_the_bus() -> None:
    size = 2 * parameter_count(LLAMA_3_8B)
    one = weight_update_seconds(LLAMA_3_8B, H100, ServingLayout(2), 8, 4)
    assert one == pytest.approx(size / 8 / H100.host_bandwidth + size / 2 / H100.host_bandwidth)
    assert weight_update_seconds(LLAMA_3_8B, H100, ServingLayout(2), 16, 8) == pytest.approx(one + size / (8 * H100.network_bandwidth))


def test_the_trainer_is_moved_where_it_does_not_fit_and_one_step_off_hides_the_shorter_phase() -> None:
    held = predict_rl_step(LLAMA_3_8B, H100, replace(STEP, held_bytes=60 << 30))
    assert held.switch == pytest.approx(2 * (60 << 30) / H100.host_bandwidth)
    assert predict_rl_step(LLAMA_3_8B, H100, replace(STEP, held_bytes=1 << 30)).switch == 0
    ahead = predict_rl_step(LLAMA_3_8B, H100, replace(STEP, held_bytes=60 << 30, is_ahead=True))
    assert ahead.seconds == pytest.approx(max(ahead.rollout, ahead.training) + ahead.weight_update)


def test_a_step_that_is_none_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="engines are 0; a rollout needs at least 1"):
        predict_rl_step(LLAMA_3_8B, H100, replace(STEP, engines=0))
    with pytest.raises(UserError, match="add engines"):
        predict_rl_step(LLAMA_3_8B, H100, replace(STEP, prompts=10**9))
