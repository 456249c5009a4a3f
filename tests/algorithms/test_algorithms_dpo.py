"""The loss on preference pairs against cases worked by hand, TRL's published formulas in float64, and the packing of pairs."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.kernels.api import TokenLogprobs
from tandem.model.head_outputs import HeadOutputs
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.algorithms.online_dpo import best_and_worst, pairs_of
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.dpo import AnswerRatios, dpo_loss, make_dpo_loss
from tandem.trainer.micro_batch import blank, collate
from tandem.trainer.packing import pack_pairs
from tandem.types import FinishReason, Sample, Score, ScoreState, TrainSequence, UserError, WeightVersion

LENGTHS = ((3, 5), (4, 1), (2, 2), (6, 3))


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "wanted"),
    [
        # h = 3 - (-1) = 4, beta 1/2: beta h = 2. Means over 3 and 2 tokens: 1 + 1/2 = 3/2, 1 / (2 beta) = 1.
        ("sigmoid", 0.0, math.log(1 + math.exp(-2))),
        ("sigmoid", 0.25, 0.75 * math.log(1 + math.exp(-2)) + 0.25 * math.log(1 + math.exp(2))),
        ("robust", 0.25, (0.75 * math.log(1 + math.exp(-2)) - 0.25 * math.log(1 + math.exp(2))) / 0.5),
        ("hinge", 0.0, 0.0),
        ("ipo", 0.0, 0.25),
    ],
)
def test_losses_equal_the_case_worked_by_hand(loss_type: Any, smoothing: float, wanted: float) -> None:
    found = dpo_loss(AnswerRatios(real(3), real(-1), real(3), real(2)), loss_type, 0.5, smoothing)
    assert found.item() == pytest.approx(wanted, rel=1e-14, abs=1e-14)
    # beta h = -1 / 2: the hinge is open.
    assert dpo_loss(AnswerRatios(real(-1), real(0), real(1), real(1)), "hinge", 0.5).item() == 1.5


def pairs(seed: int = 0) -> tuple[list[TrainSequence], list[Tensor]]:
    """Returns the sequences of four pairs, with the reference's log-probabilities, and log-probabilities of a policy for their learned tokens."""
    generator = torch.Generator().manual_seed(seed)
    sequences, policy = [], []
    for number, lengths in enumerate(LENGTHS):
        for side, length in enumerate(lengths):
            reference = -torch.rand(length, generator=generator, dtype=torch.float64) * 3
            policy.append(-torch.rand(length, generator=generator, dtype=torch.float64) * 3)
            mask = (0.0, 0.0) + (1.0,) * length
            sequences.append(TrainSequence(f"{number}/{side}", (1,) * (2 + length), 2, mask, reference_logprobs=(0.0, 0.0, *reference.tolist())))
    return sequences, policy


def trl(loss_type: str, beta: float, smoothing: float, policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    """trl/trainer/dpo_trainer.py, ``_compute_loss`` of each pair; label smoothing of ``sigmoid`` as its versions before 0.24 have it."""
    scores = torch.stack([(ours - theirs).sum() for ours, theirs in zip(policy, reference, strict=True)])
    tokens = real(*map(len, policy))
    delta = scores[::2] - scores[1::2]
    if loss_type == "sigmoid":
        return -F.logsigmoid(beta * delta) * (1 - smoothing) - F.logsigmoid(-beta * delta) * smoothing
    if loss_type == "hinge":
        return torch.relu(1 - beta * delta)
    if loss_type == "ipo":
        return ((scores / tokens)[::2] - (scores / tokens)[1::2] - 1 / (2 * beta)) ** 2
    clean, flipped = -(1 - smoothing) * F.logsigmoid(beta * delta), -smoothing * F.logsigmoid(-beta * delta)
    return (clean - flipped) / (1 - 2 * smoothing)


@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0), ("hinge", 0.0), ("robust", 0.2)])
@pytest.mark.parametrize("capacity", [1000, 13])
def test_loss_gradient_and_metrics_are_those_of_trl_whatever_the_micro_batches(loss_type: Any, smoothing: float, capacity: int) -> None:
    sequences, policy = pairs()
    reference = [real(*s.reference_logprobs[2:]) for s in sequences if s.reference_logprobs is not None]
    wanted = [p.clone().requires_grad_() for p in policy]
    loss = trl(loss_type, 0.3, smoothing, wanted, reference).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    ours = [p.clone().requires_grad_() for p in policy]
    bins = pack_pairs(sequences, capacity)
    assert len(bins) == (1 if capacity == 1000 else 3)
    make = make_dpo_loss(loss_type, 0.3, smoothing, counts_of(sequences).sequences // 2, "train/loss")
    total, sums = 0.0, dict[str, float]()
    for chosen in bins:
        raw = torch.cat([ours[i] for i in chosen])
        share = make(HeadOutputs(TokenLogprobs(raw, raw, raw)), collate([sequences[i] for i in chosen], torch.float64))
        share.loss.backward()  # type: ignore[no-untyped-call]
        total += share.loss.item()
        for name, value in share.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    assert total == pytest.approx(loss.item(), rel=1e-6) and sums["train/loss"] == pytest.approx(total)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-12)
    rewards = 0.3 * torch.stack([(p - r).sum() for p, r in zip(policy, reference, strict=True)])
    chosen_rewards, rejected_rewards = rewards[::2], rewards[1::2]
    assert sums["rewards/chosen"] == pytest.approx(chosen_rewards.mean().item())
    assert sums["rewards/rejected"] == pytest.approx(rejected_rewards.mean().item())
    assert sums["rewards/margins"] == pytest.approx((chosen_rewards - rejected_rewards).mean().item())
    assert sums["rewards/accuracies"] == (chosen_rewards > rejected_rewards).double().mean().item()
    assert sums["logps/rejected"] == pytest.approx(torch.stack([p.sum() for p in policy])[1::2].mean().item())


def test_a_rank_without_a_pair_has_the_same_metrics_and_a_gradient_of_zero() -> None:
    nothing = torch.empty(0, dtype=torch.float64, requires_grad=True)
    share = make_dpo_loss("ipo", 0.1, 0.0, 4, "train/loss")(HeadOutputs(TokenLogprobs(nothing, nothing, nothing)), blank(torch.float64))
    share.loss.backward()  # type: ignore[no-untyped-call]
    assert share.loss.item() == 0 and {"train/loss", "rewards/accuracies"} <= share.sums.keys() and not any(share.sums.values())


def test_pairs_are_packed_whole_and_side_by_side() -> None:
    sequences, _ = pairs()
    # Tokens through the network, without the last of each answer: 4 + 6, 5 + 2, 3 + 3, 7 + 4. A pair of 11 has a bin of its own.
    assert pack_pairs(sequences, 13) == [(6, 7), (0, 1), (2, 3, 4, 5)]
    assert pack_pairs([], 13) == []


def test_what_the_answers_of_a_pair_begin_with_is_computed_once() -> None:
    # 7 7 | 1 2 3 and 7 7 | 1 4: three tokens in common, of which one is learned. 8 | 5 5 and 8 | 5 5 6: the last token goes through the network once only
    # where one follows.
    rows = [((7, 7, 1, 2, 3), 2), ((7, 7, 1, 4), 2), ((8, 5, 5), 1), ((8, 5, 5, 6), 1)]
    sequences = [TrainSequence(str(i), ids, prompt, (0.0,) * prompt + (1.0,) * (len(ids) - prompt)) for i, (ids, prompt) in enumerate(rows)]
    # Through the network go 4 + 3 - 3 and 2 + 3 - 2 tokens; apart they are 7 and 5.
    assert pack_pairs(sequences, 7, share_prompts=True) == [(0, 1, 2, 3)] and pack_pairs(sequences, 7) == [(0, 1), (2, 3)]
    micro_batch = collate(sequences, torch.float64, share_prompts=True)
    assert micro_batch.tokens.tolist() == [7, 7, 1, 2, 8, 5, 5] and micro_batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert micro_batch.rows.tolist() == [1, 2, 3, 1, 2, 4, 5, 4, 5, 6] and micro_batch.targets.tolist() == [1, 2, 3, 1, 4, 5, 5, 5, 5, 6]


def test_the_best_and_the_worst_of_a_group_are_a_pair_and_equal_scores_are_none() -> None:
    rewards = torch.tensor([[0.5, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [2.0, 0.0, 1.0, 9.0], [1.0, 0.0, 0.0, 0.0]])
    valid = torch.tensor([[True] * 4, [True] * 4, [True, True, True, False], [True, False, False, False]])
    assert best_and_worst(rewards, valid) == [(1, 2), None, (0, 1), None]
    assert pairs_of([[7, 5, 3, 1], [0, 2, 4, 6], [8, 9, 10, 11], [12, 13, 14, 15]], rewards, valid) == [(5, 3), (8, 9)]


def drawn(prompt: str, index: int, length: int, finish: FinishReason = FinishReason.STOP) -> Sample:
    tokens = tuple(range(3, 3 + length))
    return Sample(f"0/{prompt}/{index}", prompt, index, (1, 2), tokens, (-1.0,) * length, (-1.0,) * length, (WeightVersion(0, 0),) * length, finish, "")


def test_a_batch_begins_with_the_pairs_and_counts_nothing_else() -> None:
    # Group a: 0 and 1 differ. Group b: equal. Group c: the best is empty and the next was not scored, so one is left.
    samples = [drawn("a", 0, 2), drawn("a", 1, 3), drawn("b", 0, 1), drawn("b", 1, 1), drawn("c", 0, 0), drawn("c", 1, 2), drawn("c", 2, 2)]
    values: list[float | None] = [0.0, 1.0, 0.5, 0.5, 1.0, None, 0.0]
    scores = [
        Score(s.id, ScoreState.INFRASTRUCTURE_FAULT if value is None else ScoreState.NUMBER, value) for s, value in zip(samples, values, strict=True)
    ]
    reference = {sample.id: (0.0, 0.0) + (-2.0,) * len(sample.token_ids) for sample in samples}
    batch = make_batch(3, samples, scores, AlgorithmConfig(name="online_dpo", group_size=3), 8, reference)
    assert [s.id for s in batch.sequences] == ["0/a/1", "0/a/0", "0/b/0", "0/b/1", "0/c/0", "0/c/1", "0/c/2"]
    assert [sum(s.loss_mask) for s in batch.sequences] == [3, 2, 0, 0, 0, 0, 0]
    assert batch.sequences[0].reference_logprobs == (0, 0, -2, -2, -2)


@pytest.mark.parametrize(("key", "value"), [("kl_coef", 0.1), ("dual_clip", 3.0), ("tis_cap", 2.0), ("old_logprobs", "recompute"), ("policy_loss", "cispo")])
def test_what_online_dpo_does_not_read_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"'algorithm.{key}' is .* which is not read: algorithm.name is 'online_dpo'"):
        AlgorithmConfig(name="online_dpo", **{key: value}).check()
    AlgorithmConfig(name="online_dpo", loss_type="ipo", beta=0.5, minibatches=2).check()
    with pytest.raises(UserError, match=r"'algorithm.beta' is 0.5, which is not read: algorithm.name is 'grpo'; set algorithm.name to online_dpo"):
        AlgorithmConfig(beta=0.5).check()
