"""Loss and gradients do not depend on how a batch is split into micro-batches, nor on tokens that do not count."""

import math
import random
from dataclasses import replace

import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.trainer import TrainerConfig
from tandem.rl.algorithms.loss import make_policy_loss
from tandem.rl.algorithms.update import update_policy
from tandem.runtime.records.tracing import Tracer, read_trace
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.logprobs import sequence_logprobs
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.micro_batch import collate, forward_tokens
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.packing import pack, split
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.trainer.step import predict
from tandem.types import Batch, RunError

CONFIG = AlgorithmConfig(kl_coef=0.1, tis_cap=2.0, dual_clip=3.0, clip_ratio_high=0.28)
VARIANTS = [
    CONFIG,
    replace(CONFIG, loss_agg_mode="seq-mean-token-sum", kl_estimator="k2"),
    replace(CONFIG, loss_agg_mode="seq-mean-token-mean", importance_level="sequence", kl_estimator="k3+"),
    replace(CONFIG, loss_agg_mode="seq-mean-token-sum-norm", tis_level="sequence", kl_estimator="k1"),
]


def loss_and_gradients(model, batch, config, bins=None, temperature=1.0):
    sequences = [s for s in batch.sequences if forward_tokens(s)]
    loss = make_policy_loss(config, counts_of(sequences, batch.length_constant), temperature, sum(sum(s.loss_mask) for s in sequences))
    model.zero_grad(set_to_none=True)
    total, sums = 0.0, {}
    for chosen in bins or [tuple(range(len(sequences)))]:
        micro_batch = collate([sequences[i] for i in chosen], model.head_weight.dtype)
        share = loss(predict(model, micro_batch, temperature), micro_batch)
        share.loss.backward()
        total += share.loss.item()
        for name, value in share.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}, sums


def distance(found, wanted):
    """Returns the norm of the difference relative to the norm, over all parameters."""
    difference = math.fsum((found[name] - wanted[name]).double().square().sum().item() for name in wanted)
    return math.sqrt(difference / math.fsum(value.double().square().sum().item() for value in wanted.values()))


def cuts(batch):
    sequences = [s for s in batch.sequences if forward_tokens(s)]
    shuffled = list(range(len(sequences)))
    random.Random(1).shuffle(shuffled)
    return {
        "one by one": [(i,) for i in range(len(sequences))],
        "packed to 25 tokens": pack(sequences, 25),
        "packed to 60 tokens": pack(sequences, 60),
        "one micro-batch, shuffled": [tuple(shuffled)],
        "three, shuffled": [tuple(shuffled[::3]), tuple(shuffled[1::3]), tuple(shuffled[2::3])],
    }


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: c.loss_agg_mode)
def test_loss_and_gradients_do_not_depend_on_the_cut_in_float64(make_model, make_batch, config):
    model, batch = make_model(), make_batch()
    total, gradients, sums = loss_and_gradients(model, batch, config, temperature=0.7)
    for name, bins in cuts(batch).items():
        found = loss_and_gradients(model, batch, config, bins, temperature=0.7)
        assert found[0] == pytest.approx(total, rel=1e-10), name
        assert distance(found[1], gradients) < 1e-10, name
        assert found[2] == pytest.approx(sums, rel=1e-10), name


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_gradients_do_not_depend_on_the_cut_in_float32(make_model, make_batch, kernels):
    model, batch = make_model(torch.float32, kernels=kernels), make_batch()
    _, gradients, _ = loss_and_gradients(model, batch, CONFIG)
    for name, bins in cuts(batch).items():
        assert distance(loss_and_gradients(model, batch, CONFIG, bins)[1], gradients) < 1e-5, name


def test_what_is_masked_changes_nothing(make_model, make_batch):
    """Samples without a counted token, and tokens after the last counted one, can be removed."""
    model, batch = make_model(), make_batch()
    total, gradients, _ = loss_and_gradients(model, batch, CONFIG)
    kept = []
    for sequence in batch.sequences:
        length = forward_tokens(sequence) + 1
        if length > 1:
            cut = {
                n: getattr(sequence, n)[:length] for n in ("token_ids", "loss_mask", "advantages", "rollout_logprobs")
            }
            cut |= {n: getattr(sequence, n)[:length] for n in ("sampling_logprobs", "reference_logprobs")}
            kept.append(replace(sequence, **cut))
    found = loss_and_gradients(model, Batch(0, tuple(kept), batch.length_constant), CONFIG)
    assert found[0] == total
    assert all(torch.equal(found[1][name], value) for name, value in gradients.items())


def test_nothing_is_padded_and_only_rows_that_count_reach_the_head(make_batch):
    sequences = [s for s in make_batch().sequences if forward_tokens(s)]
    micro_batch = collate(sequences, torch.float64)
    assert micro_batch.tokens.numel() == sum(map(forward_tokens, sequences)) == micro_batch.cu_seqlens[-1]
    assert micro_batch.rows.numel() == sum(sum(m != 0 for m in s.loss_mask) for s in sequences)
    for number, sequence in enumerate(sequences):
        mine = (micro_batch.sequence_of_row == number).nonzero().flatten()
        start = int(micro_batch.cu_seqlens[number])
        for row in mine.tolist():
            index = int(micro_batch.rows[row]) - start + 1
            assert sequence.loss_mask[index] == 1
            assert int(micro_batch.targets[row]) == sequence.token_ids[index]
            assert float(micro_batch.rollout_logprobs[row]) == sequence.rollout_logprobs[index]
            assert int(micro_batch.positions[micro_batch.rows[row]]) == index - 1


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda s: {"loss_mask": (1.0, *s.loss_mask[1:])}, "counts token 0"),
        (lambda s: {"loss_mask": (0.0,) * len(s.token_ids)}, "has no counted token"),
        (lambda s: {"advantages": s.advantages[1:]}, "advantages has"),
        (lambda s: {"loss_mask": s.loss_mask[1:]}, "loss_mask has"),
    ],
)
def test_a_sequence_that_contradicts_itself_is_refused_by_name(make_batch, harm, named):
    sequence = make_batch().sequences[0]
    with pytest.raises(ValueError, match=f"'{sequence.id}'.*{named}"):
        collate([replace(sequence, **harm(sequence))])


def trained(make_model, batch, algorithm, trainer, temperature=1.0):
    model = make_model()
    optimizer = AdamW(model.named_parameters(), trainer)
    result = update_policy(Replica(alone(), model, optimizer), batch, algorithm, trainer, temperature=temperature)
    return model, optimizer, result


def test_a_step_does_not_depend_on_the_size_of_micro_batches(make_model, make_batch):
    steps = [
        trained(
            make_model,
            make_batch(),
            CONFIG,
            TrainerConfig(learning_rate=1e-3, dtype="float64", micro_batch_tokens=tokens),
        )
        for tokens in (7, 40, 10_000)
    ]
    for model, _, result in steps[1:]:
        for name, parameter in model.named_parameters():
            # AdamW divides by the root of the second moment, which amplifies rounding errors of tiny gradients.
            torch.testing.assert_close(parameter, dict(steps[0][0].named_parameters())[name], rtol=1e-7, atol=1e-9)
        assert result.metrics == pytest.approx(steps[0][2].metrics, rel=1e-10)
        assert result.tokens == steps[0][2].tokens


def test_a_step_taken_twice_has_the_same_bits(make_model, make_batch):
    trainer = TrainerConfig(learning_rate=1e-3, dtype="float64", micro_batch_tokens=40)
    first, second = (trained(make_model, make_batch(), CONFIG, trainer) for _ in range(2))
    assert first[2] == second[2]
    for (_, a), (_, b) in zip(first[0].named_parameters(), second[0].named_parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_batch_in_which_nothing_counts_changes_neither_weights_nor_moments(make_model, make_batch):
    batch = make_batch()
    empty = Batch(0, tuple(replace(s, loss_mask=(0.0,) * len(s.token_ids)) for s in batch.sequences))
    model, optimizer, result = trained(make_model, empty, CONFIG, TrainerConfig(learning_rate=1e-3))
    assert not result.updated
    assert optimizer.updates == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), make_model().parameters(), strict=True))


def test_a_gradient_that_is_not_finite_stops_the_step_before_the_weights_change(make_model, make_batch):
    batch = make_batch()
    first = batch.sequences[0]
    broken = Batch(0, (replace(first, advantages=tuple(float("nan") for _ in first.advantages)), *batch.sequences[1:]))
    model, trainer = make_model(), TrainerConfig(learning_rate=1e-3)
    optimizer = AdamW(model.named_parameters(), trainer)
    with pytest.raises(RunError, match="gradient norm is nan"):
        update_policy(Replica(alone(), model, optimizer), broken, CONFIG, trainer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), make_model().parameters(), strict=True))


def all_sampled(sequence):
    """Returns ``sequence`` with a loss mask of ones over its completion."""
    return replace(sequence, loss_mask=(0.0,) * sequence.prompt_length + (1.0,) * (len(sequence.token_ids) - sequence.prompt_length))


def with_logprobs(model, batch):
    """Returns ``batch`` with the model's own log-probabilities of every sampled token as both records."""
    own = sequence_logprobs(FrozenReplica(alone(), model), [all_sampled(s) for s in batch.sequences], 10_000)
    return Batch(
        batch.step,
        tuple(replace(s, rollout_logprobs=own[s.id], sampling_logprobs=own[s.id]) for s in batch.sequences),
        14,
    )


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_mismatch_is_exactly_zero_where_rollout_and_trainer_agree_and_shows_where_not(make_model, make_batch, kernels):
    model = make_model(torch.float32, kernels=kernels)
    trainer = TrainerConfig(learning_rate=1e-3, micro_batch_tokens=30)
    agreed = with_logprobs(model, make_batch())
    metrics = update_policy(Replica(alone(), model, AdamW(model.named_parameters(), trainer)), agreed, AlgorithmConfig(), trainer).metrics
    assert metrics["mismatch_kl"] == 0.0
    assert metrics["mismatch_max_abs"] == 0.0
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0
    # The weights have changed by one step: the same batch is now off-policy.
    metrics = update_policy(Replica(alone(), model, AdamW(model.named_parameters(), trainer)), agreed, AlgorithmConfig(), trainer).metrics
    assert metrics["mismatch_kl"] > 0.0
    assert metrics["mismatch_max_abs"] > 0.0


def test_recomputed_old_logprobs_make_the_first_update_on_policy_whatever_the_rollout_reported(make_model, make_batch):
    trainer = TrainerConfig(learning_rate=1e-3, dtype="float64")
    algorithm = AlgorithmConfig(old_logprobs="recompute")
    _, _, result = trained(make_model, make_batch(), algorithm, trainer, temperature=0.7)
    assert result.metrics["actor/ppo_kl"] == 0.0
    assert result.metrics["actor/pg_clipfrac"] == 0.0
    assert result.metrics["mismatch_kl"] > 0.0


def test_minibatches_and_epochs_are_so_many_updates_and_the_mismatch_is_that_before_the_first(make_model, make_batch):
    trainer = TrainerConfig(learning_rate=1e-2, micro_batch_tokens=40)
    model = make_model(torch.float32)
    batch = with_logprobs(model, make_batch(count=16))
    optimizer = AdamW(model.named_parameters(), trainer)
    result = update_policy(Replica(alone(), model, optimizer), batch, AlgorithmConfig(minibatches=3, epochs=2), trainer)
    assert optimizer.updates == 6
    assert result.metrics["mismatch_kl"] == 0.0
    assert result.metrics["actor/ppo_kl"] != 0.0


def test_a_batch_is_split_into_runs_of_nearly_equal_count():
    assert [list(part) for part in split(range(10), 3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [list(part) for part in split(range(2), 5)] == [[0], [1]]
    assert [list(part) for part in split([], 5)] == [[]]


def test_progress_counts_every_micro_batch_of_every_update(make_model, make_batch):
    heard = []
    model, trainer = make_model(), TrainerConfig(micro_batch_tokens=30)
    optimizer = AdamW(model.named_parameters(), trainer)
    update_policy(
        Replica(alone(), model, optimizer),
        make_batch(),
        AlgorithmConfig(minibatches=2, epochs=2),
        trainer,
        on_progress=lambda *at: heard.append(at),
    )
    total = heard[-1][1]
    assert heard == [(done, total) for done in range(1, total + 1)]


def test_an_update_that_is_not_finite_is_left_out_by_a_guard_and_the_others_are_taken(make_model, make_batch):
    batch, trainer = make_batch(), TrainerConfig(learning_rate=1e-3, dtype="float64")
    broken = replace(batch.sequences[0], advantages=(float("nan"),) * len(batch.sequences[0].token_ids))
    model, guard = make_model(), GradScaler(trainer)
    optimizer = AdamW(model.named_parameters(), trainer)
    harmed = replace(batch, sequences=(broken, *batch.sequences[1:]))
    result = update_policy(Replica(alone(), model, optimizer), harmed, AlgorithmConfig(minibatches=3), trainer, guard=guard)
    assert (result.verdict, result.updated, optimizer.updates) == ("skipped", True, 2)
    assert result.metrics["train/skipped_steps"] == guard.skipped == 1
    other = make_model()
    counted = [s for s in batch.sequences if forward_tokens(s) > 0]
    rest = replace(batch, sequences=tuple(counted[len(split(counted, 3)[0]) :]))
    update_policy(Replica(alone(), other, AdamW(other.named_parameters(), trainer)), rest, AlgorithmConfig(minibatches=2), trainer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_traced_update_shards_the_batch_infers_and_then_passes_micro_batches(make_model, make_batch, tmp_path):
    model, trainer = make_model(), TrainerConfig(dtype="float64")
    tracer, phases = Tracer(tmp_path, steps=(0,)), []
    tracer.begin(0)
    replica = Replica(alone(), model, AdamW(model.named_parameters(), trainer))
    update_policy(replica, make_batch(), AlgorithmConfig(old_logprobs="recompute"), trainer, tracer=tracer, on_phase=phases.append)
    assert [span.name for span in sorted(read_trace(tmp_path, 0), key=lambda span: span.start_s)] == [
        "shard the batch", "log-probabilities", "log-probabilities", "forward", "backward", "clip", "optimizer",
    ]  # fmt: skip
    assert phases == ["forward", "forward", "forward", "backward", "reduce", "optimizer"]
