"""``mismatch_kl`` and ``mismatch_max_abs`` cover every sampled token, in each mode and under any mask."""

import math
from dataclasses import replace

import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.trainer import TrainerConfig
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.logprobs import sequence_logprobs
from tandem.trainer.micro_batch import forward_tokens
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.packing import pack_shares, packed_tokens
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.types import Batch

TRAINER = TrainerConfig(learning_rate=1e-3, micro_batch_tokens=40)
K3_OF_HALF_A_NAT = math.exp(-0.5) - 1 + 0.5
MODES = ["rollout", "recompute"]


def sampled_mask(sequence):
    return (0.0,) * sequence.prompt_length + (1.0,) * (len(sequence.token_ids) - sequence.prompt_length)


def sampled_tokens(batch):
    return sum(len(s.token_ids) - s.prompt_length for s in batch.sequences)


def recorded(model, batch):
    """Returns ``batch`` with the model's own log-probability of every sampled token as its record."""
    own = sequence_logprobs(FrozenReplica(alone(), model), [replace(s, loss_mask=sampled_mask(s)) for s in batch.sequences], 1000)
    return replace(batch, sequences=tuple(replace(s, rollout_logprobs=own[s.id], sampling_logprobs=own[s.id]) for s in batch.sequences))


def without_masks(batch):
    return replace(batch, sequences=tuple(replace(s, loss_mask=sampled_mask(s)) for s in batch.sequences))


def harmed(batch, chosen, index, by=0.5):
    """Returns ``batch`` with ``by`` nats added to the record of token ``index`` of the sequence ``chosen``."""
    sequence = batch.sequences[chosen]
    values = list(sequence.rollout_logprobs)
    values[index] += by
    others = batch.sequences[:chosen], batch.sequences[chosen + 1 :]
    return Batch(batch.step, (*others[0], replace(sequence, rollout_logprobs=tuple(values)), *others[1]), batch.length_constant)


def metrics_of(model, batch, algorithm, **settings):
    replica = Replica(alone(), model, AdamW(model.named_parameters(), TRAINER))
    return update_policy(replica, batch, algorithm, TRAINER, **settings).metrics


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_record_of_any_token_of_any_sample_is_seen(make_model, make_batch, mode, minibatches, temperature):
    algorithm = AlgorithmConfig(old_logprobs=mode, minibatches=minibatches)
    batch = recorded(make_model(torch.float32), make_batch(count=16))
    agreed = metrics_of(make_model(torch.float32), batch, algorithm, temperature=temperature)
    assert agreed["mismatch_kl"] == agreed["mismatch_max_abs"] == 0.0
    counted = [i for i, s in enumerate(batch.sequences) if forward_tokens(s) > 0]
    masked = [i for i, s in enumerate(batch.sequences) if forward_tokens(s) == 0]
    partly = next((i, s.loss_mask.index(0.0, s.prompt_length)) for i, s in enumerate(batch.sequences) if i in counted and 0.0 in s.loss_mask[s.prompt_length :])
    places = {
        "the first minibatch": (counted[0], -1), "the last minibatch": (counted[-1], batch.sequences[counted[-1]].prompt_length),
        "a masked sample": (masked[0], -1), "the last masked sample": (masked[-1], batch.sequences[masked[-1]].prompt_length),
        "a masked token of a sample that counts": partly,
    }  # fmt: skip
    for name, (chosen, index) in places.items():
        found = metrics_of(make_model(torch.float32), harmed(batch, chosen, index), algorithm, temperature=temperature)
        assert found["mismatch_max_abs"] == pytest.approx(0.5, rel=1e-6), name
        assert found["mismatch_kl"] == pytest.approx(K3_OF_HALF_A_NAT / sampled_tokens(batch), rel=1e-6), name


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_in_which_nothing_counts_is_compared_too(make_model, make_batch, mode):
    batch = recorded(make_model(torch.float32), make_batch())
    empty = replace(batch, sequences=tuple(replace(s, loss_mask=(0.0,) * len(s.token_ids)) for s in batch.sequences))
    for by in (0.0, 0.5):
        found = metrics_of(make_model(torch.float32), harmed(empty, 3, -1, by), AlgorithmConfig(old_logprobs=mode))
        assert found["mismatch_max_abs"] == pytest.approx(by, rel=1e-6)


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_an_observation_is_not_compared_whatever_its_record(make_model, make_batch, mode, minibatches):
    algorithm, batch = AlgorithmConfig(old_logprobs=mode, minibatches=minibatches), recorded(make_model(torch.float32), make_batch(count=16))
    sequences, observations = [], 0
    for sequence in batch.sequences:
        start = sequence.prompt_length
        is_sampled = tuple(index >= start and (index - start) % 4 != 1 for index in range(len(sequence.token_ids)))
        observations += sum(not sampled for sampled in is_sampled[start:])
        mask = tuple(value * sampled for value, sampled in zip(sequence.loss_mask, is_sampled, strict=True))
        sequences.append(replace(sequence, loss_mask=mask, response_mask=is_sampled))
    episodes = replace(batch, sequences=tuple(sequences))
    first = next(i for i, s in enumerate(sequences) if len(s.token_ids) - s.prompt_length > 2)
    start = sequences[first].prompt_length
    ignored = metrics_of(make_model(torch.float32), harmed(episodes, first, start + 1), algorithm)
    assert observations > 0 and ignored["mismatch_kl"] == ignored["mismatch_max_abs"] == 0.0
    seen = metrics_of(make_model(torch.float32), harmed(episodes, first, start + 2), algorithm)
    assert seen["mismatch_max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert seen["mismatch_kl"] == pytest.approx(K3_OF_HALF_A_NAT / (sampled_tokens(batch) - observations), rel=1e-6)


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_older_weights_drew_is_not_compared_and_counts_in_the_loss_with_its_record(make_model, make_batch, mode, minibatches):
    algorithm, batch = AlgorithmConfig(old_logprobs=mode, minibatches=minibatches), recorded(make_model(torch.float32), make_batch(count=16))
    first = next(i for i, s in enumerate(batch.sequences) if sum(s.loss_mask) > 2 and all(s.loss_mask[s.prompt_length :]))
    chosen = batch.sequences[first]
    start = chosen.prompt_length
    is_old = tuple(index == start for index in range(len(chosen.token_ids)))
    marked = replace(batch, sequences=tuple(replace(s, off_policy=is_old) if s is chosen else s for s in batch.sequences))
    stale = metrics_of(make_model(torch.float32), harmed(marked, first, start), algorithm)
    assert stale["mismatch_kl"] == stale["mismatch_max_abs"] == 0.0
    # The mark changes what is compared, not the loss: its ratio is to the record, where old log-probabilities are those of the rollout.
    unmarked = metrics_of(make_model(torch.float32), harmed(batch, first, start), algorithm)
    assert unmarked["mismatch_max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert {name: value for name, value in stale.items() if "mismatch" not in name} == {n: v for n, v in unmarked.items() if "mismatch" not in n}
    seen = metrics_of(make_model(torch.float32), harmed(marked, first, start + 1), algorithm)
    assert seen["mismatch_max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert seen["mismatch_kl"] == pytest.approx(K3_OF_HALF_A_NAT / (sampled_tokens(batch) - 1), rel=1e-6)


def tokens_without_gradient(model, run):
    seen = []
    hook = model.register_forward_pre_hook(lambda module, arguments: seen.append(0 if torch.is_grad_enabled() else len(arguments[0])))
    run()
    hook.remove()
    return sum(seen)


def tokens_of_passes(sequences):
    """Returns the tokens of passes without gradient over ``sequences``, which have what sequences of a micro-batch begin with in common once."""
    (bins,) = pack_shares(sequences, 1, TRAINER.micro_batch_tokens, share_prompts=True)
    return sum(packed_tokens([sequences[i] for i in chosen], True) for chosen in bins)


def test_comparing_costs_nothing_where_the_first_update_sees_all_and_else_a_forward_pass_of_what_it_does_not_see(make_model, make_batch):
    model, batch = make_model(torch.float32), make_batch(count=16)
    whole = without_masks(batch)
    first, unseen = len(batch.sequences[0].token_ids) - 1, tokens_of_passes(whole.sequences[8:])
    assert tokens_without_gradient(model, lambda: metrics_of(model, whole, AlgorithmConfig())) == 0
    assert tokens_without_gradient(model, lambda: metrics_of(model, whole, AlgorithmConfig(minibatches=2))) == unseen
    one_masked = replace(whole, sequences=(replace(whole.sequences[0], loss_mask=(0.0,) * (first + 1)), *whole.sequences[1:]))
    assert tokens_without_gradient(model, lambda: metrics_of(model, one_masked, AlgorithmConfig())) == first
    recompute = AlgorithmConfig(old_logprobs="recompute", minibatches=2)
    assert tokens_without_gradient(model, lambda: metrics_of(model, one_masked, recompute)) == tokens_of_passes(whole.sequences[1:]) + first
