"""The gradient of the GRPO loss against transformers' model and plain torch, one sequence at a time, in float64."""

import math

import pytest
import torch
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model, to_huggingface
from tandem.rl.algorithms import token_entropies
from tandem.rl.algorithms.token_entropies import EntropyRecord
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.logprobs import sequence_logprobs
from tandem.trainer.micro_batch import counted_indices
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.types.token_entropies import unpack_halves

TEMPERATURE = 0.8


def norm_in_float64(self, hidden):
    """The norm, which transformers computes in fp32 for any dtype of the model."""
    return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.fixture
def truth(make_model, tmp_path, monkeypatch):
    """The tiny model in transformers, in float64."""
    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm_in_float64)
    save_model(make_model(), tmp_path / "model", eos_token_id=1)
    return Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64, attn_implementation="sdpa")


def truth_logprobs(truth, sequence, temperature):
    """Returns the log-probability of every token except the first: [L - 1]."""
    logits = truth(torch.tensor([sequence.token_ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(sequence.token_ids[1:])[:, None])[:, 0]


def truth_loss(truth, batch):
    """GRPO as written in its papers: clip 0.2 / 0.28, dual clip 3, truncated importance 2, KL k3 with weight 0.1, token mean."""
    total, tokens = 0.0, sum(sum(s.loss_mask) for s in batch.sequences)
    for sequence in batch.sequences:
        scaled, raw = truth_logprobs(truth, sequence, TEMPERATURE), truth_logprobs(truth, sequence, 1.0)
        for index in range(1, len(sequence.token_ids)):
            if sequence.loss_mask[index] == 0:
                continue
            # At a temperature other than 1 the rollout's old policy is its sampling distribution: pi_old / mu is 1.
            old, advantage = sequence.sampling_logprobs[index], sequence.advantages[index]
            ratio = torch.exp(scaled[index - 1] - old)
            value = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            if advantage < 0 and value > -3.0 * advantage:
                value = torch.tensor(-3.0 * advantage, dtype=torch.float64)
            difference = sequence.reference_logprobs[index] - raw[index - 1]
            total = total + (value + 0.1 * (difference.exp() - difference - 1)) / tokens
    return total


def gradients_by_name(model):
    """Returns our gradients by Hugging Face name."""
    holder = Decoder(model.shapes, model.kernels, dtype=torch.float64)
    with torch.no_grad():
        for held, parameter in zip(holder.parameters(), model.parameters(), strict=True):
            held.copy_(parameter.grad)
    return dict(to_huggingface(holder))


def test_the_gradient_of_a_grpo_step_is_that_of_transformers_model_and_plain_torch(truth, make_model, make_batch):
    model, batch = make_model(), make_batch()
    algorithm = AlgorithmConfig(kl_coef=0.1, tis_cap=2.0, dual_clip=3.0, clip_ratio_high=0.28)
    trainer = TrainerConfig(dtype="float64", max_grad_norm=0.0, micro_batch_tokens=40)
    replica = Replica(alone(), model, AdamW(model.named_parameters(), trainer))
    metrics = update_policy(replica, batch, algorithm, trainer, temperature=TEMPERATURE).metrics
    loss = truth_loss(truth, batch)
    loss.backward()
    assert metrics["actor/pg_clipfrac"] > 0.1
    assert metrics["actor/pg_loss"] + 0.1 * metrics["kl"] == pytest.approx(loss.item(), rel=1e-10)
    wanted = {name: p.grad for name, p in truth.named_parameters()}
    found = gradients_by_name(model)
    assert found.keys() == wanted.keys()
    difference = math.fsum((found[name] - wanted[name]).square().sum().item() for name in wanted)
    norm = math.fsum(value.square().sum().item() for value in wanted.values())
    assert math.sqrt(difference / norm) < 1e-8
    assert metrics["actor/grad_norm"] == pytest.approx(math.sqrt(norm), rel=1e-8)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_entropies_of_tokens_are_those_of_transformers_model_and_cost_no_bit_of_the_update(truth, make_model, make_batch, share_prompts):
    batch, trainer = make_batch(), TrainerConfig(dtype="float64", micro_batch_tokens=40, share_prompts=share_prompts)
    record, results = EntropyRecord(), []
    for entropies in (None, record):
        replica = Replica(alone(), model := make_model(), AdamW(model.named_parameters(), trainer))
        result = update_policy(replica, batch, AlgorithmConfig(epochs=2), trainer, temperature=TEMPERATURE, entropies=entropies)
        results.append((result.metrics, torch.cat([each.detach().flatten() for each in model.parameters()])))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    of_tokens = record.take(batch.sequences, replica.ranks.world, model.device)
    assert list(of_tokens) == [sequence.id for sequence in batch.sequences if any(sequence.loss_mask)]
    for sequence in batch.sequences:
        if not any(sequence.loss_mask):
            continue
        with torch.no_grad():
            logprobs = (truth(torch.tensor([sequence.token_ids])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        entropy = [math.nan, *(-(logprobs.exp() * logprobs).sum(-1)).tolist()]
        wanted = [value if counts else math.nan for value, counts in zip(entropy, sequence.loss_mask, strict=True)][sequence.prompt_length :]
        assert unpack_halves(of_tokens[sequence.id]) == pytest.approx(wanted, rel=1e-3, nan_ok=True)
    assert not record.take(batch.sequences, replica.ranks.world, model.device), "it forgets"


def test_the_entropies_of_a_step_have_a_bound(make_model, make_batch, monkeypatch):
    batch, trainer = make_batch(), TrainerConfig(dtype="float64")
    counted = [len(counted_indices(sequence)) for sequence in batch.sequences]
    monkeypatch.setattr(token_entropies, "MOST_TOKENS", sum(counted[:3]))
    replica, record = Replica(alone(), model := make_model(), AdamW(model.named_parameters(), trainer)), EntropyRecord()
    update_policy(replica, batch, AlgorithmConfig(), trainer, entropies=record)
    assert list(record.take(batch.sequences, replica.ranks.world, model.device)) == [each.id for each in batch.sequences[:3]] and all(counted[:4])


def test_inferred_logprobs_are_those_of_transformers_model(truth, make_model, make_batch):
    batch = make_batch()
    for temperature in (1.0, TEMPERATURE):
        found = sequence_logprobs(FrozenReplica(alone(), make_model()), batch.sequences, 40, temperature)
        for sequence in batch.sequences:
            with torch.no_grad():
                wanted = [0.0, *truth_logprobs(truth, sequence, temperature).tolist()]
            wanted = [w if m else 0.0 for w, m in zip(wanted, sequence.loss_mask, strict=True)]
            assert list(found[sequence.id]) == pytest.approx(wanted, rel=1e-9)
